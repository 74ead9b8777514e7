"""A pool of slots that runs groups to their end: refill, prefill, decode, retire."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from gspo.rollout.engine import EngineError, GroupRequest, SamplingParams, not_finite_error
from gspo.rollout.native.slots import Slots, SlotStart
from gspo.rollout.progress import GroupProgress, SequenceProgress, as_requests, begin
from gspo.types import Group, Rollout

PREFILL_TOKENS = 8192  # tokens of one prefill forward: bounds its activations


class CacheFull(EngineError):
    """Not even one sequence of a pool fits into the KV cache, beside what other pools hold there."""


class Runner(Protocol):
    """Runs the rows of a pool on a device: rows 0..B-1, in the order they were placed. A prefix is what it prefilled."""

    slots: Slots
    looks_each_step: bool  # whether to look for finished rows after every token is cheap
    packs: bool  # whether a prefill costs the sum of its contexts, and not their number times the longest

    def running(self) -> AbstractContextManager[None]:
        """Around everything that runs the model."""
        ...

    def decoding(self) -> AbstractContextManager[None]:
        """Around `decode`."""
        ...

    def prefill(self, contexts: Sequence[Sequence[int]]) -> Any:
        """The prefix that holds these token lists."""
        ...

    def num_fitting(self, contexts: Sequence[Sequence[int]], sources: Sequence[int]) -> int:
        """How many of the sequences that take context sources[i] there is memory for, from the first on."""
        ...

    def place(
        self,
        prefix: Any,
        sources: Sequence[int],
        starts: Sequence[SlotStart],
        params: Sequence[SamplingParams],
    ) -> None:
        """Append rows; row i continues context sources[i] of `prefix`."""
        ...

    def keep(self, prefix: Any, source: int) -> Any:
        """One context of a prefix, to be placed from later on."""
        ...

    def drop(self, prefix: Any) -> None:
        """Say that a prefix is not needed any more."""
        ...

    def reserve(self, num_steps: int) -> bool:
        """Whether there is memory for `num_steps` more tokens of every row."""
        ...

    def decode(self) -> None:
        """Draw the next token of every row; the host waits for nothing."""
        ...

    def remove(self, gone: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """Take rows away; moves (gap, mover) fill the gaps from the end of the batch."""
        ...

    def clear(self) -> None:
        """Forget all rows."""
        ...

    def forget_captures(self) -> None:
        """Drop what holds addresses of caches."""
        ...


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The prefilled prompt of a group whose last responses still wait for a slot."""

    key: tuple[int, int]
    held: Any


