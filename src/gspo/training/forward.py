"""How micro-batches run through a model: packed where the model supports it, in padded rows otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.kernels import cpu_attention
from gspo.kernels import flash_packed as flash
from gspo.kernels.attention_swap import configs_of, swapped_attention
from gspo.kernels.compiled_layers import CompiledLayers, is_dense
from gspo.kernels.fused_projections import FusedProjections
from gspo.kernels.ragged import padded
from gspo.training.batch.attention import FLASH, FLEX, PADDED, over_ranks
from gspo.training.batch.batching import Kind, MicroBatch, micro_batch
from gspo.training.batch.packing import SpansOf
from gspo.training.cuda_graphs import GraphedDecoder
from gspo.training.parallel import ShardError
from gspo.training.parallel.sequence import SequenceRanks
from gspo.types import TrainBatch

log = logging.getLogger(__name__)

MODEL = "actor_rollout_ref.model"


class MicroBatchCache:
    """The micro-batches of the latest batch, which scoring and updating share."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._width: int | None = None
        self._made: dict[tuple[int, ...], MicroBatch] = {}
        self._last: MicroBatch | None = None

    def get(self, batch: TrainBatch, rows: tuple[int, ...], make: Callable[[], MicroBatch]) -> MicroBatch:
        """The micro-batch of these rows. Batches with the same token objects count as the same batch."""
        of = (batch.prompt_ids, batch.response_ids, batch.group_ids, batch.mask)
        width = batch.mask.shape[1]
        if width != self._width or any(a is not b for a, b in zip(of, self._of)):
            self._of, self._width, self._made = of, width, {}
        if rows not in self._made:
            self._made[rows] = make()
        micro = self._made[rows]
        if self._last is not micro and self._last is not None and self._last.layout is not None:
            self._last.layout.forget_masks()
        self._last = micro
        return micro


@dataclass(frozen=True)
class Forward:
    """Runs a decoder (a model without its head) in a layout. `reason` says why it is not the requested one."""

    decoder: nn.Module
    kind: Kind
    kernels: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    configs: list[Any] = field(default_factory=list)
    spans_of: SpansOf | None = None  # for a kernel that processes all sequences in one call
    fused: FusedProjections | None = None
    layers: CompiledLayers | None = None
    graphed: GraphedDecoder | None = None
    sequence: SequenceRanks | None = None
    made: MicroBatchCache = field(default_factory=MicroBatchCache)

    @staticmethod
    def of(
        decoder: Any, kind: Kind, *, flex: bool = False, compiled: bool = False, sequence: SequenceRanks | None = None
    ) -> Forward:
        """The requested layout if the decoder computes the same hidden states as in padded rows; else padded rows.

        Kernels that process all sequences in one call are tried first, then SDPA over blocks of sequences. Ranks that
        share a `sequence` need a packed layout.
        """
        if kind == "plain":
            _refuse_sharing(sequence, f"{MODEL}.use_remove_padding=false and {MODEL}.use_shared_prefix=false")
            return Forward(decoder, kind)
        configs, reason = configs_of(decoder), None
        for kernels, spans_of in _kernels(decoder, flex):
            wanted = Forward(decoder, kind, kernels, None, configs, spans_of, sequence=sequence)
            reason = _unsupported(configs, kernels) or _mismatch(wanted)
            if reason is None:
                if spans_of is cpu_attention.PackedSequences.of and not _is_sharded(decoder):
                    wanted = replace(wanted, fused=FusedProjections(decoder))
                return _compiled(wanted) if compiled and not flex else wanted
        _refuse_sharing(sequence, reason)
        return Forward(decoder, "plain", reason=reason)

    def micro(self, batch: TrainBatch, rows: Sequence[int], device: torch.device | str) -> MicroBatch:
        """The tensors of one forward in this layout, cached for the latest batch."""
        return self.made.get(batch, tuple(rows), lambda: self.uncached(batch, rows, device))

    def uncached(self, batch: TrainBatch, rows: Sequence[int], device: torch.device | str) -> MicroBatch:
        """The tensors of one forward in this layout."""
        return micro_batch(batch, rows, device, self.kind, spans_of=self.spans_of, sequence=self.sequence)

    def hidden(self, micro: MicroBatch) -> Tensor:
        """Hidden states [M, H] that predict the response tokens; within `running`."""
        packed = micro.layout
        graphed = self.graphed if torch.is_grad_enabled() else None
        if graphed is None or packed is None or not isinstance(packed.spans, flash.Spans):
            return micro.hidden(self.decoder)
        return packed.predicting(graphed.hidden(micro.input_ids, packed.position_ids, packed.spans))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for forwards and backwards: attention for the layout, and checkpointing with dropout off."""
        with ExitStack() as stack:
            if self.kind != "plain":
                kernels = self.kernels
                if self.sequence is not None:
                    kernels = {name: over_ranks(kernel) for name, kernel in kernels.items()}
                stack.enter_context(swapped_attention(self.configs, kernels))
            if self.fused is not None:
                stack.enter_context(self.fused.active(trained=True))
            if self.layers is not None:
                stack.enter_context(self.layers.active())
            stack.enter_context(_checkpointing(self.decoder))
            yield


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """A context in which layers with gradient checkpointing recompute their forward in the backward.

    transformers does so only in training mode, which would switch dropout on.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    if not torch.is_grad_enabled():
        layers = []
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _captures(decoder: nn.Module) -> bool:
    """Whether captured graphs can train this decoder: without recomputed layers and float32 parameters.

    A graph's next replay overwrites its gradients. Half-precision ones are added to separate sums after every backward
    (optim/adamw.py); a float32 parameter's would be lost.
    """
    recomputes = any(getattr(m, "gradient_checkpointing", False) for m in decoder.modules())
    return not recomputes and not any(p.requires_grad and p.dtype == torch.float32 for p in decoder.parameters())


