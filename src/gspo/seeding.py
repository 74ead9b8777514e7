"""Counter-based randomness: every random choice is a hash of what it is for, so there is no generator state to lose."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed for one purpose ("shuffle", "rollout", "eval" …) and its counters."""
    text = f"{run_seed}/{purpose}/" + "/".join(str(c) for c in counters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
