"""Conversion of other systems' values: each function returns our keys and values, or raises ValueError.

Its docstring is shown to users as the documentation of the aliases that use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("expected a number") from None


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return str(value).lower() in ("true", "yes", "on", "1")
    raise ValueError("expected true or false")


def _pick(value: Any, table: Mapping[Any, Mapping[str, Any]]) -> Mapping[str, Any]:
    chosen = table.get(str(value).lower())
    if chosen is None:
        raise ValueError(f"expected one of {', '.join(table)}")
    return chosen


def tool_iterations(value: Any) -> Mapping[str, Any]:
    """Rounds of tool calls; the model has one turn more, for its answer. None is no limit."""
    if value is None:
        return {f"{ROLLOUT}.multi_turn.max_assistant_turns": None}
    return {f"{ROLLOUT}.multi_turn.max_assistant_turns": int(_number(value)) + 1}


def wandb_logger(value: Any) -> Mapping[str, Any]:
    """Also log to Weights & Biases."""
    return {"trainer.logger": ["console", "wandb"] if _truth(value) else ["console"]}


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
    beta = _number(value)
    return {f"{ACTOR}.use_kl_loss": beta > 0, f"{ACTOR}.kl_loss_coef": beta}


def kl_in_reward(value: Any) -> Mapping[str, Any]:
    """Coefficient of the KL penalty in the reward; 0 switches it off."""
    coefficient = _number(value)
    return {"algorithm.use_kl_in_reward": coefficient > 0, "algorithm.kl_ctrl.kl_coef": coefficient}


def trl_loss_type(value: Any) -> Mapping[str, Any]:
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
    return _pick(value, table)


def trl_scale_rewards(value: Any) -> Mapping[str, Any]:
    """Whether advantages are divided by the standard deviation of the group's or the batch's rewards: group, batch, none."""
    key, level = "algorithm.norm_adv_by_std_in_grpo", "algorithm.std_level"
    group, none = {key: True, level: "group"}, {key: False}
    table = {"group": group, "true": group, "batch": {key: True, level: "batch"}, "none": none, "false": none}
    return _pick(value, table)


def trl_reward_funcs(value: Any) -> Mapping[str, Any]:
    """Names of built-in rewards, or file.py:function; one or a list."""
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("expected a name, file.py:function, or a list of these")
    entries = []
    for name in names:
        path, colon, function = name.rpartition(":")
        entries.append({"path": path, "name": function} if colon else {"name": name})
    return {"reward.functions": entries}


def trl_scheduler(value: Any) -> Mapping[str, Any]:
    """constant, constant_with_warmup, linear or cosine."""
    key = f"{ACTOR}.optim.lr_scheduler_type"
    kinds = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    return _pick(getattr(value, "value", value), {name: {key: kind} for name, kind in kinds.items()})


def trl_warmup(value: Any) -> Mapping[str, Any]:
    """Steps of warm-up; below 1 a share of the steps."""
    number = _number(value)
    key = "lr_warmup_steps_ratio" if 0 < number < 1 else "lr_warmup_steps"
    return {f"{ACTOR}.optim.{key}": number if 0 < number < 1 else int(number)}


def trl_max_steps(value: Any) -> Mapping[str, Any]:
    """Training steps; -1 = as many as num_train_epochs makes."""
    return {"trainer.total_training_steps": value} if _number(value) > 0 else {}


def trl_eval_strategy(value: Any) -> Mapping[str, Any]:
    """no: no evaluation; steps: every eval_steps, and at the end."""
    off = {"trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.val_after_train": False}
    return _pick(getattr(value, "value", value), {"no": off, "false": off, "steps": {"trainer.val_after_train": True}})


def trl_save_strategy(value: Any) -> Mapping[str, Any]:
    """no: only at the end; steps: every save_steps."""
    off = {"trainer.save_freq": -1}
    return _pick(getattr(value, "value", value), {"no": off, "false": off, "steps": {}})


def trl_vllm_mode(value: Any) -> Mapping[str, Any]:
    """colocate frees the engine's cache during training; server keeps it."""
    key = f"{ROLLOUT}.free_cache_engine"
    return _pick(value, {"colocate": {key: True}, "server": {key: False}})


def trl_is_mode(value: Any) -> Mapping[str, Any]:
    """token_mask, token_truncate, sequence_mask or sequence_truncate; a sequence's weight is the product of its tokens'."""
    key = f"{ACTOR}.behav_imp_weight_mode"
    modes = {m: m if m.startswith("token") else m.replace("sequence", "sequence_product") for m in _TRL_MODES}
    return _pick(value, {name: {key: mode} for name, mode in modes.items()})


_TRL_MODES = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate")


def trl_model_init(value: Any) -> Mapping[str, Any]:
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


def fp16_dtype(value: Any) -> Mapping[str, Any]:
    """Compute in float16."""
    return {f"{MODEL}.dtype": "float16"} if _truth(value) else {}


def on_cpu(value: Any) -> Mapping[str, Any]:
    """Train on the CPU."""
    return {"trainer.device": "cpu"} if _truth(value) else {}


def resume_checkpoint(value: Any) -> Mapping[str, Any]:
    """Continue from the newest checkpoint (true) or from this one."""
    if value in (None, False):
        return {}
    return {"trainer.resume_mode": "auto" if value is True else value}


