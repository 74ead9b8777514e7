"""Weights by reference on GPUs: one version in the trainer's GPU memory, opened by workers of this machine (CUDA IPC).

A worker on the same GPU copies within its memory, one on another GPU from device to device; host memory is not used.
torch frees exported memory once a counter in shared memory, one per export, is 0. A reader that closes the memory takes
1 from it; a reader that was killed never does. So discarding a version sets its counters to 0. (To take 1 from each
would be wrong: below 0 the unsigned counter is huge, and the memory stays for ever.)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gspo.rollout.workers.weight_store import SharedWeights, WeightsRef

_ALIGNMENT = 256
_COUNTER_FILES = "/dev/shm"
_HEADER = 8  # 64-bit words before the first counter of a file
Layout = dict[str, tuple[torch.dtype, tuple[int, ...], int]]  # name → type, shape, first byte
Counter = tuple[bytes, int]  # counts the readers of an export: a file in shared memory, and the place in it


class CudaWeightsRef:
    """A version's tensors in one block of GPU memory; pickling exports it anew, as torch counts one reader per export."""

    def __init__(self, block: Tensor, layout: Layout) -> None:
        self.block, self.layout = block, layout
        self._exports: list[Counter] = []

    def tensors(self) -> dict[str, Tensor]:
        """Views into the block; the reader must drop them before the version is discarded."""
        found = {}
        for name, (dtype, shape, start) in self.layout.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            found[name] = self.block[start : start + size].view(dtype).view(shape)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(self.block)
        named = inspect.signature(rebuild).bind(*arguments).arguments
        self._exports.append((named["ref_counter_handle"], named["ref_counter_offset"]))
        return _open, (rebuild, arguments, self.layout)

    def release(self) -> None:
        """Count every reader as gone, also those killed while they read. No live reader may still use the block."""
        exports, self._exports = self._exports, []
        for handle, offset in exports:
            place = _HEADER + offset
            counters = torch.from_file(_COUNTER_FILES + handle.decode(), shared=True, size=place + 1, dtype=torch.int64)
            counters[place] = 0


def _open(rebuild: Any, arguments: tuple[Any, ...], layout: Layout) -> CudaWeightsRef:
    return CudaWeightsRef(rebuild(*arguments), layout)


class CudaWeights:
    """A WeightStore in this process's GPU memory. Tensors in host memory (gathered from shards) go to shared memory."""

    def __init__(self) -> None:
        self._held: dict[int, CudaWeightsRef] = {}
        self._host = SharedWeights()

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> WeightsRef:
        if any(not tensor.is_cuda for tensor in tensors.values()):
            return self._host.publish(tensors, version)
        layout: Layout = {}
        end = 0
        for name, tensor in tensors.items():
            layout[name] = (tensor.dtype, tuple(tensor.shape), end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        device = next(t.device for t in tensors.values())
        ref = CudaWeightsRef(torch.empty(end, dtype=torch.uint8, device=device), layout)
        for name, target in ref.tensors().items():
            target.copy_(tensors[name].detach())
        torch.cuda.synchronize(device)  # readers use other streams
        self._held[id(ref)] = ref
        return ref

    def discard(self, ref: WeightsRef) -> None:
        held = self._held.pop(id(ref), None)
        if held is None:
            self._host.discard(ref)
        else:
            held.release()

    def close(self) -> None:
        for ref in self._held.values():
            ref.release()
        self._held.clear()
        self._host.close()
