"""What a slot pool asks of the code that runs its rows on a device, and the prefixes that it holds between two turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gspo.kernels.sizes import PAGE
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


class HoldingRunner(Runner):
    """A runner whose cache can keep the prefix of a row after the row has ended."""

    @abstractmethod
    def detach(self, row: int, length: int) -> Any:
        """The first `length` tokens of a row as a prefix that outlives it; the row must be removed next."""

    @abstractmethod
    def fork(self, prefix: Any, length: int) -> tuple[Any, int]:
        """A prefix of its own with about the first `length` tokens of another, and how many those are."""

    @abstractmethod
    def extend(self, prefixes: Sequence[Any], lengths: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Any]:
        """The first `lengths[i]` tokens of prefixes with more tokens behind them; the prefixes themselves are used up."""


MIN_SHARED = 2 * PAGE  # tokens that two contexts must have in common
MAX_EXTENSION = 512  # tokens that may be appended to a part that is shorter than they are


class HeldPrefixes:
    """Prefixes of finished responses that a later request may continue, by submission and response, oldest first.

    With `shared`, a context that begins like a held one, of whatever request, starts from a copy of that part. Over a
    runner that cannot hold a prefix, every context is prefilled.
    """

    def __init__(self, runner: Runner, *, shared: bool = False) -> None:
        self._runner, self._shared = runner, shared
        self._holder = runner if isinstance(runner, HoldingRunner) else None
        self._held: dict[tuple[int, int], tuple[int, tuple[int, ...], Any]] = {}  # prompt length, tokens, prefix
        self.num_reused = self.num_continued = 0  # tokens of continued and copied contexts: held, all

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, key: tuple[int, int], row: int, num_prompt: int, tokens: tuple[int, ...]) -> None:
        """Hold the cache of a row that is about to be removed, if that is possible; `tokens` are those that it has."""
        self.release(key)
        if self._holder is not None:
            self._held[key] = num_prompt, tokens, self._holder.detach(row, len(tokens))

    def num_held(self, key: tuple[int, int], context: Sequence[int]) -> int:
        """How many of a context's first tokens are held; 0, and nothing is held any more, when not even its prompt is.

        A cache that is continued before its end is written to there, and the pages of a prompt are shared.
        """
        if key not in self._held:
            return 0
        num_prompt, tokens, _ = self._held[key]
        num = _num_same(tokens, context)
        if num >= num_prompt:
            return num
        self.release(key)
        return 0

    def fill(self, contexts: Mapping[tuple[int, int], Sequence[int]]) -> dict[tuple[int, int], Any]:
        """The prefixes of these contexts: what is held is extended, the others are prefilled."""
        nums = {key: self.num_held(key, context) for key, context in contexts.items()}
        held = [key for key, num in nums.items() if num]
        fresh = [key for key in contexts if key not in held]
        copies = {key: copy for key in fresh if (copy := self._copy(contexts[key])) is not None}
        self.num_reused += sum(nums.values()) + sum(length for _, length in copies.values())
        self.num_continued += sum(len(contexts[key]) for key in contexts if key[1] >= 0 or key in copies)
        fresh = [key for key in fresh if key not in copies]
        filled = dict(zip(fresh, self._runner.prefill([contexts[key] for key in fresh]))) if fresh else {}
        starts = {key: (self._held.pop(key)[-1], nums[key]) for key in held} | copies
        if starts and self._holder is not None:
            prefixes, lengths = [prefix for prefix, _ in starts.values()], [length for _, length in starts.values()]
            tokens = [contexts[key][length:] for key, length in zip(starts, lengths)]
            filled |= zip(starts, self._holder.extend(prefixes, lengths, tokens))
        return filled

    def _copy(self, context: Sequence[int]) -> tuple[Any, int] | None:
        """A copy of the longest part of a context that some request left, and its length; None where it is too short."""
        if self._holder is None or not self._shared or len(context) < MIN_SHARED:
            return None
        start = tuple(context[:MIN_SHARED])
        begun = [(tokens, prefix) for _, tokens, prefix in self._held.values() if tokens[:MIN_SHARED] == start]
        if not begun:
            return None
        tokens, prefix = max(begun, key=lambda pair: _num_same(pair[0], context))
        num = _num_same(tokens, context)
        if 2 * num < len(context) and len(context) - num > MAX_EXTENSION:
            return None  # a prefill of the whole costs less
        return self._holder.fork(prefix, num)

    def release(self, key: tuple[int, int]) -> None:
        """Free what is held of a response, if anything."""
        if key in self._held:
            self._runner.release(self._held.pop(key)[-1])

    def release_oldest(self) -> bool:
        """Free the cache that was held first; False when none is."""
        if not self._held:
            return False
        self.release(next(iter(self._held)))
        return True

    def clear(self) -> None:
        """Free everything."""
        while self.release_oldest():
            pass


def _num_same(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two lists have in common at their beginnings."""
    size = min(len(tokens), len(others))
    return next((i for i in range(size) if tokens[i] != others[i]), size)
