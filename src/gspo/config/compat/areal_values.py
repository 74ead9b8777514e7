"""Conversion of AReaL's values: each function returns our keys and values, or raises ValueError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gspo.config.compat import trl_values
from gspo.config.compat.alias_values import ACTOR, MODEL, ROLLOUT, number, pick, truth


def mean_level(value: Any) -> Mapping[str, Any]:
    """group: GRPO's baseline; batch or null: none, the rewards are whitened over the batch (REINFORCE++)."""
    key = "algorithm.adv_estimator"
    return pick(value, {"group": {key: "grpo"}, "batch": {key: "reinforce_plus_plus"}, "none": {}})


def leave_one_out(value: Any) -> Mapping[str, Any]:
    """The baseline is the mean of the other responses (RLOO)."""
    return {"algorithm.adv_estimator": "rloo"} if truth(value) else {}


def std_level(value: Any) -> Mapping[str, Any]:
    """Whose standard deviation advantages are divided by: group, batch or null."""
    return trl_values.scale_rewards("none" if value is None else value)


def adv_norm(value: Any) -> Mapping[str, Any]:
    """batch: advantages are whitened over the batch; null: they are not."""
    on = {"algorithm.normalize_advantages": True}
    return pick(value, {"batch": on, "none": {"algorithm.normalize_advantages": False}})


def eps_clip(value: Any) -> Mapping[str, Any]:
    """Clip range on both sides of 1; 0 = the policy gradient without a ratio (loss gpg)."""
    if number(value) > 0:
        return {f"{ACTOR}.clip_ratio": value}
    return {f"{ACTOR}.policy_loss.loss_mode": "gpg"}


def sapo(value: Any) -> Mapping[str, Any]:
    """true is the loss sapo."""
    return {f"{ACTOR}.policy_loss.loss_mode": "sapo"} if truth(value) else {}


def rejection_level(value: Any) -> Mapping[str, Any]:
    """Whether tokens or whole responses above the bound are left out: token or sequence."""
    key = f"{ACTOR}.behav_imp_weight_mode"
    return pick(value, {"token": {key: "token_mask"}, "sequence": {key: "sequence_mask"}})


def rollout_backend(value: Any) -> Mapping[str, Any]:
    """`vllm:d4t2` is 4 engines on 2 devices each; vLLM also generates for sglang."""
    engine, _, sizes = str(value).partition(":")
    if engine not in ("vllm", "sglang"):
        raise ValueError("expected vllm or sglang with its sizes, such as vllm:d4t1")
    found = dict(re.findall(r"([dpt])(\d+)", sizes))
    return {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.num_workers": int(found.get("d", 1)),
        f"{ROLLOUT}.tensor_model_parallel_size": int(found.get("t", 1)),
    }


def critic(value: Any) -> Mapping[str, Any]:
    """A critic makes the advantages GAE's."""
    return {"critic.model.path": value, "algorithm.adv_estimator": "gae"}


def critic_optimizer(value: Any) -> Mapping[str, Any]:
    """The critic's optimiser: lr, betas, weight_decay, eps, gradient_clipping, lr_scheduler_type, warmup_steps_proportion."""
    names = {
        "lr": "optim.lr",
        "weight_decay": "optim.weight_decay",
        "eps": "optim.eps",
        "gradient_clipping": "grad_clip",
    }
    names |= {"lr_scheduler_type": "optim.lr_scheduler_type", "warmup_steps_proportion": "optim.lr_warmup_steps_ratio"}
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping")
    found = {f"critic.{names[name]}": given for name, given in value.items() if name in names}
    if "beta1" in value and "beta2" in value:
        found["critic.optim.betas"] = [value["beta1"], value["beta2"]]
    return found


def modules(value: Any) -> Mapping[str, Any]:
    """Modules that get LoRA adapters; [all-linear] is all-linear."""
    return {f"{MODEL}.target_modules": "all-linear" if value in (["all-linear"], "all-linear") else value}
