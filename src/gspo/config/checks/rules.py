"""Rules between keys: sizes that must divide or nest, choices that contradict, settings that surprise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from gspo.algo.settings import length_weighting_note
from gspo.config.batch_plan import BatchPlan, distills, roles, trains_on_ranks
from gspo.config.checks import ineffective, small_machines, supervised
from gspo.config.checks.reward_rules import judge, rewards
from gspo.config.loading.names import nearest_choice
from gspo.config.loading.settings import Settings
from gspo.config.problems import Problem
from gspo.config.resolved_loss import resolved_loss
from gspo.config.schema import TrainerConfig
from gspo.paths import user_path

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
FILTER = "algorithm.filter_groups"
WIDE_SEQUENCE_CLIP = 0.01
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".tsv")

Report = Callable[..., Problem]
Rule = Callable[[TrainerConfig, Report], Iterator[Problem]]


def check(config: TrainerConfig, settings: Settings, rules: Sequence[Rule]) -> list[Problem]:
    """A problem for every rule that the config breaks, errors first."""

    def report(key: str, *problem: Any) -> Problem:
        return settings[key].problem(*problem)

    found = [problem for rule in rules for problem in rule(config, report)]
    found += ineffective.find(config, settings)
    return sorted(found, key=lambda p: p.level != "error")


def batch_sizes(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Micro-batch within mini-batch within batch within data."""
    train, actor = c.data.train_batch_size, c.actor_rollout_ref.actor
    mini, n = actor.ppo_mini_batch_size, c.actor_rollout_ref.rollout.n
    if train % mini:
        message = f"must divide data.train_batch_size = {train} into whole mini-batches"
        remedy = f"e.g. {ACTOR}.ppo_mini_batch_size={_largest_divisor(train, mini)}"
        yield report(f"{ACTOR}.ppo_mini_batch_size", message, remedy)
    micro = actor.ppo_micro_batch_size_per_gpu
    if micro is not None and not actor.use_dynamic_bsz and micro > mini * n:
        message = f"is larger than the mini-batch of {mini} prompts x {n} responses = {mini * n}"
        yield report(f"{ACTOR}.ppo_micro_batch_size_per_gpu", message, f"set it to at most {mini * n}")
    critic_mini = c.critic.ppo_mini_batch_size
    if critic_mini is not None and train % critic_mini:
        message = f"must divide data.train_batch_size = {train}"
        yield report("critic.ppo_mini_batch_size", message, "leave it null to use the actor's")
    samples = c.data.num_train_samples
    if samples is not None and samples < train:
        message = f"gives fewer prompts than data.train_batch_size = {train}, so no batch can be filled"
        yield report("data.num_train_samples", message, f"set data.train_batch_size to at most {samples}")
    world = (c.trainer.n_gpus_per_node or 1) * c.trainer.nnodes // _sharing(c)
    if trains_on_ranks(c) and mini * n < world:
        message = f"{mini} prompts x {n} responses are fewer than the {world} devices, so some have nothing to do"
        remedy = f"raise it or {ROLLOUT}.n until their product is at least {world}"
        yield report(f"{ACTOR}.ppo_mini_batch_size", message, remedy, "warning")


