"""The models of a run: the policy, and beside it the critic, the reference and adapters where the config asks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from gspo.config import TrainerConfig
from gspo.config.model import FSDPConfig, OptimConfig
from gspo.loop.checkpoint import Loaded, TensorSet
from gspo.models.compiled import worth_compiling
from gspo.models.load import load_model
from gspo.seeding import derive_seed
from gspo.training.batching import Kind
from gspo.training.critic import Critic, CriticSettings, ValueModel
from gspo.training.fsdp import ShardSettings, full
from gspo.training.lora import Adapters, LoraSettings, num_trained
from gspo.training.moe import RouterWatch
from gspo.training.optimizer import MasterOptimizer
from gspo.training.policy import Policy, PolicyLoss, PolicySettings, Regulariser, TokenScorer, Update
from gspo.training.ranks import ALONE, Ranks
from gspo.training.reference import Reference
from gspo.training.schedule import Schedule
from gspo.types import TrainBatch

T = TypeVar("T")
ADAPTER_FILES = "adapter/adapter_model"  # under training/, as peft names them
SAMPLED_ELEMENTS = 1024  # of every frozen tensor: enough to tell one training of a model from another

FLEX_ATTENTION = "flex_attention"  # of packed training; the engine and padded rows keep the model's own


RanksOf = Callable[[nn.Module, ShardSettings], Ranks]  # places a model over ranks; its weights move


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run says about its policy and what identifies it, whether its weights are here or in other processes."""

    num_trained: int
    num_parameters: int
    device: str
    layout_problem: str | None  # why training runs in padded rows when it was not to
    shapes: list[tuple[str, list[int], str]]
    frozen_digest: str | None
    has_critic: bool
    has_reference: bool
    num_ranks: int | None = None  # None: in this process, without sharding


@dataclass
class Roles:
    """The models of one run and how their weights are saved. `reference` may be the policy with its adapters off."""

    policy: Policy
    adapters: Adapters | None = None
    critic: Critic | None = None
    reference: Reference | None = None

    def __post_init__(self) -> None:
        self.routers = RouterWatch(self.policy.model, self.policy.ranks)

    def facts(self) -> Facts:
        """What to say about the policy, and what identifies it."""
        policy = self.policy
        trained, num = num_trained(policy.model)
        shapes = [(name, list(p.shape), str(p.dtype)) for name, p in policy.model.named_parameters()]
        return Facts(
            num_trained=trained,
            num_parameters=num,
            device=str(policy.device),
            layout_problem=policy.layout.reason,
            shapes=shapes,
            frozen_digest=self.frozen_digest(),
            has_critic=self.critic is not None,
            has_reference=self.reference is not None,
        )

    def update_policy(
        self, batch: TrainBatch, loss: PolicyLoss, *, step: int, regulariser: Regulariser | None = None
    ) -> Update:
        """Train the policy on a batch; with a router, what it changed is among the metrics."""
        with self.routers.watching(batch) as routing:
            update = self.policy.update(batch, loss, step=step, regulariser=regulariser)
        return Update(update.metrics | routing, update.log_probs)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rates of this run's schedules."""
        for role in (self.policy, self.critic):
            if role is not None:
                role.schedule = dataclasses.replace(role.schedule, lr=role.schedule.lr * factor)

    def with_reference(self, batch: TrainBatch) -> TrainBatch:
        """The batch scored by the reference, which the config must have asked for."""
        assert self.reference is not None
        return self.reference.score(batch)

    @property
    def saves_aside(self) -> bool:
        """Whether a checkpoint can be written while the models are read: adapters are merged into them for a while."""
        return self.adapters is None

    def save_model(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """The policy as an ordinary Hugging Face folder; adapters are merged into it and described beside.

        `weights` are what `weights()` gave earlier, for a model without adapters.
        """
        if self.adapters is None:
            self.policy.model.save_pretrained(folder, state_dict=weights)
            return
        self.adapters.save_merged(folder)
        self.adapters.save_config((folder / "training" / ADAPTER_FILES).parent)

    def tensors(self) -> dict[str, TensorSet]:
        """What a resume needs beside the policy's folder, by file."""
        sets = {"optimizer": self.policy.optimizer.state_tensors()}
        if self.adapters is not None:
            sets[ADAPTER_FILES] = self.adapters.state_tensors()
        return sets if self.critic is None else {**sets, **self.critic.state_tensors()}

    def weights(self) -> dict[str, Tensor]:
        """The policy's own tensors by name, as they are now."""
        return self.policy.model.state_dict()

    write_shards: ClassVar[None] = None  # `tensors` holds everything, in one piece

    def stacks(self) -> str:
        """Nothing: the models are in this process."""
        return ""

    def close(self) -> None:
        """Nothing: the models are freed with this object."""

    def load(self, loaded: Loaded) -> None:
        """Take up the state of a checkpoint, beside the weights that its folder gave."""
        self.load_tensors(loaded.tensors)

    def load_tensors(self, sets: dict[str, TensorSet]) -> None:
        if self.adapters is not None:
            self.adapters.load_state_tensors(sets[ADAPTER_FILES])
        self.policy.optimizer.load_state_tensors(sets["optimizer"])
        if self.critic is not None:
            self.critic.load_state_tensors(sets)

    def frozen_digest(self) -> str | None:
        """Identifies the weights that no checkpoint holds: those under adapters, and the reference's."""
        models = [self.policy.model] if self.adapters is not None else []
        if self.reference is not None and self.reference.scorer is not self.policy:
            models.append(self.reference.scorer.model)
        if not models:
            return None
        digest = hashlib.sha256()
        for model in models:
            for name, p in model.named_parameters():
                if not p.requires_grad:
                    sample = full(p.detach()).flatten()[:SAMPLED_ELEMENTS].float().cpu()
                    digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:16]


