"""The memory plan of a config: what each role and stage holds at most, and the peak of the largest stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gspo.config import BatchPlan, TrainerConfig
from gspo.config.plan import roles
from gspo.models import resolve
from gspo.rollout.pages import PAGE
from gspo.training.head import CHUNK_ELEMENTS
from gspo.validate.activations import measure_activations

FUSED_CHUNK_ELEMENTS = 1 << 27  # of training/head_kernels.py, which only a machine with Triton can import
LOGIT_COPIES = 4  # logits, log-softmax, its gradient and the gradient of the logits are alive at once
FLOAT = 4
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder that memory depends on."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @staticmethod
    def of(config: Any, lora_rank: int = 0) -> Shape:
        """From a transformers config; parameters are counted on a model without storage."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        total = sum(p.numel() for p in model.parameters())
        head = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        adapters = sum(lora_rank * (m.in_features + m.out_features) for m in linear)
        heads = config.num_attention_heads
        return Shape(
            parameters=total + adapters,
            trained=adapters if lora_rank else total,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what holds them, and by stage; `peak` includes the libraries' own on a CPU."""

    held: dict[str, int]
    stages: dict[str, int]
    base: int
    available: int

    @property
    def stage(self) -> str:
        """The stage with the largest need."""
        return max(self.stages, key=lambda name: self.stages[name])

    @property
    def peak(self) -> int:
        return self.base + self.stages[self.stage]

    @property
    def fits(self) -> bool:
        return self.peak <= self.available

    def to_dict(self) -> dict[str, Any]:
        facts = {"base": self.base, "held": self.held, "stages": self.stages, "peak_stage": self.stage}
        return {**facts, "peak": self.peak, "available": self.available, "fits": self.fits}


def compute_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """The precision the model computes in."""
    name = config.actor_rollout_ref.model.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def plan_memory(
    config: TrainerConfig, device: torch.device, *, base: int, available: int, num_val: int
) -> MemoryPlan:
    """The plan of a run, from the model's config alone; `num_val` held-out questions are answered at once."""
    from transformers import AutoConfig

    c = config.actor_rollout_ref.model
    model = AutoConfig.from_pretrained(resolve(c.path), trust_remote_code=c.trust_remote_code)
    shape = Shape.of(model, c.lora_rank)
    dtype = compute_dtype(config, device)
    size = torch.finfo(dtype).bits // 8
    kept = measure_activations(model, dtype)
    held = _held(config, shape, size)
    tokens, targets = _micro_batch(config)
    cache = _cache(config, shape, size, device, available)
    activations = _activations(config, shape, kept, size, tokens)
    logits = _fused_logits(targets, shape, size) if _is_fused(size, device) else _logits(targets, shape, size)
    static = sum(held.values())
    transient = _transient(shape, size)
    prefill = min(
        config.actor_rollout_ref.rollout.max_num_batched_tokens,
        _in_flight(config) * config.data.max_prompt_length,
    )
    answering = int(prefill * transient + prefill * _cache_bytes(shape, size))
    val_rows = min(
        config.actor_rollout_ref.rollout.max_num_seqs, num_val * config.actor_rollout_ref.rollout.val_kwargs.n
    )
    length = config.data.max_prompt_length + config.data.max_response_length
    gradients = FLOAT * shape.trained
    held |= {"KV cache": cache, "activations of a micro-batch": activations, "logits of a chunk": logits}
    held["gradients"] = gradients
    return MemoryPlan(
        held=held,
        stages={
            "generation": static + cache + answering,
            "scoring": static + cache + int(tokens * transient) + logits,
            "update": static + cache + gradients + activations + int(tokens * transient) + logits,
            "evaluation": static + cache + answering + val_rows * length * _cache_bytes(shape, size),
        },
        base=base,
        available=available,
    )


def _held(config: TrainerConfig, shape: Shape, size: int) -> dict[str, int]:
    """What stays from the first step to the last."""
    wanted = roles(config)
    masters = FLOAT * shape.trained if size < FLOAT else 0
    held = {"parameters": size * shape.parameters, "optimiser": 2 * FLOAT * shape.trained}
    if masters:
        held["float32 masters"] = masters
    has_base = config.actor_rollout_ref.model.lora_rank > 0 and config.actor_rollout_ref.ref.path is None
    if wanted["reference"] and not has_base:
        held["reference"] = size * shape.parameters
    if wanted["critic"]:
        held["critic"] = (size + 2 * FLOAT + (FLOAT if size < FLOAT else 0)) * shape.parameters
    return held


def _in_flight(config: TrainerConfig) -> int:
    """Responses that run at once, at most."""
    groups = config.algorithm.filter_groups
    plan = BatchPlan.of(config)
    staleness = groups.max_staleness if groups.enable and groups.strategy == "stream" else 0
    wanted = groups.max_in_flight or max(plan.generation_batch, plan.prompts)
    if groups.strategy == "stream":
        wanted = min(wanted, (staleness + 1) * plan.prompts)
    return min(config.actor_rollout_ref.rollout.max_num_seqs, wanted * plan.group_size)


def _cache_bytes(shape: Shape, size: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * size


def _cache(config: TrainerConfig, shape: Shape, size: int, device: torch.device, available: int) -> int:
    """The slots' cache: on a GPU pages for all of them within its share; on a CPU slots that never run cost nothing."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    length = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    if device.type != "cuda":
        return _in_flight(config) * length * _cache_bytes(shape, size)
    pages = rollout.max_num_seqs * (length + 2 * PAGE) * _cache_bytes(shape, size)
    return min(pages, int(rollout.gpu_memory_utilization * available))


def _micro_batch(config: TrainerConfig) -> tuple[int, int]:
    """Padded tokens and response tokens of the largest training forward."""
    actor, plan = config.actor_rollout_ref.actor, BatchPlan.of(config)
    length = plan.max_prompt_tokens + plan.max_response_tokens
    rows = plan.mini_batch_rollouts
    if actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None:
        rows = min(rows, max(1, actor.ppo_max_token_len_per_gpu // length))
    else:
        rows = min(rows, actor.ppo_micro_batch_size_per_gpu)
    return rows * length, rows * plan.max_response_tokens


def _activations(config: TrainerConfig, shape: Shape, kept: Any, size: int, tokens: int) -> int:
    """Kept for the backward; with gradient checkpointing each layer's input, and one layer in full."""
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        return int(tokens * (shape.layers * shape.hidden * size + kept.per_layer + kept.beside))
    return int(tokens * (shape.layers * kept.per_layer + kept.beside))


def _transient(shape: Shape, size: int) -> float:
    """Bytes a token that a layer's forward or backward uses and frees: the MLP's widest tensors and their products."""
    return size * (3 * shape.intermediate + 4 * shape.hidden)


def _is_fused(size: int, device: torch.device) -> bool:
    """Whether the GPU's own head kernels run (training/head_kernels.py)."""
    return device.type == "cuda" and size < FLOAT


def _fused_logits(targets: int, shape: Shape, size: int) -> int:
    """One chunk of float32 logits with its gradient in the model's precision, and the gradient of the head's weights."""
    chunk = min(targets, max(1, FUSED_CHUNK_ELEMENTS // shape.vocab))
    return chunk * shape.vocab * (FLOAT + size) + shape.vocab * shape.hidden * (FLOAT + size)


def _logits(targets: int, shape: Shape, size: int) -> int:
    """One chunk of the head, in float32, and a float32 copy of its weights when they are not."""
    chunk = min(targets, max(1, CHUNK_ELEMENTS // shape.vocab))
    weights = shape.vocab * shape.hidden * FLOAT if size < FLOAT else 0
    return LOGIT_COPIES * chunk * shape.vocab * FLOAT + weights