def micro_batches(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Forward passes are filled by tokens or have a fixed number of rows."""
    actor = c.actor_rollout_ref.actor
    if actor.ppo_micro_batch_size_per_gpu is None and not actor.use_dynamic_bsz:
        remedy = f"set {ACTOR}.ppo_micro_batch_size_per_gpu, or use_dynamic_bsz=true"
        yield report(f"{ACTOR}.use_dynamic_bsz", "without it a micro-batch size is needed", remedy)


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def lengths(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """The engine's limits must be enough for the lengths of the data."""
    data, rollout, actor = c.data, c.actor_rollout_ref.rollout, c.actor_rollout_ref.actor
    for own, key in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        value, wanted = getattr(rollout, own), getattr(data, key)
        if value is not None and value != wanted:
            yield report(f"{ROLLOUT}.{own}", f"differs from data.{key} = {wanted}", f"set only data.{key}")
    total = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < total:
        message = f"is shorter than data.max_prompt_length + data.max_response_length = {total}"
        yield report(f"{ROLLOUT}.max_model_len", message, f"set it to at least {total}, or to null")
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < total:
        message = f"is less than the longest sequence, {total} tokens; such a sequence gets a forward pass to itself"
        remedy = f"set it to at least {total} if memory allows"
        yield report(f"{ACTOR}.ppo_max_token_len_per_gpu", message, remedy, "warning")


def dynamic_sampling(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Filtering needs groups, and a metric that is equal only where nothing can be learnt."""
    groups, n, kl = c.algorithm.filter_groups, c.actor_rollout_ref.rollout.n, c.algorithm.use_kl_in_reward
    if not groups.enable:
        return
    if n < 2:
        message = "dynamic sampling needs groups of at least 2 responses per prompt"
        yield report(f"{ROLLOUT}.n", message, f"set {ROLLOUT}.n=8, or {FILTER}.enable=false")
    size, batches, train = c.data.gen_batch_size, groups.max_num_gen_batches, c.data.train_batch_size
    if groups.strategy == "rounds" and size is not None and batches > 0 and batches * size < train:
        message = f"batches of data.gen_batch_size = {size} prompts can never fill data.train_batch_size = {train}"
        remedy = "raise it or data.gen_batch_size, or set it to 0 for no limit"
        yield report(f"{FILTER}.max_num_gen_batches", message, remedy)
    if groups.function is not None:  # it decides, not the metric
        return
    metric = f"{FILTER}.metric"
    overlong = c.reward_model.reward_kwargs.overlong_buffer_cfg.enable and c.reward_model.reward_manager == "dapo"
    shaping = [
        name
        for name, on in (
            ("the overlong penalty", overlong),
            ("reward.format_weight", c.reward.format_weight != 0),
            ("reward.repetition_penalty", c.reward.repetition_penalty != 0),
        )
        if on
    ]
    remedy = f"filter on the outcome alone: set {FILTER}.metric=acc"
    if groups.metric in ("seq_reward", "seq_final_reward", "score") and shaping:
        message = f"includes {' and '.join(shaping)}: groups that are all right or all wrong differ in it and are kept"
        yield report(metric, message, remedy, "warning")
    elif groups.metric == "seq_final_reward" and kl:
        message = "includes the KL penalty, which differs for every response: no group is filtered"
        yield report(metric, message, remedy, "warning")
    if groups.metric == "seq_final_reward" and not kl:
        message = "equals seq_reward, because there is no KL penalty in the reward"
        remedy = f"set {FILTER}.metric=seq_reward, or algorithm.use_kl_in_reward=true"
        yield report(metric, message, remedy, "warning")


def clipping(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """GSPO's ratio is a mean over tokens: its clip range is narrow, and with one update the ratio is 1."""
    actor = c.actor_rollout_ref.actor
    objective, plan = resolved_loss(actor), BatchPlan.of(c)
    sides = {
        f"{ACTOR}.{name}" if getattr(actor, name) is not None else f"{ACTOR}.clip_ratio": value
        for name, value in (("clip_ratio_low", objective.clip[0]), ("clip_ratio_high", objective.clip[1]))
    }
    for key, value in sides.items():
        wide = (
            objective.is_sequence_level and objective.level != "turn" and value > WIDE_SEQUENCE_CLIP
        )  # turns may be short
        if wide and objective.clips:
            message = (
                f"ε = {value:g} is wide for a sequence ratio, which stays within 1e-4 to 1e-2 of 1: it rarely clips"
            )
            remedy = "use 3e-4/4e-4 for responses of thousands of tokens, 7e-3/9e-3 for 16 tokens, or set clip_target"
            yield report(key, message, remedy, "warning")
    if objective.clips and objective.clip[0] >= 1 and objective.loss_mode != "geo_mean":
        key = f"{ACTOR}.clip_ratio_low" if actor.clip_ratio_low is not None else f"{ACTOR}.clip_ratio"
        message = "no ratio is below 1 - ε ≤ 0, so the lower side cannot clip"
        yield report(key, message, "set it below 1", "warning")
    if objective.is_sequence_level and plan.optimiser_steps == 1 and actor.old_log_prob_source != "rollout":
        message = (
            f"equals data.train_batch_size = {plan.prompts}: with one update per rollout batch the sequence ratio is "
            "always 1, nothing clips, and GSPO equals GRPO with seq-mean-token-mean"
        )
        size = _largest_divisor(plan.prompts, max(1, plan.prompts // 4))
        remedy = f"e.g. {ACTOR}.ppo_mini_batch_size={size} for {plan.prompts // size} mini-batches"
        if plan.prompts == 1:
            remedy = "raise data.train_batch_size"
        yield report(f"{ACTOR}.ppo_mini_batch_size", message, remedy, "warning")
    note = length_weighting_note(objective.loss_mode, actor.loss_agg_mode)
    if note:
        yield report(f"{ACTOR}.loss_agg_mode", note, "set it to null", "warning")
    bounds = actor.clip_target_bounds
    if len(bounds) != 2 or not 0 < bounds[0] <= 1 <= bounds[1]:
        message = "expected two factors, the first at most 1 and the second at least 1"
        yield report(f"{ACTOR}.clip_target_bounds", message, "e.g. [0.1, 10]")


def off_policy(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """The decoupled loss and old log-probs from the engine need μ; asynchronous rollouts need a budget."""
    actor, rollout, groups = c.actor_rollout_ref.actor, c.actor_rollout_ref.rollout, c.algorithm.filter_groups
    if not rollout.calculate_log_probs and actor.use_decoupled_loss:
        message = "the decoupled loss (actor.use_decoupled_loss) needs the engine's log-probs"
        yield report(f"{ROLLOUT}.calculate_log_probs", message, "set it to true")
    if not rollout.calculate_log_probs and actor.old_log_prob_source == "rollout":
        message = "actor.old_log_prob_source = rollout needs the engine's log-probs"
        yield report(f"{ROLLOUT}.calculate_log_probs", message, "set it to true")
    if rollout.mode == "async" and rollout.max_head_offpolicyness == 0:
        message = "async with a budget of 0 versions is the same as sync"
        yield report(
            f"{ROLLOUT}.max_head_offpolicyness", message, f"e.g. {ROLLOUT}.max_head_offpolicyness=2", "warning"
        )
    ahead = rollout.mode == "async" and rollout.max_head_offpolicyness > 0
    if ahead and groups.enable and groups.strategy == "rounds":
        message = "rounds waits for whole generation batches, so nothing would be generated while training"
        yield report(f"{FILTER}.strategy", message, f"set {FILTER}.strategy=stream, or {ROLLOUT}.mode=sync")
    if ahead and c.algorithm.use_kl_in_reward:
        message = f"is measured with the policy, which {ROLLOUT}.mode = async trains at the same time"
        yield report("algorithm.use_kl_in_reward", message, f"set {ACTOR}.use_kl_loss=true instead")
    if ahead and not actor.use_decoupled_loss:
        message = f"rollouts may be {rollout.max_head_offpolicyness} weight versions old, and nothing corrects for it"
        yield report(f"{ACTOR}.use_decoupled_loss", message, "set it to true", "warning")
    carried = groups.enable and groups.strategy == "stream" and groups.max_staleness > 0
    fresh = rollout.mode == "sync" and not carried and rollout.name == "native"
    if actor.use_decoupled_loss and fresh:
        message = "the current weights write every rollout, so π_old/μ is 1 up to rounding"
        remedy = f"set {ROLLOUT}.mode=async, or remove it"
        yield report(f"{ACTOR}.use_decoupled_loss", message, remedy, "warning")


def estimators(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Group baselines need groups; gae needs a critic; KL should count once."""
    algorithm, n, critic = c.algorithm, c.actor_rollout_ref.rollout.n, c.critic.enable
    if algorithm.adv_estimator in GROUP_ESTIMATORS and n == 1 and not algorithm.filter_groups.enable:
        message = f"compares the responses of a group, but {ROLLOUT}.n = 1 gives one response per prompt"
        yield report("algorithm.adv_estimator", message, f"set {ROLLOUT}.n to at least 2", "warning")
    if algorithm.adv_estimator == "gae" and critic is False:
        yield report("critic.enable", "algorithm.adv_estimator = gae needs a critic", "set it to null or true")
    if algorithm.adv_estimator != "gae" and critic:
        message = f"algorithm.adv_estimator = {algorithm.adv_estimator} does not use the critic's values"
        yield report("critic.enable", message, "remove it, or set algorithm.adv_estimator=gae", "warning")
    steps = c.trainer.total_training_steps
    if roles(c)["critic"] and steps is not None and c.trainer.critic_warmup >= steps:
        message = f"trainer.total_training_steps = {steps}, so the policy would never be trained"
        yield report("trainer.critic_warmup", message, f"set it below {steps}")
    if c.actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward:
        message = f"KL is penalised twice, in the reward and in the loss ({ACTOR}.use_kl_loss)"
        yield report("algorithm.use_kl_in_reward", message, "set one of the two to false", "warning")
    if algorithm.use_kl_in_reward and algorithm.kl_penalty not in ("kl", "k1"):
        message = "in the reward this estimator loses part of the KL's gradient, so no coefficient holds the policy"
        yield report("algorithm.kl_penalty", message, "set algorithm.kl_penalty=kl", "warning")
    if c.actor_rollout_ref.actor.use_kl_loss and c.actor_rollout_ref.actor.kl_loss_coef == 0:
        message = "the KL term has weight 0 and only costs a forward pass of the reference"
        yield report(f"{ACTOR}.kl_loss_coef", message, f"set {ACTOR}.use_kl_loss=false", "warning")


def distillation(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """A teacher has a path of its own, and its advantages are by token."""
    actor, algorithm = c.actor_rollout_ref.actor, c.algorithm
    if not distills(c):
        return
    key = "algorithm.adv_estimator" if algorithm.adv_estimator == "opd" else "algorithm.distill_weight"
    if c.actor_rollout_ref.ref.path is None:
        message = "the teacher would be the model that the run starts from"
        yield report("actor_rollout_ref.ref.path", message, "name the folder or hub name of the teacher")
    if resolved_loss(actor).level == "sequence":
        message = "a teacher's advantages differ by token, and one ratio for the whole response would mix them"
        yield report(key, message, f"set {ACTOR}.policy_loss.loss_mode=gspo_token, or vanilla")
    if actor.old_log_prob_source == "first_pass":
        message = "distillation needs π_old before the update"
        yield report(f"{ACTOR}.old_log_prob_source", message, "set it to recompute, or remove it")
    if algorithm.adv_estimator == "opd" and algorithm.filter_groups.enable:
        message = "drops groups whose rewards are equal, of which a teacher could teach something"
        yield report(f"{FILTER}.enable", message, "set it to false", "warning")


def optimisers(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """AdamW's constants."""
    for key, betas in (
        (f"{ACTOR}.optim.betas", c.actor_rollout_ref.actor.optim.betas),
        ("critic.optim.betas", c.critic.optim.betas),
    ):
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            yield report(key, "expected two numbers in [0, 1)", "e.g. [0.9, 0.999]")


def files(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Files must exist; other names are looked up later."""
    for name in ("train_files", "val_files", "sft_files"):
        key, value = f"data.{name}", getattr(c.data, name)
        for name in value if isinstance(value, list) else [value] if value else []:
            path = re.sub(r"^(gsm8k|jsonl|parquet):", "", name)  # the format may precede the path
            pattern = str(user_path(path))
            if path.endswith(DATA_SUFFIXES) and "://" not in path and not (Path(pattern).is_file() or glob(pattern)):
                yield report(key, f"no such file: {name}", "give a file that exists, a built-in task or a hub name")
    if c.data.train_files == []:
        yield report("data.train_files", "no training data", "e.g. data.train_files=arithmetic")
    path = c.actor_rollout_ref.model.path
    if path.startswith(("/", "./", "../", "~")) and not user_path(path).is_dir():
        yield report("actor_rollout_ref.model.path", "no such folder", "give a Hugging Face folder or a hub name")


def run_settings(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Keys of the trainer section that accept a word or something else."""
    trainer = c.trainer
    if isinstance(trainer.save_freq, str) and trainer.save_freq != "auto":
        yield report("trainer.save_freq", "expected a number of steps, or auto", "e.g. trainer.save_freq=10")
    mode = trainer.resume_mode
    if mode not in ("auto", "disable") and not user_path(mode).exists():
        remedy = nearest_choice(mode, ("auto", "disable")) or "give the folder of a run or of a checkpoint"
        yield report("trainer.resume_mode", "expected auto, disable or the path of a checkpoint", remedy)
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", trainer.device):
        near = nearest_choice(trainer.device, ("auto", "cpu", "cuda")) or "e.g. trainer.device=auto"
        remedy = "did you mean cuda?" if trainer.device.lower().startswith(("gpu", "nvidia")) else near
        yield report("trainer.device", "expected auto, cpu, cuda, cuda:N or mps", remedy)
    name = trainer.experiment_name
    if name is not None and (not name.strip() or "/" in name or name in (".", "..")):
        message = "cannot be the name of a folder in trainer.default_local_dir"
        yield report("trainer.experiment_name", message, "use a name without /")


def devices(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Several devices or machines need a backend that can use them."""
    trainer, rollout, actor = c.trainer, c.actor_rollout_ref.rollout, c.actor_rollout_ref.actor
    if trainer.backend == "local" and trainer.nnodes > 1:
        remedy = "set trainer.nnodes=1, or trainer.backend=ray"
        yield report("trainer.nnodes", "trainer.backend = local runs on one machine", remedy)
    if trainer.backend == "local" and actor.strategy == "local" and (trainer.n_gpus_per_node or 1) > 1:
        message = "trainer.backend = local with actor.strategy = local uses one device"
        remedy = f"set {ACTOR}.strategy=fsdp2 to train on all of them, or trainer.n_gpus_per_node=1"
        yield report("trainer.n_gpus_per_node", message, remedy, "warning")
    if rollout.name == "native" and rollout.tensor_model_parallel_size > 1:
        message = "the native engine runs on one device"
        yield report(f"{ROLLOUT}.tensor_model_parallel_size", message, f"set {ROLLOUT}.tensor_model_parallel_size=1")


def shared_sequences(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Ranks that share sequences: as many as divide the ranks, on packed rows."""
    actor, model, size = c.actor_rollout_ref.actor, c.actor_rollout_ref.model, _sharing(c)
    name = f"{ACTOR}.ulysses_sequence_parallel_size"
    if size == 1:
        return
    if not trains_on_ranks(c):
        message = f"has no effect: {ACTOR}.strategy = {actor.strategy} trains in one process"
        remedy = f"set {ACTOR}.strategy=fsdp2 and trainer.n_gpus_per_node to a multiple of {size}, or set it to 1"
        yield report(name, message, remedy, "warning")
        return
    if c.trainer.n_gpus_per_node is not None and (ranks := c.trainer.n_gpus_per_node * c.trainer.nnodes) % size:
        message = f"does not divide the {ranks} trainer rank{'s' * (ranks > 1)}"
        yield report(name, message, "set it to a divisor, or change trainer.n_gpus_per_node")
    if not (model.use_remove_padding or model.use_shared_prefix):
        message = "needs packed rows, and both keys that pack are false"
        yield report(name, message, "set actor_rollout_ref.model.use_remove_padding=true, or set it to 1")


def _sharing(c: TrainerConfig) -> int:
    return c.actor_rollout_ref.actor.ulysses_sequence_parallel_size


def turns(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Advantages by turn need a ratio with a gradient by token or by turn; turns need something to talk to."""
    turns, level = c.actor_rollout_ref.rollout.multi_turn, resolved_loss(c.actor_rollout_ref.actor).level
    if c.algorithm.turn_rewards == "return_to_go" and level == "sequence":
        message = "one ratio for the whole response would mix the advantages of its turns"
        remedy = f"set {ACTOR}.policy_loss.loss_mode=gspo_token, or {ACTOR}.importance_sampling_level=turn"
        yield report("algorithm.turn_rewards", message, remedy)
    if c.algorithm.turn_rewards == "return_to_go" and roles(c)["critic"]:
        yield report("algorithm.turn_rewards", "has its own baseline and no critic", "choose another adv_estimator")
    if turns.max_tool_response_length >= c.data.max_response_length and turns.enable:
        message = f"one message may fill the whole response of {c.data.max_response_length} tokens"
        remedy = "lower it, or raise data.max_response_length"
        yield report(f"{ROLLOUT}.multi_turn.max_tool_response_length", message, remedy, "warning")


def only_supervised(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Keys of `gspo sft`."""
    for key, is_set in (
        ("data.max_length", c.data.max_length is not None),
        ("data.response_key", c.data.response_key is not None),
        ("trainer.val_accuracy", c.trainer.val_accuracy),
    ):
        if is_set:
            yield report(key, "has no effect: only gspo sft uses it", "remove it", "warning")


RULES: tuple[Rule, ...] = (
    batch_sizes,
    micro_batches,
    lengths,
    dynamic_sampling,
    clipping,
    off_policy,
    estimators,
    distillation,
    optimisers,
    rewards,
    judge,
    files,
    run_settings,
    devices,
    small_machines.quantised,
    small_machines.mps,
    shared_sequences,
    turns,
    only_supervised,
)
SUPERVISED_RULES: tuple[Rule, ...] = (
    micro_batches,
    supervised.lengths,
    optimisers,
    rewards,
    judge,
    files,
    run_settings,
    devices,
    small_machines.quantised,
    small_machines.mps,
    shared_sequences,
)
