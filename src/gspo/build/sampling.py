"""What generates and judges in a run: the sampler with its group filter, the evaluator, and ReMax's greedy baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gspo.build.parts import RunParts
from gspo.build.settings import groups_held, sampling_settings, training_params, validation_params
from gspo.config import TrainerConfig
from gspo.data.cursor import PromptCursor
from gspo.distributed.run_layout import runs_ahead
from gspo.evaluation.evaluator import Evaluator
from gspo.evaluation.greedy_baseline import GreedyBaseline
from gspo.registry import PluginError
from gspo.rewards import Scorer
from gspo.rollout.engine import RolloutEngine
from gspo.sampling.dynamic import DynamicSampler, Record
from gspo.sampling.filters import GROUP_FILTERS, GroupFilter
from gspo.sampling.producer import Producer
from gspo.sampling.sampler import Sampler
from gspo.seeding import derive_seed
from gspo.types import Prompt


def choose_filter(config: TrainerConfig, given: GroupFilter | None) -> GroupFilter | None:
    """The user's rule for which groups are kept; None: the built-in rule."""
    settings = config.algorithm.filter_groups
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


def build_sampler(
    config: TrainerConfig,
    prompts: list[Prompt],
    engine: RolloutEngine,
    scorer: Any,
    record: Record | None,
    watch: Callable[[int, int], None] | None,
    keep: GroupFilter | None,
    lag: int,
    environment: Any = None,
) -> Sampler:
    """The sampler; in its own thread when rollouts are asynchronous. `environment` is one that was passed in Python."""
    source = PromptCursor(
        prompts,
        seed=config.trainer.seed if config.data.seed is None else config.data.seed,
        shuffle=config.data.shuffle,
        total_epochs=None if config.trainer.total_training_steps else config.trainer.total_epochs,
    )
    settings = sampling_settings(config, lag, environment)

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


def add_baseline(parts: RunParts, scorer: Scorer) -> None:
    """Add ReMax's greedy answers, with their own scorer: groups may still be scored by the other."""
    parts.scorers.append(scorer)
    parts.baseline = GreedyBaseline(parts.engine, scorer, training_params(parts.config))
