"""Counter-based randomness: every random choice is a hash of what it is for, so there is no generator state to lose."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def derive_seed(run_seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed for one purpose ("shuffle", "rollout", "eval" …) and its counters."""
    text = f"{run_seed}/{purpose}/" + "/".join(str(c) for c in counters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def permutation(seed: int, size: int) -> np.ndarray:
    """The numbers below `size` in an order drawn by `seed`."""
    import numpy as np  # here, because tasks that only derive seeds are imported without it

    # RandomState's stream is frozen across numpy versions, so an old checkpoint keeps its order.
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).permutation(size)
