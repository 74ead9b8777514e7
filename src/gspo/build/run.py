"""From a config to the objects of a run."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo.algo.advantages import ADVANTAGE_ESTIMATORS
from gspo.algo.kl import make_controller
from gspo.algo.losses import POLICY_LOSSES
from gspo.build.data.rows import given_datasets
from gspo.build.device import choose_device, default_threads, use_only_deterministic
from gspo.build.engines import build_engine, build_fleet, check_engine, num_workers, stop_tokens
from gspo.build.environments import episode_settings, has_environment, require_sendable, turn_scorer
from gspo.build.fingerprint import example_rows, fingerprint, prompt_rows
from gspo.build.inputs import check_code_tests, load_prompts, load_sft_examples, prompt_columns
from gspo.build.models import build_roles
from gspo.build.parts import RunParts
from gspo.build.ranks import build_rank
from gspo.build.rewards import add_model, build_scorer, grades, names_reward, own_judge, reward_lag, try_reward
from gspo.build.settings import (
    build_objective,
    groups_held,
    sampling_settings,
    total_steps,
    training_params,
    validation_params,
)
from gspo.config import TrainerConfig
from gspo.config.batch_plan import distills
from gspo.data.columns import Say
from gspo.data.cursor import PromptCursor
from gspo.data.examples import Example, ExampleOrder
from gspo.distributed.backend import Backend, ClusterError
from gspo.distributed.launch import check_launch
from gspo.distributed.rank_engine import RankEngine
from gspo.distributed.rank_group import RankGroup
from gspo.distributed.rank_roles import RankRoles
from gspo.distributed.run_layout import runs_ahead
from gspo.environments.pool import EpisodePool
from gspo.evaluation.evaluator import Evaluator
from gspo.evaluation.greedy_baseline import GreedyBaseline
from gspo.models import ModelError
from gspo.models.load import load_tokenizer
from gspo.plugins import import_plugins
from gspo.registry import PluginError
from gspo.rewards import Scorer
from gspo.rewards.mixed import MixedScorer
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.episodes.settings import EpisodeSettings
from gspo.rollout.workers.worker import Wrapper
from gspo.sampling.dynamic import DynamicSampler, Record
from gspo.sampling.filters import GROUP_FILTERS, GroupFilter
from gspo.sampling.producer import Producer
from gspo.sampling.sampler import Sampler
from gspo.seeding import derive_seed
from gspo.serving.agents.settings import AgentSettings
from gspo.training.kl_reward import KlScorer
from gspo.training.roles import LocalRoles, Roles
from gspo.types import Prompt

METRIC = "algorithm.filter_groups.metric"


@dataclass(frozen=True)
class Inputs:
    """Python objects of the caller that replace what the config names."""

    reward_fn: Any = None
    val_reward_fn: Any = None  # None: `reward_fn`
    train_dataset: Iterable[Any] | None = None
    val_dataset: Iterable[Any] | None = None
    tokenizer: Any = None
    environment: Any = None  # a class, a factory, or a list of functions as tools
    group_filter: GroupFilter | None = None  # used only where `algorithm.filter_groups.function` is null

    def facts(self, share: float | None = None) -> dict[str, str]:
        """What replaces the config's data and reward, in words, by the name of the argument.

        `share` of the training rows is held out where none are passed for that.
        """
        rows = {"train_dataset": self.train_dataset, "val_dataset": self.val_dataset}
        found = {name: f"{len(list(given))} rows passed in Python" for name, given in rows.items() if given is not None}
        if self.train_dataset is not None and self.val_dataset is None:
            found["val_dataset"] = "none" if share is None else f"{share:.3g} of the training rows"
        if self.reward_fn is not None:
            found["reward_fn"] = f"{_name_of(self.reward_fn)}, passed in Python"
        return found


NOTHING = Inputs()


def _name_of(function: Any) -> str:
    if isinstance(function, list | tuple):
        return ", ".join(map(_name_of, function))
    return str(getattr(function, "__name__", type(function).__name__))


def build(
    config: TrainerConfig,
    inputs: Inputs = NOTHING,
    *,
    weights_from: Path | None = None,
    backend: Backend | None = None,
    record: Record | None = None,
    watch: Callable[[int, int], None] | None = None,
    folder: Path | None = None,
    notify: Callable[[str], None] | None = None,
    progress: Callable[[str | None], None] = lambda what: None,
) -> RunParts:
    """Everything a run needs. Data and reward are tried before the weights are loaded.

    Processes of the run write their logs below `folder`; `notify` gets a sentence for each that fails, `progress` what is
    being done.
    """
    progress("reading the data")
    import_plugins(config.trainer.plugins)
    check_engine(config, backend)
    ADVANTAGE_ESTIMATORS.check(config.algorithm.adv_estimator)
    POLICY_LOSSES.check(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    keep = _group_filter(config, inputs)
    device = prepare_process(config)
    tokenizer = inputs.tokenizer or load_run_tokenizer(config)
    episodes, reward_fn = episode_settings(config, inputs.environment), inputs.reward_fn
    adapted: dict[str, tuple[Any, str]] = {}
    check_teacher(config, tokenizer)
    with ExitStack() as started:  # ends what runs already when a later part cannot be built
        pool = None
        if isinstance(episodes, AgentSettings):
            episodes.check()
        elif episodes is not None:
            pool = episodes.open_pool()
            started.callback(pool.close)
            episodes = episodes.with_tools(pool)
            episodes.check_template(tokenizer)
        options = None if episodes is None else episodes.prompt_options(tokenizer)
        notes: list[str] = []
        train, held_out = _load_data(config, tokenizer, inputs, options, notes.append)
        num_seen = count_seen(train, held_out)
        if num_seen and notify is not None:
            notify(
                f"{num_seen} of the {len(held_out)} evaluation questions are also training rows, so their accuracy says "
                "nothing about new questions; hold rows out, or set data.val_split to a share"
            )
        if not names_reward(config, reward_fn):
            check_code_tests([*train, *held_out])
        if isinstance(episodes, EpisodeSettings) and pool is not None and train:
            episodes = episodes.with_opening(pool, train[0])
        config, judge = own_judge(config)
        if judge is not None:
            started.callback(judge.close)
        rewards = build_scorer(config, reward_fn, folder=folder)
        started.callback(rewards.close)
        val_rewards = build_scorer(config, inputs.val_reward_fn or reward_fn, folder=folder, held_out=True)
        started.callback(val_rewards.close)
        scorer, val_scorer = (_behind_environment(config, inputs, each) for each in (rewards, val_rewards))
        if train and (episodes is None or grades(config, train[0], reward_fn)):
            metric = try_reward(config, scorer, train[0], uses_metric=keep is None and episodes is None)
            if metric != config.algorithm.filter_groups.metric:
                config, adapted = copy.deepcopy(config), {METRIC: (metric, "the reward function returns no acc")}
                config.algorithm.filter_groups.metric = metric
        num_steps = total_steps(config, len(train))
        examples = _examples(config, tokenizer)
        progress("loading the model")
        roles, build_own_engine = build_models(
            config, tokenizer, device, num_steps, weights_from, backend, episodes, pool
        )
        started.callback(roles.close)
        for each in (rewards, val_rewards):
            add_model(config, each, roles.reward_model)
        progress("starting the engine")
        if notify is not None and isinstance(roles, LocalRoles):
            _warn_without_end(roles.policy.model.generation_config, tokenizer, notify)
        count, logs = num_workers(config, backend), None if folder is None else folder / "workers"
        if pool is not None and not owns_engine(roles, count):
            assert isinstance(episodes, EpisodeSettings)
            pool.close()  # rollout workers and ranks have environments of their own
            require_sendable(episodes)
        engine = (
            build_fleet(
                config, roles, tokenizer, device, count, backend=backend, folder=logs, notify=notify, episodes=episodes
            )
            if count
            else build_own_engine()
        )
        started.callback(engine.close)
        kl_reward = _kl_reward(config, scorer, roles)
        lag = reward_lag(config, scorer, train, on_gpu=device.type == "cuda")
        parts = RunParts(
            config=config,
            tokenizer=tokenizer,
            roles=roles,
            engine=engine,
            sampler=_build_sampler(config, train, engine, kl_reward or scorer, record, watch, keep, lag),
            evaluator=build_evaluator(config, engine, val_scorer, held_out) if held_out else None,
            objective=build_objective(config),
            total_steps=num_steps,
            fingerprint=fingerprint(config, roles.facts(), [*prompt_rows(train), *example_rows(examples)], num_steps),
            scorers=[scorer, val_scorer],
            data=inputs.facts().get("train_dataset") or str(config.data.train_files),
            kl_reward=kl_reward,
            examples=examples,
            adapted=adapted,
            held_out={"questions": len(held_out), "also_trained_on": num_seen} if held_out else {},
            notes=notes,
            mixed=rewards if isinstance(rewards, MixedScorer) else None,
            judge=judge,
        )
        if config.algorithm.adv_estimator == "remax":
            baseline = build_scorer(config, reward_fn, folder=folder)
            add_model(config, baseline, roles.reward_model)
            _add_baseline(parts, _behind_environment(config, inputs, baseline))
        started.pop_all()
        progress(None)
        return parts


def _warn_without_end(generation_config: Any, tokenizer: Any, notify: Callable[[str], None]) -> None:
    """Say it when no token ends a response."""
    if not stop_tokens(generation_config, tokenizer):
        notify(
            "the model has no end-of-sequence token, so every response runs to data.max_response_length; set eos_token in "
            "tokenizer_config.json, or actor_rollout_ref.model.override_config={eos_token_id: N}"
        )


def _group_filter(config: TrainerConfig, inputs: Inputs) -> GroupFilter | None:
    """The user's rule for which groups are kept; None: the built-in rule."""
    settings, given = config.algorithm.filter_groups, inputs.group_filter
    if given is None:
        return None if settings.function is None else GROUP_FILTERS.find(settings.function)
    if not callable(given):
        raise PluginError(f"group_filter is of type {type(given).__name__}; expected a function of a group")
    if settings.function is not None:
        raise PluginError(
            f"group_filter is passed and algorithm.filter_groups.function={settings.function!r} is set; choose one of them"
        )
    if not settings.enable:
        raise PluginError("group_filter has no effect without algorithm.filter_groups.enable=true; set it")
    return given


