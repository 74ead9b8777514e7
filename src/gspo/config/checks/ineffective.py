"""Keys that have no effect in combination with others. A warning names each one that was set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gspo.config.batch_plan import BatchPlan, roles
from gspo.config.loading import tree
from gspo.config.loading.settings import Settings
from gspo.config.problems import Problem
from gspo.config.resolved_loss import resolved_loss
from gspo.config.schema import TrainerConfig

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
FILTER = "algorithm.filter_groups"


@dataclass(frozen=True, slots=True)
class NoEffect:
    """`keys` (a trailing dot means every key below) have no effect when `when` holds, because of `reason`."""

    keys: tuple[str, ...]
    when: Callable[[TrainerConfig], bool]
    reason: str
    remedy: str


def _actor_loss(config: TrainerConfig) -> str:
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def _engine_is_in_trainer(config: TrainerConfig) -> bool:
    rollout = config.actor_rollout_ref.rollout
    apart = rollout.mode == "async" or rollout.num_workers > 1 or config.trainer.backend == "ray"
    return rollout.name == "native" and not apart


def _largest_num_mini_batches(config: TrainerConfig) -> int:
    """Mini-batches per step of the policy or the critic, whichever has more."""
    sizes = [config.actor_rollout_ref.actor.ppo_mini_batch_size]
    if roles(config)["critic"]:
        sizes.append(config.critic.ppo_mini_batch_size or sizes[0])
    return max(1, config.data.train_batch_size // min(sizes))


_FILTER_KEYS = ("max_num_gen_batches", "strategy", "max_staleness", "on_limit", "max_in_flight", "metric", "predict")
_VLLM_KEYS = ("enable_chunked_prefill", "enable_prefix_caching", "engine_kwargs")
RULES = (
    NoEffect(
        (*(f"{FILTER}.{k}" for k in _FILTER_KEYS), "data.gen_batch_size"),
        lambda c: not c.algorithm.filter_groups.enable,
        "dynamic sampling is off",
        f"set {FILTER}.enable=true, or remove it",
    ),
    NoEffect(
        (f"{FILTER}.max_staleness", f"{FILTER}.max_in_flight"),
        lambda c: c.algorithm.filter_groups.enable and c.algorithm.filter_groups.strategy == "rounds",
        "strategy=rounds carries no groups over",
        f"set {FILTER}.strategy=stream, or remove it",
    ),
    NoEffect(
        (f"{FILTER}.max_staleness", f"{FILTER}.max_in_flight"),
        lambda c: c.actor_rollout_ref.rollout.mode == "async",
        f"with mode=async {ROLLOUT}.max_head_offpolicyness and max_concurrent_rollouts decide this",
        "set those instead",
    ),
    NoEffect(
        (f"{FILTER}.predict_weight", f"{FILTER}.predict_min_prob", f"{FILTER}.predict_discount"),
        lambda c: c.algorithm.filter_groups.predict == "off",
        "no prompts are skipped",
        f"set {FILTER}.predict=skip, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.behav_imp_weight_cap", f"{ACTOR}.behav_imp_weight_mode"),
        lambda c: not c.actor_rollout_ref.actor.use_decoupled_loss,
        "the decoupled loss is off",
        f"set {ACTOR}.use_decoupled_loss=true, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss and c.actor_rollout_ref.actor.kl_loss_coef > 0,
        "there is no KL term in the loss",
        f"set {ACTOR}.use_kl_loss=true, or remove it",
    ),
    NoEffect(
        ("algorithm.kl_ctrl.", "algorithm.kl_penalty"),
        lambda c: not c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.kl_coef > 0,
        "there is no KL penalty in the reward",
        "set algorithm.use_kl_in_reward=true, or remove it",
    ),
    NoEffect(
        ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"),
        lambda c: c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.type == "fixed",
        "the KL coefficient is fixed",
        "set algorithm.kl_ctrl.type=adaptive, or remove it",
    ),
    NoEffect(
        ("actor_rollout_ref.ref.",),
        lambda c: not roles(c)["reference"],
        "no KL term is on, so no reference model is used",
        f"set {ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true, or remove it",
    ),
    NoEffect(
        (
            *(f"critic.{k}" for k in ("model.", "optim.", "fsdp_config.", "cliprange_value", "grad_clip")),
            *(f"critic.ppo_{k}" for k in ("mini_batch_size", "micro_batch_size_per_gpu", "epochs")),
            "critic.ppo_max_token_len_per_gpu",
        ),
        lambda c: not roles(c)["critic"],
        "there is no critic",
        "set algorithm.adv_estimator=gae, or remove it",
    ),
    NoEffect(
        ("trainer.critic_warmup",),
        lambda c: not roles(c)["critic"],
        "there is no critic to warm up",
        "set algorithm.adv_estimator=gae, or remove it",
    ),
    NoEffect(
        ("algorithm.lam",),
        lambda c: c.algorithm.adv_estimator != "gae",
        "only the estimator gae uses it",
        "set algorithm.adv_estimator=gae, or remove it",
    ),
    NoEffect(
        ("algorithm.gamma",),
        lambda c: c.algorithm.adv_estimator not in ("gae", "reinforce_plus_plus", "remax"),
        "this estimator does not discount",
        "remove it",
    ),
    NoEffect(
        ("algorithm.norm_adv_by_std_in_grpo",),
        lambda c: c.algorithm.adv_estimator not in ("grpo", "grpo_passk"),
        "this estimator does not divide by the group's std",
        "remove it",
    ),
    NoEffect(
        (f"{ACTOR}.policy_loss.tau_pos", f"{ACTOR}.policy_loss.tau_neg"),
        lambda c: (
            _actor_loss(c) in tree.leaves()[f"{ACTOR}.policy_loss.loss_mode"].info.choices and _actor_loss(c) != "sapo"
        ),
        "only the loss sapo uses it",
        f"set {ACTOR}.policy_loss.loss_mode=sapo, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.clip_ratio_c",),
        lambda c: (
            (_actor_loss(c) not in ("vanilla", "dapo") and not resolved_loss(c.actor_rollout_ref.actor).clips)
            or _actor_loss(c) in ("gspo", "gspo_token", "cispo", "geo_mean")
        ),
        "this loss has no dual clip",
        "remove it",
    ),
    NoEffect(
        tuple(f"{ACTOR}.{k}" for k in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_target")),
        lambda c: not resolved_loss(c.actor_rollout_ref.actor).clips,
        "this loss does not clip; the range is only used to count clip fractions",
        "remove it",
    ),
    NoEffect(
        (f"{ACTOR}.clip_ratio",),
        lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
        "both sides are set by clip_ratio_low and clip_ratio_high",
        "remove it",
    ),
    NoEffect(
        (f"{ACTOR}.clip_target",),
        lambda c: BatchPlan.of(c).optimiser_steps == 1,
        "with one optimiser step per rollout batch nothing clips",
        f"make {ACTOR}.ppo_mini_batch_size smaller than data.train_batch_size",
    ),
    NoEffect(
        (f"{ACTOR}.shuffle",),
        lambda c: _largest_num_mini_batches(c) == 1,
        "all groups of a step are in one mini-batch",
        f"make {ACTOR}.ppo_mini_batch_size smaller than data.train_batch_size, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.clip_target_bounds",),
        lambda c: c.actor_rollout_ref.actor.clip_target is None,
        "clip_target is not set, so the clip range does not change",
        f"set {ACTOR}.clip_target, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.loss_scale_factor",),
        lambda c: resolved_loss(c.actor_rollout_ref.actor).aggregation != "seq-mean-token-sum-norm",
        "only the aggregation seq-mean-token-sum-norm uses it",
        "remove it",
    ),
    NoEffect(
        (f"{ACTOR}.entropy_checkpointing",),
        lambda c: c.actor_rollout_ref.actor.entropy_coeff == 0,
        "the entropy has no gradient",
        f"set {ACTOR}.entropy_coeff, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.optim.min_lr_ratio",),
        lambda c: c.actor_rollout_ref.actor.optim.lr_scheduler_type == "constant",
        "the learning rate is constant",
        f"set {ACTOR}.optim.lr_scheduler_type=cosine, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.optim.lr_warmup_steps_ratio",),
        lambda c: c.actor_rollout_ref.actor.optim.lr_warmup_steps >= 0,
        "lr_warmup_steps is set",
        "keep one of the two",
    ),
    NoEffect(
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu",),
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        "forward passes are filled by tokens (use_dynamic_bsz)",
        f"set {ACTOR}.use_dynamic_bsz=false, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.ppo_max_token_len_per_gpu",),
        lambda c: not c.actor_rollout_ref.actor.use_dynamic_bsz,
        "forward passes have a fixed number of responses",
        f"set {ACTOR}.use_dynamic_bsz=true, or remove it",
    ),
    NoEffect(
        tuple(
            f"{ACTOR}.fsdp_config.{k}"
            for k in ("param_offload", "offload_policy", "reshard_after_forward", "fsdp_size")
        ),
        lambda c: c.actor_rollout_ref.actor.strategy == "local",
        "the policy is not sharded",
        f"set {ACTOR}.strategy=fsdp2, or remove it",
    ),
    NoEffect(
        (f"{ACTOR}.fsdp_config.optimizer_offload", "critic.fsdp_config.optimizer_offload"),
        lambda c: c.trainer.device == "cpu",
        "on a CPU the optimiser's state is in host memory anyway",
        "remove it",
    ),
    NoEffect(
        tuple(f"{MODEL}.{k}" for k in ("lora_alpha", "lora_dropout", "target_modules", "exclude_modules")),
        lambda c: c.actor_rollout_ref.model.lora_rank == 0,
        "LoRA is off",
        f"set {MODEL}.lora_rank, or remove it",
    ),
    NoEffect(
        (f"{MODEL}.lora_dropout",),
        lambda c: c.actor_rollout_ref.model.lora_rank > 0,
        "dropout is always off in reinforcement learning, so that ratios compare like with like",
        "remove it",
    ),
    NoEffect(
        tuple(f"{ROLLOUT}.{k}" for k in _VLLM_KEYS),
        lambda c: c.actor_rollout_ref.rollout.name == "native",
        "only vllm uses it",
        f"set {ROLLOUT}.name=vllm, or remove it",
    ),
    NoEffect(
        (f"{ROLLOUT}.dtype",),
        _engine_is_in_trainer,
        "the engine runs inside the trainer, in the precision of training",
        f"set {MODEL}.dtype, or remove it",
    ),
    NoEffect(
        (f"{ROLLOUT}.max_head_offpolicyness", f"{ROLLOUT}.max_concurrent_rollouts"),
        lambda c: c.actor_rollout_ref.rollout.mode == "sync",
        "rollouts are not asynchronous",
        f"set {ROLLOUT}.mode=async, or remove it",
    ),
    NoEffect(
        (f"{ROLLOUT}.val_kwargs.temperature", f"{ROLLOUT}.val_kwargs.top_k", f"{ROLLOUT}.val_kwargs.top_p"),
        lambda c: not c.actor_rollout_ref.rollout.val_kwargs.do_sample,
        "responses to held-out prompts are greedy",
        f"set {ROLLOUT}.val_kwargs.do_sample=true, or remove it",
    ),
    NoEffect(
        (f"{ROLLOUT}.val_kwargs.n",),
        lambda c: not c.actor_rollout_ref.rollout.val_kwargs.do_sample,
        "all greedy responses to a prompt are the same",
        f"set {ROLLOUT}.val_kwargs.do_sample=true, or remove it",
    ),
    NoEffect(
        ("reward_model.reward_kwargs.",),
        lambda c: c.reward_model.reward_manager == "naive",
        "the naive manager has no overlong penalty",
        "set reward_model.reward_manager=dapo, or remove it",
    ),
    NoEffect(
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
        lambda c: c.custom_reward_function.path is None,
        "custom_reward_function.path is not set",
        "set custom_reward_function.path, or remove it",
    ),
    NoEffect(
        ("data.seed",), lambda c: not c.data.shuffle, "the data is not shuffled", "set data.shuffle=true, or remove it"
    ),
    NoEffect(
        ("data.truncation",),
        lambda c: c.data.filter_overlong_prompts and c.data.truncation != "error",
        "prompts that are too long are left out, not truncated",
        "set data.filter_overlong_prompts=false, or remove it",
    ),
    NoEffect(
        ("trainer.total_epochs",),
        lambda c: c.trainer.total_training_steps is not None,
        "trainer.total_training_steps is set",
        "keep one of the two",
    ),
)


def find(config: TrainerConfig, settings: Settings) -> Iterator[Problem]:
    """A warning for every key that was set to something other than its default and has no effect."""
    seen: set[str] = set()
    for rule in RULES:
        if not rule.when(config):
            continue
        for key, leaf in tree.leaves().items():
            setting = settings[key]
            hit = any(key == name or (name.endswith(".") and key.startswith(name)) for name in rule.keys)
            if hit and key not in seen and setting.origin.explicit and setting.value != leaf.default:
                seen.add(key)
                message = f"has no effect: {rule.reason}"
                yield Problem("warning", key, setting.value, setting.origin.text, message, rule.remedy)
