"""A pool of slots that runs groups to their end: refill, prefill, decode, retire.

    submit ─▶ _waiting (responses, in order) ─▶ prefill ─▶ rows 0..B-1 of one decode batch ─▶ complete groups
                   ▲                                          │
                   └── too little memory, or new weights ─────┘

One `advance` does all of it in the caller's thread. The only wait is for the device, when `_retire` reads which rows are
done: after every token on a CPU, once per `advance` on a GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from gspo.rollout.engine import EngineError, GroupRequest, not_finite_error
from gspo.rollout.native.runner import PageCounts, Runner
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


@dataclass(slots=True)
class _KeptPrefix:
    """The prefilled prompt of a group whose last responses still wait for a slot."""

    key: tuple[int, int]
    prefix: Any


class SlotPool:
    """Runs responses in `num_slots` rows of one decode batch; rows 0..B-1 are in use, in the order they were placed.

    The gap of a finished row is filled from the end of the batch and new rows are appended, so the batch is always
    compact and its layout is a function of the calls made.
    """

    def __init__(
        self,
        runner: Runner,
        detokenize: Callable[[Sequence[int]], str],
        eos_token_ids: Sequence[int],
        num_slots: int,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self._runner = runner
        self._slots = runner.slots
        self._detokenize = detokenize
        self._eos = tuple(eos_token_ids)
        self._num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._num_arrivals = self._num_prefills = self._num_contexts = 0
        self._kept: _KeptPrefix | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything in flight."""
        self._groups: dict[int, GroupProgress] = {}  # by arrival
        self._complete: list[GroupProgress] = []  # of those, the ones that `advance` returns
        self._waiting: deque[SequenceProgress] = deque()
        self._clear_rows()

    def _clear_rows(self) -> None:
        self._rows: list[SequenceProgress] = []
        self._set_kept(None)
        self._runner.clear()

    def _set_kept(self, kept: _KeptPrefix | None) -> None:
        if self._kept is not None:
            self._runner.release(self._kept.prefix)
        self._kept = kept

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def holds_cache(self) -> bool:
        """Whether the cache holds something that `rewind` would free."""
        return bool(self._rows) or self._kept is not None

    @property
    def stats(self) -> PoolStats:
        rows = tuple((s.group.request.submission, s.index) for s in self._rows)
        return PoolStats(rows, self._num_prefills, self._num_contexts, self._runner.pages)

    def submit(self, request: GroupRequest) -> GroupProgress:
        """Queue the responses of a group behind those already waiting."""
        group, sequences = begin(request, self._num_arrivals, request.params.stop_tokens(self._eos))
        self._num_arrivals += 1
        self._groups[group.arrival] = group
        self._waiting.extend(sequences)
        if group.is_complete:
            self._complete.append(group)
        return group

    def advance(self, num_steps: int, version: int) -> list[Group]:
        """Refill the slots, decode up to `num_steps` tokens per row, and return the groups that became complete."""
        runner = self._runner
        with runner.running():
            self._refill()
            self._make_room(num_steps, version)
            with runner.decoding():
                for step in range(num_steps):
                    if not self._rows:
                        break
                    runner.decode()
                    if runner.checks_every_step or step == num_steps - 1:
                        self._retire(version)
        complete, self._complete = self._complete, []
        for group in complete:
            del self._groups[group.arrival]
        return [g.group() for g in sorted(complete, key=lambda g: (g.request.submission, g.arrival))]

    def rewind(self, version: int) -> None:
        """Forget every cache: running responses queue again with the tokens drawn so far, drawn under `version`.

        The queue is then the one that a fresh pool would have after `submit` of everything in `unfinished`.
        """
        for sequence, rollout in self._in_flight(version):
            sequence.begun = rollout
        self._waiting = deque(sorted([*self._rows, *self._waiting], key=lambda s: s.order))
        self._clear_rows()

    def unfinished(self, version: int) -> list[GroupRequest]:
        """The groups in flight as requests, in order of submission, with what each response has so far."""
        return as_requests(self._groups.values(), self._in_flight(version))

    def _in_flight(self, version: int) -> list[tuple[SequenceProgress, Rollout]]:
        """Every response in flight with what it has so far."""
        running = self._read(range(len(self._rows)), version)
        return [*((s, s.begun) for s in self._waiting), *zip(self._rows, running)]

    def _retire(self, version: int) -> None:
        """Hand finished rows to their groups and remove them."""
        num_rows = len(self._rows)
        done = self._slots.done[:num_rows].tolist()
        if not any(done):
            return
        finished = [row for row in range(num_rows) if done[row]]
        for row, rollout in zip(finished, self._read(finished, version)):
            sequence = self._rows[row]
            stopped = rollout.token_ids[-1] in sequence.group.stops
            sequence.finish(rollout, self._detokenize(rollout.token_ids), "stop" if stopped else "length")
            if sequence.group.is_complete:
                self._complete.append(sequence.group)
        self._remove(finished)

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

    def _make_room(self, num_steps: int, version: int) -> None:
        """Preempt the rows placed last until the others have memory for `num_steps` more tokens."""
        while self._rows and not self._runner.reserve(num_steps):
            last = len(self._rows) - 1
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
        """What these rows have so far. Log-probs that are not finite stop the run here."""
        if not len(rows):
            return []
        index = torch.tensor(list(rows), device=self._slots.device)
        lengths = self._slots.length[index].tolist()
        tokens = self._slots.tokens[index, : max(lengths)].tolist()
        log_probs = self._slots.log_probs[index, : max(lengths)].tolist()
        rollouts = []
        for row, end, row_tokens, row_log_probs in zip(rows, lengths, tokens, log_probs):
            sequence = self._rows[row]
            start = len(sequence.context) - 1
            if not math.isfinite(sum(row_log_probs[start:end])):
                raise not_finite_error(sequence.group.request, sequence.index, version)
            rollouts.append(sequence.extended(row_tokens[start:end], row_log_probs[start:end], version))
        return rollouts

    def _refill(self) -> None:
        """Give the free slots to waiting responses, in order; every prompt is prefilled once for its group."""
        while self._waiting and len(self._rows) < self._num_slots:
            if not self._place(list(islice(self._waiting, self._num_slots - len(self._rows)))):
                break

    def _place(self, sequences: list[SequenceProgress]) -> int:
        """Place a first part of the waiting `sequences` with one prefill; returns how many."""
        batch, contexts, sources = self._next_prefill(sequences)
        kept = self._kept if self._kept is not None and self._kept.key == batch[0].prefix_key else None
        num = self._runner.num_fitting([] if kept else contexts, sources)
        if not num:
            if not self._rows:
                self._make_room_for_one(batch[0])
            return 0
        batch, sources = batch[:num], sources[:num]
        for _ in batch:
            self._waiting.popleft()
        prefix = kept.prefix if kept else self._prefill(contexts[: max(sources) + 1])
        starts, params = [s.start() for s in batch], [s.group.request.params for s in batch]
        self._runner.place(prefix, sources, starts, params)
        self._rows.extend(batch)
        self._keep_prefix(batch[-1], prefix, sources[-1], kept is not None)
        return num

    def _prefill(self, contexts: Sequence[Sequence[int]]) -> Any:
        self._num_prefills += 1
        self._num_contexts += len(contexts)
        return self._runner.prefill(contexts)

    def _make_room_for_one(self, sequence: SequenceProgress) -> None:
        """Free the kept prompt, since nothing runs and still the next sequence does not fit; CacheFull without one."""
        if self._kept is None:
            raise CacheFull(
                f"prompt {sequence.group.request.prompt.uid!r} and its response do not fit into the KV cache; raise "
                "rollout.gpu_memory_utilization"
            )
        self._set_kept(None)

    def _next_prefill(
        self, sequences: list[SequenceProgress]
    ) -> tuple[list[SequenceProgress], list[tuple[int, ...]], list[int]]:
        """The sequences of the next prefill forward, its distinct contexts, and the context of each sequence.

        The last token is left out of every context: decoding feeds it, so that the first token of a response is
        drawn by the same code as the others. The sequences of the kept prefix make a batch by themselves.
        """
        kept = self._kept.key if self._kept is not None else None
        known: dict[tuple[int, int], int] = {}
        contexts: list[tuple[int, ...]] = []
        sources: list[int] = []
        longest = total = 0
        for sequence in sequences:
            key = sequence.prefix_key
            if sources and (key == kept) != (sequences[0].prefix_key == kept):
                break
            if key not in known:
                context = sequence.context[:-1]
                longest, total = max(longest, len(context)), total + len(context)
                cost = total if self._runner.packs_prefill else longest * (len(contexts) + 1)
                if sources and cost > self._prefill_tokens:
                    break
                known[key] = len(contexts)
                contexts.append(context)
            sources.append(known[key])
        return sequences[: len(sources)], contexts, sources

    def _keep_prefix(self, last: SequenceProgress, prefix: Any, source: int, is_kept: bool) -> None:
        """Keep the last group's prefilled prompt while responses that share it still wait."""
        siblings = islice(self._waiting, last.group.request.n)
        if any(s.prefix_key == last.prefix_key for s in siblings):
            if not is_kept:
                self._set_kept(_KeptPrefix(last.prefix_key, self._runner.keep(prefix, source)))
        else:
            self._set_kept(None)
        if not is_kept:
            self._runner.release(prefix)
