"""Values that follow from others: aliases that count batches, and defaults that adapt to what was set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gspo.algo.settings import ESTIMATORS, LOSSES, SEQUENCE_LEVELS
from gspo.config.compat.aliases import aliases
from gspo.config.loading.coerce import WrongType, coerce
from gspo.config.loading.settings import Layer, Origin, Setting, Settings
from gspo.config.problems import Problem

ACTOR = "actor_rollout_ref.actor"
TRAIN = "data.train_batch_size"
SAMPLES = "data.num_train_samples"
MINI = f"{ACTOR}.ppo_mini_batch_size"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
N = "actor_rollout_ref.rollout.n"
ESTIMATOR = "algorithm.adv_estimator"
FUNCTIONS = "reward.functions"
LEVEL = f"{ACTOR}.importance_sampling_level"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
CLIPS = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
LOSS_OF_LEVEL = {"token": "vanilla", "turn": "gspo", "sequence": "gspo", "sequence_token": "gspo_token"}
USUAL_MINI_BATCHES = 4


def derive(settings: Settings, deferred: Sequence[Setting], problems: list[Problem], system: str | None = None) -> None:
    """Fill in derived values in place, those of deferred aliases included; contradictions go to `problems`."""
    if system == "verl":
        _devices_of_verl(settings)
    _distillation(settings)
    _filter_metric(settings)
    _loss_of_method(settings)
    _loss_of_level(settings, problems)
    _clip_range(settings)
    _length_of_run(settings)
    _give_way(settings, problems)
    deferred = _reward_weights(settings, _adam_betas(settings, deferred, problems), problems)
    bad = [setting for setting in deferred if not _is_count(setting.value)]
    for setting in bad:
        problems.append(setting.problem("expected a whole number of at least 1", f"e.g. {setting.name}=4"))
    if bad:
        return
    trl = [setting for setting in deferred if aliases()[setting.name].system == "TRL"]
    if trl:
        _trl_batch(settings, trl, problems)
    for setting in deferred:
        if setting not in trl:
            _mini_batches(settings, setting, problems)
    _micro_batch(settings)
    follow_batch_size(settings)


def follow_batch_size(settings: Settings) -> None:
    """Adapt the sizes that nobody set to those that somebody did."""
    _batch_sizes(settings)
    _gen_batch(settings)


def _adam_betas(settings: Settings, deferred: Sequence[Setting], problems: list[Problem]) -> list[Setting]:
    """Put TRL's and AReaL's two decay rates into the list of ours; returns the other deferred settings.

    A list that is set in a later layer replaces both.
    """
    rest = []
    for setting in deferred:
        target = aliases()[setting.name].target
        if not target.endswith("optim.betas"):
            rest.append(setting)
        elif not _is_number(setting.value):
            problems.append(setting.problem("expected a number in [0, 1)", f"e.g. {setting.name}=0.9"))
        elif settings[target].origin.layer <= setting.origin.layer:
            betas = list(settings[target].value)
            betas[0 if setting.name.endswith("beta1") else 1] = coerce(setting.value, float)
            settings.put(target, betas, setting.origin)
    return rest


def _reward_weights(settings: Settings, deferred: Sequence[Setting], problems: list[Problem]) -> list[Setting]:
    """Give the entries of `reward.functions` TRL's weights, in their order; returns the other deferred settings."""
    for setting in deferred:
        if setting.name != "reward_weights":
            continue
        entries, weights = settings[FUNCTIONS].value, setting.value
        if not isinstance(weights, list) or len(weights) != len(entries) or not all(map(_is_number, weights)):
            message = f"expected a list of {len(entries)} numbers, one for each entry of {FUNCTIONS}"
            problems.append(setting.problem(message, f"give each entry of {FUNCTIONS} its own `weight`"))
        else:
            weighted = [{**entry, "weight": coerce(weight, float)} for entry, weight in zip(entries, weights)]
            settings.put(FUNCTIONS, weighted, setting.origin)
    return [setting for setting in deferred if setting.name != "reward_weights"]


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(coerce(value, float))
    except WrongType:
        return False


def _is_count(value: Any) -> bool:
    """Whether a value is a positive whole number."""
    try:
        return coerce(value, int) >= 1
    except WrongType:
        return False


def _distillation(settings: Settings) -> None:
    """A teacher compares itself with π_old of every token, and it is not the model that a recipe's KL term means."""
    only = settings[ESTIMATOR].value == "opd"
    if not only and not settings["algorithm.distill_weight"].value:
        return
    source, kl, groups = f"{ACTOR}.old_log_prob_source", f"{ACTOR}.use_kl_loss", "algorithm.filter_groups.enable"
    if not settings.explicit(source):
        settings.derive(source, "recompute", "distillation needs π_old before the update")
    if settings[kl].origin.layer == Layer.RECIPE:
        settings.derive(kl, False, "the reference is the teacher")
    if only and settings[groups].origin.layer == Layer.RECIPE:
        settings.derive(groups, False, "a teacher has something to say about every group")


