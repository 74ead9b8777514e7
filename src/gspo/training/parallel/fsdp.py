"""FSDP2: a model sharded over ranks by decoder layer. The float32 shards are the master weights.

`fully_shard` (torch.distributed.fsdp) gathers a layer's weights in the compute precision for its forward and backward
and sums gradients over ranks in float32. Weights outside the layers (embeddings, last norm, head) belong to the root,
which stays gathered from a forward to its backward, so that the chunked head can use its weight directly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.training.critic import ValueModel
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.parallel import ShardError
from gspo.training.parallel.ranks import Ranks
from gspo.training.parallel.sequence import SequenceRanks
from gspo.training.router_change import experts_per_token

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """How one model is sharded. `fsdp_size` ranks hold one copy (-1: all ranks); gradients are summed over copies."""

    compute_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    fsdp_size: int = -1
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False
    ranks_per_sequence: int = 1


class Whole(nn.Module):
    """The root of a sharded model: runs a function of the model with the root's weights gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        # Writing to a view in place would lose the hook that gathers weights for the backward.
        return tree_map_only(Tensor, lambda t: t.clone() if t._is_view() else t, function(*args, **kwargs))


class Shards(Ranks):
    """This rank's shards of one model. Every rank makes the same calls in the same order."""

    def __init__(self, model: nn.Module, device: torch.device, settings: ShardSettings) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.model, self.device, self.settings = model, device, settings
        if settings.ranks_per_sequence > 1:
            self.sequence = SequenceRanks.of(settings.ranks_per_sequence)
            self.sequence.check(model.decoder if isinstance(model, ValueModel) else model)
        self.whole = _shard(model, _mesh(device, self.size, settings.fsdp_size), settings)

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.whole(function, args, kwargs)

    def rest(self) -> None:
        cast(FSDPModule, self.whole).reshard()

    def sum(self, values: Tensor) -> Tensor:
        # Summed here in the order of ranks: a collective may add in a different order on each.
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous())
        return torch.stack(parts[:: self.ranks_per_sequence]).sum(0)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and saved buffer by its name in the state dict, gathered one by one.

        Tied parameters appear under each of their names with the same tensor.
        """
        self.rest()
        state = self.model.state_dict(keep_vars=True)
        names_of = Counter(id(tensor) for tensor in state.values())
        tied: dict[int, Tensor] = {}
        for name, tensor in state.items():
            whole = tied[id(tensor)] if id(tensor) in tied else full(tensor.detach())
            if names_of[id(tensor)] > 1:
                tied[id(tensor)] = whole
            yield name, whole

    def shapes(self) -> list[tuple[str, list[int], str]]:
        """Name, full shape and compute precision of every parameter."""
        self.rest()
        return [(name, list(p.shape), str(self.settings.compute_dtype)) for name, p in self.model.named_parameters()]

    @contextmanager
    def resident(self, optimizer: MasterOptimizer | None = None) -> Iterator[None]:
        """A context in which offloaded weights, and an optimizer's state, are on the device."""
        moves: list[Callable[[torch.device | str], Any]] = []
        if self.device.type != "cpu" and not self.settings.offload_policy:
            moves += [self.whole.to] if self.settings.param_offload else []
            moves += [optimizer.move_state] if self.settings.optimizer_offload and optimizer is not None else []
        for move in moves:
            move(self.device)
        yield
        for move in moves:
            move("cpu")


def full(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; others unchanged. Every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mesh(device: torch.device, world_size: int, fsdp_size: int) -> DeviceMesh:
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if fsdp_size < 1 or world_size % fsdp_size:
        raise ShardError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} trainer ranks; "
            "use -1 for all of them, or a divisor"
        )
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("copy", "shard"))


def _shard(model: nn.Module, mesh: DeviceMesh, settings: ShardSettings) -> Whole:
    """Shard each decoder layer, then the rest. Weights become float32 shards on the mesh's device."""
    policy = MixedPrecisionPolicy()
    if settings.compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=settings.compute_dtype, reduce_dtype=torch.float32)
    on_gpu = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy() if settings.offload_policy and on_gpu else OffloadPolicy()
    common: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    for layer in decoder_layers(model):
        fully_shard(
            _as_float32(layer), mp_policy=policy, reshard_after_forward=settings.reshard_after_forward, **common
        )
    if isinstance(model, ValueModel):  # its head computes in float32
        fully_shard(_as_float32(model.head), mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **common)
    whole = Whole(model)
    fully_shard(_as_float32(whole), mp_policy=policy, reshard_after_forward=False, **common)
    routed = not isinstance(model, ValueModel) and experts_per_token(model) is not None
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the counts of the whole mini-batch, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if routed:  # experts without tokens on this rank must be part of the sum
                module.set_reduce_scatter_unused_params(True, recurse=False)
    return whole


def _as_float32(module: nn.Module) -> nn.Module:
    """The module with float32 parameters. Sharded ones already are float32."""
    for p in module.parameters():
        if not isinstance(p, DTensor):
            p.data = p.data.float()
    return module


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost blocks that the model declares as not to be split."""
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    found: list[nn.Module] = []
    inner: set[int] = set()
    for module in model.modules():
        is_layer = type(module).__name__ in names or isinstance(module, GradientCheckpointingLayer)
        if is_layer and id(module) not in inner:
            found.append(module)
            inner.update(id(m) for m in module.modules())
    return found
