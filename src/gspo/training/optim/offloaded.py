"""AdamW with masters and moments in host memory, which pass through the GPU in pieces during a step.

Host memory holds three float32 rows: masters and both moments. Every parameter has a range in them; a piece is a range
of all three. AdamW works element by element, so pieces give the same bits as one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gspo.training.optim.adamw import MOMENTS, MasterOptimizer, widened
from gspo.training.optim.host_device_pipeline import HostDevicePipeline
from gspo.training.optim.pinned import PinnedFloats

PIECE_ELEMENTS = 1 << 24  # 64 MiB of each row: a few milliseconds of transfer
# Tensors start and are split at multiples of this, as CPU kernels split them for threads: elements after the last full
# vector are rounded differently.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Segment:
    """Elements `first` to `last` of a parameter, in memory order, which start at `at` in their piece."""

    name: str
    first: int
    last: int
    at: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.first : self.last]

    def within(self, piece: Tensor) -> Tensor:
        return piece[self.at : self.at + self.last - self.first]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of the rows in host memory, and the segments in it."""

    rows: tuple[Tensor, ...]
    segments: tuple[_Segment, ...]


class OffloadedOptimizer(MasterOptimizer):
    """A `MasterOptimizer` with the same bits, whose state uses no memory on the parameters' device between steps.

    Gradient sums stay on the device, and so do float32 parameters, which are their own masters.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        piece_elements: int = PIECE_ELEMENTS,
        **settings: Any,
    ) -> None:
        self._piece_elements = _aligned(piece_elements)
        super().__init__(named_parameters, **settings)

    def _make_masters(self) -> dict[str, nn.Parameter]:
        self._device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self._pipeline = HostDevicePipeline(self._device)
        self._lay_out()
        return {name: p if _is_own(p) else self._host_master(name) for name, p in self.parameters.items()}

    def _lay_out(self) -> None:
        """Allocate the rows. Parameters with a separate master come first; the row of masters ends after them."""
        self._places: dict[str, int] = {}
        num, num_masters = 0, 0
        for name, p in sorted(self.parameters.items(), key=lambda item: _is_own(item[1])):
            self._places[name] = num
            num += _aligned(p.numel())
            num_masters = num_masters if _is_own(p) else num
        self._memory = PinnedFloats(num_masters + 2 * num, self._device)
        rows = self._memory.values.split([num_masters, num, num])
        self._rows: dict[str, Tensor] = dict(zip(("master", *MOMENTS), rows))
        starts = range(0, num, self._piece_elements)
        self._pieces = [self._piece(start, min(start + self._piece_elements, num)) for start in starts]

    def _piece(self, start: int, end: int) -> _Piece:
        segments = []
        for name, place in self._places.items():
            first, last = max(start - place, 0), min(end - place, self.parameters[name].numel())
            if first < last:
                segments.append(_Segment(name, first, last, place + first - start))
        return _Piece(tuple(row[start:end] for row in self._rows.values()), tuple(segments))

    def _in_row(self, row: str, name: str) -> Tensor:
        """A parameter's range of a row, with the parameter's shape and strides."""
        p = self.parameters[name]
        return self._rows[row].narrow(0, self._places[name], p.numel()).as_strided(p.size(), p.stride())

    def _host_master(self, name: str) -> nn.Parameter:
        master = self._in_row("master", name)
        master.copy_(self.parameters[name].detach().cpu())  # converted on the host to save device memory
        return nn.Parameter(master, requires_grad=False)

    def _make_summed(self) -> dict[str, Tensor]:
        # A master in host memory cannot have a gradient on a GPU: an expanded scalar of its shape has it.
        nothing = torch.zeros((), device=self._device)
        return {name: p if _is_own(p) else nothing.expand(p.shape) for name, p in self.parameters.items()}

    def _first_moments(self, name: str) -> dict[str, Tensor]:
        return {key: self._in_row(key, name) for key in MOMENTS}

    @torch.no_grad()
    def _apply(self, found_inf: Tensor | None, scale: Tensor | None) -> None:
        grads = {
            name: _flat(grad, self.parameters[name])
            for name, summed in self._summed.items()
            if (grad := self._sums.narrow.get(summed, summed.grad)) is not None
        }
        self.prepare_state(grads)
        work = [(p.rows, [s for s in p.segments if s.name in grads]) for p in self._pieces]
        work = [(rows, segments) for rows, segments in work if segments]

        def compute(index: int, rows: Sequence[Tensor]) -> None:
            self._move(work[index][1], grads, rows, found_inf, scale)

        self._pipeline.run([rows for rows, _ in work], compute)
        steps = [self._step_of(name) for name in grads]
        if steps:
            torch._foreach_add_(steps, 1)
        if steps and found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _move(
        self,
        segments: Sequence[_Segment],
        grads: dict[str, Tensor],
        rows: Sequence[Tensor],
        found_inf: Tensor | None,
        scale: Tensor | None,
    ) -> None:
        """AdamW on the segments of a piece whose rows are on the device; parameters get the rounded masters."""
        masters, exp_avg, exp_avg_sq = rows
        group = self.adamw.param_groups[0]
        weights = [s.of(_flat(self.parameters[s.name], self.parameters[s.name])) for s in segments]
        wide = [w if w.dtype == torch.float32 else s.within(masters) for w, s in zip(weights, segments)]
        adamw(
            wide,
            [_sum_of(s.of(grads[s.name]), scale) for s in segments],
            [s.within(exp_avg) for s in segments],
            [s.within(exp_avg_sq) for s in segments],
            [],
            # AdamW increments these copies: a tensor in several pieces counts one step.
            [self._step_of(s.name).clone() for s in segments],
            fused=group["fused"],
            found_inf=found_inf,
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        pairs = [(narrow, master) for narrow, master in zip(weights, wide) if narrow is not master]
        if pairs:
            torch._foreach_copy_([narrow for narrow, _ in pairs], [master for _, master in pairs])

    def _step_of(self, name: str) -> Tensor:
        return self.adamw.state[self.masters[name]]["step"]

    def move_state(self, device: torch.device | str) -> None:
        """Nothing to do: the moments are on the device during a step only."""

    def state_tensors(self) -> dict[str, Tensor]:
        """As `MasterOptimizer.state_tensors`. Tensors in host memory are not copies: read them before the next step."""
        self._pipeline.wait()
        return super().state_tensors()

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        self._pipeline.wait()
        super().load_state_tensors(tensors)

    def _set_state(self, name: str, state: dict[str, Tensor]) -> None:
        self.prepare_state([name])
        for key, value in state.items():
            self.adamw.state[self.masters[name]][key].copy_(value)


def _sum_of(grad: Tensor, scale: Tensor | None) -> Tensor:
    """A float32 gradient sum; a single half-precision gradient is converted and scaled."""
    return grad if grad.dtype == torch.float32 else widened([grad], scale)[0]


def _is_own(parameter: nn.Parameter) -> bool:
    """Whether a parameter is its own master."""
    return parameter.dtype == torch.float32


def _aligned(num: int) -> int:
    """The next multiple of the alignment."""
    return -(-num // ALIGNMENT) * ALIGNMENT


def _flat(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The elements in memory order, which must be that of the parameter."""
    sides = [side for side in zip(tensor.shape, tensor.stride(), parameter.stride()) if side[0] > 1]
    assert all(own == other for _, own, other in sides), (tensor.stride(), parameter.stride())
    assert sum((size - 1) * own for size, own, _ in sides) + 1 == tensor.numel(), tensor.stride()
    return tensor.detach().as_strided((tensor.numel(),), (1,))
