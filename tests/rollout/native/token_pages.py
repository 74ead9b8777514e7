"""Pages that hold tokens instead of keys and values: a pool runs on them without a model.

A row's logits are a function of the tokens that its pages hold, so that a page, a length or a copy in the wrong place
changes what is drawn. `Alone` draws the same responses without a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.kernels.sizes import PAGE
from gspo.rollout.counter_noise import sequence_key, uniform
from gspo.rollout.engine import GroupRequest
from gspo.rollout.native.paged_rows import PagedRows
from gspo.rollout.native.pages import PageAllocator
from gspo.rollout.native.slot_pool import SlotPool
from gspo.rollout.token_sampling import RowSampling, choose

VOCAB, EOS, MAX_LENGTH = 13, 1, 120
_PRIME = 1_000_003
_POWERS = np.array([pow(31, i, _PRIME) for i in range(MAX_LENGTH)], dtype=np.int64)
_FACTORS = np.arange(3, VOCAB + 3)


def logits_of(context: Sequence[int]) -> Tensor:
    """Logits [VOCAB] of the token after a context."""
    number = int((np.asarray(context) * _POWERS[: len(context)] % _PRIME).sum() % _PRIME)
    return torch.from_numpy(number * _FACTORS % 101 / 25).float()


class TokenPages:
    """What PagedRows asks of a PagedModel."""

    device, graphs = torch.device("cpu"), False

    def __init__(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages + 1)
        self.tokens = np.zeros((num_pages + 1, PAGE), dtype=np.int64)
        self.prefills: list[list[tuple[int, ...]]] = []
        self.extensions: list[list[tuple[int, ...]]] = []

    def allocate(self) -> TokenPages:
        return self

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prefill(self, contexts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> None:
        self.prefills.append([tuple(context) for context in contexts])
        self._write(contexts, pages, [0] * len(contexts))

    def extend(self, tokens: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], firsts: Sequence[int]) -> None:
        self.extensions.append([tuple(new) for new in tokens])
        self._write(tokens, pages, firsts)

    def _write(self, tokens: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], firsts: Sequence[int]) -> None:
        for new, own, first in zip(tokens, pages, firsts, strict=True):
            assert len(new) and 0 not in own
            for position, token in enumerate(new, first):
                self.tokens[own[position // PAGE], position % PAGE] = token

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        for original, copy in copies:
            self.tokens[copy] = self.tokens[original]

    def logits(self, tokens: Tensor, lengths: Tensor, pages: TokenPages, table: Tensor) -> Tensor:
        rows = []
        for token, length, own in zip(tokens.tolist(), lengths.tolist(), table.tolist()):
            self.tokens[own[length // PAGE], length % PAGE] = token
            seen = np.arange(length + 1)
            rows.append(logits_of(self.tokens[np.asarray(own)[seen // PAGE], seen % PAGE]))
        return torch.stack(rows)


class World:
    """A pool over token pages, which notes under which version every token was drawn."""

    def __init__(self, num_pages: int = 200, num_slots: int = 4, **options: Any) -> None:
        self.pages = TokenPages(num_pages)
        paged: Any = self.pages
        self.rows = PagedRows(paged, num_slots, MAX_LENGTH)
        self.pool = SlotPool(self.rows, lambda ids: " ".join(map(str, ids)), (EOS,), num_slots, **options)

    @property
    def num_used(self) -> int:
        return self.pages.allocator.num_usable - self.pages.allocator.num_free


class Alone:
    """A response drawn token by token, from its whole context each time."""

    def __init__(self, request: GroupRequest, index: int) -> None:
        begun = request.partial[index].token_ids if index < len(request.partial) else ()
        draw = request.submission if request.draw is None else request.draw
        key = sequence_key(request.seed, draw, request.first_response + index)
        sampling = RowSampling.of([request.params])
        self.tokens, self.log_probs = list(begun), []
        while True:
            logits = logits_of((*request.prompt.token_ids, *self.tokens))[None]
            position = len(self.tokens)
            token, log_prob = choose(logits, sampling, uniform(torch.tensor([key]), torch.tensor([position])))
            self.tokens.append(int(token))
            self.log_probs.append(float(log_prob))
            self.stopped = int(token) in request.params.stop_tokens((EOS,))
            if self.stopped or len(self.tokens) == request.params.max_tokens:
                return