def _filter_metric(settings: Settings) -> None:
    """Where a judge or a reward model decides, a recipe's filter by the rule's accuracy gives way to the reward."""
    metric = "algorithm.filter_groups.metric"
    entries = settings[FUNCTIONS].value
    judged = settings["reward.judge.base_url"].value is not None or settings["reward_model.enable"].value
    judged = judged or any("judge" in entry or "model" in entry for entry in entries if isinstance(entry, dict))
    if judged and settings[metric].origin.layer == Layer.RECIPE:
        settings.derive(metric, "seq_reward", "the reward is a judge's or a model's")


def _devices_of_verl(settings: Settings) -> None:
    """verl trains on all devices it is given: on several machines with Ray, on those of one machine with FSDP."""
    backend, strategy = "trainer.backend", f"{ACTOR}.strategy"
    if settings["trainer.nnodes"].value > 1 and not settings.explicit(backend):
        settings.derive(backend, "ray", "verl runs on Ray")
    several = (settings["trainer.n_gpus_per_node"].value or 1) > 1
    if several and settings[backend].value == "local" and not settings.explicit(strategy):
        settings.derive(strategy, "fsdp2", "verl shards over the devices of trainer.n_gpus_per_node")


def _loss_of_method(settings: Settings) -> None:
    """Who names an estimator names a method: GRPO, PPO and the others have a ratio per token unless a loss is named."""
    chosen = settings.explicit(ESTIMATOR) and settings[ESTIMATOR].value in ESTIMATORS
    if chosen and settings[LOSS].origin.layer == Layer.DEFAULT and settings[LEVEL].value is None:
        settings.derive(LOSS, "vanilla", f"the loss of {ESTIMATOR}={settings[ESTIMATOR].value}; {LOSS}=gspo is GSPO")


def _loss_of_level(settings: Settings, problems: list[Problem]) -> None:
    """A ratio level selects the loss, and a loss its level. If both are set, they must agree."""
    level, loss = settings[LEVEL], settings[LOSS]
    defaults = LOSSES.get(loss.value)
    if level.value is None:
        if defaults is not None:
            settings.derive(LEVEL, defaults.levels[0], f"follows from {LOSS}")
        return
    if not loss.origin.explicit:
        settings.derive(LOSS, LOSS_OF_LEVEL[level.value], f"follows from {LEVEL} ({level.origin.text})")
    elif defaults is not None and level.value not in defaults.levels:
        supported = " or ".join(defaults.levels)
        message = f"contradicts {LOSS} = {loss.value} ({loss.origin.text}), which supports only {supported}"
        remedy = f"remove one of the two, or set {LOSS}={LOSS_OF_LEVEL[level.value]}"
        problems.append(level.problem(message, remedy))


def _clip_range(settings: Settings) -> None:
    """`clip_ratio`, when set, replaces a recipe's two sides; a recipe's GSPO range is not used for a token ratio."""
    shared = f"{ACTOR}.clip_ratio"
    for key in CLIPS:
        if settings.explicit(shared) and not settings.explicit(key):
            settings.derive(key, None, f"because {shared} is set")
    loss_is_chosen = settings[LOSS].origin.layer > Layer.RECIPE or settings.explicit(LEVEL)
    if settings[LEVEL].value in SEQUENCE_LEVELS or not loss_is_chosen:
        return
    for key in (*CLIPS, f"{ACTOR}.clip_target"):
        if settings[key].origin.layer == Layer.RECIPE:
            settings.derive(key, None, f"the recipe's value is for GSPO, not for {settings[LOSS].value}")


def _length_of_run(settings: Settings) -> None:
    """A number of epochs that was set replaces a recipe's number of steps."""
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if settings.explicit(epochs) and not settings.explicit(steps):
        settings.derive(steps, None, f"because {epochs} is set")


def _give_way(settings: Settings, problems: list[Problem]) -> None:
    """A recipe's dynamic sampling and KL loss are off where what somebody set excludes them."""
    enable, kl_loss, kl_reward = "algorithm.filter_groups.enable", f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    excluded = {
        enable: (settings[N].value == 1, f"{N} = 1, and dynamic sampling compares the responses of a group"),
        kl_loss: (settings[kl_reward].value is True, f"{kl_reward} is set, and KL should count once"),
    }
    for key, (is_excluded, reason) in excluded.items():
        if is_excluded and settings[key].value is True and settings[key].origin.layer == Layer.RECIPE:
            problems.append(settings[key].problem(f"is switched off: {reason}", f"set {key} yourself", "warning"))
            settings.derive(key, False, f"because {reason}")


