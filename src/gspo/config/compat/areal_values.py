"""Conversion of AReaL's values: each function returns our keys and values, or raises ValueError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gspo.config.compat import trl_values
from gspo.config.compat.alias_values import ACTOR, MODEL, ROLLOUT, number, pick, truth

# Keys of a critic's `optimizer` in AReaL, besides the decay rates, and ours.
CRITIC_OPTIMIZER = {
    "lr": "critic.optim.lr",
    "weight_decay": "critic.optim.weight_decay",
    "eps": "critic.optim.eps",
    "lr_scheduler_type": "critic.optim.lr_scheduler_type",
    "warmup_steps_proportion": "critic.optim.lr_warmup_steps_ratio",
    "min_lr_ratio": "critic.optim.min_lr_ratio",
    "gradient_clipping": "critic.grad_clip",
}


def mean_level(value: Any) -> Mapping[str, Any]:
    """group: GRPO's baseline; batch or null: none, the rewards are whitened over the batch (REINFORCE++)."""
    key = "algorithm.adv_estimator"
    whitened = {key: "reinforce_plus_plus"}
    return pick(value, {"group": {key: "grpo"}, "batch": whitened, "none": whitened})


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
    """The critic's optimiser, with the keys of the actor's: lr, beta1, beta2, weight_decay, eps and others."""
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping")
    found = {CRITIC_OPTIMIZER[name]: given for name, given in value.items() if name in CRITIC_OPTIMIZER}
    if "beta1" in value or "beta2" in value:
        found["critic.optim.betas"] = [value.get("beta1", 0.9), value.get("beta2", 0.999)]
    return found


def modules(value: Any) -> Mapping[str, Any]:
    """Modules that get LoRA adapters; [all-linear] is all-linear."""
    return {f"{MODEL}.target_modules": "all-linear" if value in (["all-linear"], "all-linear") else value}
