"""How micro-batches go through a model: packed where the model's own modules allow it, in padded rows otherwise."""

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
from gspo.training.batch.attention import FLASH, FLEX, PADDED
from gspo.training.batch.batching import Kind, MicroBatch, micro_batch
from gspo.training.batch.packing import SpansOf
from gspo.training.cuda_graphs import GraphedDecoder
from gspo.types import TrainBatch

log = logging.getLogger(__name__)


class MicroBatchCache:
    """The micro-batches of the latest batch: scoring and updating run the same ones."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._width: int | None = None
        self._made: dict[tuple[int, ...], MicroBatch] = {}
        self._last: MicroBatch | None = None

    def get(self, batch: TrainBatch, rows: tuple[int, ...], make: Callable[[], MicroBatch]) -> MicroBatch:
        """That of these rows of `batch`, which is told from others by its tokens being the same objects."""
        of = (batch.prompt_ids, batch.response_ids, batch.group_ids)
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
    """The layout that a decoder (a model without its head) runs in. `reason` says why it is not the one asked for."""

    decoder: nn.Module
    kind: Kind
    kernels: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    configs: list[Any] = field(default_factory=list)
    spans_of: SpansOf | None = None  # for a kernel that takes all sequences in one call
    fused: FusedProjections | None = None
    layers: CompiledLayers | None = None
    graphed: GraphedDecoder | None = None
    made: MicroBatchCache = field(default_factory=MicroBatchCache)

    @staticmethod
    def of(decoder: Any, kind: Kind, *, flex: bool = False, compiled: bool = False) -> Forward:
        """The layout asked for if the decoder gives the same hidden states in it as in padded rows; else padded rows.

        Kernels that take all sequences in one call come first, SDPA over blocks of sequences after them.
        """
        if kind == "plain":
            return Forward(decoder, kind)
        configs, reason = configs_of(decoder), None
        for kernels, spans_of in _kernels(decoder, flex):
            wanted = Forward(decoder, kind, kernels, None, configs, spans_of)
            reason = _unsupported(configs, kernels) or _mismatch(wanted)
            if reason is None:
                if spans_of is cpu_attention.PackedSequences.of and not _is_sharded(decoder):
                    wanted = replace(wanted, fused=FusedProjections(decoder))
                return _compiled(wanted) if compiled and not flex else wanted
        return Forward(decoder, "plain", reason=reason)

    def micro(self, batch: TrainBatch, rows: Sequence[int], device: torch.device | str) -> MicroBatch:
        """The tensors of one forward, in this layout; those of the latest batch are made once."""
        return self.made.get(
            batch, tuple(rows), lambda: micro_batch(batch, rows, device, self.kind, spans_of=self.spans_of)
        )

    def hidden(self, micro: MicroBatch) -> Tensor:
        """Hidden states [M, H] before the response tokens; within `running`."""
        packed = micro.layout
        graphed = self.graphed if torch.is_grad_enabled() else None
        if graphed is None or packed is None or not isinstance(packed.spans, flash.Spans):
            return micro.hidden(self.decoder)
        return packed.predicting(graphed.hidden(micro.input_ids, packed.position_ids, packed.spans))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around forwards and their backwards: attention by layout, and checkpointed layers that keep dropout off."""
        with ExitStack() as stack:
            if self.kind != "plain":
                stack.enter_context(swapped_attention(self.configs, self.kernels))
            if self.fused is not None:
                stack.enter_context(self.fused.active(trained=True))
            if self.layers is not None:
                stack.enter_context(self.layers.active())
            stack.enter_context(_checkpointing(self.decoder))
            yield


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """Within this, layers marked for gradient checkpointing recompute their forward in the backward.

    transformers does so only in training mode, which would switch dropout on and make ratios compare unlike things.
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
    """Whether captured graphs train this decoder: without layers to recompute, and every gradient taken at once.

    A graph leaves its gradients in memory that its next replay overwrites. Those of half-precision parameters are added
    to sums of their own after every backward (optimizer.py); a float32 parameter's would stay there.
    """
    recomputes = any(getattr(m, "gradient_checkpointing", False) for m in decoder.modules())
    return not recomputes and not any(p.requires_grad and p.dtype == torch.float32 for p in decoder.parameters())


def _unsupported(configs: Sequence[Any], kernels: dict[str, str]) -> str | None:
    for config in configs:
        name = config._attn_implementation
        if name not in kernels:
            return f"attn_implementation={name!r}; packed training takes the place of {' or '.join(kernels)}"
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            return f"layers of type {', '.join(sorted(kinds))}"
        if getattr(config, "attention_chunk_size", None) is not None:
            return "chunked attention"
    return None


def _is_sharded(decoder: nn.Module) -> bool:
    """Whether ranks hold parts of its weights, which may be gathered just now."""
    gathers = any(isinstance(m, FSDPModule) for m in decoder.modules())
    return gathers or any(isinstance(p, DTensor) for p in decoder.parameters())


def _kernels(decoder: nn.Module, flex: bool) -> Iterator[tuple[dict[str, str], SpansOf | None]]:
    """Ways to attend over packed tokens that a decoder of this device and precision may have, the best first."""
    if flex:
        yield FLEX, None
        return
    if flash.supports(decoder):
        yield FLASH, flash.Spans.of
    if cpu_attention.supports(decoder):
        yield FLASH, cpu_attention.PackedSequences.of
    yield PADDED, None


def _compiled(forward: Forward) -> Forward:
    """The same with compiled layers. On a GPU only what attends in one call is compiled, and captured where it may be."""
    decoder = forward.decoder
    if next(decoder.parameters()).device.type == "cpu":
        # A reference has the policy's settings and may be another model.
        return _with_compiled_layers(forward) if is_dense(decoder) else forward
    if forward.spans_of is None:
        return forward
    graphed = GraphedDecoder(decoder) if _captures(decoder) else None
    return replace(forward, layers=CompiledLayers(decoder), graphed=graphed)


def _with_compiled_layers(forward: Forward) -> Forward:
    """The same with compiled layers, or without where they do not compile.

    They are compiled here, on a batch that is always the same: compiled code depends on the sizes that it first met,
    and a run that is resumed must compute the same bits.
    """
    compiled = replace(forward, layers=CompiledLayers(forward.decoder))
    try:
        _run_once(compiled)
    except Exception as error:  # a compiler that is broken or lacks headers, a model that cannot be traced
        log.warning("training runs uncompiled: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return forward
    return compiled


def _run_once(forward: Forward) -> None:
    """A forward, and a backward where something is trained, that leave nothing behind."""
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
    """Why the packed hidden states of a few tokens are not those of padded rows; None when they are."""
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
    want, got = (x[m.slots.argsort()] for x, m in ((want, plain), (got, packed)))
    # A token that sees what it must not, or at another position, is off by its own size. In bf16 a router may choose
    # another expert for a token here and there: hence the median.
    worst = ((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)).median().item()
    allowed = 1e-3 if parameter.dtype in (torch.float32, torch.float64) else 0.1
    return None if worst <= allowed else f"{name}: packed hidden states differ by {worst:.2g} of their size"


def _probe(num_tokens: int, times: int = 1) -> TrainBatch:
    """Three groups with prompts and responses of several lengths, 31 · `times` tokens, 11 · `times` the longest."""
    shape = [(3, (4, 2, 1)), (5, (3, 6)), (2, (5,))]
    prompts, responses, groups = [], [], []
    for group, (size, answers) in enumerate(shape):
        for i, num in enumerate(answers):
            prompts.append(tuple((7 * group + 3 * j + 1) % num_tokens for j in range(size * times)))
            responses.append(tuple((5 * i + 11 * j + group) % num_tokens for j in range(num * times)))
            groups.append(group)
    width = max(len(r) for r in responses)
    mask = torch.zeros(len(responses), width)
    return TrainBatch(prompts, responses, mask, torch.tensor(groups), scores=mask[:, 0], rollout_log_probs=mask)
