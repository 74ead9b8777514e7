"""Conversion of other systems' values: each function returns our keys and values, or raises ValueError.

Its docstring is shown to users as the documentation of the aliases that use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"


def number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("expected a number") from None


def truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return str(value).lower() in ("true", "yes", "on", "1")
    raise ValueError("expected true or false")


def pick(value: Any, table: Mapping[Any, Mapping[str, Any]]) -> Mapping[str, Any]:
    chosen = table.get(str(value).lower())
    if chosen is None:
        raise ValueError(f"expected one of {', '.join(table)}")
    return chosen


def tool_iterations(value: Any) -> Mapping[str, Any]:
    """Rounds of tool calls; the model has one turn more, for its answer. None is no limit."""
    if value is None:
        return {f"{ROLLOUT}.multi_turn.max_assistant_turns": None}
    return {f"{ROLLOUT}.multi_turn.max_assistant_turns": int(number(value)) + 1}


def wandb_logger(value: Any) -> Mapping[str, Any]:
    """Also log to Weights & Biases."""
    return {"trainer.logger": ["console", "wandb"] if truth(value) else ["console"]}


def loggers(value: Any) -> Mapping[str, Any]:
    """Where metrics go besides the console: wandb, tensorboard, trackio or none."""
    wanted = [value] if isinstance(value, str) else value or []
    if wanted == ["all"]:
        raise ValueError("expected names, not all: wandb, tensorboard, trackio or none")
    if not isinstance(wanted, list) or not all(isinstance(w, str) for w in wanted):
        raise ValueError("expected a name or a list of names")
    return {"trainer.logger": ["console", *(w for w in wanted if w not in ("none", "console"))]}


def kl_in_loss(value: Any) -> Mapping[str, Any]:
    """Weight of the KL term in the loss; 0 switches it off."""
    beta = number(value)
    return {f"{ACTOR}.use_kl_loss": beta > 0, f"{ACTOR}.kl_loss_coef": beta}


def kl_in_reward(value: Any) -> Mapping[str, Any]:
    """Coefficient of the KL penalty in the reward; 0 switches it off."""
    coefficient = number(value)
    return {"algorithm.use_kl_in_reward": coefficient > 0, "algorithm.kl_ctrl.kl_coef": coefficient}


def fp16_dtype(value: Any) -> Mapping[str, Any]:
    """Compute in float16."""
    return {f"{MODEL}.dtype": "float16"} if truth(value) else {}


def on_cpu(value: Any) -> Mapping[str, Any]:
    """Train on the CPU."""
    return {"trainer.device": "cpu"} if truth(value) else {}


def resume_checkpoint(value: Any) -> Mapping[str, Any]:
    """Continue from the newest checkpoint (true) or from this one."""
    if value in (None, False):
        return {}
    return {"trainer.resume_mode": "auto" if value is True else value}


def off_policyness(value: Any) -> Mapping[str, Any]:
    """How many versions rollouts may run ahead of training; more than 0 also sets mode=async."""
    steps = number(value)
    mode = "async" if steps > 0 else "sync"
    return {f"{ROLLOUT}.max_head_offpolicyness": value, f"{ROLLOUT}.mode": mode}


def bf16_dtype(value: Any) -> Mapping[str, Any]:
    """Compute in bfloat16."""
    return {f"{MODEL}.dtype": "bfloat16" if truth(value) else "float32"}


def vllm_engine(value: Any) -> Mapping[str, Any]:
    """Generate with vLLM."""
    return {f"{ROLLOUT}.name": "vllm" if truth(value) else "native"}


def never_greedy(value: Any) -> Mapping[str, Any]:
    """Only false is accepted: training samples at random."""
    if truth(value):
        raise ValueError("expected false: all greedy rollouts of a prompt are the same and teach nothing")
    return {}


def old_log_probs(value: Any) -> Mapping[str, Any]:
    """true recomputes the log-probs of π_old, false uses those of the engine."""
    return {f"{ACTOR}.old_log_prob_source": "recompute" if truth(value) else "rollout"}


def resume_mode(value: Any) -> Mapping[str, Any]:
    """Continue an earlier run: auto or disabled."""
    on, off = {"trainer.resume_mode": "auto"}, {"trainer.resume_mode": "disable"}
    return pick(value, {"auto": on, "on": on, "true": on, "disabled": off, "off": off, "false": off})


def train_samples(value: Any) -> Mapping[str, Any]:
    """Use only so many training prompts; -1 = all."""
    return {"data.num_train_samples": None if value is None or number(value) <= 0 else value}


def val_samples(value: Any) -> Mapping[str, Any]:
    """Use only so many held-out prompts; -1 = all."""
    return {"data.num_val_samples": None if value is None or number(value) <= 0 else value}


def resume_path(value: Any) -> Mapping[str, Any]:
    """Continue from this checkpoint, with trainer.resume_mode=resume_path; null or false = none."""
    return {} if value in (None, False, "") else {"trainer.resume_mode": value}


def strategy(value: Any) -> Mapping[str, Any]:
    """fsdp and fsdp2 shard the models."""
    return {f"{ACTOR}.strategy": own_strategy(value)[0]}


def dtype(value: Any) -> Mapping[str, Any]:
    """Precision of computation: bfloat16, float16 or float32."""
    return {f"{MODEL}.dtype": own_dtype(value)[0]}


def attention(value: Any) -> Mapping[str, Any]:
    """flash_attention_2 and flash_attention_3 are used on GPUs anyway, by packed training and the engine."""
    return {f"{MODEL}.attn_implementation": own_attention(value)[0]}


def overlong_penalty(value: Any) -> Mapping[str, Any]:
    """true lowers the reward of responses near the length limit, with the reward manager dapo."""
    found = {"reward_model.reward_kwargs.overlong_buffer_cfg.enable": truth(value)}
    return {**found, "reward_model.reward_manager": "dapo"} if truth(value) else found


def excluded_modules(value: Any) -> Mapping[str, Any]:
    """Names of modules that get no LoRA adapters; an empty list = none are excluded."""
    return {f"{MODEL}.exclude_modules": value or None}


def rollout_is(value: Any) -> Mapping[str, Any]:
    """Importance weights π_old/μ against the rollout policy: token, sequence (their product) or null."""
    mode = {"token": "token_truncate", "sequence": "sequence_product_truncate"}
    if value is None:
        return {f"{ACTOR}.use_decoupled_loss": False}
    if value not in mode:
        raise ValueError(f"expected one of {', '.join(mode)} or null")
    return {
        f"{ACTOR}.use_decoupled_loss": True,
        f"{ACTOR}.behav_imp_weight_mode": mode[value],
        f"{ACTOR}.behav_imp_weight_cap": 2.0,  # verl's default; rollout_is_threshold replaces it
    }


def rollout_is_threshold(value: Any) -> Mapping[str, Any]:
    """Weights above it are truncated to it."""
    try:
        return {f"{ACTOR}.behav_imp_weight_cap": None if value is None else float(value)}
    except (TypeError, ValueError):
        raise ValueError("expected a number: only the upper bound is supported") from None


def bypass_mode(value: Any) -> Mapping[str, Any]:
    """true uses the engine's log-probs as those of π_old."""
    return {f"{ACTOR}.old_log_prob_source": "rollout"} if truth(value) else {}


