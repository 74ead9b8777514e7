"""Weights by reference: one version in shared memory, in the safetensors layout, read by every worker on the machine.

On Linux this is memory without a file name (memfd), opened through the publisher's `/proc` entry. It is freed when the
publisher and its readers have ended, however they ended, so a crash leaves nothing behind, and it does not count
against the size of /dev/shm. Elsewhere it is a file in a temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A version's tensors as a safetensors file that any process of this user on this machine can open."""

    path: str

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, on the CPU."""
        return load_file(self.path)


WeightsRef = Any
"""What `RolloutWorker.load_weights` accepts: a WeightsFile, a CudaWeightsRef, a mapping of tensors (Ray resolves an
object reference to one), or None for the weights that the engine was built with."""


class WeightStore(Protocol):
    """Publishes versions of the weights. The fleet discards a version when no worker needs it any more."""

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> WeightsRef:
        """Copy the tensors to where workers can read them; they may change as soon as this returns."""

    def discard(self, ref: WeightsRef) -> None:
        """Free a version. Readers that have begun may finish."""

    def close(self) -> None:
        """Free everything."""


class SharedWeights:
    """A WeightStore in this machine's memory; a version is written once, whatever the number of workers."""

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {}  # by the path that readers open; closing a file frees it

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> WeightsFile:
        path, file = _create(version)
        self._files[path] = file
        try:
            _write(file.fileno(), {name: t.detach() for name, t in tensors.items()})
        except BaseException:
            self.discard(WeightsFile(path))
            raise
        return WeightsFile(path)

    def discard(self, ref: WeightsRef) -> None:
        if isinstance(ref, WeightsFile) and ref.path in self._files:
            with contextlib.suppress(OSError):
                self._files.pop(ref.path).close()

    def close(self) -> None:
        for path in list(self._files):
            self.discard(WeightsFile(path))


def _create(version: int) -> tuple[str, IO[bytes]]:
    """Create a file that is gone when it is closed, and the path by which others open it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(f"gspo-weights-{version}")
        return f"/proc/{os.getpid()}/fd/{fd}", open(fd, "r+b")
    file = tempfile.NamedTemporaryFile(prefix=f"gspo-weights-{version}-", suffix=".safetensors")  # noqa: SIM115
    return file.name, file


def _write(fd: int, tensors: Mapping[str, Tensor]) -> None:
    """Write the safetensors format by copying each tensor, from any device, straight into the file's memory."""
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    # The format allows no gaps. With the widest types first every tensor is aligned to its own type.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        spans[name] = (end, end + tensor.nbytes)
        end += tensor.nbytes
    described = {
        name: {"dtype": _DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [*span]}
        for name, span in spans.items()
    }
    header = json.dumps(described).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    start = 8 + len(header)
    os.truncate(fd, start + end)
    with mmap.mmap(fd, start + end) as memory:
        memory[:8] = len(header).to_bytes(8, "little")
        memory[8:start] = header
        for name, (first, last) in spans.items():
            if first == last:
                continue
            tensor = tensors[name]
            target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start + first)
            target.view(tensor.shape).copy_(tensor)
            del target  # the map cannot be closed while a tensor refers to it


def read_weights(ref: WeightsRef) -> Mapping[str, Tensor] | None:
    """The tensors behind a reference. They must be dropped before the version is discarded."""
    return ref.tensors() if hasattr(ref, "tensors") else ref
