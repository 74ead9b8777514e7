"""Which running rows begin with the same prompt, so that attention reads it once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, groupby

import torch
from torch import Tensor

MAX_CHUNK = 8  # rows that one thread processes together


class SharedPrompts:
    """The prompt of every row, as a number, and how many of its tokens are in the cache of every row that has it."""

    def __init__(self, num_slots: int) -> None:
        self._numbers = count()
        self._prompt = [(-1, 0)] * num_slots  # number, tokens
        self._chunks: tuple[Tensor, Tensor] | None = None  # of the latest `chunks`

    def place(self, first_row: int, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Row first_row + i begins with `lengths[i]` tokens, the same ones for rows of the same source."""
        numbers = {source: next(self._numbers) for source in dict.fromkeys(sources)}
        for row, (source, length) in enumerate(zip(sources, lengths), first_row):
            self._prompt[row] = numbers[source], length
        self._chunks = None

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Rows `targets` get the prompts of rows `sources`."""
        moved = [self._prompt[source] for source in sources]
        for target, prompt in zip(targets, moved):
            self._prompt[target] = prompt
        self._chunks = None

    def chunks(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Rows 0..num_rows-1 ordered by prompt, and chunks of them as [first, count, shared tokens].

        A row's result does not depend on its chunk, to the bit; chunks are small enough to give every thread some.
        """
        if self._chunks is None or len(self._chunks[0]) != num_rows:
            most = max(1, min(MAX_CHUNK, num_rows // (2 * torch.get_num_threads())))
            rows = sorted(range(num_rows), key=lambda row: self._prompt[row])
            chunks, first = [], 0
            for (_, length), same in groupby(rows, key=lambda row: self._prompt[row]):
                left = len(list(same))
                while left:
                    num = min(left, most)
                    chunks.append((first, num, length))
                    first, left = first + num, left - num
            self._chunks = torch.tensor(rows), torch.tensor(chunks)
        return self._chunks
