"""The environment of a run: from its keys to the settings of episodes, tried before any weights are loaded."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from typing import Any

from gspo.build.rewards import names_reward
from gspo.config import TrainerConfig
from gspo.environments.loading import EnvironmentSpec
from gspo.environments.pool import EpisodePool
from gspo.environments.protocol import EnvironmentProblem
from gspo.rewards import Scorer
from gspo.rewards.turns import TurnScorer
from gspo.rollout.episodes.dialogue import DialogueSettings
from gspo.rollout.episodes.settings import EpisodeSettings
from gspo.serving.agents.settings import AgentSettings


def has_environment(config: TrainerConfig, made: Any = None) -> bool:
    """Whether rollouts have turns."""
    turns, environment = config.actor_rollout_ref.rollout.multi_turn, config.environment
    named = (
        environment.name or environment.path or environment.agent or turns.function_tool_path or turns.tool_config_path
    )
    if turns.enable and not named and made is None:
        raise EnvironmentProblem(
            "actor_rollout_ref.rollout.multi_turn.enable=true needs an environment; set environment.name or .path, or "
            "multi_turn.function_tool_path or .tool_config_path"
        )
    return turns.enable is not False and (bool(named) or made is not None)


def episode_settings(config: TrainerConfig, made: Any = None) -> EpisodeSettings | AgentSettings | None:
    """The settings of episodes, or of an agent; None without. `made` is an object that replaces the named environment."""
    if not has_environment(config, made):
        return None
    turns, environment = config.actor_rollout_ref.rollout.multi_turn, config.environment
    if environment.agent is not None:
        return _agent_settings(config)
    spec = EnvironmentSpec(
        name=environment.name,
        path=environment.path,
        kwargs=dict(environment.kwargs),
        function_tool_path=turns.function_tool_path,
        tool_config_path=turns.tool_config_path,
        plugins=tuple(config.trainer.plugins),
        made=made,
    )
    return EpisodeSettings(
        spec=spec,
        dialogue=DialogueSettings(
            max_turns=turns.max_assistant_turns,
            max_observations=turns.max_user_turns,
            max_calls=turns.max_parallel_calls,
            max_observation=turns.max_tool_response_length,
            truncate_side=turns.tool_response_truncate_side,
        ),
        tool_format=turns.format,
        num_workers=environment.num_workers,
        timeout=environment.timeout,
        tool_timeout=environment.tool_timeout,
        memory=environment.memory,
        retries=environment.retries,
        lag=environment.lag,
        template_options=dict(config.data.apply_chat_template_kwargs),
    )


def open_environment(
    config: TrainerConfig, made: Any, tokenizer: Any, started: ExitStack
) -> tuple[EpisodeSettings | AgentSettings | None, EpisodePool | None]:
    """The settings of episodes or of an agent, and the running environments; `started` closes them."""
    episodes = episode_settings(config, made)
    if not isinstance(episodes, EpisodeSettings):
        if episodes is not None:
            episodes.check()
        return episodes, None
    pool = episodes.open_pool()
    started.callback(pool.close)
    episodes = episodes.with_tools(pool)
    episodes.check_template(tokenizer)
    return episodes, pool


def _agent_settings(config: TrainerConfig) -> AgentSettings:
    environment = config.environment
    assert environment.agent is not None
    if environment.name or environment.path:
        raise EnvironmentProblem("environment.agent replaces an environment; leave out environment.name and .path")
    return AgentSettings(
        environment.agent,
        dict(environment.kwargs),
        config.actor_rollout_ref.rollout.multi_turn.format,
        environment.timeout,
        environment.lag,
        dict(config.data.apply_chat_template_kwargs),
    )


def require_sendable(settings: EpisodeSettings) -> None:
    """Refuse an environment object that cannot be sent to rollout workers or trainer ranks."""
    try:
        pickle.dumps(settings)
    except Exception as error:
        raise EnvironmentProblem(
            f"the environment {settings.spec.title!r} cannot be sent to other processes ({error}); put it into a file and "
            "set environment.path"
        ) from error


def turn_scorer(config: TrainerConfig, scorer: Scorer, reward_fn: Any) -> Scorer:
    """A scorer that gives rollouts their environment's rewards; a reward function that is set adds to them."""
    return TurnScorer(scorer, adds_function=names_reward(config, reward_fn))