class SlotPool:
    """Runs responses in `num_slots` rows of one decode batch; rows 0..B-1 are in use, in the order they were placed.

    A finished row is filled from the end of the batch and new rows are appended, so the batch is always compact and
    its layout is a function of the calls made.
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
        self._num_arrivals = 0
        self._prefix: _Prefix | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything in flight."""
        self._groups: dict[int, GroupProgress] = {}  # by arrival
        self._whole: list[GroupProgress] = []  # of those, the ones to hand out
        self._waiting: deque[SequenceProgress] = deque()
        self._empty()

    def _empty(self) -> None:
        """Leave no row in use; the buffers stay."""
        self._rows: list[SequenceProgress] = []
        self._hold(None)
        self._runner.clear()

    def _hold(self, prefix: _Prefix | None) -> None:
        if self._prefix is not None:
            self._runner.drop(self._prefix.held)
        self._prefix = prefix

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def holds_cache(self) -> bool:
        """Whether there is something in the cache that `rewind` would free."""
        return bool(self._rows) or self._prefix is not None

    def submit(self, request: GroupRequest) -> GroupProgress:
        """Queue the responses of a group behind those already waiting."""
        stops = request.params.stop_tokens(self._eos)
        group, sequences = begin(request, self._num_arrivals, stops)
        self._num_arrivals += 1
        self._groups[group.arrival] = group
        self._waiting.extend(sequences)
        if group.is_whole:
            self._whole.append(group)
        return group

    def advance(self, num_steps: int, version: int) -> list[Group]:
        """Refill the slots, decode up to `num_steps` tokens a row, and return the groups that became whole."""
        runner = self._runner
        with runner.running():
            self._refill()
            self._make_room(num_steps, version)
            with runner.decoding():
                for step in range(num_steps):
                    if not self._rows:
                        break
                    runner.decode()
                    if runner.looks_each_step or step == num_steps - 1:
                        self._retire(version)
        whole, self._whole = self._whole, []
        for group in whole:
            del self._groups[group.arrival]
        return [g.group() for g in sorted(whole, key=lambda g: (g.request.submission, g.arrival))]

    def forget_captures(self) -> None:
        """Drop what the runner captured of the caches' addresses."""
        self._runner.forget_captures()

    def rewind(self, version: int) -> None:
        """Forget every cache: running responses queue again with the tokens drawn so far, drawn under `version`.

        The queue is then the one a fresh pool would have after `submit` of everything in `unfinished`.
        """
        for sequence, rollout in self._open(version):
            sequence.begun = rollout
        self._waiting = deque(sorted([*self._rows, *self._waiting], key=lambda s: s.order))
        self._empty()

    def unfinished(self, version: int) -> list[GroupRequest]:
        """The groups in flight as requests, in order of submission, with what each response has so far."""
        return as_requests(self._groups.values(), self._open(version))

    def _open(self, version: int) -> list[tuple[SequenceProgress, Rollout]]:
        """Every response in flight with what it has so far."""
        running = self._read(range(len(self._rows)), version)
        return [*((s, s.begun) for s in self._waiting), *zip(self._rows, running)]

    def _retire(self, version: int) -> None:
        """Hand finished rows to their groups and close the gaps they leave from the end of the batch."""
        num_rows = len(self._rows)
        done = self._slots.done[:num_rows].tolist()
        if not any(done):
            return
        ended = [row for row in range(num_rows) if done[row]]
        for row, rollout in zip(ended, self._read(ended, version)):
            sequence = self._rows[row]
            stopped = rollout.token_ids[-1] in sequence.group.stops
            sequence.finish(rollout, self._detokenize(rollout.token_ids), "stop" if stopped else "length")
            if sequence.group.is_whole:
                self._whole.append(sequence.group)
        self._remove(ended)

    def _remove(self, rows: Sequence[int]) -> None:
        """Take these rows away and close the gaps they leave from the end of the batch."""
        gone, num_rows = set(rows), len(self._rows)
        num_left = num_rows - len(gone)
        gaps = [row for row in rows if row < num_left]
        movers = [row for row in range(num_left, num_rows) if row not in gone]
        for gap, mover in zip(gaps, movers):
            self._rows[gap] = self._rows[mover]
        del self._rows[num_left:]
        self._runner.remove(rows, list(zip(gaps, movers)))

    def _make_room(self, num_steps: int, version: int) -> None:
        """Put the rows placed last back into the queue until the others have memory for `num_steps` more tokens."""
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
        """What these rows have so far; a log-prob that is not a number stops the run here, by name."""
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
        """Give waiting responses the free slots, in order; every prompt is prefilled once for its group."""
        while self._waiting and len(self._rows) < self._num_slots:
            if not self._place(list(islice(self._waiting, self._num_slots - len(self._rows)))):
                break

    def _place(self, sequences: list[SequenceProgress]) -> int:
        """Place a first part of the waiting `sequences` with one prefill; returns how many."""
        batch, contexts, sources = self._next_prefill(sequences)
        kept = self._prefix is not None and self._prefix.key == batch[0].prefix_key
        num = self._runner.num_fitting([] if kept else contexts, sources)
        if not num:
            if not self._rows:
                self._make_room_for_one(batch[0])
            return 0
        batch, sources = batch[:num], sources[:num]
        contexts = contexts[: max(sources) + 1]
        for _ in batch:
            self._waiting.popleft()
        prefix = self._prefix.held if kept and self._prefix else self._runner.prefill(contexts)
        starts, params = [s.start() for s in batch], [s.group.request.params for s in batch]
        self._runner.place(prefix, sources, starts, params)
        self._rows.extend(batch)
        self._keep_prefix(batch[-1], prefix, sources[-1], kept)
        return num

    def _make_room_for_one(self, sequence: SequenceProgress) -> None:
        """Nothing runs and yet the next sequence does not fit: a kept prompt may be in its way, or nothing helps."""
        if self._prefix is None:
            raise CacheFull(
                f"prompt {sequence.group.request.prompt.uid!r} and its response do not fit into the KV cache; raise "
                "rollout.gpu_memory_utilization"
            )
        self._hold(None)

    def _next_prefill(
        self, sequences: list[SequenceProgress]
    ) -> tuple[list[SequenceProgress], list[tuple[int, ...]], list[int]]:
        """The sequences of the next prefill forward, its distinct contexts, and the context of each sequence.

        The last token is left out of every context: decoding feeds it, so that the first token of a response is
        drawn by the same code as the others. A kept prefix makes a batch of its own.
        """
        kept = self._prefix.key if self._prefix is not None else None
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
                cost = total if self._runner.packs else longest * (len(contexts) + 1)
                if sources and cost > self._prefill_tokens:
                    break
                known[key] = len(contexts)
                contexts.append(context)
            sources.append(known[key])
        return sequences[: len(sources)], contexts, sources

    def _keep_prefix(self, last: SequenceProgress, prefix: Any, source: int, kept: bool) -> None:
        """Keep the last group's prefilled prompt while responses that share it still wait."""
        siblings = islice(self._waiting, last.group.request.n)
        if any(s.prefix_key == last.prefix_key for s in siblings):
            if not kept:
                self._hold(_Prefix(last.prefix_key, self._runner.keep(prefix, source)))
        else:
            self._hold(None)
        if not kept:
            self._runner.drop(prefix)
