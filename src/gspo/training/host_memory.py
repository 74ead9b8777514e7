"""Memory of the host that is freed and soon wanted again."""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE = (1 << 31) - 1


@cache
def keep_freed_memory() -> bool:
    """Have glibc keep what a step frees for the next one; whether it could be told so.

    By default it hands large blocks back to the kernel, which clears every page of the same activations and gradients
    again a moment later: 440,000 page faults, a second of the kernel's time, in a step of 135 million parameters.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return all(mallopt(name, _LARGE) for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
