"""Sizes that nobody set: adapted to the rows, the device and the memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gspo.build.data.lengths import TrainingPrompts
from gspo.build.device import choose_device, held_memory
from gspo.build.environments import has_environment
from gspo.build.memory import MemoryPlan, in_words, machine_memory, model_size, num_held_out, plan_memory
from gspo.config import ResolvedConfig, TrainerConfig
from gspo.config.loading.settings import Layer
from gspo.config.schema import DataConfig
from gspo.plan.constants import RESERVED

FILES = "data.train_files"
PROMPT = "data.max_prompt_length"
TRAIN = "data.train_batch_size"
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
SLOTS = "actor_rollout_ref.rollout.max_num_seqs"
PREFILL = "actor_rollout_ref.rollout.max_num_batched_tokens"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
SHARE = 0.85  # of the memory, for sizes that are adapted: the plan is an estimate, and other programs need some
CPU_BATCH = 32  # prompts per step without a GPU: a step of the usual 1024 would take hours
# Part of a memory plan → the size that it grows with.
SIZE_OF_PART = {
    "KV cache": SLOTS,
    "KV cache of the evaluation": SLOTS,
    "logits of a step": SLOTS,
    "prefill": PREFILL,
    "activations of a micro-batch": TOKENS,
    "temporaries of a layer": TOKENS,
}


class NotEnoughMemory(ValueError):
    """The run needs more memory than the machine has."""


@dataclass(frozen=True)
class Sizes:
    """A config with every size decided, sentences about those that were adapted, and its memory plan if one was made."""

    resolved: ResolvedConfig
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    memory: MemoryPlan | None = None


def decide_sizes(
    resolved: ResolvedConfig, given: Iterable[Any] | None = None, tokenizer: Any = None, environment: Any = None
) -> Sizes:
    """Adapt the sizes that nobody set. `given` rows, tokenizer and environment replace those that the config names.

    Raises NotEnoughMemory where the run cannot fit, unless `trainer.memory_check` says otherwise.
    """
    sizes = adapt_sizes(resolved, given, tokenizer, environment)
    plan = sizes.memory
    if plan is not None and not plan.fits:
        if resolved.config.trainer.memory_check == "refuse":
            raise NotEnoughMemory(f"{plan.shortage()}. To start anyway: trainer.memory_check=warn")
        sizes.warnings.append(plan.shortage())
    return sizes


def adapt_sizes(
    resolved: ResolvedConfig, given: Iterable[Any] | None = None, tokenizer: Any = None, environment: Any = None
) -> Sizes:
    """The same, whether the run then fits or not."""
    device = choose_device(resolved.config.trainer.device)
    prompts = TrainingPrompts(given, tokenizer)
    sizes = _adapt_to_prompts(resolved, prompts, environment)
    sizes = _adapt_to_rows(sizes, prompts, device)
    return _adapt_to_memory(sizes, device) if _is_planned(resolved.config) else sizes


def _adapt_to_prompts(resolved: ResolvedConfig, prompts: TrainingPrompts, environment: Any) -> Sizes:
    """A recipe's limit of the prompt gives way to longer rows of the user, up to the limit without a recipe."""
    config, limit, most = resolved.config, resolved.config.data.max_prompt_length, DataConfig().max_prompt_length
    is_own = prompts.given is not None or resolved.origins[FILES].explicit
    is_recipe = resolved.origins[PROMPT].layer == Layer.RECIPE and not resolved.for_sft
    if not is_own or not is_recipe or limit >= most or has_environment(config, environment):
        return Sizes(resolved)
    longest = max(prompts.lengths(config), default=0)
    if longest <= limit:
        return Sizes(resolved)
    wanted, reason = min(longest, most), f"the longest prompt of the training data has {longest} tokens"
    adapted = resolved.adapted({PROMPT: wanted}, f"auto: {reason}")
    return Sizes(adapted, [f"{PROMPT}={wanted}, not {limit} as in the {resolved.origin(PROMPT)}: {reason}"])