def _unsupported(configs: Sequence[Any], kernels: dict[str, str]) -> str | None:
    for config in configs:
        name = config._attn_implementation
        if name not in kernels:
            return f"attn_implementation={name!r}; packed training replaces {' or '.join(kernels)}"
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            return f"layers of type {', '.join(sorted(kinds))}"
        if getattr(config, "attention_chunk_size", None) is not None:
            return "chunked attention"
    return None


def _refuse_sharing(sequence: SequenceRanks | None, reason: str | None) -> None:
    """Raise ShardError if ranks are to share sequences that are not packed."""
    if sequence is not None:
        key = f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={sequence.size}"
        raise ShardError(f"{key} needs packed rows, which this model or config does not have: {reason}; set it to 1")


def _is_sharded(decoder: nn.Module) -> bool:
    """Whether ranks hold shards of its weights."""
    gathers = any(isinstance(m, FSDPModule) for m in decoder.modules())
    return gathers or any(isinstance(p, DTensor) for p in decoder.parameters())


def _kernels(decoder: nn.Module, flex: bool) -> Iterator[tuple[dict[str, str], SpansOf | None]]:
    """Attention kernels for packed tokens on this device and precision, the best first."""
    if flex:
        yield FLEX, None
        return
    if flash.supports(decoder):
        yield FLASH, flash.Spans.of
    if cpu_attention.supports(decoder):
        yield FLASH, cpu_attention.PackedSequences.of
    yield PADDED, None


def _compiled(forward: Forward) -> Forward:
    """The same with compiled layers, or without if they do not compile.

    On a GPU that needs single-call attention, and CUDA graphs are added where possible. On a CPU the layers are
    compiled here, on a fixed batch: compiled code depends on the first sizes that it runs, and a resumed run must
    compute the same bits.
    """
    decoder = forward.decoder
    on_cpu = next(decoder.parameters()).device.type == "cpu"
    # The reference shares the policy's settings but may be another model, one that is not dense.
    if not (is_dense(decoder) if on_cpu else forward.spans_of):
        return forward
    compiled = replace(forward, layers=CompiledLayers(decoder))
    if not on_cpu:
        return replace(compiled, graphed=GraphedDecoder(decoder) if _captures(decoder) else None)
    try:
        _run_once(compiled)
    except Exception as error:  # a broken compiler, missing headers, a model that cannot be traced
        log.warning("training runs uncompiled: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return forward
    return compiled


def _run_once(forward: Forward) -> None:
    """One forward, and a backward if there are trained parameters, without side effects."""
    decoder: Any = forward.decoder
    positions = getattr(decoder.config.get_text_config(), "max_position_embeddings", None) or 1024
    batch = _probe(decoder.get_input_embeddings().num_embeddings, times=max(1, min(16, positions // 11)))
    trained = [p for p in decoder.parameters() if p.requires_grad]
    with torch.set_grad_enabled(bool(trained)), forward.running():
        hidden = forward.hidden(forward.micro(batch, range(batch.num_sequences), "cpu"))
        if trained:
            torch.autograd.grad(hidden.sum(), trained, allow_unused=True)


@torch.no_grad()
def _mismatch(forward: Forward) -> str | None:
    """Why the packed hidden states of a few tokens differ from those of padded rows; None if they do not."""
    decoder = forward.decoder
    parameter = next(decoder.parameters())
    batch = _probe(decoder.get_input_embeddings().num_embeddings)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    name, rows = type(decoder).__name__, list(range(batch.num_sequences))
    was_training = decoder.training
    decoder.eval()
    try:
        plain, packed = (micro_batch(batch, rows, parameter.device), forward.micro(batch, rows, parameter.device))
        want = plain.hidden(decoder).float()
        with forward.running():
            got = packed.hidden(decoder).float()
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"{name} does not run packed: {type(error).__name__}: {error}"
    finally:
        decoder.train(was_training)
    got = _by_slot(got, packed)
    if forward.sequence is not None:
        got = forward.sequence.add_up(got)
    got = got[plain.slots]
    # A wrong mask or position changes a hidden state by about its size. The median ignores the few tokens for which a
    # router chooses another expert in bf16.
    worst = ((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)).median().item()
    allowed = 1e-3 if parameter.dtype in (torch.float32, torch.float64) else 0.1
    return None if worst <= allowed else f"{name}: packed hidden states differ by {worst:.2g} of their size"


def _by_slot(hidden: Tensor, micro: MicroBatch) -> Tensor:
    """Hidden states [M, H] at the places of the response tokens they predict in a flat [rows, T], 0 elsewhere."""
    out = hidden.new_zeros(len(micro.rows) * micro.num_response, hidden.shape[1])
    out[micro.slots] = hidden
    return out


def _probe(num_tokens: int, times: int = 1) -> TrainBatch:
    """Three groups with prompts and responses of several lengths: 31 · `times` tokens, the longest row 11 · `times`."""
    shape = [(3, (4, 2, 1)), (5, (3, 6)), (2, (5,))]
    prompts, responses, groups = [], [], []
    for group, (size, answers) in enumerate(shape):
        for i, num in enumerate(answers):
            prompts.append(tuple((7 * group + 3 * j + 1) % num_tokens for j in range(size * times)))
            responses.append(tuple((5 * i + 11 * j + group) % num_tokens for j in range(num * times)))
            groups.append(group)
    mask = padded([(1,) * len(r) for r in responses], max(map(len, responses)))
    return TrainBatch(prompts, responses, mask, torch.tensor(groups), scores=mask[:, 0], rollout_log_probs=mask)