def _micro_batch(settings: Settings) -> None:
    """A micro-batch size that was set switches the token budget off, unless that was set too."""
    dynamic = f"{ACTOR}.use_dynamic_bsz"
    if settings.explicit(MICRO) and settings[MICRO].value is not None and not settings.explicit(dynamic):
        settings.derive(dynamic, False, f"because {MICRO} is set")


def _mini_batches(settings: Settings, setting: Setting, problems: list[Problem]) -> None:
    """`update_frequency k`: k mini-batches per rollout batch. A size that was set stays; the other one follows."""
    k = coerce(setting.value, int)
    train, mini = settings[TRAIN].value, settings[MINI].value
    origin = Origin(setting.origin.layer, f"{setting.origin.text}: {k} mini-batches per rollout batch")
    if settings.explicit(MINI) and not settings.explicit(TRAIN):
        settings.put(TRAIN, k * mini, origin)
    elif settings.explicit(MINI):
        if train != k * mini:
            message = f"contradicts {TRAIN} = {train} and {MINI} = {mini}, which make {train / mini:g} mini-batches"
            problems.append(setting.problem(message, "set only two of the three"))
    elif train % k == 0:
        settings.put(MINI, train // k, origin)
    elif settings.explicit(TRAIN):
        message = f"{TRAIN} = {train} ({settings[TRAIN].origin.text}) does not divide into {k} mini-batches"
        remedy = f"set {TRAIN} to a multiple of {k}, e.g. {max(k, round(train / k) * k)}"
        problems.append(setting.problem(message, remedy))
    else:
        settings.put(TRAIN, k * mini, origin)


def _trl_batch(settings: Settings, trl: Sequence[Setting], problems: list[Problem]) -> None:
    """TRL's sizes count responses and forward passes; ours count prompts.

    Without per_device_train_batch_size or generation_batch_size only their ratio, the number of mini-batches, is known.
    """
    value = {setting.name: coerce(setting.value, int) for setting in trl}
    n, last = settings[N].value, trl[-1]
    accumulate = value.get("gradient_accumulation_steps", 1)
    forwards = value.get("steps_per_generation", accumulate)
    sizes = ", ".join(f"{k}={v}" for k, v in value.items())
    origin = Origin(last.origin.layer, f"{last.origin.text} (TRL batch: {sizes})")
    device = value.get("per_device_train_batch_size")
    total = value.get("generation_batch_size")
    remedy = f"change these sizes, or set {TRAIN} and {MINI}, which count prompts"
    if device is None and total is None:
        if forwards % accumulate:
            message = f"{forwards} forward passes do not divide into optimiser steps of {accumulate}"
            problems.append(last.problem(message, remedy))
            return
        count = forwards // accumulate
        train = settings[TRAIN].value
        train = train if train % count == 0 else count * max(1, train // count)
        if train != settings[TRAIN].value:
            settings.put(TRAIN, train, origin)
        settings.put(MINI, train // count, origin)
        return
    if device is None:
        assert total is not None
        device = total // forwards
    total = device * forwards if total is None else total
    mini = device * accumulate
    if total % n or mini % n:
        message = f"{total} responses per rollout batch and {mini} per optimiser step must be multiples of {N} = {n}"
        problems.append(last.problem(message, remedy))
        return
    settings.put(TRAIN, total // n, origin)
    settings.put(MINI, mini // n, origin)
    if "per_device_train_batch_size" in value:
        settings.put(MICRO, device, origin)


def _batch_sizes(settings: Settings) -> None:
    """Batch sizes that nobody set adapt to those that somebody did."""
    samples: Any = settings[SAMPLES].value
    train, mini = settings[TRAIN].value, settings[MINI].value
    if samples is not None and samples < train and not settings.explicit(TRAIN):
        if not settings.explicit(MINI):
            train = samples - samples % USUAL_MINI_BATCHES or samples
        elif samples >= mini:
            train = samples - samples % mini
        settings.derive(TRAIN, train, f"adjusted to {SAMPLES} = {samples}")
    if train % mini == 0:
        return
    if not settings.explicit(MINI):
        counts = [c for c in range(2, 2 * USUAL_MINI_BATCHES + 1) if train % c == 0]
        best = min(counts, key=lambda c: abs(c - USUAL_MINI_BATCHES), default=1)
        settings.derive(MINI, train // best, f"adjusted to {TRAIN} = {train}")
    elif not settings.explicit(TRAIN):
        settings.derive(TRAIN, mini * max(1, train // mini), f"adjusted to {MINI} = {mini}")


def _gen_batch(settings: Settings) -> None:
    """A recipe's generation batch is not used when the training batch was set or adjusted."""
    key = "data.gen_batch_size"
    size = settings[key]
    if size.value is not None and not size.origin.explicit and settings[TRAIN].origin.layer > Layer.RECIPE:
        settings.derive(key, None, f"because {TRAIN} is set")
