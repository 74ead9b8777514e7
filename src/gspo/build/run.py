"""From a config to the objects of a run."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gspo.algo.advantages import ADVANTAGE_ESTIMATORS
from gspo.algo.kl import make_controller
from gspo.algo.losses import POLICY_LOSSES
from gspo.build.data.given import NOTHING, Inputs
from gspo.build.data.training_data import check_code_tests, load_prompt_data, load_sft_examples
from gspo.build.device import choose_device, default_threads, use_only_deterministic
from gspo.build.engines import build_engine, build_fleet, check_engine, num_workers, stop_tokens
from gspo.build.environments import has_environment, open_environment, require_sendable, turn_scorer
from gspo.build.fingerprint import example_rows, fingerprint, prompt_rows
from gspo.build.models import build_roles, check_teacher
from gspo.build.parts import RunParts
from gspo.build.ranks import build_rank
from gspo.build.rewards import add_model, build_scorer, grades, names_reward, own_judge, reward_lag, try_reward
from gspo.build.sampling import add_baseline, build_evaluator, build_sampler, choose_filter
from gspo.build.settings import build_objective, total_steps
from gspo.config import TrainerConfig
from gspo.data.examples import Example, ExampleOrder
from gspo.distributed.backend import Backend, ClusterError
from gspo.distributed.launch import check_launch
from gspo.distributed.rank_engine import RankEngine
from gspo.distributed.rank_group import RankGroup
from gspo.distributed.rank_roles import RankRoles
from gspo.environments.pool import EpisodePool
from gspo.models.load import load_tokenizer
from gspo.plugins import import_plugins
from gspo.rewards import Scorer
from gspo.rewards.mixed import MixedScorer
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.episodes.settings import EpisodeSettings
from gspo.rollout.workers.worker import Wrapper
from gspo.sampling.dynamic import Record
from gspo.seeding import derive_seed
from gspo.training.kl_reward import KlScorer
from gspo.training.roles import LocalRoles, Roles

METRIC = "algorithm.filter_groups.metric"


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

    Processes of the run write their logs below `folder`; `notify` gets a sentence for each that fails, `progress` what
    is being done.
    """
    progress("reading the data")
    import_plugins(config.trainer.plugins)
    check_engine(config, backend)
    ADVANTAGE_ESTIMATORS.check(config.algorithm.adv_estimator)
    POLICY_LOSSES.check(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    keep = choose_filter(config, inputs.group_filter)
    device = prepare_process(config)
    tokenizer = inputs.tokenizer or load_run_tokenizer(config)
    check_teacher(config, tokenizer)
    reward_fn = inputs.reward_fn
    adapted: dict[str, tuple[Any, str]] = {}
    with ExitStack() as started:  # ends what runs already when a later part cannot be built
        episodes, pool = open_environment(config, inputs.environment, tokenizer, started)
        options = None if episodes is None else episodes.prompt_options(tokenizer)
        data = load_prompt_data(config, tokenizer, inputs, options)
        train, held_out = data.train, data.held_out
        if notify is not None:
            data.warn(notify)
        for rows, function in ((train, reward_fn), (held_out, inputs.val_reward_fn or reward_fn)):
            if not names_reward(config, function):
                check_code_tests(rows)
        if isinstance(episodes, EpisodeSettings) and pool is not None and train:
            episodes = episodes.with_opening(pool, train[0])
        config, judge = own_judge(config)
        if judge is not None:
            started.callback(judge.close)
        rewards = build_scorer(config, reward_fn, folder=folder)
        started.callback(rewards.close)
        scorer = _behind_environment(config, inputs, rewards, reward_fn)
        val_reward_fn = inputs.val_reward_fn or reward_fn
        val_rewards = build_scorer(config, val_reward_fn, folder=folder, held_out=True)
        started.callback(val_rewards.close)
        val_scorer = _behind_environment(config, inputs, val_rewards, val_reward_fn)
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
            sampler=build_sampler(
                config, train, engine, kl_reward or scorer, record, watch, keep, lag, inputs.environment
            ),
            evaluator=build_evaluator(config, engine, val_scorer, held_out) if held_out else None,
            objective=build_objective(config),
            total_steps=num_steps,
            fingerprint=fingerprint(config, roles.facts(), [*prompt_rows(train), *example_rows(examples)], num_steps),
            scorers=[scorer, val_scorer],
            data=inputs.facts().get("train_dataset") or str(config.data.train_files),
            kl_reward=kl_reward,
            examples=examples,
            adapted=adapted,
            held_out=data.held_out_facts(),
            notes=data.notes,
            mixed=rewards if isinstance(rewards, MixedScorer) else None,
            judge=judge,
        )
        if config.algorithm.adv_estimator == "remax":
            baseline = build_scorer(config, reward_fn, folder=folder)
            add_model(config, baseline, roles.reward_model)
            add_baseline(parts, _behind_environment(config, inputs, baseline, reward_fn))
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


def _behind_environment(config: TrainerConfig, inputs: Inputs, scorer: Scorer, reward_fn: Any) -> Scorer:
    """The scorer of the rewards that are set, behind the rewards of the environment where there is one."""
    return turn_scorer(config, scorer, reward_fn) if has_environment(config, inputs.environment) else scorer


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


def _kl_reward(config: TrainerConfig, scorer: Scorer, roles: Roles) -> KlScorer | None:
    c = config.algorithm
    if not c.use_kl_in_reward:
        return None
    assert roles.reference is not None
    k = c.kl_ctrl
    controller = make_controller(k.type, k.kl_coef, k.target_kl, k.horizon)
    return KlScorer(scorer, roles.policy, roles.reference, controller, c.kl_penalty)
