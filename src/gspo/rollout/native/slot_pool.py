"""A pool of slots that runs groups to their end: refill, prefill, decode, retire.

    submit ─▶ _waiting (responses, in order) ─▶ prefill ─▶ rows 0..B-1 of one decode batch ─▶ complete groups
                   ▲                                          │
                   └── too little memory, or new weights ─────┘

One `advance` does all of it in the caller's thread. On a CPU it checks after every token which rows are done. A GPU
works behind the host: `advance` launches a span of tokens and then retires the rows that ended in the span before, so
that the host's work (reading, detokenising, judging, refilling) and the device's next span run at the same time.
Prompts are prefilled ahead, many in one forward, while earlier responses still occupy the slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import numpy as np

from gspo.rollout.engine import EngineError, GroupRequest, Written, not_finite_error
from gspo.rollout.native.runner import HeldPrefixes, PageCounts, Runner
from gspo.rollout.progress import GroupProgress, SequenceProgress, as_requests, begin
from gspo.types import Group, Rollout

PREFILL_TOKENS = 8192  # tokens of one prefill forward: bounds its activations


class CacheFull(EngineError):
    """Not even one sequence of a pool fits into the KV cache, beside what other pools hold there."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool runs now, and what it has prefilled since it was made."""

    rows: tuple[tuple[int, int], ...]  # submission and response of every row
    num_prefills: int  # forwards
    num_contexts: int  # token lists in them
    pages: PageCounts
    num_continued: int = 0  # tokens of contexts that continue a response or begin like a held one
    num_reused: int = 0  # of those, tokens whose cache was held


