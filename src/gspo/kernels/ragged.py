"""Rows of unequal length as flat or padded tensors, without a Python step per number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def flat(rows: Iterable[Sequence[int]]) -> Tensor:
    """The integers of all rows, one row after another."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=np.int64))


def padded(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    """Float32 [rows, width], zero after the end of a row."""
    out = np.zeros((len(rows), width), dtype=np.float32)
    for row, values in zip(out, rows):
        row[: len(values)] = values
    return torch.from_numpy(out)


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """start, start + 1, … for `length` numbers, one range after another."""
    sizes = np.asarray(lengths, dtype=np.int64)
    shifts = np.asarray(starts, dtype=np.int64) - sizes.cumsum() + sizes
    return torch.from_numpy(np.arange(sizes.sum()) + np.repeat(shifts, sizes))


def repeated(values: Sequence[int], times: Sequence[int]) -> Tensor:
    """Each value repeated as `times` says. (torch's repeat_interleave wakes every core, however few numbers there are.)"""
    return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.int64), times))
