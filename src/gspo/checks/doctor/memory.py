"""The memory plan of a config: what each role and stage holds at most, and the peak of the largest stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gspo.build.models import compute_dtype
from gspo.build.role_settings import layout_kind
from gspo.checks.doctor.activations import Activations, measure_activations
from gspo.config import BatchPlan, TrainerConfig
from gspo.config.batch_plan import roles
from gspo.kernels.compiled_layers import MIN_PARAMETERS, has_cpp_compiler
from gspo.kernels.sizes import CHUNK_ELEMENTS, FUSED_CHUNK_ELEMENTS, PAGE
from gspo.models import resolve
from gspo.models.shape import ModelShape, from_config
from gspo.plan.constants import LOGIT_COPIES

FLOAT = 4
COMPILED_SHARE = (
    0.6  # of an eager layer's activations that a compiled one keeps on a GPU (docs/performance.md)
)
COMPILER = 200 << 20  # what torch's compiler and its code take of a process on a CPU
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of a model, adapters among them, and those that are trained."""

    parameters: int
    trained: int

    @staticmethod
    def of(config: Any, lora_rank: int = 0) -> Counts:
        """From a transformers config: counted on a model without storage, whatever its kind."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        total = sum(p.numel() for p in model.parameters())
        head = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        adapters = sum(lora_rank * (m.in_features + m.out_features) for m in linear)
        return Counts(total + adapters, adapters if lora_rank else total)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what holds them, and by stage; `peak` includes the libraries' own on a CPU."""

    held: dict[str, int]
    stages: dict[str, int]
    base: int
    available: int
    on_host: int = 0  # beside a GPU: what its optimiser keeps in host memory

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
        facts |= {"peak": self.peak, "available": self.available, "fits": self.fits}
        return {**facts, "on_host": self.on_host}


def plan_memory(
    config: TrainerConfig, device: torch.device, *, base: int, available: int, num_val: int
) -> MemoryPlan:
    """The plan of a run, from the model's config alone; `num_val` held-out questions are answered at once."""
    from transformers import AutoConfig

    c = config.actor_rollout_ref.model
    model = AutoConfig.from_pretrained(resolve(c.path), trust_remote_code=c.trust_remote_code)
    counts, shape = Counts.of(model, c.lora_rank), _shape(model, c.path)
    dtype = getattr(torch, compute_dtype(config, device))
    size = torch.finfo(dtype).bits // 8
    kept = measure_activations(model, dtype)
    held = _held(config, counts, size)
    on_host = _offload(config, held) if device.type == "cuda" else 0
    half_on_gpu = _is_half_on_gpu(size, device)
    rows, tokens, targets = _micro_batch(config, half_on_gpu)
    cache = _cache(config, shape, size, device, available)
    captured = half_on_gpu and _compiles(config, shape) and not c.enable_gradient_checkpointing
    if captured:
        kept = Activations(COMPILED_SHARE * kept.per_layer, COMPILED_SHARE * kept.beside)
    activations = _activations(config, shape, kept, size, tokens)
    logits = (_fused_logits if half_on_gpu else _logits)(targets, shape, size)
    static = sum(held.values())
    transient = _transient(shape, size)
    prefill = min(
        config.actor_rollout_ref.rollout.max_num_batched_tokens,
        _in_flight(config) * config.data.max_prompt_length,
    )
    answering = int(prefill * transient + prefill * shape.kv_bytes(size))
    val_rows = min(
        config.actor_rollout_ref.rollout.max_num_seqs, num_val * config.actor_rollout_ref.rollout.val_kwargs.n
    )
    length = config.data.max_prompt_length + config.data.max_response_length
    is_one = rows == BatchPlan.of(config).mini_batch_rollouts
    gradients = _gradient_bytes(size, is_one, captured) * counts.trained
    is_large = counts.parameters >= MIN_PARAMETERS and dtype == torch.float32
    if device.type == "cpu" and is_large and has_cpp_compiler() and _compiles(config, shape):
        base += COMPILER
    held |= {"KV cache": cache, "activations of a micro-batch": activations, "logits of a chunk": logits}
    held["gradients"] = gradients
    return MemoryPlan(
        held=held,
        stages={
            "generation": static + cache + answering,
            "scoring": static + cache + int(tokens * transient) + logits,
            "update": static + cache + gradients + int(activations + tokens * transient) + logits,
            "evaluation": static + cache + answering + val_rows * length * shape.kv_bytes(size),
        },
        base=base,
        available=available,
        on_host=on_host,
    )


def _gradient_bytes(size: int, is_one: bool, captured: bool) -> int:
    """Of a parameter: float32 sums, and the model's precision alone where one micro-batch is all there is.

    A captured backward keeps what it wrote beside the sums.
    """
    if is_one:
        return size
    return FLOAT + size if captured else FLOAT


def _compiles(config: TrainerConfig, shape: ModelShape) -> bool:
    """Whether the policy's layers are compiled, on a device where that pays."""
    actor, lora_rank = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.lora_rank
    alone = actor.strategy == "local" and lora_rank == 0 and not config.trainer.deterministic
    return actor.use_torch_compile and alone and not shape.experts


