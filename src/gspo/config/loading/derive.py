"""Values that follow from others: aliases that count batches, and defaults that give way to what was set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo.algo.settings import LOSSES, SEQUENCE_LEVELS
from gspo.config.loading.coerce import WrongType, coerce
from gspo.config.loading.names import Deferred
from gspo.config.loading.settings_table import Setting, Settings
from gspo.config.loading.sources import Layer, Origin
from gspo.config.problems import Problem

ACTOR = "actor_rollout_ref.actor"
TRAIN = "data.train_batch_size"
SAMPLES = "data.num_train_samples"
MINI = f"{ACTOR}.ppo_mini_batch_size"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
N = "actor_rollout_ref.rollout.n"
LEVEL = f"{ACTOR}.importance_sampling_level"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
CLIPS = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
LOSS_OF_LEVEL = {"token": "vanilla", "sequence": "gspo", "sequence_token": "gspo_token"}
USUAL_MINI_BATCHES = 4


def derive(settings: Settings, deferred: Sequence[Deferred], problems: list[Problem]) -> None:
    """Fill in what follows, in place; contradictions go to `problems`."""
    _loss_of_level(settings, problems)
    _clip_range(settings)
    _length_of_run(settings)
    counts = {d.alias.name: _count(d, problems) for d in deferred}
    if any(value is None for value in counts.values()):
        return
    trl = [d for d in deferred if d.alias.system == "TRL"]
    if trl:
        _trl_batch(settings, trl, problems)
    for item in deferred:
        if item not in trl:
            _mini_batches(settings, item, problems)
    _micro_batch(settings)
    _fit_batch(settings)
    _gen_batch(settings)


def _count(item: Deferred, problems: list[Problem]) -> int | None:
    """The alias's value as a positive whole number."""
    try:
        value = coerce(item.entry.value, int)
    except WrongType:
        value = 0
    if value < 1:
        entry = item.entry
        problems.append(
            Problem(
                "error",
                entry.name,
                entry.value,
                entry.origin.text,
                "expected a whole number of at least 1",
                "e.g. 4",
            )
        )
        return None
    return value


def _loss_of_level(settings: Settings, problems: list[Problem]) -> None:
    """A ratio level chooses the loss, and a loss its level; both set must agree."""
    level, loss = settings[LEVEL], settings[LOSS]
    own = LOSSES.get(loss.value)
    if level.value is None:
        if own is not None:
            settings.follow(LEVEL, own.levels[0], f"follows from {LOSS}")
        return
    if not loss.origin.explicit:
        settings.follow(LOSS, LOSS_OF_LEVEL[level.value], f"follows from {LEVEL} ({level.origin.text})")
    elif own is not None and level.value not in own.levels:
        takes = " or ".join(own.levels)
        message = f"contradicts {LOSS} = {loss.value} ({loss.origin.text}), which takes {takes}"
        remedy = f"remove one of the two, or set {LOSS}={LOSS_OF_LEVEL[level.value]}"
        problems.append(Problem("error", LEVEL, level.value, level.origin.text, message, remedy))


def _clip_range(settings: Settings) -> None:
    """`clip_ratio`, when set, replaces a recipe's two sides; a recipe's GSPO range is not used for a token ratio."""
    shared = settings[f"{ACTOR}.clip_ratio"]
    for key in CLIPS:
        if shared.origin.explicit and not settings.explicit(key):
            settings.follow(key, None, f"gives way to {ACTOR}.clip_ratio")
    chosen = settings.explicit(LOSS) or settings.explicit(LEVEL)
    if settings[LEVEL].value in SEQUENCE_LEVELS or not chosen:
        return
    for key in (*CLIPS, f"{ACTOR}.clip_target"):
        if settings[key].origin.layer == Layer.RECIPE:
            settings.follow(key, None, f"the recipe's value is for GSPO, not for {settings[LOSS].value}")


def _length_of_run(settings: Settings) -> None:
    """Epochs that were set replace a recipe's number of steps."""
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if settings.explicit(epochs) and not settings.explicit(steps):
        settings.follow(steps, None, f"gives way to {epochs}")


def _micro_batch(settings: Settings) -> None:
    """A micro-batch size that was set switches the token budget off, unless that was asked for too."""
    dynamic = f"{ACTOR}.use_dynamic_bsz"
    if settings.explicit(MICRO) and settings[MICRO].value is not None and not settings.explicit(dynamic):
        settings.follow(dynamic, False, f"gives way to {MICRO}")


