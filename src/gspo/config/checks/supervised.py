"""The keys that `gspo sft` uses. Others keep their defaults, and a warning names those that were set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gspo.config.loading import tree
from gspo.config.loading.settings import Layer, Origin, Settings
from gspo.config.problems import Problem
from gspo.config.schema import TrainerConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
BATCH = "data.train_batch_size"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
ACCURACY = "trainer.val_accuracy"
# A trailing dot means every key below.
USED = (
    *("data.", "trainer.", "actor_rollout_ref.model.", f"{ACTOR}.optim.", f"{ACTOR}.fsdp_config."),
    *(f"{ACTOR}.{key}" for key in ("strategy", "grad_clip", "use_torch_compile", "ulysses_sequence_parallel_size")),
    *(f"{ACTOR}.{key}" for key in ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")),
)
NOT_USED = (
    "data.gen_batch_size",
    "data.sft_files",
    "data.sft_batch_size",
    "trainer.critic_warmup",
    "trainer.save_groups",
)
FOR_ACCURACY = (
    *("reward.", "reward_model.", "custom_reward_function.", f"{ROLLOUT}.val_kwargs.", "trainer.log_val_generations"),
    *(f"{ROLLOUT}.{key}" for key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "prompt_length")),
    *(f"{ROLLOUT}.{key}" for key in ("response_length", "gpu_memory_utilization", "enforce_eager")),
    *("data.max_prompt_length", "data.max_response_length", "data.val_batch_size", "data.ground_truth_key"),
)


def drop_unused(settings: Settings) -> list[Problem]:
    """Give every key that `gspo sft` does not use its default, in place. A warning names each that was set otherwise."""
    found = []
    for key, leaf in tree.leaves().items():
        reason = _why_unused(key, bool(settings[ACCURACY].value))
        if reason is None:
            continue
        setting, value = settings[key], _value(key, leaf.default, settings)
        if setting.origin.explicit and setting.value != value:
            found.append(setting.problem(f"has no effect: {reason}", "remove it", "warning"))
        if value != leaf.default:
            settings.derive(key, value, "a step is one mini-batch")
        elif setting.value != value:
            settings.put(key, value, Origin(Layer.DEFAULT, "default"))
    return found


def _why_unused(key: str, accuracy: bool) -> str | None:
    if _is_in(key, FOR_ACCURACY):
        return None if accuracy else f"gspo sft uses it only with {ACCURACY}=true"
    is_used = _is_in(key, USED) and not _is_in(key, NOT_USED)
    return None if is_used else "gspo sft does not use it"


def _is_in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def _value(key: str, default: Any, settings: Settings) -> Any:
    """The value of a key that is not used: its default, except that a step is one mini-batch."""
    return settings[BATCH].value if key == MINI_BATCH else default


def lengths(c: TrainerConfig, report: Any) -> Iterator[Problem]:
    """A forward pass should hold the longest example."""
    actor, longest = c.actor_rollout_ref.actor, c.data.max_length
    if actor.use_dynamic_bsz and longest is not None and actor.ppo_max_token_len_per_gpu < longest:
        message = f"is less than the longest example, {longest} tokens; such an example gets a forward pass to itself"
        remedy = f"set it to at least {longest} if memory allows"
        yield report(f"{ACTOR}.ppo_max_token_len_per_gpu", message, remedy, "warning")