def _shape(config: Any, name: str) -> ModelShape:
    """The sizes of a transformers config, which has some under names of its own."""
    text = config.get_text_config()
    return from_config(text.to_dict() | {key: getattr(text, key, None) for key in text.attribute_map}, name)


def _held(config: TrainerConfig, counts: Counts, size: int) -> dict[str, int]:
    """What stays from the first step to the last."""
    wanted = roles(config)
    masters = FLOAT * counts.trained if size < FLOAT else 0
    held = {"parameters": size * counts.parameters, "optimiser": 2 * FLOAT * counts.trained}
    if masters:
        held["float32 masters"] = masters
    has_base = config.actor_rollout_ref.model.lora_rank > 0 and config.actor_rollout_ref.ref.path is None
    if wanted["reference"] and not has_base:
        held["reference"] = size * counts.parameters
    if wanted["critic"]:
        held["critic"] = (size + 2 * FLOAT + (FLOAT if size < FLOAT else 0)) * counts.parameters
    return held


def _offload(config: TrainerConfig, held: dict[str, int]) -> int:
    """Take from `held` what the policy's optimiser keeps in host memory: its bytes."""
    actor = config.actor_rollout_ref.actor
    if not actor.fsdp_config.optimizer_offload or actor.strategy != "local":
        return 0
    return sum(held.pop(name, 0) for name in ("optimiser", "float32 masters"))


def _in_flight(config: TrainerConfig) -> int:
    """Responses that run at once, at most."""
    groups = config.algorithm.filter_groups
    plan = BatchPlan.of(config)
    staleness = groups.max_staleness if groups.enable and groups.strategy == "stream" else 0
    wanted = groups.max_in_flight or max(plan.generation_batch, plan.prompts)
    if groups.strategy == "stream":
        wanted = min(wanted, (staleness + 1) * plan.prompts)
    return min(config.actor_rollout_ref.rollout.max_num_seqs, wanted * plan.group_size)


def _cache(config: TrainerConfig, shape: ModelShape, size: int, device: torch.device, available: int) -> int:
    """The slots' cache: on a GPU pages for all of them within its share; on a CPU slots that never run cost nothing."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    length = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    if device.type != "cuda":
        return _in_flight(config) * length * shape.kv_bytes(size)
    pages = rollout.max_num_seqs * (length + 2 * PAGE) * shape.kv_bytes(size)
    return min(pages, int(rollout.gpu_memory_utilization * available))


def _micro_batch(config: TrainerConfig, flash: bool) -> tuple[int, int, int]:
    """Responses, tokens and response tokens of the largest training forward.

    By the flash kernel as the layout counts them; without it attention pads its own copies of a packed row.
    """
    actor, plan = config.actor_rollout_ref.actor, BatchPlan.of(config)
    prompt, response, n = plan.max_prompt_tokens, plan.max_response_tokens, plan.group_size
    per_row = {
        "plain": float(prompt + response),
        "packed": float(prompt + response - 1),
        "shared": prompt / n + response - 1,
    }[layout_kind(config) if flash else "plain"]
    rows = plan.mini_batch_rollouts
    if actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None:
        rows = min(rows, max(1, int(actor.ppo_max_token_len_per_gpu / per_row)))
    else:
        rows = min(rows, actor.ppo_micro_batch_size_per_gpu)
    return rows, int(rows * per_row), rows * response


def _activations(config: TrainerConfig, shape: ModelShape, kept: Any, size: int, tokens: int) -> int:
    """Kept for the backward; with gradient checkpointing each layer's input, and one layer in full."""
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        return int(tokens * (shape.layers * shape.hidden * size + kept.per_layer + kept.beside))
    return int(tokens * (shape.layers * kept.per_layer + kept.beside))


def _transient(shape: ModelShape, size: int) -> float:
    """Bytes a token that a layer's forward or backward uses and frees: the MLP's widest tensors and their products."""
    return size * (3 * shape.intermediate + 4 * shape.hidden)


def _is_half_on_gpu(size: int, device: torch.device) -> bool:
    """Whether the GPU's own kernels run, of attention (kernels/flash_packed.py) and of the head (head_kernels.py)."""
    return device.type == "cuda" and size < FLOAT


def _fused_logits(targets: int, shape: ModelShape, size: int) -> int:
    """One chunk of float32 logits with its gradient in the model's precision, and the gradient of the head's weights."""
    chunk = min(targets, max(1, FUSED_CHUNK_ELEMENTS // shape.vocab))
    return chunk * shape.vocab * (FLOAT + size) + shape.vocab * shape.hidden * (FLOAT + size)


def _logits(targets: int, shape: ModelShape, size: int) -> int:
    """One chunk of the head, in float32, and a float32 copy of its weights when they are not."""
    chunk = min(targets, max(1, CHUNK_ELEMENTS // shape.vocab))
    weights = shape.vocab * shape.hidden * FLOAT if size < FLOAT else 0
    return LOGIT_COPIES * chunk * shape.vocab * FLOAT + weights
