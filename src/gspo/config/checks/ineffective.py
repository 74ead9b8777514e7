"""Keys that have no effect in combination with others. A warning names each one that was set."""

from __future__ import annotations

from collections.abc import Iterator

from gspo.algo.settings import ESTIMATORS, LOSSES
from gspo.config.batch_plan import BatchPlan, roles, trains_on_ranks
from gspo.config.loading import tree
from gspo.config.loading.settings import Settings
from gspo.config.problems import Problem
from gspo.config.resolved_loss import resolved_loss
from gspo.config.reward_parts import reward_parts
from gspo.config.schema import TrainerConfig

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
FILTER = "algorithm.filter_groups"


# Constants of the policy loss that only one loss uses.
LOSS_KEYS = {
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
}
NoEffect = tuple[str, str, tuple[str, ...]]  # reason, remedy, keys; a trailing dot means every key below


def find(config: TrainerConfig, settings: Settings) -> Iterator[Problem]:
    """A warning for every key that was set to something other than its default and has no effect."""
    seen: set[str] = set()
    for reason, remedy, names in rules(config):
        for key, leaf in tree.leaves().items():
            setting = settings[key]
            hit = any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)
            if hit and key not in seen and setting.origin.explicit and setting.value != leaf.default:
                seen.add(key)
                yield setting.problem(f"has no effect: {reason}", remedy, "warning")


def rules(c: TrainerConfig) -> Iterator[NoEffect]:
    """The rules that hold for a config. A key is reported for the first one that names it."""
    for part in (sampling, estimator, loss, updates, model, rollout, environment, rest):
        yield from part(c)


def unused(reason: str, remedy: str, *keys: str) -> NoEffect:
    return reason, remedy, keys


def sampling(c: TrainerConfig) -> Iterator[NoEffect]:
    """Keys of dynamic sampling."""
    groups, carried = c.algorithm.filter_groups, (f"{FILTER}.max_staleness", f"{FILTER}.max_in_flight")
    if not groups.enable:
        remedy = f"set {FILTER}.enable=true, or remove it"
        yield unused("dynamic sampling is off", remedy, f"{FILTER}.", "data.gen_batch_size")
    if groups.strategy == "rounds":
        yield unused("strategy=rounds carries no groups over", f"set {FILTER}.strategy=stream, or remove it", *carried)
    if c.actor_rollout_ref.rollout.mode == "async":
        reason = f"with mode=async {ROLLOUT}.max_head_offpolicyness and max_concurrent_rollouts decide this"
        yield unused(reason, "set those instead", *carried)
    if groups.predict == "off":
        keys = (f"{FILTER}.predict_weight", f"{FILTER}.predict_min_prob", f"{FILTER}.predict_discount")
        yield unused("no prompts are skipped", f"set {FILTER}.predict=skip, or remove it", *keys)


def estimator(c: TrainerConfig) -> Iterator[NoEffect]:
    """Keys of advantages, KL in the reward, the reference and the critic. A registered estimator may use any of them."""
    algorithm, name = c.algorithm, c.algorithm.adv_estimator
    if not algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0:
        remedy = "set algorithm.use_kl_in_reward=true, or remove it"
        yield unused("there is no KL penalty in the reward", remedy, "algorithm.kl_ctrl.", "algorithm.kl_penalty")
    if algorithm.kl_ctrl.type == "fixed":
        keys, remedy = ("target_kl", "horizon"), "set algorithm.kl_ctrl.type=adaptive, or remove it"
        yield unused("the KL coefficient is fixed", remedy, *(f"algorithm.kl_ctrl.{key}" for key in keys))
    if not roles(c)["reference"]:
        remedy = f"set {ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true, or remove it"
        yield unused(
            "neither a KL term nor a teacher is on, so no reference model is used", remedy, "actor_rollout_ref.ref."
        )
    use_gae = "set algorithm.adv_estimator=gae, or remove it"
    if not roles(c)["critic"]:
        yield unused("there is no critic to warm up", use_gae, "trainer.critic_warmup")
        keys = [key for key in tree.leaves() if key.startswith("critic.") and key != "critic.enable"]
        yield unused("there is no critic", use_gae, *keys)
    if name not in ESTIMATORS:
        return
    if name != "gae":
        yield unused("only the estimator gae uses it", use_gae, "algorithm.lam")
    if name not in ("gae", "reinforce_plus_plus", "remax"):
        yield unused("this estimator does not discount", "remove it", "algorithm.gamma")
    if name != "grpo" or not algorithm.norm_adv_by_std_in_grpo:
        reason = "advantages are not divided by a standard deviation, or by that of the group only"
        yield unused(reason, "remove it", "algorithm.std_level")
    if name == "opd":
        reason = "adv_estimator=opd uses the teacher alone"
        yield unused(reason, "choose another adv_estimator, or remove it", "algorithm.distill_weight")
    if name not in ("grpo", "grpo_passk"):
        reason = "this estimator does not divide by the group's std"
        yield unused(reason, "remove it", "algorithm.norm_adv_by_std_in_grpo")


