"""AdamW over float32 master weights, with clipping and a skip of steps with non-finite numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WAITING_BYTES = 1 << 28  # of half-precision gradients before they are added to their sums
LARGE_ELEMENTS = 1 << 20  # a gradient this large is added in a separate call, without a float32 copy on a GPU
WIDENED_ELEMENTS = 1 << 26  # of half-precision gradients per call of AdamW
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim.AdamW names them


@dataclass(frozen=True, slots=True)
class StepResult:
    """The gradient norm before clipping, and whether the step was applied. Reading either waits for a GPU."""

    norm: Tensor
    finite: Tensor

    @property
    def grad_norm(self) -> float:
        return float(self.norm)

    @property
    def applied(self) -> bool:
        return bool(self.finite)


class _GradientSums:
    """Adds the gradients of half-precision parameters to the float32 gradients of their masters, many tensors per call.

    They are added at the end of the backward, or earlier once WAITING_BYTES have collected, to bound memory. If there
    is only one backward per step, its gradients stay in half precision: there is nothing to sum.
    """

    def __init__(self) -> None:
        self._new: dict[Tensor, Tensor] = {}  # by master
        self._num_bytes = 0
        self.only_one = False  # one backward until the next step
        self.narrow: dict[Tensor, Tensor] = {}  # its half-precision gradients, by master

    def add(self, master: Tensor, parameter: Tensor) -> None:
        """Add a parameter's gradient. Called in the backward as soon as it is complete."""
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if self.only_one and grad.itemsize < master.itemsize:
            assert master not in self.narrow, "a second backward after `begin(1)`"
            self.narrow[master] = grad
            return
        # For every gradient: those that wait may belong to a failed backward, or to an outer one.
        torch.autograd.Variable._execution_engine.queue_callback(self._add_waiting)  # pyright: ignore[reportAttributeAccessIssue]
        if master in self._new:
            self._add_waiting()
        self._new[master] = grad
        self._num_bytes += grad.nbytes
        if self._num_bytes >= WAITING_BYTES:
            self._add_waiting()

    def clear(self) -> None:
        self._new, self._num_bytes, self.narrow = {}, 0, {}

    @torch.no_grad()
    def _add_waiting(self) -> None:
        first = [(master, grad) for master, grad in self._new.items() if master.grad is None]
        later = [(master.grad, grad) for master, grad in self._new.items() if master.grad is not None]
        if first:
            sums = [torch.empty_like(grad, dtype=torch.float32) for _, grad in first]
            torch._foreach_copy_(sums, [grad for _, grad in first])
            for (master, _), total in zip(first, sums):
                master.grad = total
        for total, grad in later:
            if grad.numel() >= LARGE_ELEMENTS:
                total.add_(grad)
        small = [(total, grad) for total, grad in later if grad.numel() < LARGE_ELEMENTS]
        if small:
            sums, wide = [s for s, _ in small], [torch.empty_like(s) for s, _ in small]
            torch._foreach_copy_(wide, [grad for _, grad in small])
            torch._foreach_add_(sums, wide)
        self._new, self._num_bytes = {}, 0