class SlotPool:
    """Runs responses in `num_slots` rows of one decode batch; rows 0..B-1 are in use, in the order they were placed.

    The gap of a finished row is filled from the end of the batch and new rows are appended, so the batch is always
    compact and its layout is a function of the calls made. A prefill includes the contexts of up to `num_ahead` waiting
    responses that do not have a slot yet.
    """

    def __init__(
        self,
        runner: Runner,
        detokenize: Callable[[Sequence[int]], str],
        eos_token_ids: Sequence[int],
        num_slots: int,
        prefill_tokens: int = PREFILL_TOKENS,
        num_ahead: int = 0,
        share_prefixes: bool = False,
    ) -> None:
        self._runner = runner
        self._slots = runner.slots
        self._detokenize = detokenize
        self._eos = tuple(eos_token_ids)
        self._num_slots, self._num_ahead = num_slots, num_ahead
        self._prefill_tokens = prefill_tokens
        self._num_arrivals = self._num_prefills = self._num_contexts = 0
        self._prefixes: dict[tuple[int, int], Any] = {}  # prefilled contexts of waiting responses, by their key
        self._held = HeldPrefixes(runner, shared=share_prefixes)  # caches of finished responses of requests with `hold`
        self.clear()

    def clear(self) -> None:
        """Forget everything in flight."""
        self._groups: dict[int, GroupProgress] = {}  # by arrival
        self._complete: list[GroupProgress] = []  # of those, the ones that `advance` returns
        self._waiting: deque[SequenceProgress] = deque()
        self._written: list[Written] = []
        self._clear_rows()

    def _clear_rows(self) -> None:
        self._rows: list[SequenceProgress] = []
        self._num_row_steps = self._num_ended = 0
        self._release_except(set())
        self._held.clear()
        self._slots.forget_mark()
        self._runner.clear()

    def _release_except(self, keys: set[tuple[int, int]]) -> None:
        """Release the prefilled contexts of all other keys."""
        for key in [key for key in self._prefixes if key not in keys]:
            self._runner.release(self._prefixes.pop(key))

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_responses(self) -> int:
        """Responses that run or wait for a slot."""
        return len(self._rows) + len(self._waiting)

    @property
    def holds_cache(self) -> bool:
        """Whether the cache holds something that `rewind` would free."""
        return bool(self._rows or self._prefixes or self._held)

    @property
    def stats(self) -> PoolStats:
        rows = tuple((s.group.request.submission, s.index) for s in self._rows)
        held = self._held
        pages = self._runner.pages
        return PoolStats(rows, self._num_prefills, self._num_contexts, pages, held.num_continued, held.num_reused)

    @property
    def ended_per_token(self) -> float:
        """Estimate, since the caches were last forgotten, of the share of rows that end with each token drawn."""
        return (self._num_ended + 1) / (self._num_row_steps + 128)

    def submit(self, request: GroupRequest) -> GroupProgress:
        """Queue the responses of a group behind those already waiting."""
        group, sequences = begin(request, self._num_arrivals, request.params.stop_tokens(self._eos))
        self._num_arrivals += 1
        self._groups[group.arrival] = group
        self._waiting.extend(sequences)
        if group.is_complete:
            self._complete.append(group)
        return group

    def release(self, submission: int, response: int) -> None:
        """Free what is held of a finished response."""
        self._held.release((submission, response))

    def advance(self, num_steps: int, version: int) -> list[Group]:
        """Refill the slots, decode up to `num_steps` tokens per row, and return the groups that became complete."""
        runner = self._runner
        with runner.running():
            self._refill()
            self._make_room(num_steps, version)
            with runner.decoding():
                for _ in range(num_steps):
                    if not self._rows:
                        break
                    runner.decode()
                    self._num_row_steps += len(self._rows)
                    if runner.checks_every_step:
                        self._slots.mark(len(self._rows))
                        self._retire(version)
            self._report_watched(version)
            if not runner.checks_every_step:
                self._retire(version)
                self._slots.mark(len(self._rows))
        complete, self._complete = self._complete, []
        for group in complete:
            del self._groups[group.arrival]
        return [g.group() for g in sorted(complete, key=lambda g: (g.request.submission, g.arrival))]

    def take_written(self) -> list[Written]:
        """What watched responses gained since the last call. A GPU reports the tokens of the span before the last."""
        written, self._written = self._written, []
        return written

    def cancel(self, submission: int, response: int, version: int) -> None:
        """Forget the groups of this submission and first response."""

        def is_cancelled(group: GroupProgress) -> bool:
            return (group.request.submission, group.request.first_response) == (submission, response)

        self._groups = {arrival: group for arrival, group in self._groups.items() if not is_cancelled(group)}
        self._waiting = deque(s for s in self._waiting if not is_cancelled(s.group))
        if any(is_cancelled(s.group) for s in self._rows):
            self._settle(version)
            self._remove([row for row, s in enumerate(self._rows) if is_cancelled(s.group)])
        self._complete = [group for group in self._complete if not is_cancelled(group)]
        unused = {key for key in self._prefixes if key[0] == submission} - {s.prefix_key for s in self._waiting}
        self._release_except(self._prefixes.keys() - unused)

    def rewind(self, version: int) -> None:
        """Forget every cache: running responses queue again with the tokens drawn so far, drawn under `version`.

        The queue is then the one that a fresh pool would have after `submit` of everything in `unfinished`.
        """
        self.close_version(version)
        self._waiting = deque(sorted([*self._rows, *self._waiting], key=lambda s: s.order))
        self._clear_rows()

    def close_version(self, version: int) -> None:
        """Note that the tokens drawn so far were drawn under `version`; what rows draw next belongs to another one."""
        self._settle(version)
        for sequence, rollout in zip(self._rows, self._read(range(len(self._rows)), version)):
            sequence.begun = rollout
        self._release_except(set())

    def unfinished(self, version: int) -> list[GroupRequest]:
        """The groups in flight as requests, in order of submission, with what each response has so far."""
        self._settle(version)
        running = zip(self._rows, self._read(range(len(self._rows)), version))
        return as_requests(self._groups.values(), [*((s, s.begun) for s in self._waiting), *running])

    def _settle(self, version: int) -> None:
        """Wait for the device and retire every row that is done. The rows left are marked, so `_read` may follow."""
        self._slots.mark(len(self._rows))
        self._retire(version)
        self._slots.mark(len(self._rows))

    def _retire(self, version: int) -> None:
        """Hand the rows that were done at the last mark to their groups and remove them."""
        finished = self._slots.finished()
        if not finished:
            return
        self._num_ended += len(finished)
        for row, rollout in zip(finished, self._read(finished, version)):
            sequence = self._rows[row]
            stopped = rollout.token_ids[-1] in sequence.group.stops
            sequence.finish(rollout, self._detokenize(rollout.token_ids), "stop" if stopped else "length")
            if sequence.group.request.hold:
                request = sequence.group.request
                tokens = (*request.prompt.token_ids, *rollout.token_ids[:-1])  # the last one was never fed
                self._held.hold((request.submission, sequence.number), row, len(request.prompt.token_ids), tokens)
            if sequence.group.is_complete:
                self._complete.append(sequence.group)
        self._remove(finished)

    def _report_watched(self, version: int) -> None:
        """Read what watched rows had at the last mark, so that it is reported."""
        watched = [row for row, sequence in enumerate(self._rows) if sequence.group.request.watch]
        if watched and self._runner.checks_every_step:
            self._slots.mark(len(self._rows))
        self._read([row for row in watched if row < self._slots.num_marked] if watched else (), version)

    def _remove(self, rows: Sequence[int]) -> None:
        """Remove these rows and fill the gaps from the end of the batch."""
        removed, num_rows = set(rows), len(self._rows)
        num_left = num_rows - len(removed)
        gaps = [row for row in rows if row < num_left]
        movers = [row for row in range(num_left, num_rows) if row not in removed]
        for gap, mover in zip(gaps, movers):
            self._rows[gap] = self._rows[mover]
        del self._rows[num_left:]
        self._runner.remove(rows, list(zip(gaps, movers)))
        self._slots.forget_mark()

    def _make_room(self, num_steps: int, version: int) -> None:
        """Free memory until every row left has room for `num_steps` more tokens.

        First held caches are released, the oldest first, then contexts that were prefilled ahead, then rows that are
        done are retired, and then the rows placed last are preempted.
        """
        while self._rows and not self._runner.reserve(num_steps):
            if self._held.release_oldest():
                continue
            if self._prefixes:
                self._release_except(set())
                continue
            last = len(self._rows) - 1
            self._settle(version)
            if len(self._rows) <= last:
                continue
            if not last:
                raise CacheFull(
                    "the KV cache cannot hold one response; raise rollout.gpu_memory_utilization or lower "
                    "data.max_response_length"
                )
            sequence = self._rows[last]
            (sequence.begun,) = self._read([last], version)
            self._waiting.appendleft(sequence)
            self._remove([last])

    def _read(self, rows: Sequence[int], version: int) -> list[Rollout]:
        """What these rows had at the last mark. Log-probs that are not finite stop the run here."""
        if not len(rows):
            return []
        lengths, tokens, log_probs = self._slots.read(rows)
        rollouts = []
        for number, (row, end) in enumerate(zip(rows, lengths)):
            sequence = self._rows[row]
            start = sequence.num_cached
            own = log_probs[number, start:end]
            if not np.isfinite(own).all():
                raise not_finite_error(sequence.group.request, sequence.number, version)
            rollouts.append(sequence.extended(tokens[number, start:end].tolist(), own.tolist(), version))
            if sequence.group.request.watch:
                self._report(sequence, row, rollouts[-1])
        return rollouts

    def _report(self, sequence: SequenceProgress, row: int, rollout: Rollout) -> None:
        """Add the tokens that a watched response gained to what `take_written` returns."""
        first, request = sequence.num_reported, sequence.group.request
        if len(rollout.token_ids) == first:
            return
        sequence.num_reported = len(rollout.token_ids)
        column = len(request.prompt.token_ids) - 1
        top = self._slots.read_top(row, column + first, column + len(rollout.token_ids), request.params.num_top)
        new = (rollout.token_ids[first:], rollout.log_probs[first:], rollout.versions[first:])
        self._written.append(Written(request.submission, sequence.number, *new, top))

    def _refill(self) -> None:
        """Give the free slots to waiting responses, in order; every prompt is prefilled once for its group."""
        while self._waiting and len(self._rows) < self._num_slots:
            if not (self._place_prefilled() or self._prefill_next()):
                break
        for key, prefix in self._prefixes.items():
            self._prefixes[key] = self._runner.keep(prefix)

    def _place_prefilled(self) -> int:
        """Place the first waiting responses as long as their contexts are prefilled; returns how many."""
        num_free = self._num_slots - len(self._rows)
        ready = list(takewhile(lambda s: s.prefix_key in self._prefixes, islice(self._waiting, num_free)))
        placed = ready[: self._runner.num_fitting([0] * len(ready))]
        if not placed:
            return 0
        for _ in placed:
            self._waiting.popleft()
        prefixes = [self._prefixes[s.prefix_key] for s in placed]
        self._runner.place(prefixes, [s.start() for s in placed], [s.group.request.params for s in placed])
        self._rows.extend(placed)
        siblings = islice(self._waiting, placed[-1].group.request.n)
        used = {s.prefix_key for s in placed} - {s.prefix_key for s in siblings}
        self._release_except(self._prefixes.keys() - used)
        return len(placed)

    def _prefill_next(self) -> bool:
        """Prefill the contexts of the next waiting responses in one forward; False when memory must be freed by rows.

        The last token is left out of every context: decoding feeds it, so that the first token of a response is
        drawn by the same code as the others.
        """
        contexts: dict[tuple[int, int], tuple[int, ...]] = {}
        needs: list[int] = []  # tokens to prefill, response by response
        longest = total = 0
        for sequence in islice(self._waiting, self._num_slots - len(self._rows) + self._num_ahead):
            key, need = sequence.prefix_key, 0
            if key not in self._prefixes and key not in contexts:
                context = sequence.context[:-1]
                need = len(context) - self._held.num_held(key, context)
                longest, total = max(longest, need), total + need
                cost = total if self._runner.packs_prefill else longest * (len(contexts) + 1)
                if contexts and cost > self._prefill_tokens:
                    break
                contexts[key] = context
            needs.append(need)
        fitting = {s.prefix_key for s in islice(self._waiting, self._runner.num_fitting(needs))}
        new = {key: context for key, context in contexts.items() if key in fitting}
        if not new:
            if self._held.release_oldest():
                return True
            return not self._rows and self._make_room_for_one(self._waiting[0])
        self._num_prefills += 1
        self._num_contexts += len(new)
        self._prefixes.update(self._held.fill(new))
        return True

    def _make_room_for_one(self, sequence: SequenceProgress) -> bool:
        """Free what was prefilled for others, since nothing runs and still this one does not fit; CacheFull if nothing was."""
        if not self._prefixes.keys() - {sequence.prefix_key}:
            raise CacheFull(
                f"prompt {sequence.group.request.prompt.uid!r} and its response do not fit into the KV cache; raise "
                "rollout.gpu_memory_utilization"
            )
        self._release_except({sequence.prefix_key})
        return True