# The following convert values of our own keys: each returns the value, or UNSET, and a note where the meaning changes.
UNSET = object()
Converted = tuple[Any, str | None]
SHORT_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16", "float": "float32"}
LOGGERS_ELSEWHERE = ("mlflow", "swanlab", "clearml", "vemlp_wandb", "file", "rl_logging_board", "comet_ml")


def logger_list(value: Any) -> Converted:
    wanted = [value] if isinstance(value, str) else value
    if not isinstance(wanted, list):
        return value, None
    gone = [name for name in wanted if name in LOGGERS_ELSEWHERE]
    note = f"{', '.join(gone)} is not supported; metrics are in metrics.jsonl of the run folder" if gone else None
    return [name for name in wanted if name not in gone], note


def own_resume_mode(value: Any) -> Converted:
    return (UNSET, None) if value == "resume_path" else (value, None)


def own_strategy(value: Any) -> Converted:
    if value in ("megatron", "veomni", "torchtitan", "fsdp_turbo"):
        return "fsdp2", f"FSDP2 shards the models, not {value}"
    return "fsdp2" if value == "fsdp" else value, None


def engine_name(value: Any) -> Converted:
    if value in ("sglang", "trtllm", "vllm_omni"):
        return "vllm", f"vLLM generates, not {value}"
    return "native" if value == "hf" else value, None


def own_dtype(value: Any) -> Converted:
    name = str(value).removeprefix("torch.") if str(value).startswith("torch.") else value
    return SHORT_DTYPES.get(name, name), None


def own_attention(value: Any) -> Converted:
    if str(value).startswith(("flash_attention", "kernels-community/")):
        return None, "packed training and the engine use flash attention on GPUs anyway"
    return value, None


def save_freq(value: Any) -> Mapping[str, Any]:
    """Training steps between checkpoints."""
    return {"trainer.save_freq": -1 if value is None else value}


def test_freq(value: Any) -> Mapping[str, Any]:
    """Training steps between evaluations."""
    return {"trainer.test_freq": -1 if value is None else value}