class MasterOptimizer:
    """AdamW with float32 weights and gradient sums for any compute precision.

    A float32 parameter is its own master. A bf16 one has a float32 copy, to which its gradient is added after every
    backward, so that micro-batches are not summed in bf16.
    """

    state_keys: tuple[str, ...] = ("step", *MOMENTS)  # of a parameter, in a checkpoint

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        grad_clip: float | None = 1.0,
        fused: bool = True,
    ) -> None:
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self.masters = self._make_masters()
        self.grad_clip = grad_clip
        self._summed = self._make_summed()
        self._sums = _GradientSums()
        for name, p in self.parameters.items():
            if self._summed[name] is not p:
                p.register_post_accumulate_grad_hook(partial(self._sums.add, self._summed[name]))
        self.adamw = self._make_adamw(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    def _make_adamw(
        self, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, fused: bool
    ) -> torch.optim.Optimizer:
        """The optimiser of the masters."""
        masters = list(self.masters.values())
        return torch.optim.AdamW(masters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    def _make_masters(self) -> dict[str, nn.Parameter]:
        """The float32 weights by name: a float32 parameter itself, a copy of any other."""
        return {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }

    def _make_summed(self) -> Mapping[str, Tensor]:
        """The tensors, by name, whose `grad` is the float32 sum of a parameter's gradients."""
        return self.masters

    def begin(self, num_backwards: int) -> None:
        """Start a step of `num_backwards` backwards. A single one needs no float32 sums."""
        self.zero_grad()
        self._sums.only_one = num_backwards == 1

    def zero_grad(self) -> None:
        self._sums.clear()
        for summed in self._summed.values():
            summed.grad = None

    def step(self, lr: float, loss: Tensor | None = None) -> StepResult:
        """Clip and apply the gradients. A non-finite gradient or `loss` leaves weights and moments unchanged."""
        wide, narrow = [s.grad for s in self._summed.values() if s.grad is not None], self._sums.narrow
        grads = [*wide, *narrow.values()]
        norm = _total_norm(wide, list(narrow.values()))
        finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite().to(norm.device)
        result = StepResult(norm, finite)
        found_inf = (~finite).float() if self._skips_on_device(grads) else None
        if found_inf is None and not result.applied:
            self.zero_grad()
            return result
        scale = None
        # Clipping is a pass over memory: skipped where that is known without waiting for a GPU.
        if self.grad_clip and (norm.is_cuda or norm > self.grad_clip):
            torch.nn.utils.clip_grads_with_norm_(list(self._summed.values()), self.grad_clip, norm)
            # The same factor for gradients in half precision.
            scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self._apply(found_inf, scale)
        self.zero_grad()
        return result

    def _apply(self, found_inf: Tensor | None, scale: Tensor | None) -> None:
        """Apply the gradients to masters, moments and parameters, unless `found_inf` is 1.

        Half-precision gradients are converted to float32 and multiplied by `scale`, a part at a time.
        """
        self.adamw.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]
        self.adamw.step()
        for master in self.masters.values():
            master.grad = None
        for part in _parts(self._sums.narrow.items()):
            for (master, _), wide in zip(part, widened([grad for _, grad in part], scale)):
                master.grad = wide
            self.adamw.step()
            for master, _ in part:
                master.grad = None
        self._publish()

    def _skips_on_device(self, grads: list[Tensor]) -> bool:
        """Whether AdamW's kernel can skip the step itself, without waiting for the GPU."""
        plain = not any(isinstance(grad, DTensor) or not grad.is_cuda for grad in grads)
        return plain and bool(grads) and bool(self.adamw.defaults["fused"])

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy the masters to their parameters."""
        pairs = [(p, self.masters[name]) for name, p in self.parameters.items() if self.masters[name] is not p]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])

    @torch.no_grad()
    def prepare_state(self, names: Iterable[str] | None = None) -> None:
        """Create moments and step counts of 0, as a first step would, so that a checkpoint can be read into them."""
        for name in self.masters if names is None else names:
            master = self.masters[name]
            if not self.adamw.state.get(master):
                device = self.parameters[name].device if self.adamw.defaults["fused"] else "cpu"
                self.adamw.state[master] = {"step": torch.zeros((), device=device), **self._first_moments(name)}

    def _first_moments(self, name: str) -> dict[str, Tensor]:
        return {key: torch.zeros_like(self.masters[name]) for key in MOMENTS}

    def move_state(self, device: torch.device | str) -> None:
        """Move the moments to another device."""
        for state in self.adamw.state.values():
            for key in MOMENTS:
                state[key] = state[key].to(device)

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments, step counts and separate masters by name: the state that a resume needs beside the weights."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            out |= {f"{key}/{name}": value for key, value in self._state_of(master).items()}
            if master is not self.parameters[name]:
                out[f"master/{name}"] = master.detach()
        return out

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of `state_tensors` once every parameter was updated."""
        out: dict[str, tuple[int, ...]] = {}
        for name, master in self.masters.items():
            out |= {f"{key}/{name}": shape for key, shape in self._shapes_of(master).items()}
            if master is not self.parameters[name]:
                out[f"master/{name}"] = tuple(master.shape)
        return out

    def _state_of(self, master: nn.Parameter) -> dict[str, Tensor]:
        """The step count and moments of a parameter; nothing before its first update."""
        return self.adamw.state.get(master, {})

    def _shapes_of(self, master: nn.Parameter) -> dict[str, tuple[int, ...]]:
        return {"step": (), **dict.fromkeys(MOMENTS, tuple(master.shape))}

    def without_state(self) -> list[str]:
        """Parameters that no update has reached: they have no moments yet."""
        return [name for name, master in self.masters.items() if not self.adamw.state.get(master)]

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, master in self.masters.items():
            if f"master/{name}" in tensors:
                master.copy_(tensors[f"master/{name}"])
            state = {key: tensors[f"{key}/{name}"] for key in self.state_keys if f"{key}/{name}" in tensors}
            if state:
                self._set_state(name, state)
        self._publish()

    def _set_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Set the step count and moments of a parameter."""
        master = self.masters[name]
        self.adamw.state[master] = {key: value.to(master.device).clone() for key, value in state.items()}


def _total_norm(wide: list[Tensor], narrow: list[Tensor]) -> Tensor:
    """The norm of all gradients, computed in float32."""
    if narrow:
        norms = [n for some in (wide, narrow) if some for n in torch._foreach_norm(some, 2.0, torch.float32)]
        return torch.linalg.vector_norm(torch.stack(norms))
    norm = torch.nn.utils.get_total_norm(wide) if wide else torch.zeros(())
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of sharded gradients: over all shards


def widened(grads: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    """Float32 copies, multiplied by `scale`."""
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    torch._foreach_copy_(wide, grads)
    if scale is not None:
        torch._foreach_mul_(wide, scale)
    return wide


def _parts(gradients: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Consecutive gradients of up to WIDENED_ELEMENTS in total, or a single larger one."""
    part: list[tuple[Tensor, Tensor]] = []
    num_elements = 0
    for master, grad in gradients:
        if part and num_elements + grad.numel() > WIDENED_ELEMENTS:
            yield part
            part, num_elements = [], 0
        part.append((master, grad))
        num_elements += grad.numel()
    if part:
        yield part