def prepare_process(config: TrainerConfig) -> torch.device:
    """Set the threads and determinism of this process; returns its device."""
    torch.set_num_threads(config.trainer.num_threads or default_threads())
    if config.trainer.deterministic:  # else as the caller has set it
        use_only_deterministic(True)
    return choose_device(config.trainer.device)


def load_run_tokenizer(config: TrainerConfig) -> Any:
    c = config.actor_rollout_ref.model
    return load_tokenizer(c.tokenizer_path or c.path, trust_remote_code=c.trust_remote_code)


def _examples(config: TrainerConfig, tokenizer: Any) -> ExampleOrder[Example] | None:
    """The examples that are imitated beside reinforcement learning; None without any."""
    c = config.data
    if c.sft_files is None or config.actor_rollout_ref.actor.sft_weight == 0:
        return None
    seed = derive_seed(config.trainer.seed if c.seed is None else c.seed, "sft")
    size = c.sft_batch_size or c.train_batch_size
    return ExampleOrder(load_sft_examples(config, tokenizer), size, seed=seed, shuffle=c.shuffle)


def check_teacher(config: TrainerConfig, tokenizer: Any) -> None:
    """Refuse a teacher whose tokens are not the policy's: its log-probs would be those of other texts."""
    path = config.actor_rollout_ref.ref.path
    if path is None or not distills(config):
        return
    own = tokenizer.get_vocab()
    other = load_tokenizer(path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code).get_vocab()
    if own != other:
        token = next(iter(sorted({*own.items(), *other.items()} - (own.items() & other.items()))))[0]
        raise ModelError(
            f"actor_rollout_ref.ref.path={path}: the teacher's tokenizer is not the policy's: token {token!r} is number "
            f"{other.get(token)} there and {own.get(token)} here ({len(other)} and {len(own)} tokens); a teacher needs "
            "the tokens of the model that it teaches"
        )


