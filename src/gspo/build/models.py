"""From a config to the models of a run: loaded, sharded where they are to be, with optimisers and adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from gspo.build.rewards import rewards_of
from gspo.build.role_settings import FLEX_ATTENTION, critic_settings, layout_kind, policy_settings, reference_settings
from gspo.config import TrainerConfig
from gspo.config.batch_plan import distills
from gspo.config.schema.model import FSDPConfig, OptimConfig
from gspo.kernels.compiled_layers import worth_compiling
from gspo.models import ModelError
from gspo.models.four_bit import forget_quantizer
from gspo.models.load import compute_dtype, load_model, load_reward_model, load_tokenizer
from gspo.seeding import derive_seed
from gspo.training.critic import Critic, ValueModel
from gspo.training.lora import Adapters, LoraSettings
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.optim.eight_bit import EightBitOptimizer
from gspo.training.optim.offloaded import OffloadedOptimizer
from gspo.training.parallel.fsdp import ShardSettings
from gspo.training.parallel.ranks import ALONE, Ranks
from gspo.training.policy import Policy, TokenScorer
from gspo.training.reference import Reference
from gspo.training.reward_model import RewardModel, RewardModelSettings
from gspo.training.roles import LocalRoles
from gspo.training.schedule import Schedule

T = TypeVar("T")
RanksOf = Callable[[nn.Module, ShardSettings], Ranks]  # places a model over ranks; its weights move


def build_roles(
    config: TrainerConfig,
    device: torch.device,
    total_steps: int,
    weights_from: Path | None = None,
    ranks_of: RanksOf | None = None,
) -> LocalRoles:
    """Load the models. `weights_from` is a checkpoint's folder; frozen weights always come from the config's paths."""
    disable_progress_bar()  # one bar per checkpoint would hide the run's own lines
    c = config.actor_rollout_ref.model
    has_adapters = c.lora_rank > 0
    path = c.path if has_adapters or weights_from is None else str(weights_from)
    model = load_weights(config, device, path, on_host=ranks_of is not None, four_bit=c.load_in_4bit)
    adapters = _adapters(config, model) if has_adapters else None
    policy = _policy(config, model, total_steps, ranks_of)
    roles = LocalRoles(policy, adapters)
    needs_critic = config.algorithm.adv_estimator == "gae"
    if needs_critic if config.critic.enable is None else config.critic.enable:
        roles.critic = _critic(config, device, total_steps, ranks_of)
    if config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward or distills(config):
        roles.reference = _reference(config, device, policy, adapters, ranks_of)
    if rewards_of(config).model is not None:
        roles.reward_model = _reward_model(config, device, ranks_of)
    return roles


def load_weights(
    config: TrainerConfig, device: torch.device, path: str, *, on_host: bool = False, four_bit: bool = False
) -> Any:
    """The model of the config's model section, loaded from `path` into new tensors.

    `on_host` leaves it in host memory, for a model that is sharded before it goes to the device. `four_bit` quantises
    the weights of its linear layers.
    """
    c = config.actor_rollout_ref.model
    model = load_model(
        path,
        dtype=compute_dtype(c.dtype, device),
        device="cpu" if on_host else str(device),
        trust_remote_code=c.trust_remote_code,
        overrides=c.override_config,
        four_bit=four_bit,
    )
    if c.attn_implementation not in (None, FLEX_ATTENTION):
        model.set_attn_implementation(c.attn_implementation)
    if c.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if on_host:  # still the file's own pages, which the ranks of a machine share until each has cut out its shards
        return model
    # Tensors mapped from a file may be aligned differently from allocated ones, and alignment can change the last
    # bit of a matrix product: a resumed run must compute what the first one did.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def _adapters(config: TrainerConfig, model: Any) -> Adapters:
    c = config.actor_rollout_ref.model
    settings = LoraSettings(c.lora_rank, c.lora_alpha, c.lora_dropout, c.target_modules, c.exclude_modules)
    adapters = Adapters(model, settings, seed=derive_seed(config.trainer.seed, "lora"))
    if c.load_in_4bit:
        forget_quantizer(model)  # peft has read it
    return adapters


def _placed(ranks: Ranks, make: Callable[[], T]) -> T:
    """Make something that tries the model: with the weights gathered, and free again afterwards."""
    with torch.no_grad():
        made = ranks.run(make)
    ranks.rest()
    return made


def _policy(config: TrainerConfig, model: Any, total_steps: int, ranks_of: RanksOf | None) -> Policy:
    actor = config.actor_rollout_ref.actor
    ranks = ranks_of(model, _shard_settings(actor.fsdp_config)) if ranks_of else ALONE
    offload = actor.fsdp_config.optimizer_offload and ranks_of is None
    optimizer = optimizer_of(model, actor.optim, actor.grad_clip, offload)
    schedule, settings = schedule_of(actor.optim, total_steps), policy_settings(config)
    # Captured code reads its weights where they were: not with shards that come and go, nor adapters switched off.
    alone = ranks_of is None and config.actor_rollout_ref.model.lora_rank == 0
    on_mps = next(model.parameters()).device.type == "mps"  # for which nothing is captured or compiled
    if actor.use_torch_compile and alone and not on_mps and worth_compiling(model):
        settings = dataclasses.replace(settings, compiled=True)
    return _placed(ranks, lambda: Policy(model, optimizer, schedule, settings, ranks))


def _critic(config: TrainerConfig, device: torch.device, total_steps: int, ranks_of: RanksOf | None) -> Critic:
    c = config.critic
    path = c.model.path or config.actor_rollout_ref.model.path
    model = ValueModel(load_weights(config, device, path, on_host=ranks_of is not None))
    ranks = ranks_of(model, _shard_settings(c.fsdp_config)) if ranks_of else ALONE
    offload = c.fsdp_config.optimizer_offload and ranks_of is None
    optimizer, schedule = optimizer_of(model, c.optim, c.grad_clip, offload), schedule_of(c.optim, total_steps)
    settings = critic_settings(config)
    return _placed(ranks, lambda: Critic(model, optimizer, schedule, settings, ranks))


def _reference(
    config: TrainerConfig, device: torch.device, policy: Policy, adapters: Adapters | None, ranks_of: RanksOf | None
) -> Reference:
    c = config.actor_rollout_ref.ref
    if adapters is not None and c.path is None:
        return Reference(policy, adapters.disabled)
    path = c.path or config.actor_rollout_ref.model.path
    four_bit = config.actor_rollout_ref.model.load_in_4bit
    model = load_weights(config, device, path, on_host=ranks_of is not None, four_bit=four_bit).requires_grad_(False)
    ranks = ranks_of(model, _shard_settings(c.fsdp_config)) if ranks_of else ALONE
    settings = reference_settings(config, policy.settings)
    return Reference(_placed(ranks, lambda: TokenScorer(model, settings, ranks)))


def _reward_model(config: TrainerConfig, device: torch.device, ranks_of: RanksOf | None) -> RewardModel:
    c, path = config.reward_model, rewards_of(config).model_path
    assert path is not None, "checked with the config"
    classifier = load_reward_model(
        path,
        dtype=compute_dtype(c.dtype, device),
        device="cpu" if ranks_of is not None else str(device),
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
    )
    model = ValueModel.of_classifier(classifier.requires_grad_(False))
    kind = "plain" if layout_kind(config) == "plain" else "packed"
    settings = RewardModelSettings(c.max_tokens_per_batch, kind, offload=_offloads(config, model, device))
    sharding = ShardSettings(param_offload=settings.offload)
    ranks = ranks_of(model, sharding) if ranks_of else ALONE
    return _placed(ranks, lambda: RewardModel(model, settings, ranks))


def _offloads(config: TrainerConfig, model: nn.Module, device: torch.device) -> bool:
    """Whether the reward model rests in host memory."""
    if config.reward_model.offload != "auto" or device.type != "cuda":
        return config.reward_model.offload == "on"
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return size > torch.cuda.mem_get_info(device)[0] / 4


def optimizer_of(model: Any, optim: OptimConfig, grad_clip: float, offload: bool) -> MasterOptimizer:
    """`offload` keeps the state of a model on a GPU in host memory; that of ranks is moved as a whole (`Shards`)."""
    on_gpu = any(p.is_cuda for p in model.parameters())
    if optim.eight_bit:
        kind = EightBitOptimizer
    else:
        kind = OffloadedOptimizer if offload and on_gpu else MasterOptimizer
    return kind(
        model.named_parameters(),
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        grad_clip=grad_clip,
        fused=optim.fused,
    )


def _shard_settings(c: FSDPConfig) -> ShardSettings:
    """How a model is sharded, by its section; the compute precision is the run's."""
    return ShardSettings(
        reshard_after_forward=c.reshard_after_forward,
        fsdp_size=c.fsdp_size,
        param_offload=c.param_offload,
        optimizer_offload=c.optimizer_offload,
        offload_policy=c.offload_policy,
    )


def schedule_of(optim: OptimConfig, total_steps: int) -> Schedule:
    """The learning rate by step."""
    span = optim.total_training_steps if optim.total_training_steps > 0 else total_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * span)
    return Schedule(optim.lr, optim.lr_scheduler_type, warmup, span, optim.min_lr_ratio)


def check_teacher(config: TrainerConfig, tokenizer: Any) -> None:
    """Refuse a teacher whose tokens are not the policy's: its log-probs would be those of other texts."""
    path = config.actor_rollout_ref.ref.path
    if path is None or not distills(config):
        return
    own = tokenizer.get_vocab()
    other = load_tokenizer(path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code).get_vocab()
    if own != other:
        token = next(iter(sorted({*own.items(), *other.items()} - (own.items() & other.items()))))[0]
        raise ModelError(
            f"actor_rollout_ref.ref.path={path}: the teacher's tokenizer is not the policy's: token {token!r} is number "
            f"{other.get(token)} there and {own.get(token)} here ({len(other)} and {len(own)} tokens); a teacher needs "
            "the tokens of the model that it teaches"
        )
