"""The rewards of a run, from the config to a scorer that is tried before any weights are loaded."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.config import TrainerConfig
from gspo.config.reward_parts import RewardParts, split_rewards
from gspo.config.schema.fields import explicit_fields
from gspo.config.schema.reward import JudgeConfig
from gspo.models.load import load_config, load_tokenizer
from gspo.paths import user_path
from gspo.rewards import Overlong, RewardError, RewardSpec, Scorer, dry_run, make_scorer
from gspo.rewards.builtin import by_source
from gspo.rewards.compose import DEFAULT, Finishing, RewardScale, unique_name
from gspo.rewards.functions import CUSTOM
from gspo.rewards.judge.cache import VerdictCache
from gspo.rewards.judge.own_server import NAME as OWN_NAME
from gspo.rewards.judge.own_server import OwnServer
from gspo.rewards.judge.scorer import JudgeScorer
from gspo.rewards.judge.settings import JudgeSettings, read_rubric
from gspo.rewards.mixed import MixedScorer, Part
from gspo.rewards.scoring import PoolScorer
from gspo.training.model_reward import ModelScorer, Normalization, Rendering, RewardModelRole
from gspo.types import Prompt

POOL_LAG = 4  # engine steps on a GPU, where rewards are computed in other processes or threads


def rewards_of(config: TrainerConfig) -> RewardParts:
    """The rewards that the config adds up."""
    reward, model = config.reward, config.reward_model
    judge = reward.judge.weight if reward.judge.base_url is not None else None
    return split_rewards(reward.functions, judge, model.weight if model.enable else None, model.path)


def build_scorer(
    config: TrainerConfig, reward_fn: Any = None, *, folder: Path | None = None, held_out: bool = False
) -> Scorer:
    """The scorer that the config asks for, of `reward_fn` when one is given; without the reward model, which comes later.

    A judge keeps its verdicts below `folder`. `held_out` rows may have a judge of their own.
    """
    parts, finishing = rewards_of(config), _finishing(config)
    if parts.only_functions:
        return _functions(config, _named(config, parts, reward_fn), finishing)
    found = [_functions_part(config, parts, reward_fn)]
    taken: set[str] = set()
    for judge in parts.judges:
        name = unique_name(judge.name, taken)
        taken.add(name)
        keys: JudgeConfig = dataclasses.replace(config.reward.judge, **judge.replaced)
        settings = judge_settings(keys, folder, held_out=held_out)
        cache = VerdictCache(None if settings.cache is None else Path(settings.cache), _sharing(settings.cache, folder))
        scorer = JudgeScorer(settings, cache, "held out" if held_out else "train")
        found.append(Part(name, scorer, judge.weight, "judge", orders=settings.kind == "rank"))
    return MixedScorer(found, finishing)


def _named(config: TrainerConfig, parts: RewardParts, reward_fn: Any) -> Any:
    """What grades responses by a function; None: the built-in of each row's data source."""
    custom = config.custom_reward_function
    if reward_fn is not None:
        return reward_fn
    if parts.functions:
        return parts.functions
    if custom.path is None:
        return None
    return RewardSpec(custom.name, path=custom.path, kwargs=dict(custom.reward_kwargs), key=CUSTOM)


def _functions_part(config: TrainerConfig, parts: RewardParts, reward_fn: Any) -> Part:
    """The functions beside a judge or a model. Where none is named, the built-in of each row is only logged."""
    named = _named(config, parts, reward_fn)
    if named is None:
        return Part("rule", _functions(config, RewardSpec(DEFAULT.name, weight=0.0), Finishing()), weight=0.0)
    weights = [entry.get("weight", 1.0) for entry in parts.functions] if named is parts.functions else [1.0]
    name = parts.functions[0]["name"] if len(parts.functions) == 1 and named is parts.functions else "rule"
    return Part(name, _functions(config, named, Finishing()), weight=float(any(weights)))


def _functions(config: TrainerConfig, reward: Any, finishing: Finishing) -> Scorer:
    pool = config.reward
    return make_scorer(
        reward,
        manager=finishing.manager,
        num_workers=pool.num_workers,
        timeout=pool.timeout,
        memory=pool.memory,
        retries=pool.retries,
        overlong=finishing.overlong,
        scale=finishing.scale,
        format_weight=pool.format_weight,
        repetition_penalty=pool.repetition_penalty,
        sandbox_level=pool.sandbox_level,
        allow_unsandboxed_code=pool.allow_unsandboxed_code,
    )


def _finishing(config: TrainerConfig) -> Finishing:
    """The reward manager with its penalty on long responses, and the scale."""
    manager, pool = config.reward_model, config.reward
    buffer = manager.reward_kwargs.overlong_buffer_cfg
    overlong = None
    if buffer.enable:
        limit = manager.reward_kwargs.max_resp_len or config.data.max_response_length
        overlong = Overlong(limit, buffer.len, buffer.penalty_factor, buffer.log)
    scale = RewardScale(pool.scale, pool.bias, pool.clip)
    return Finishing(manager.reward_manager, overlong, scale if scale != RewardScale() else None)


def own_judge(config: TrainerConfig) -> tuple[TrainerConfig, OwnServer | None]:
    """The config with the address of the served start model where the judge is `policy`, and its server."""
    if config.reward.judge.base_url != "policy":
        return config, None
    server = OwnServer(config.actor_rollout_ref.model.path, config.trainer.device)
    config = copy.deepcopy(config)
    config.reward.judge.base_url, config.reward.judge.model = server.url, OWN_NAME
    return config, server