def _load_data(
    config: TrainerConfig, tokenizer: Any, inputs: Inputs, template_options: Mapping[str, Any] | None, say: Say
) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts and held-out ones, from the caller's rows or the config's files."""
    train, val = given_datasets(config, prompt_columns(config), inputs.train_dataset, inputs.val_dataset, say)
    prompts = load_prompts(config, tokenizer, "train", train, template_options, say)
    return prompts, load_prompts(config, tokenizer, "val", val, template_options)


def count_seen(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """How many held-out prompts have the text of a training prompt, whatever their rows are called."""
    seen = {_text_of(prompt) for prompt in train}
    return sum(_text_of(prompt) in seen for prompt in held_out)


def _text_of(prompt: Prompt) -> tuple[str, ...]:
    return tuple(" ".join(str(message.get("content", "")).split()) for message in prompt.messages)


def _behind_environment(config: TrainerConfig, inputs: Inputs, scorer: Scorer) -> Scorer:
    """The scorer of the rewards that are set, behind the rewards of the environment where there is one."""
    return turn_scorer(config, scorer, inputs.reward_fn) if has_environment(config, inputs.environment) else scorer


def owns_engine(roles: Roles, num_workers: int) -> bool:
    """Whether the engine runs in this process."""
    return not num_workers and not isinstance(roles, RankRoles)


def _start_ranks(config: TrainerConfig, backend: Backend | None) -> RankGroup | None:
    """The trainer's ranks where the config trains on several; None: the models are in this process."""
    if backend is not None:
        backend.start(config)
        return backend.ranks()
    if config.actor_rollout_ref.actor.strategy != "fsdp2":
        return None
    from gspo.distributed.torchrun_ranks import TorchrunRanks

    check_launch(config)
    return TorchrunRanks.join(config.trainer.device)