def _adapt_to_rows(sizes: Sizes, prompts: TrainingPrompts, device: torch.device) -> Sizes:
    """A batch that is not larger than the data, nor than a machine without a GPU can generate in minutes."""
    resolved = sizes.resolved
    size, explicit = resolved.config.data.train_batch_size, resolved.origins[TRAIN].explicit
    is_default = resolved.origins[TRAIN].layer == Layer.DEFAULT
    wanted, reason = size, ""
    if is_default and device.type == "cpu" and size > CPU_BATCH:
        wanted, reason = CPU_BATCH, "training on a CPU"
    rows = prompts.count(resolved, wanted)
    if rows is None or rows >= wanted:
        rows = wanted
    elif explicit:
        steps = resolved.config.trainer.total_training_steps
        note = f"{TRAIN}={size} is more than the {_rows(rows)} of the training data: a step uses rows more than once"
        return replace(sizes, warnings=[note] if steps and rows else [])
    elif rows:
        wanted, reason = rows, f"the training data has {_rows(rows)}"
    if wanted == size:
        return sizes
    adapted = resolved.adapted({TRAIN: wanted}, f"auto: {reason}")
    mini = adapted.config.actor_rollout_ref.actor.ppo_mini_batch_size
    note = f"{TRAIN}={wanted} (mini-batches of {mini}), not {size}: {reason}"
    return replace(sizes, resolved=adapted, notes=[*sizes.notes, note])


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


def _is_planned(config: TrainerConfig) -> bool:
    """Whether the memory plan, which is one of a single process that trains and generates, holds for this config."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    alone = trainer.backend == "local" and config.actor_rollout_ref.actor.strategy == "local"
    here = rollout.name == "native" and rollout.mode == "sync" and (rollout.num_workers or 1) <= 1
    return trainer.memory_check != "off" and alone and here


def _adapt_to_memory(sizes: Sizes, device: torch.device) -> Sizes:
    """Halve the size that the largest part grows with until the run fits, as far as nobody set the sizes."""
    resolved = sizes.resolved
    model, available = model_size(resolved.config, device), machine_memory(device)
    base = int(RESERVED) if device.type == "cuda" else held_memory()

    def plan(config: TrainerConfig) -> MemoryPlan:
        return plan_memory(config, device, base=base, available=available, num_val=num_held_out(config), model=model)

    before = found = plan(resolved.config)
    changed: dict[str, Any] = {}
    reason = f"auto: fits into {in_words(available)} of memory"
    while found.peak > SHARE * available and (smaller := _smaller(resolved, found)):
        changed |= smaller
        resolved = resolved.adapted(smaller, reason)
        found = plan(resolved.config)
    if not changed:
        return replace(sizes, resolved=resolved, memory=found)
    words = ", ".join(f"{key}={str(value).lower()}" for key, value in changed.items())
    cause = f"the defaults need {in_words(before.peak)} of the {in_words(available)} of memory"
    return replace(sizes, resolved=resolved, memory=found, notes=[*sizes.notes, f"{words}: {cause}"])


def _smaller(resolved: ResolvedConfig, plan: MemoryPlan) -> dict[str, Any]:
    """A change that shrinks the largest part that can shrink; {} where none can."""
    free, config = resolved.auto_keys(), resolved.config
    longest = config.data.max_prompt_length + config.data.max_response_length
    least = {SLOTS: config.actor_rollout_ref.rollout.n, PREFILL: config.data.max_prompt_length, TOKENS: longest}
    parts = plan.memory.at_peak
    for part in sorted(parts, key=lambda name: -parts[name]):
        key = SIZE_OF_PART.get(part)
        if key in free and resolved.get(key) // 2 >= least[key]:
            return {key: resolved.get(key) // 2}
    if CHECKPOINTING in free and not resolved.get(CHECKPOINTING) and "activations of a micro-batch" in parts:
        return {CHECKPOINTING: True}
    return {}