def off_policyness(value: Any) -> Mapping[str, Any]:
    """How many versions rollouts may run ahead of training; more than 0 also sets mode=async."""
    steps = _number(value)
    mode = "async" if steps > 0 else "sync"
    return {f"{ROLLOUT}.max_head_offpolicyness": value, f"{ROLLOUT}.mode": mode}


def bf16_dtype(value: Any) -> Mapping[str, Any]:
    """Compute in bfloat16."""
    return {f"{MODEL}.dtype": "bfloat16" if _truth(value) else "float32"}


def vllm_engine(value: Any) -> Mapping[str, Any]:
    """Generate with vLLM."""
    return {f"{ROLLOUT}.name": "vllm" if _truth(value) else "native"}


def never_greedy(value: Any) -> Mapping[str, Any]:
    """Only false is accepted: training samples at random."""
    if _truth(value):
        raise ValueError("expected false: all greedy rollouts of a prompt are the same and teach nothing")
    return {}


def old_log_probs(value: Any) -> Mapping[str, Any]:
    """true recomputes the log-probs of π_old, false uses those of the engine."""
    return {f"{ACTOR}.old_log_prob_source": "recompute" if _truth(value) else "rollout"}


def resume_mode(value: Any) -> Mapping[str, Any]:
    """Continue an earlier run: auto or disabled."""
    on, off = {"trainer.resume_mode": "auto"}, {"trainer.resume_mode": "disable"}
    return _pick(value, {"auto": on, "on": on, "true": on, "disabled": off, "off": off, "false": off})


def train_samples(value: Any) -> Mapping[str, Any]:
    """Use only so many training prompts; -1 = all."""
    return {"data.num_train_samples": None if value is None or _number(value) <= 0 else value}


def val_samples(value: Any) -> Mapping[str, Any]:
    """Use only so many held-out prompts; -1 = all."""
    return {"data.num_val_samples": None if value is None or _number(value) <= 0 else value}


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
    found = {"reward_model.reward_kwargs.overlong_buffer_cfg.enable": _truth(value)}
    return {**found, "reward_model.reward_manager": "dapo"} if _truth(value) else found


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
    return {f"{ACTOR}.old_log_prob_source": "rollout"} if _truth(value) else {}


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
    return SHORT_DTYPES.get(str(value).removeprefix("torch."), value), None


def own_attention(value: Any) -> Converted:
    if str(value).startswith(("flash_attention", "kernels-community/")):
        return None, "packed training and the engine use flash attention on GPUs anyway"
    return value, None


def areal_mean_level(value: Any) -> Mapping[str, Any]:
    """group: GRPO's baseline; batch or null: none, the rewards are whitened over the batch (REINFORCE++)."""
    key = "algorithm.adv_estimator"
    return _pick(value, {"group": {key: "grpo"}, "batch": {key: "reinforce_plus_plus"}, "none": {}})


def areal_leave_one_out(value: Any) -> Mapping[str, Any]:
    """The baseline is the mean of the other responses (RLOO)."""
    return {"algorithm.adv_estimator": "rloo"} if _truth(value) else {}


def areal_std_level(value: Any) -> Mapping[str, Any]:
    """Whose standard deviation advantages are divided by: group, batch or null."""
    return trl_scale_rewards("none" if value is None else value)


def areal_adv_norm(value: Any) -> Mapping[str, Any]:
    """batch: advantages are whitened over the batch; null: they are not."""
    on = {"algorithm.normalize_advantages": True}
    return _pick(value, {"batch": on, "none": {"algorithm.normalize_advantages": False}})


def areal_eps_clip(value: Any) -> Mapping[str, Any]:
    """Clip range on both sides of 1; 0 = the policy gradient without a ratio (loss gpg)."""
    if _number(value) > 0:
        return {f"{ACTOR}.clip_ratio": value}
    return {f"{ACTOR}.policy_loss.loss_mode": "gpg"}


def areal_sapo(value: Any) -> Mapping[str, Any]:
    """true is the loss sapo."""
    return {f"{ACTOR}.policy_loss.loss_mode": "sapo"} if _truth(value) else {}


def areal_rejection_level(value: Any) -> Mapping[str, Any]:
    """Whether tokens or whole responses above the bound are left out: token or sequence."""
    key = f"{ACTOR}.behav_imp_weight_mode"
    return _pick(value, {"token": {key: "token_mask"}, "sequence": {key: "sequence_mask"}})


def areal_rollout_backend(value: Any) -> Mapping[str, Any]:
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


def areal_critic(value: Any) -> Mapping[str, Any]:
    """A critic makes the advantages GAE's."""
    return {"critic.model.path": value, "algorithm.adv_estimator": "gae"}


def areal_critic_optimizer(value: Any) -> Mapping[str, Any]:
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


def areal_modules(value: Any) -> Mapping[str, Any]:
    """Modules that get LoRA adapters; [all-linear] is all-linear."""
    return {f"{MODEL}.target_modules": "all-linear" if value in (["all-linear"], "all-linear") else value}


def save_freq(value: Any) -> Mapping[str, Any]:
    """Training steps between checkpoints."""
    return {"trainer.save_freq": -1 if value is None else value}


def test_freq(value: Any) -> Mapping[str, Any]:
    """Training steps between evaluations."""
    return {"trainer.test_freq": -1 if value is None else value}