def build_models(
    config: TrainerConfig,
    tokenizer: Any,
    device: torch.device,
    num_steps: int,
    weights_from: Path | None,
    backend: Backend | None,
    episodes: Wrapper | None = None,
    pool: EpisodePool | None = None,
) -> tuple[Roles, Callable[[], RolloutEngine]]:
    """The models, here or on the trainer's ranks, and a function that builds the engine over them.

    Without a tokenizer the ranks build no engine.
    """
    ranks = _start_ranks(config, backend)
    if ranks is None:
        local = build_roles(config, device, num_steps, weights_from)
        return local, lambda: build_engine(config, local.policy.model, tokenizer, device, episodes, pool)
    folder = None if weights_from is None else weights_from.absolute()
    engine_tokenizer = None if num_workers(config, backend) else tokenizer
    roles = RankRoles(ranks, functools.partial(build_rank, config, num_steps, folder, engine_tokenizer, episodes))
    return roles, lambda: RankEngine(ranks)


def choose_backend(config: TrainerConfig) -> Backend | None:
    """The backend that `trainer.backend` names; None: this process, or the processes that torchrun started."""
    if config.trainer.backend != "ray":
        return None
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("trainer.backend=ray: Ray is not installed; pip install 'gspo[ray]'")
    from gspo.distributed.ray.backend import RayBackend

    return RayBackend()


def _build_sampler(
    config: TrainerConfig,
    prompts: list[Prompt],
    engine: RolloutEngine,
    scorer: Any,
    record: Record | None,
    watch: Callable[[int, int], None] | None,
    keep: GroupFilter | None,
    lag: int,
) -> Sampler:
    """The sampler; in its own thread when rollouts are asynchronous."""
    source = PromptCursor(
        prompts,
        seed=config.trainer.seed if config.data.seed is None else config.data.seed,
        shuffle=config.data.shuffle,
        total_epochs=None if config.trainer.total_training_steps else config.trainer.total_epochs,
    )
    settings = sampling_settings(config, lag)

    def make(record: Record | None) -> DynamicSampler:
        return DynamicSampler(
            source,
            engine,
            scorer,
            settings,
            seed=config.trainer.seed,
            record=record,
            watch=watch,
            num_held=_num_held(config, engine),
            keep=keep,
        )

    return Producer(make, record) if config.actor_rollout_ref.rollout.mode == "async" else make(record)


def _num_held(config: TrainerConfig, engine: RolloutEngine) -> Callable[[], int] | None:
    """How many groups the engine can hold, which changes with the number of asynchronous workers; None: by the settings."""
    if not engine.num_workers or not runs_ahead(config):
        return None
    return lambda: groups_held(config, engine.num_workers)


def build_evaluator(config: TrainerConfig, engine: RolloutEngine, scorer: Scorer, prompts: list[Prompt]) -> Evaluator:
    return Evaluator(
        engine,
        scorer,
        prompts,
        validation_params(config),
        n=config.actor_rollout_ref.rollout.val_kwargs.n,
        seed=derive_seed(config.trainer.seed, "eval"),
        batch_size=config.data.val_batch_size,
    )


def _kl_reward(config: TrainerConfig, scorer: Scorer, roles: Roles) -> KlScorer | None:
    c = config.algorithm
    if not c.use_kl_in_reward:
        return None
    assert roles.reference is not None
    k = c.kl_ctrl
    controller = make_controller(k.type, k.kl_coef, k.target_kl, k.horizon)
    return KlScorer(scorer, roles.policy, roles.reference, controller, c.kl_penalty)


def _add_baseline(parts: RunParts, scorer: Scorer) -> None:
    """Add ReMax's greedy answers, with their own scorer: groups may still be scored by the other."""
    parts.scorers.append(scorer)
    parts.baseline = GreedyBaseline(parts.engine, scorer, training_params(parts.config))