def add_model(config: TrainerConfig, scorer: Scorer, role: RewardModelRole | None) -> None:
    """Add the reward model to the rewards. It comes last, since it is loaded with the other models."""
    parts = rewards_of(config)
    if role is None or parts.model is None or parts.model_path is None:
        return
    assert isinstance(scorer, MixedScorer)
    trust = config.actor_rollout_ref.model.trust_remote_code
    tokenizer = load_tokenizer(parts.model_path, trust_remote_code=trust)
    facts = load_config(parts.model_path, trust_remote_code=trust)
    limit = getattr(facts.get_text_config(), "max_position_embeddings", None)
    kind = config.reward_model.normalize
    mean, std = getattr(facts, "reward_mean", None), getattr(facts, "reward_std", None)
    if kind == "saved" and (mean is None or not std):
        raise RewardError(f"reward_model.normalize=saved: {parts.model_path} has no reward_mean and reward_std")
    normalization = Normalization(kind, mean or 0.0, std or 1.0)
    scores = ModelScorer(role, Rendering(tokenizer, limit), normalization)
    scorer.parts.append(Part("model", scores, parts.model, "model", orders=True))


def judge_settings(judge: JudgeConfig, folder: Path | None, *, held_out: bool = False) -> JudgeSettings:
    """The settings of a judge, with its files read. A held-out row may have another model and server."""
    base_url, model, variable = judge.base_url, judge.model, judge.api_key_env
    if held_out:
        base_url = judge.eval.base_url or base_url
        model = judge.eval.model or model
        variable = judge.eval.api_key_env or variable
    if base_url is None or model is None:
        raise RewardError("a judge needs reward.judge.base_url and reward.judge.model; set both")
    return JudgeSettings(
        base_url=base_url,
        model=model,
        kind=judge.kind,
        api_key_env=variable,
        rubric=() if judge.rubric is None or judge.kind != "rubric" else read_rubric(judge.rubric),
        prompt=None if judge.prompt is None else _read_prompt(judge.prompt),
        view=judge.view,
        max_score=judge.max_score,
        samples=judge.samples,
        temperature=judge.temperature,
        max_tokens=judge.max_tokens,
        timeout=judge.timeout,
        retries=judge.retries,
        max_concurrent=judge.max_concurrent,
        requests_per_minute=judge.requests_per_minute,
        tokens_per_minute=judge.tokens_per_minute,
        cache=_cache_path(judge.cache, folder),
        max_tokens_spent=judge.max_tokens_spent,
    )


def _read_prompt(path: str) -> str:
    try:
        return user_path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"reward.judge.prompt={path!r} cannot be read: {error}") from error


def _cache_path(name: str | None, folder: Path | None) -> str | None:
    """Where the verdicts are; None: in memory, for a name without a run folder."""
    path = None if name is None else user_path(name)
    if path is None or (folder is None and not path.is_absolute()):
        return None
    return str(path if folder is None else folder / path)


def _sharing(cache: str | None, folder: Path | None) -> str:
    """What tells this run from others that share its file of verdicts; "" for a file of its own."""
    if cache is None or (folder is not None and Path(cache).resolve().is_relative_to(folder.resolve())):
        return ""
    return "no run " if folder is None else f"{folder.resolve()} "


def reward_lag(config: TrainerConfig, scorer: Scorer, prompts: Sequence[Prompt], *, on_gpu: bool) -> int:
    """Engine steps after which rewards are collected: by key, else 1 on a CPU, whose steps are long, or for cheap rewards."""
    if config.reward.lag is not None:
        return config.reward.lag
    if not on_gpu and not rewards_of(config).judges:
        return 1
    here = isinstance(scorer, PoolScorer) and all(map(scorer.grades_here, {p.data_source for p in prompts}))
    return 1 if here else POOL_LAG


def grades(config: TrainerConfig, prompt: Prompt, reward_fn: Any = None) -> bool:
    """Whether something grades a row besides its environment: a reward that is set, or the built-in of its data source."""
    if names_reward(config, reward_fn):
        return True
    try:
        by_source(prompt.data_source)
    except RewardError:
        return False
    return True


def names_reward(config: TrainerConfig, reward_fn: Any = None) -> bool:
    """Whether a reward is set, so that the built-in of a row's data source is not used."""
    parts = rewards_of(config)
    named = bool(parts.functions) or config.custom_reward_function.path is not None
    return reward_fn is not None or named or not parts.only_functions


def try_reward(config: TrainerConfig, scorer: Scorer, prompt: Prompt, *, uses_metric: bool = True) -> str:
    """Score one row now, so that a broken reward, or a filter metric that it does not return, is found at the start.

    A group filter of the user replaces the rule that reads the metric (`uses_metric=False`). Returns the metric to
    filter by: that of the config, or the score where a recipe's metric is not returned.
    """
    reward = dry_run(scorer, prompt)
    filters = config.algorithm.filter_groups
    known = {"seq_reward", "seq_final_reward", "score", *reward.extra} | ({"acc"} if reward.acc is not None else set())
    known |= set() if rewards_of(config).model is None else {"reward/model"}
    if not filters.enable or not uses_metric or filters.metric in known:
        return filters.metric
    if "metric" not in explicit_fields(filters):
        return "seq_reward"
    raise RewardError(
        f"algorithm.filter_groups.metric={filters.metric!r} is not returned by the reward function; "
        f"it returns {', '.join(sorted(known))}. Set the metric to one of these, or return "
        f"{{'score': …, {filters.metric!r}: …}}"
    )