def build_roles(
    config: TrainerConfig,
    device: torch.device,
    total_steps: int,
    weights_from: Path | None = None,
    ranks_of: RanksOf | None = None,
) -> Roles:
    """Load the models. `weights_from` is a checkpoint's folder; frozen weights always come from the config's paths."""
    disable_progress_bar()  # one bar a checkpoint would drown the run's own lines
    c = config.actor_rollout_ref.model
    has_adapters = c.lora_rank > 0
    path = c.path if has_adapters or weights_from is None else str(weights_from)
    model = load_weights(config, device, path, on_host=ranks_of is not None)
    adapters = _adapters(config, model) if has_adapters else None
    policy = _policy(config, model, total_steps, ranks_of)
    roles = Roles(policy, adapters)
    needs_critic = config.algorithm.adv_estimator == "gae"
    if needs_critic if config.critic.enable is None else config.critic.enable:
        roles.critic = _critic(config, device, total_steps, ranks_of)
    if config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        roles.reference = _reference(config, device, policy, adapters, ranks_of)
    return roles


def compute_dtype(config: TrainerConfig, device: torch.device) -> str:
    """The precision that models compute in."""
    dtype = config.actor_rollout_ref.model.dtype
    if dtype == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return dtype


def load_weights(config: TrainerConfig, device: torch.device, path: str, *, on_host: bool = False) -> Any:
    """A model as the config's model section says, from `path`, in tensors of its own.

    `on_host` leaves it in host memory, for a model that is sharded before it goes to the device.
    """
    c = config.actor_rollout_ref.model
    model = load_model(
        path,
        dtype=compute_dtype(config, device),
        device="cpu" if on_host else str(device),
        trust_remote_code=c.trust_remote_code,
    )
    for key, value in c.override_config.items():
        setattr(model.config, key, value)
    if c.attn_implementation not in (None, FLEX_ATTENTION):
        model.set_attn_implementation(c.attn_implementation)
    if c.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if (
        on_host
    ):  # still the file's own pages, which the ranks of a machine share until each has cut out its shards
        return model
    # Tensors mapped from a file may be aligned differently from allocated ones, and alignment can change the last
    # bit of a matrix product: a resumed run must compute what the first one did.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def _adapters(config: TrainerConfig, model: Any) -> Adapters:
    c = config.actor_rollout_ref.model
    settings = LoraSettings(c.lora_rank, c.lora_alpha, c.lora_dropout, c.target_modules, c.exclude_modules)
    return Adapters(model, settings, seed=derive_seed(config.trainer.seed, "lora"))


def shard_settings(c: FSDPConfig) -> ShardSettings:
    """How a model is sharded, as its section says; the compute precision is the run's."""
    return ShardSettings(
        reshard_after_forward=c.reshard_after_forward,
        fsdp_size=c.fsdp_size,
        param_offload=c.param_offload,
        optimizer_offload=c.optimizer_offload,
        offload_policy=c.offload_policy,
    )


def _placed(ranks: Ranks, make: Callable[[], T]) -> T:
    """Make something that tries the model: with the weights gathered, and free again afterwards."""
    with torch.no_grad():
        made = ranks.run(make)
    ranks.rest()
    return made


def _policy(config: TrainerConfig, model: Any, total_steps: int, ranks_of: RanksOf | None) -> Policy:
    actor = config.actor_rollout_ref.actor
    ranks = ranks_of(model, shard_settings(actor.fsdp_config)) if ranks_of else ALONE
    optimizer = _optimizer(model, actor.optim, actor.grad_clip)
    schedule, settings = _schedule(actor.optim, total_steps), _policy_settings(config)
    # Captured code reads its weights where they were: not with shards that come and go, nor adapters switched off.
    alone = ranks_of is None and config.actor_rollout_ref.model.lora_rank == 0
    if actor.use_torch_compile and alone and worth_compiling(model):
        settings = dataclasses.replace(settings, compiled=True)
    return _placed(ranks, lambda: Policy(model, optimizer, schedule, settings, ranks))