def _mini_batches(settings: Settings, item: Deferred, problems: list[Problem]) -> None:
    """`update_frequency k`: k mini-batches a rollout batch. What was set stays; the other of the two sizes follows."""
    k, entry = coerce(item.entry.value, int), item.entry
    train, mini = settings[TRAIN].value, settings[MINI].value
    because = Origin(entry.origin.layer, f"{entry.origin.text}: {k} mini-batches a rollout batch")
    if settings.explicit(MINI) and not settings.explicit(TRAIN):
        settings[TRAIN] = Setting(k * mini, because)
    elif settings.explicit(MINI):
        if train != k * mini:
            message = (
                f"contradicts {TRAIN} = {train} and {MINI} = {mini}, which make {train / mini:g} mini-batches"
            )
            problems.append(
                Problem("error", entry.name, k, entry.origin.text, message, "set two of the three")
            )
    elif train % k == 0:
        settings[MINI] = Setting(train // k, because)
    elif settings.explicit(TRAIN):
        message = f"{TRAIN} = {train} ({settings[TRAIN].origin.text}) does not divide into {k} mini-batches"
        remedy = f"set {TRAIN} to a multiple of {k}, e.g. {max(k, round(train / k) * k)}"
        problems.append(Problem("error", entry.name, k, entry.origin.text, message, remedy))
    else:
        settings[TRAIN] = Setting(k * mini, because)


def _trl_batch(settings: Settings, items: Sequence[Deferred], problems: list[Problem]) -> None:
    """TRL counts responses and forwards; ours are prompts. Needs per_device_train_batch_size for absolute sizes."""
    value = {d.alias.name: coerce(d.entry.value, int) for d in items}
    n, origin = settings[N].value, items[-1].entry.origin
    accumulate = value.get("gradient_accumulation_steps", 1)
    forwards = value.get("steps_per_generation", accumulate)
    because = Origin(
        origin.layer, f"{origin.text} (TRL batch: {', '.join(f'{k}={v}' for k, v in value.items())})"
    )
    device = value.get("per_device_train_batch_size")
    total = value.get("generation_batch_size")
    if device is None and total is None:
        if forwards % accumulate:
            _trl_problem(
                items[-1], f"{forwards} forwards do not divide into optimiser steps of {accumulate}", problems
            )
            return
        count = forwards // accumulate
        train = settings[TRAIN].value
        train = train if train % count == 0 else count * max(1, train // count)
        settings[TRAIN] = Setting(train, because) if train != settings[TRAIN].value else settings[TRAIN]
        settings[MINI] = Setting(train // count, because)
        return
    if device is None:
        assert total is not None
        device = total // forwards
    total = device * forwards if total is None else total
    mini = device * accumulate
    if total % n or mini % n:
        text = (
            f"{total} responses a rollout batch and {mini} an optimiser step must be multiples of {N} = {n}"
        )
        _trl_problem(items[-1], text, problems)
        return
    settings[TRAIN] = Setting(total // n, because)
    settings[MINI] = Setting(mini // n, because)
    if "per_device_train_batch_size" in value:
        settings[MICRO] = Setting(device, because)


def _trl_problem(item: Deferred, message: str, problems: list[Problem]) -> None:
    remedy = f"or set {TRAIN} and {MINI}, which count prompts"
    problems.append(
        Problem("error", item.entry.name, item.entry.value, item.entry.origin.text, message, remedy)
    )


def _fit_batch(settings: Settings) -> None:
    """Batch sizes that nobody set give way to those that somebody did."""
    samples: Any = settings[SAMPLES].value
    train, mini = settings[TRAIN].value, settings[MINI].value
    if samples is not None and samples < train and not settings.explicit(TRAIN):
        if not settings.explicit(MINI):
            train = samples - samples % USUAL_MINI_BATCHES or samples
        elif samples >= mini:
            train = samples - samples % mini
        settings.follow(TRAIN, train, f"fits {SAMPLES} = {samples}")
    if train % mini == 0:
        return
    if not settings.explicit(MINI):
        counts = [c for c in range(2, 2 * USUAL_MINI_BATCHES + 1) if train % c == 0]
        best = min(counts, key=lambda c: abs(c - USUAL_MINI_BATCHES), default=1)
        settings.follow(MINI, train // best, f"fits {TRAIN} = {train}")
    elif not settings.explicit(TRAIN):
        settings.follow(TRAIN, mini * max(1, train // mini), f"fits {MINI} = {mini}")


def _gen_batch(settings: Settings) -> None:
    """A recipe's generation batch follows the training batch that was set."""
    key = "data.gen_batch_size"
    size = settings[key]
    if size.value is not None and not size.origin.explicit and settings[TRAIN].origin.layer > Layer.RECIPE:
        settings.follow(key, None, f"follows {TRAIN}")
