"""Counter-based random numbers: the draw of a token is a hash of (seed, submission, response, position)."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.seeding import derive_seed

# The constants of SplitMix64 (Steele, Lea, Flood 2014) as signed 64-bit numbers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_A = 0xBF58476D1CE4E5B9 - 2**64
_MIX_B = 0x94D049BB133111EB - 2**64


def sequence_key(seed: int, submission: int, response: int) -> int:
    """The 63-bit key of one response; `uniform` turns it and a position into a number."""
    return derive_seed(seed, "token", submission, response)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) as float64, one for each (key, position): the same bits on every device.

    Both are int64 and broadcast. Integer products wrap around modulo 2^64 on every backend, so the hash is exact.
    A row of positions is the output of SplitMix64 started at the key, which is itself a hash.
    """
    x = keys + positions * _GAMMA
    x = (x ^ _shift_right(x, 30)) * _MIX_A
    x = (x ^ _shift_right(x, 27)) * _MIX_B
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).to(torch.float64) * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A shift that fills with zeros; torch's >> keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
