"""Host memory that a GPU copies from and to on its own."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

FLOAT = 4


class PinnedFloats:
    """Float32 zeros in one piece of host memory, pinned for a GPU as long as this object lives; plain ones for a CPU.

    Pages are mapped here and registered: torch's own allocator of pinned memory rounds up to a power of two, which for
    the state of a large model may be as much again.
    """

    def __init__(self, num: int, device: torch.device) -> None:
        if device.type != "cuda" or num == 0:
            self.values = torch.zeros(num)
            return
        memory = mmap.mmap(-1, FLOAT * num, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are pinned many times faster; a child that shared pinned pages would have them copied on write,
        # away from where the GPU reads.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):  # a kernel without it
                memory.madvise(advice)
        self.values = torch.frombuffer(memory, dtype=torch.float32)
        runtime: Any = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(self.values.data_ptr(), self.values.nbytes, 0))
        if error != 0:
            raise RuntimeError(
                f"fsdp_config.optimizer_offload=true: {self.values.nbytes / 2**30:.1f} GiB of host memory could not be "
                f"pinned (CUDA error {error}); free host memory, or set it to false"
            )
        # The values are kept until then, also when nobody else has them; views of them are plain memory afterwards.
        weakref.finalize(self, _unpin, self.values, device).atexit = False


def _unpin(values: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies may still be under way
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(values.data_ptr())