def _policy_settings(config: TrainerConfig) -> PolicySettings:
    actor = config.actor_rollout_ref.actor
    by_tokens = actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None
    score_tokens, score_rows = _score_cut(config)
    return PolicySettings(
        temperature=config.actor_rollout_ref.rollout.temperature,
        mini_batch_groups=actor.ppo_mini_batch_size,
        num_epochs=actor.ppo_epochs,
        micro_batch_tokens=actor.ppo_max_token_len_per_gpu if by_tokens else None,
        micro_batch_rows=actor.ppo_micro_batch_size_per_gpu or 1,
        old_log_prob_source=actor.old_log_prob_source,  # pyright: ignore[reportArgumentType]
        entropy_in_loss=actor.entropy_coeff != 0,
        entropy_checkpointing=actor.entropy_checkpointing,
        layout=_layout(config),
        flex_attention=config.actor_rollout_ref.model.attn_implementation == FLEX_ATTENTION,
        score_tokens=score_tokens,
        score_rows=score_rows,
    )


def _score_cut(config: TrainerConfig) -> tuple[int | None, int | None]:
    """Tokens or rows of a micro-batch when π_old is computed, where the config says so."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    rows, tokens = rollout.log_prob_micro_batch_size_per_gpu, rollout.log_prob_max_token_len_per_gpu
    by_tokens = rollout.log_prob_use_dynamic_bsz
    if by_tokens or (by_tokens is None and tokens is not None):
        return tokens or actor.ppo_max_token_len_per_gpu, None
    return None, rows


def _critic(
    config: TrainerConfig, device: torch.device, total_steps: int, ranks_of: RanksOf | None
) -> Critic:
    c, actor = config.critic, config.actor_rollout_ref.actor
    path = c.model.path or config.actor_rollout_ref.model.path
    model = ValueModel(load_weights(config, device, path, on_host=ranks_of is not None))
    rows, tokens = c.ppo_micro_batch_size_per_gpu, c.ppo_max_token_len_per_gpu
    ranks = ranks_of(model, shard_settings(c.fsdp_config)) if ranks_of else ALONE
    optimizer, schedule = _optimizer(model, c.optim, c.grad_clip), _schedule(c.optim, total_steps)
    settings = CriticSettings(
        mini_batch_groups=c.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        num_epochs=c.ppo_epochs or actor.ppo_epochs,
        micro_batch_tokens=None if rows else tokens or actor.ppo_max_token_len_per_gpu,
        micro_batch_rows=rows or 1,
        clip=c.cliprange_value,
        layout=_layout(config),
    )
    return _placed(ranks, lambda: Critic(model, optimizer, schedule, settings, ranks))


def _layout(config: TrainerConfig) -> Kind:
    """How micro-batches are laid out. Sharing prompts packs: their tokens would have no row to stand in."""
    c = config.actor_rollout_ref.model
    return "shared" if c.use_shared_prefix else "packed" if c.use_remove_padding else "plain"


def _reference(
    config: TrainerConfig,
    device: torch.device,
    policy: Policy,
    adapters: Adapters | None,
    ranks_of: RanksOf | None,
) -> Reference:
    c = config.actor_rollout_ref.ref
    if adapters is not None and c.path is None:
        return Reference(policy, adapters.disabled)
    path = c.path or config.actor_rollout_ref.model.path
    model = load_weights(config, device, path, on_host=ranks_of is not None).requires_grad_(False)
    ranks = ranks_of(model, shard_settings(c.fsdp_config)) if ranks_of else ALONE
    settings = _reference_settings(config, policy.settings)
    return Reference(_placed(ranks, lambda: TokenScorer(model, settings, ranks)))


def _reference_settings(config: TrainerConfig, settings: PolicySettings) -> PolicySettings:
    """The policy's own cut of a batch, so that equal weights give equal bits, unless the config says otherwise."""
    c, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor
    rows, tokens = c.log_prob_micro_batch_size_per_gpu, c.log_prob_max_token_len_per_gpu
    by_tokens = c.log_prob_use_dynamic_bsz
    if by_tokens is None:
        by_tokens = rows is None and (tokens is not None or settings.micro_batch_tokens is not None)
    if by_tokens:
        budget = tokens or actor.ppo_max_token_len_per_gpu
        return dataclasses.replace(settings, micro_batch_tokens=budget)
    size = rows or settings.micro_batch_rows
    return dataclasses.replace(settings, micro_batch_tokens=None, micro_batch_rows=size)


def _optimizer(model: Any, optim: OptimConfig, grad_clip: float) -> MasterOptimizer:
    return MasterOptimizer(
        model.named_parameters(),
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        grad_clip=grad_clip,
        fused=optim.fused,
    )


def _schedule(optim: OptimConfig, total_steps: int) -> Schedule:
    span = optim.total_training_steps if optim.total_training_steps > 0 else total_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * span)
    return Schedule(optim.lr, optim.lr_scheduler_type, warmup, span, optim.min_lr_ratio)  # pyright: ignore[reportArgumentType]
