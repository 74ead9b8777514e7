"""Conversion of TRL's values: each function returns our keys and values, or raises ValueError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.config.compat.alias_values import ACTOR, MODEL, ROLLOUT, number, own_attention, own_dtype, pick


def loss_type(value: Any) -> Mapping[str, Any]:
    """Aggregation, or the loss: grpo, dr_grpo, bnpo, dapo, cispo or sapo."""
    aggregation, mode = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.policy_loss.loss_mode"
    table = {
        "grpo": {aggregation: "seq-mean-token-mean"},
        "dr_grpo": {aggregation: "seq-mean-token-sum-norm"},
        "bnpo": {aggregation: "token-mean"},
        "dapo": {aggregation: "token-mean"},
        "cispo": {mode: "cispo", aggregation: "token-mean"},
        "sapo": {mode: "sapo"},
    }
    return pick(value, table)


def scale_rewards(value: Any) -> Mapping[str, Any]:
    """Whether advantages are divided by the standard deviation of the group's or the batch's rewards: group, batch, none."""
    key, level = "algorithm.norm_adv_by_std_in_grpo", "algorithm.std_level"
    group, none = {key: True, level: "group"}, {key: False}
    table = {"group": group, "true": group, "batch": {key: True, level: "batch"}, "none": none, "false": none}
    return pick(value, table)


def reward_funcs(value: Any) -> Mapping[str, Any]:
    """Names of built-in rewards, file.py:function, or a reward model with a slash in its name; one or a list."""
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("expected a name, file.py:function, a reward model, or a list of these")
    return {"reward.functions": [reward_entry(name) for name in names]}


def reward_entry(name: str) -> dict[str, str]:
    """One of TRL's rewards as an entry of `reward.functions`: org/model and ./folder are reward models."""
    path, colon, function = name.rpartition(":")
    if colon:
        return {"path": path, "name": function}
    return {"model": name} if "/" in name else {"name": name}


def scheduler(value: Any) -> Mapping[str, Any]:
    """constant, constant_with_warmup, linear or cosine."""
    key = f"{ACTOR}.optim.lr_scheduler_type"
    kinds = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    return pick(getattr(value, "value", value), {name: {key: kind} for name, kind in kinds.items()})


def warmup(value: Any) -> Mapping[str, Any]:
    """Steps of warm-up; below 1 a share of the steps."""
    steps = number(value)
    key = "lr_warmup_steps_ratio" if 0 < steps < 1 else "lr_warmup_steps"
    return {f"{ACTOR}.optim.{key}": steps if 0 < steps < 1 else int(steps)}


def max_steps(value: Any) -> Mapping[str, Any]:
    """Training steps; -1 = as many as num_train_epochs makes."""
    return {"trainer.total_training_steps": value} if number(value) > 0 else {}


def eval_strategy(value: Any) -> Mapping[str, Any]:
    """no: no evaluation; steps: every eval_steps, and at the end."""
    off = {"trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.val_after_train": False}
    return pick(getattr(value, "value", value), {"no": off, "false": off, "steps": {"trainer.val_after_train": True}})


def save_strategy(value: Any) -> Mapping[str, Any]:
    """no: only at the end; steps: every save_steps."""
    off = {"trainer.save_freq": -1}
    return pick(getattr(value, "value", value), {"no": off, "false": off, "steps": {}})


def vllm_mode(value: Any) -> Mapping[str, Any]:
    """colocate frees the engine's cache during training; server keeps it."""
    key = f"{ROLLOUT}.free_cache_engine"
    return pick(value, {"colocate": {key: True}, "server": {key: False}})


def is_mode(value: Any) -> Mapping[str, Any]:
    """token_mask, token_truncate, sequence_mask or sequence_truncate; a sequence's weight is the product of its tokens'."""
    key = f"{ACTOR}.behav_imp_weight_mode"
    names = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate")
    return pick(value, {name: {key: name.replace("sequence_", "sequence_product_")} for name in names})


def model_init(value: Any) -> Mapping[str, Any]:
    """Arguments of from_pretrained: dtype, attn_implementation, trust_remote_code and device_map."""
    keys = {"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attn_implementation"}
    keys["trust_remote_code"] = "trust_remote_code"
    if value is not None and not isinstance(value, Mapping):
        raise ValueError("expected a mapping")
    unknown = sorted(set(value or {}) - set(keys) - {"device_map", "use_cache"})
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not supported; set it in {MODEL}.override_config")
    convert = {"dtype": own_dtype, "attn_implementation": own_attention}
    return {
        f"{MODEL}.{keys[name]}": convert.get(keys[name], lambda v: (v, None))(given)[0]
        for name, given in (value or {}).items()
        if name in keys
    }
