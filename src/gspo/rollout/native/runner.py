"""What a slot pool asks of the code that runs its rows on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.slots import Slots, SlotStart


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of a KV cache: all that can be used, and those that nothing holds."""

    num_pages: int = 0
    num_free: int = 0


class Runner(ABC):
    """Runs the rows of a pool: rows 0..B-1, in the order they were placed. A *prefix* is a prefilled context.

    What is not abstract is about memory that may run out; a cache with room for every row inherits it.
    """

    slots: Slots
    checks_every_step: bool  # whether the host waits for every token; else it learns one span late which rows are done
    packs_prefill: bool  # whether a prefill costs the sum of its contexts, not their number times the longest

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Around everything that runs the model."""

    def decoding(self) -> AbstractContextManager[None]:
        """Around `decode`."""
        return nullcontext()

    @abstractmethod
    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[Any]:
        """The prefixes of these token lists, from one forward."""

    def num_fitting(self, needs: Sequence[int]) -> int:
        """How many more rows, from the first on, there is memory for; `needs[i]` tokens must be prefilled for row i."""
        return len(needs)

    @abstractmethod
    def place(self, prefixes: Sequence[Any], starts: Sequence[SlotStart], params: Sequence[SamplingParams]) -> None:
        """Append rows; row i continues prefixes[i]."""

    def keep(self, prefix: Any) -> Any:
        """The same prefix in a form that holds no more memory than it needs, for rows that are placed much later."""
        return prefix

    def release(self, prefix: Any) -> None:  # noqa: B027
        """Free a prefix."""

    def reserve(self, num_steps: int) -> bool:
        """Reserve memory for `num_steps` more tokens of every row; False, with no effect, when there is too little."""
        return True

    @abstractmethod
    def decode(self) -> None:
        """Draw the next token of every row; the host waits for nothing."""

    @abstractmethod
    def remove(self, removed: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """Remove rows; moves (gap, mover) fill the gaps from the end of the batch."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows."""

    @property
    def pages(self) -> PageCounts:
        """How the cache's pages are used; zeros for a cache without pages."""
        return PageCounts()
