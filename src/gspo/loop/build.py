"""From a config to the objects of a run. The only module that knows every implementation."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspo.algo.kl import make_controller
from gspo.algo.losses import get_policy_loss
from gspo.algo.settings import Behaviour, LossSettings
from gspo.config import TrainerConfig
from gspo.data.cursor import PromptCursor
from gspo.data.rows import DataError
from gspo.loop.backend import Backend, ClusterError
from gspo.loop.engines import build_engine as build_engine
from gspo.loop.engines import build_rollout, check_engine, num_workers, runs_ahead
from gspo.loop.evaluation import Evaluator
from gspo.loop.greedy_baseline import GreedyBaseline
from gspo.loop.inputs import build_scorer, check_code_tests, load_prompts, try_reward
from gspo.loop.kl_reward import KlScorer
from gspo.loop.objective import AdvantageSettings, Objective
from gspo.loop.plugins import import_plugins
from gspo.loop.producer import Producer
from gspo.loop.resume import ResumeRefused
from gspo.loop.roles import Facts, Roles, build_roles
from gspo.loop.roles_team import TeamRoles
from gspo.loop.team import Team
from gspo.models.load import load_tokenizer
from gspo.rewards import Scorer
from gspo.rollout.engine import RolloutEngine, SamplingParams
from gspo.rollout.fleet import Fleet
from gspo.rollout.roster import Roster
from gspo.sampling.dynamic import DynamicSampler, Record
from gspo.sampling.settings import SamplingSettings
from gspo.seeding import derive_seed
from gspo.training.clip_control import ClipController
from gspo.training.policy import Policy
from gspo.types import Metrics, Prompt

RANKS = "trainer ranks"
ARITHMETIC = (RANKS, "threads", "device")


@dataclass
class Parts:
    """The objects of one run, and what identifies its computation."""

    config: TrainerConfig
    tokenizer: Any
    roles: Roles | TeamRoles
    engine: RolloutEngine
    sampler: DynamicSampler | Producer
    evaluator: Evaluator | None
    objective: Objective
    total_steps: int
    fingerprint: dict[str, Any]
    scorers: list[Scorer] = field(default_factory=list)
    kl_reward: KlScorer | None = None
    baseline: GreedyBaseline | None = None

    def __post_init__(self) -> None:
        self.token_text = functools.cache(
            lambda token: self.tokenizer.decode([token], skip_special_tokens=False)
        )

    @property
    def policy(self) -> Policy:
        """The policy in this process; a team's is reached through `roles`."""
        assert isinstance(self.roles, Roles)
        return self.roles.policy

    def save_model(self, folder: Path) -> None:
        """The weights and tokenizer as an ordinary Hugging Face folder."""
        self.roles.save_model(folder)
        self.tokenizer.save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        """What a step boundary needs beside tensors. The sampler comes first: it collects, and so charges KL."""
        state = {"sampler": self.sampler.state_dict(), "objective": self.objective.state_dict()}
        return state if self.kl_reward is None else {**state, "kl_reward": self.kl_reward.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.objective.load_state_dict(state["objective"])
        if self.kl_reward is not None:
            self.kl_reward.load_state_dict(state["kl_reward"])
        self.sampler.load_state_dict(state["sampler"])

    def check_fingerprint(self, saved: Mapping[str, Any]) -> None:
        """Refuse to go on when the model, the data or the machine's arithmetic is another one.

        Another number of ranks adds up in another order: what only decides the last bits is then not compared.
        """
        other_ranks = saved.get(RANKS) != self.fingerprint[RANKS]
        lines = [
            f"  {key}: {saved.get(key)!r} in the checkpoint, {now!r} now"
            for key, now in self.fingerprint.items()
            if saved.get(key) != now and not (other_ranks and key in ARITHMETIC)
        ]
        if lines:
            raise ResumeRefused("the checkpoint cannot be resumed to the bit here:\n" + "\n".join(lines))

    def summary(self, path: Path, total_steps: int) -> str:
        """A few lines that say what is about to happen."""
        c = self.config
        actor = c.actor_rollout_ref.actor
        facts = self.roles.facts()
        trained, num = facts.num_trained, facts.num_parameters
        size = f"{num:,} parameters" if trained == num else f"{trained:,} of {num:,} parameters trained"
        updates = -(-c.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
        return (
            f"{c.actor_rollout_ref.model.path} ({size}) on {c.data.train_files}, "
            f"{actor.policy_loss.loss_mode} with {c.algorithm.adv_estimator} advantages, {_where(facts)}\n"
            f"{total_steps} steps of {c.data.train_batch_size} groups × {c.actor_rollout_ref.rollout.n} responses, "
            f"{updates} optimiser steps each; files in {path}{self._rollouts()}{self._fallback()}"
        )

    def _rollouts(self) -> str:
        """A line about the processes that generate, where there are any."""
        if not isinstance(self.engine, Roster):
            return ""
        count, bound = self.engine.num_workers, self.config.actor_rollout_ref.rollout.max_head_offpolicyness
        how = f"at most {bound} versions ahead of training" if runs_ahead(self.config) else "in step"
        own = "its own" if count == 1 else "their own"
        return f"\nrollouts in {count} process{'es' * (count > 1)} of {own}, {how}"

    def _fallback(self) -> str:
        """A line that says why training does not share prompts or pack, when it was to."""
        reason = self.roles.facts().layout_problem
        return f"\ntraining in padded rows: {reason}" if reason else ""

    def rest_engine(self) -> None:
        """Say that the trainer is about to use the device."""
        if isinstance(self.engine, Fleet):
            self.engine.rest()

    def engine_metrics(self) -> Metrics:
        """What befell the rollout workers, where there are any."""
        return self.engine.metrics() if isinstance(self.engine, Roster) else {}

    def stacks(self) -> str:
        """What the run's other processes are doing now."""
        return self.engine.stacks() if isinstance(self.engine, Roster) else ""

    def kill(self) -> None:
        """End the run's other processes at once."""
        if isinstance(self.engine, Roster):
            self.engine.kill()

    def close(self) -> None:
        """End everything, whatever one of them raises. The engine goes first: the sampler's thread may wait for it."""
        with ExitStack() as stack:
            stack.callback(self.roles.close)
            for scorer in self.scorers:
                stack.callback(scorer.close)
            if isinstance(self.sampler, Producer):
                stack.callback(self.sampler.close)
            stack.callback(self.engine.close)


def _where(facts: Facts) -> str:
    if facts.num_ranks is None:
        return facts.device
    return f"{facts.num_ranks} rank{'s' * (facts.num_ranks > 1)} on {facts.device}"


def build(
    config: TrainerConfig,
    *,
    weights_from: Path | None = None,
    reward_fn: Any = None,
    val_reward_fn: Any = None,
    train_dataset: Iterable[Any] | None = None,
    val_dataset: Iterable[Any] | None = None,
    tokenizer: Any = None,
    backend: Backend | None = None,
    record: Record | None = None,
    watch: Callable[[int, int], None] | None = None,
    folder: Path | None = None,
    notify: Callable[[str], None] | None = None,
) -> Parts:
    """Everything a run needs. Data and reward are tried before the weights are loaded.

    Processes of the run write their logs below `folder`; `notify` is told what befalls them.
    """
    import_plugins(config.trainer.plugins)
    check_engine(config, backend)
    torch.set_num_threads(config.trainer.num_threads or default_threads())
    device = choose_device(config.trainer.device)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
    model_config = config.actor_rollout_ref.model
    tokenizer = tokenizer or load_tokenizer(
        model_config.tokenizer_path or model_config.path, trust_remote_code=model_config.trust_remote_code
    )
    train = load_prompts(config, tokenizer, "train", train_dataset)
    if train_dataset is not None and val_dataset is None and config.data.val_files is None:
        val_dataset = []  # the default task's held-out questions say nothing about data of the caller's own
    held_out = load_prompts(config, tokenizer, "val", val_dataset)
    if reward_fn is None and config.custom_reward_function.path is None and not config.reward.functions:
        check_code_tests([*train, *held_out])
    with ExitStack() as started:  # ends what runs already when a later part cannot be built
        scorer, val_scorer = (build_scorer(config, fn) for fn in (reward_fn, val_reward_fn or reward_fn))
        for each in (scorer, val_scorer):
            started.callback(each.close)
        if train:
            try_reward(config, scorer, train[0])
        total_steps = _total_steps(config, len(train))
        roles = _build_roles(config, tokenizer, device, total_steps, weights_from, backend)
        started.callback(roles.close)
        logs = None if folder is None else folder / "workers"
        engine = build_rollout(config, roles, tokenizer, device, backend=backend, folder=logs, notify=notify)
        started.callback(engine.close)
        kl_reward = _kl_reward(config, scorer, roles)
        source = PromptCursor(
            train,
            seed=config.trainer.seed if config.data.seed is None else config.data.seed,
            shuffle=config.data.shuffle,
            total_epochs=None if config.trainer.total_training_steps else config.trainer.total_epochs,
        )
        sampling = sampling_settings(config, tokenizer, num_workers(config, backend))

        def make_sampler(record: Record | None) -> DynamicSampler:
            return DynamicSampler(
                source,
                engine,
                kl_reward or scorer,
                sampling,
                seed=config.trainer.seed,
                record=record,
                watch=watch,
            )

        in_background = config.actor_rollout_ref.rollout.mode == "async"
        sampler = Producer(make_sampler, record) if in_background else make_sampler(record)
        evaluator = _evaluator(config, engine, val_scorer, held_out, tokenizer) if held_out else None
        scorers, baseline = [scorer, val_scorer], None
        if (
            config.algorithm.adv_estimator == "remax"
        ):  # by the training reward, apart from groups still being scored
            scorers.append(build_scorer(config, reward_fn))
            baseline = GreedyBaseline(engine, scorers[-1], sampling.params)
        parts = Parts(
            config=config,
            tokenizer=tokenizer,
            roles=roles,
            engine=engine,
            sampler=sampler,
            evaluator=evaluator,
            objective=build_objective(config),
            total_steps=total_steps,
            fingerprint=_fingerprint(config, roles, train, total_steps),
            scorers=scorers,
            kl_reward=kl_reward,
            baseline=baseline,
        )
        started.pop_all()
        return parts


def _build_roles(
    config: TrainerConfig,
    tokenizer: Any,
    device: torch.device,
    total_steps: int,
    weights_from: Path | None,
    backend: Backend | None,
) -> Roles | TeamRoles:
    """The models here, or on the ranks of a team, which generate too unless workers do."""
    if backend is None and config.actor_rollout_ref.actor.strategy != "fsdp2":
        return build_roles(config, device, total_steps, weights_from)
    if backend is not None:
        backend.start(config)
        team: Team = backend.team()
    else:
        from gspo.loop.team_torchrun import TorchrunTeam, check_launch

        check_launch(config)
        team = TorchrunTeam.join(config.trainer.device)
    own_engine = num_workers(config, backend) == 0
    return TeamRoles(team, config, total_steps, weights_from, tokenizer if own_engine else None)


def choose_backend(config: TrainerConfig) -> Backend | None:
    """What `trainer.backend` names; None: everything is in this process, or where torchrun put it."""
    if config.trainer.backend != "ray":
        return None
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("trainer.backend=ray: Ray is not installed; pip install 'gspo[ray]'")
    from gspo.cluster.backend import RayBackend

    return RayBackend()


def default_threads() -> int:
    """As many as OMP_NUM_THREADS says, else one a core this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() and int(named) else len(os.sched_getaffinity(0))


def choose_device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _total_steps(config: TrainerConfig, num_prompts: int) -> int:
    if config.trainer.total_training_steps:
        return config.trainer.total_training_steps
    per_epoch = num_prompts // config.data.train_batch_size
    if per_epoch == 0:
        raise DataError(
            "data.train_batch_size",
            f"is {config.data.train_batch_size}, more than the {num_prompts} training prompts; lower it",
        )
    return per_epoch * config.trainer.total_epochs


def _params(config: TrainerConfig, tokenizer: Any) -> SamplingParams:
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=rollout.response_length or config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        ignore_eos=rollout.ignore_eos,
    )


def sampling_settings(config: TrainerConfig, tokenizer: Any, workers: int | None = None) -> SamplingSettings:
    """How training groups are drawn and filtered. `workers` generate, where that is not as many as the config says."""
    f, data = config.algorithm.filter_groups, config.data
    return SamplingSettings(
        train_batch_size=data.train_batch_size,
        n=config.actor_rollout_ref.rollout.n,
        params=_params(config, tokenizer),
        gen_batch_size=data.gen_batch_size,
        enable=f.enable,
        metric=f.metric,
        strategy=f.strategy,  # pyright: ignore[reportArgumentType]
        max_num_gen_batches=f.max_num_gen_batches,
        on_limit=f.on_limit,  # pyright: ignore[reportArgumentType]
        max_staleness=_max_staleness(config),
        max_in_flight=_max_in_flight(config, workers or config.actor_rollout_ref.rollout.num_workers),
        predict=f.predict,  # pyright: ignore[reportArgumentType]
        predict_weight=f.predict_weight,
        predict_min_prob=f.predict_min_prob,
        predict_discount=f.predict_discount,
        max_failure_rate=config.reward.max_failure_rate,
    )


def _max_staleness(config: TrainerConfig) -> int:
    """Versions that a group may lag behind: the budget of asynchrony, else what dynamic sampling may carry over."""
    rollout, filters = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    if rollout.mode == "async":
        return rollout.max_head_offpolicyness
    return filters.max_staleness if filters.enable else 0  # without filtering there is nothing to save


def _max_in_flight(config: TrainerConfig, workers: int) -> int | None:
    rollout = config.actor_rollout_ref.rollout
    if not runs_ahead(config):
        return config.algorithm.filter_groups.max_in_flight
    held = max(1, workers * rollout.max_num_seqs // rollout.n)
    return rollout.max_concurrent_rollouts or held


def _evaluator(
    config: TrainerConfig, engine: RolloutEngine, scorer: Scorer, prompts: list[Prompt], tokenizer: Any
) -> Evaluator:
    val = config.actor_rollout_ref.rollout.val_kwargs
    params = SamplingParams(
        max_tokens=config.actor_rollout_ref.rollout.response_length or config.data.max_response_length,
        temperature=val.temperature if val.do_sample else 0.0,
        top_k=val.top_k,
        top_p=val.top_p,
    )
    return Evaluator(
        engine,
        scorer,
        prompts,
        params,
        n=val.n,
        seed=derive_seed(config.trainer.seed, "eval"),
        batch_size=config.data.val_batch_size,
    )


def _kl_reward(config: TrainerConfig, scorer: Scorer, roles: Roles | TeamRoles) -> KlScorer | None:
    c = config.algorithm
    if not c.use_kl_in_reward:
        return None
    assert roles.reference is not None
    k = c.kl_ctrl
    controller = make_controller(k.type, k.kl_coef, k.target_kl, k.horizon)
    return KlScorer(scorer, roles.policy, roles.reference, controller, c.kl_penalty)


def build_objective(config: TrainerConfig) -> Objective:
    """The loss, its settings with every default filled in, and the terms beside it."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss = actor.policy_loss
    settings = LossSettings(
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        aggregation=actor.loss_agg_mode,
        norm_length=actor.loss_scale_factor or config.data.max_response_length,
        level=actor.importance_sampling_level,
        tau_pos=loss.tau_pos,
        tau_neg=loss.tau_neg,
        behaviour=Behaviour(actor.behav_imp_weight_mode, actor.behav_imp_weight_cap)
        if actor.use_decoupled_loss
        else None,
    )
    return Objective(
        loss_mode=loss.loss_mode,
        settings=get_policy_loss(loss.loss_mode).resolve(settings),
        advantage=AdvantageSettings(
            algorithm.adv_estimator, algorithm.gamma, algorithm.lam, algorithm.norm_adv_by_std_in_grpo
        ),
        clip_control=ClipController(
            actor.clip_target, (actor.clip_target_bounds[0], actor.clip_target_bounds[1])
        ),
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_kind=actor.kl_loss_type,
    )


def _fingerprint(
    config: TrainerConfig, roles: Roles | TeamRoles, prompts: list[Prompt], total_steps: int
) -> dict[str, Any]:
    """What must be the same for a resumed run to compute the same bits, beside the config."""
    facts = roles.facts()
    rows = [(p.uid, p.token_ids, str(p.ground_truth)) for p in prompts]
    optim = config.actor_rollout_ref.actor.optim
    return {
        "model shape": _digest(facts.shapes),
        "weights that stay as they are (LoRA's base, the reference)": facts.frozen_digest,
        RANKS: facts.num_ranks,
        "training data": _digest(rows),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "steps of the learning-rate schedule": None if optim.lr_scheduler_type == "constant" else total_steps,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
