"""Pinned host memory, for asynchronous copies to and from a GPU."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

FLOAT = 4


class PinnedFloats:
    """Contiguous float32 zeros in host memory, pinned for a GPU while this object lives; unpinned for a CPU.

    The pages are mapped and registered here: torch's allocator of pinned memory rounds up to a power of two, which may
    double the memory of a large model's state.
    """

    def __init__(self, num: int, device: torch.device) -> None:
        if device.type != "cuda" or num == 0:
            self.values = torch.zeros(num)
            return
        memory = mmap.mmap(-1, FLOAT * num, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are pinned many times faster. Pages shared with a child process would be copied on write, away from
        # the memory that the GPU reads.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):  # not supported by this kernel
                memory.madvise(advice)
        self.values = torch.frombuffer(memory, dtype=torch.float32)
        runtime: Any = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(self.values.data_ptr(), self.values.nbytes, 0))
        if error != 0:
            raise RuntimeError(
                f"fsdp_config.optimizer_offload=true: {self.values.nbytes / 2**30:.1f} GiB of host memory could not be "
                f"pinned (CUDA error {error}); free host memory, or set it to false"
            )
        # The finalizer keeps the values until then. Remaining views of them are unpinned memory.
        weakref.finalize(self, _unpin, self.values, device).atexit = False


def _unpin(values: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies may still run
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(values.data_ptr())