def loss(c: TrainerConfig) -> Iterator[NoEffect]:
    """Keys of the policy loss. A loss that the user registered may use any of its constants."""
    actor, name = c.actor_rollout_ref.actor, c.actor_rollout_ref.actor.policy_loss.loss_mode
    objective, smaller = resolved_loss(actor), f"make {ACTOR}.ppo_mini_batch_size smaller than data.train_batch_size"
    if not actor.use_decoupled_loss:
        keys = (f"{ACTOR}.behav_imp_weight_cap", f"{ACTOR}.behav_imp_weight_mode")
        yield unused("the decoupled loss is off", f"set {ACTOR}.use_decoupled_loss=true, or remove it", *keys)
    if not actor.use_kl_loss and actor.kl_loss_coef > 0:
        remedy = f"set {ACTOR}.use_kl_loss=true, or remove it"
        yield unused("there is no KL term in the loss", remedy, f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    for own, keys in LOSS_KEYS.items():
        if name in LOSSES and name != own:
            remedy = f"set {ACTOR}.policy_loss.loss_mode={own}, or remove it"
            yield unused("this loss does not use it", remedy, *(f"{ACTOR}.policy_loss.{key}" for key in keys))
    if name in LOSSES and name not in ("vanilla", "dapo"):
        yield unused("this loss has no dual clip", "remove it", f"{ACTOR}.clip_ratio_c")
    if not objective.clips:
        reason, names = "this loss does not clip; the range is only used to count clip fractions", ("", "_low", "_high")
        yield unused(reason, "remove it", *(f"{ACTOR}.clip_ratio{side}" for side in names), f"{ACTOR}.clip_target")
    if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        yield unused("both sides are set by clip_ratio_low and clip_ratio_high", "remove it", f"{ACTOR}.clip_ratio")
    if BatchPlan.of(c).optimiser_steps == 1:
        yield unused("with one optimiser step per rollout batch nothing clips", smaller, f"{ACTOR}.clip_target")
    if actor.clip_target is None:
        reason = "clip_target is not set, so the clip range does not change"
        yield unused(reason, f"set {ACTOR}.clip_target, or remove it", f"{ACTOR}.clip_target_bounds")
    if objective.aggregation != "seq-mean-token-sum-norm":
        reason = "only the aggregation seq-mean-token-sum-norm uses it"
        yield unused(reason, "remove it", f"{ACTOR}.loss_scale_factor")
    if actor.entropy_coeff == 0:
        remedy = f"set {ACTOR}.entropy_coeff, or remove it"
        yield unused("the entropy has no gradient", remedy, f"{ACTOR}.entropy_checkpointing")


def updates(c: TrainerConfig) -> Iterator[NoEffect]:
    """Keys of mini-batches, the optimiser and sharding."""
    actor = c.actor_rollout_ref.actor
    if _largest_num_mini_batches(c) == 1:
        remedy = f"make {ACTOR}.ppo_mini_batch_size smaller than data.train_batch_size, or remove it"
        yield unused("all groups of a step are in one mini-batch", remedy, f"{ACTOR}.shuffle")
    for part, optim in ((ACTOR, actor.optim), ("critic", c.critic.optim)):
        if optim.lr_scheduler_type == "constant":
            remedy = f"set {part}.optim.lr_scheduler_type=cosine, or remove it"
            yield unused("the learning rate is constant", remedy, f"{part}.optim.min_lr_ratio")
        if optim.lr_warmup_steps >= 0:
            yield unused("lr_warmup_steps is set", "keep one of the two", f"{part}.optim.lr_warmup_steps_ratio")
    if actor.use_dynamic_bsz:
        reason = "forward passes are filled by tokens (use_dynamic_bsz)"
        remedy = f"set {ACTOR}.use_dynamic_bsz=false, or remove it"
        yield unused(reason, remedy, f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    else:
        remedy = f"set {ACTOR}.use_dynamic_bsz=true, or remove it"
        yield unused("forward passes have a fixed number of responses", remedy, f"{ACTOR}.ppo_max_token_len_per_gpu")
    if c.critic.ppo_micro_batch_size_per_gpu:
        remedy = "keep one of the two"
        yield unused("critic.ppo_micro_batch_size_per_gpu is set", remedy, "critic.ppo_max_token_len_per_gpu")
    yield unused("the reference has no optimiser", "remove it", f"{REF}.fsdp_config.optimizer_offload")
    if not trains_on_ranks(c):
        names = ("param_offload", "offload_policy", "reshard_after_forward", "fsdp_size")
        keys = [f"{part}.fsdp_config.{name}" for part in (ACTOR, REF, "critic") for name in names]
        yield unused("the models are not sharded", f"set {ACTOR}.strategy=fsdp2, or remove it", *keys)
    if c.trainer.device == "cpu":
        keys = (f"{ACTOR}.fsdp_config.optimizer_offload", "critic.fsdp_config.optimizer_offload")
        yield unused("on a CPU the optimiser's state is in host memory anyway", "remove it", *keys)


def _largest_num_mini_batches(c: TrainerConfig) -> int:
    """Mini-batches per step of the policy or the critic, whichever has more."""
    sizes = [c.actor_rollout_ref.actor.ppo_mini_batch_size]
    if roles(c)["critic"]:
        sizes.append(c.critic.ppo_mini_batch_size or sizes[0])
    return max(1, c.data.train_batch_size // min(sizes))


def model(c: TrainerConfig) -> Iterator[NoEffect]:
    """Keys of LoRA."""
    if c.actor_rollout_ref.model.lora_rank == 0:
        keys = ("lora_alpha", "lora_dropout", "target_modules", "exclude_modules")
        yield unused("LoRA is off", f"set {MODEL}.lora_rank, or remove it", *(f"{MODEL}.{key}" for key in keys))
    reason = "dropout is always off in training, so that ratios compare like with like"
    yield unused(reason, "remove it", f"{MODEL}.lora_dropout")


def rollout(c: TrainerConfig) -> Iterator[NoEffect]:
    """Keys of the engine. One of the user's own gets only the keys that every engine has, and `engine_kwargs`."""
    part = c.actor_rollout_ref.rollout
    name = part.name if part.name in ("native", "vllm") else "own"
    if name != "vllm":
        keys = (f"{ROLLOUT}.enable_chunked_prefill", f"{ROLLOUT}.enable_prefix_caching")
        yield unused("only vllm uses it", f"set {ROLLOUT}.name=vllm, or remove it", *keys)
    if name == "native":
        remedy = f"set {ROLLOUT}.name=vllm, or remove it"
        yield unused("the native engine has no further arguments", remedy, f"{ROLLOUT}.engine_kwargs")
    else:
        remedy = f"set {ROLLOUT}.name=native, or remove it"
        yield unused("only the native engine uses it", remedy, f"{ROLLOUT}.keep_cache")
    if name == "native" and part.keep_cache:
        remedy = f"set {ROLLOUT}.keep_cache=false, or remove it"
        yield unused("the engine keeps its KV cache", remedy, f"{ROLLOUT}.free_cache_engine")
    if name == "own":
        keys = ["max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "free_cache_engine"]
        keys += ["tensor_model_parallel_size"] if c.trainer.backend == "local" else []  # with Ray it reserves devices
        remedy = f"pass it in {ROLLOUT}.engine_kwargs, or remove it"
        yield unused("only the engines native and vllm use it", remedy, *(f"{ROLLOUT}.{key}" for key in keys))
    apart = part.mode == "async" or part.num_workers > 1 or c.trainer.backend == "ray"
    if name == "native" and not apart:
        reason = "the engine runs inside the trainer, in the precision of training"
        yield unused(reason, f"set {MODEL}.dtype, or remove it", f"{ROLLOUT}.dtype")
    if part.mode == "sync":
        keys = (f"{ROLLOUT}.max_head_offpolicyness", f"{ROLLOUT}.max_concurrent_rollouts")
        yield unused("rollouts are not asynchronous", f"set {ROLLOUT}.mode=async, or remove it", *keys)
    if not part.val_kwargs.do_sample:
        remedy = f"set {ROLLOUT}.val_kwargs.do_sample=true, or remove it"
        keys = (f"{ROLLOUT}.val_kwargs.{key}" for key in ("temperature", "top_k", "top_p"))
        yield unused("responses to held-out prompts are greedy", remedy, *keys)
        yield unused("all greedy responses to a prompt are the same", remedy, f"{ROLLOUT}.val_kwargs.n")


def environment(c: TrainerConfig) -> Iterator[NoEffect]:
    """Keys of environments and turns. An object passed to Trainer may be the environment, so they are kept then."""
    turns = c.actor_rollout_ref.rollout.multi_turn
    if c.algorithm.turn_rewards == "outcome":
        remedy = "set algorithm.turn_rewards=return_to_go, or remove it"
        yield unused("turns have no returns of their own", remedy, "algorithm.turn_discount")
    elif c.algorithm.turn_rewards == "return_to_go":
        keys = ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo", "std_level")
        reason = "turn_rewards=return_to_go computes the advantages"
        yield unused(reason, "remove it", *(f"algorithm.{key}" for key in keys))
    if turns.enable is False:
        yield unused("turns are switched off", f"remove {ROLLOUT}.multi_turn.enable=false", "environment.")
    elif turns.function_tool_path is not None or turns.tool_config_path is not None:
        key = "tool_config_path" if turns.function_tool_path is None else "function_tool_path"
        reason, keys = f"multi_turn.{key} decides the tools", ("name", "path", "kwargs")
        yield unused(reason, "remove one of the two keys", *(f"environment.{key}" for key in keys))
    named = (
        c.environment.name,
        c.environment.path,
        c.environment.agent,
        turns.function_tool_path,
        turns.tool_config_path,
    )
    if turns.enable is not False and any(named):
        reason = "with an environment environment.max_failure_rate counts all missing rewards"
        yield unused(reason, "set environment.max_failure_rate", "reward.max_failure_rate")


def rest(c: TrainerConfig) -> Iterator[NoEffect]:
    """Keys of rewards, data and the length of the run."""
    if c.reward_model.reward_manager != "dapo":
        remedy = "set reward_model.reward_manager=dapo, or remove it"
        reason = f"the {c.reward_model.reward_manager} manager has no overlong penalty"
        yield unused(reason, remedy, "reward_model.reward_kwargs.")
    if reward_parts(c).model is None:
        names = ("path", "weight", "normalize", "dtype", "max_tokens_per_batch", "offload")
        remedy = "set reward_model.enable=true, or remove it"
        yield unused("there is no reward model", remedy, *(f"reward_model.{name}" for name in names))
    if not reward_parts(c).judges:
        keys = [key for key in tree.leaves() if key.startswith("reward.judge.") and key != "reward.judge.base_url"]
        yield unused("there is no judge", "set reward.judge.base_url, or remove it", *keys)
    for kind, key in {"rubric": "reward.judge.rubric", "score": "reward.judge.max_score"}.items():
        if c.reward.judge.kind != kind:
            yield unused("this kind of judge does not use it", f"set reward.judge.kind={kind}, or remove it", key)
    if any("judge" in entry for entry in c.reward.functions):
        reason = "the weight in reward.functions decides"
        yield unused(reason, "remove it", "reward.judge.weight")
    if reward_parts(c).functions:
        remedy = "name the function in reward.functions, or remove one of the two keys"
        yield unused("reward.functions decides the reward", remedy, "custom_reward_function.")
    if c.custom_reward_function.path is None:
        keys = ("custom_reward_function.name", "custom_reward_function.reward_kwargs")
        remedy = "set custom_reward_function.path, or remove it"
        yield unused("custom_reward_function.path is not set", remedy, *keys)
    if isinstance(c.data.val_split, float) and c.data.val_files is not None:
        remedy = "remove one of the two keys"
        yield unused("data.val_files names the held-out data", remedy, "data.val_split")
    if c.data.sft_files is None:
        keys = ("data.sft_batch_size", f"{ACTOR}.sft_weight")
        yield unused("there are no examples to imitate", "set data.sft_files, or remove it", *keys)
    if c.actor_rollout_ref.actor.sft_weight == 0:
        keys = ("data.sft_files", "data.sft_batch_size")
        yield unused("the supervised loss has weight 0", f"set {ACTOR}.sft_weight, or remove it", *keys)
    if not c.data.shuffle:
        yield unused("the data is not shuffled", "set data.shuffle=true, or remove it", "data.seed")
    if c.data.filter_overlong_prompts:
        remedy = "set data.filter_overlong_prompts=false, or remove it"
        yield unused("prompts that are too long are left out, not truncated", remedy, "data.truncation")
    if c.trainer.total_training_steps is not None:
        yield unused("trainer.total_training_steps is set", "keep one of the two", "trainer.total_epochs")
