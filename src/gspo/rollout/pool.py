"""A pool of slots that runs groups to their end: refill, prefill, decode, retire."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from gspo.rollout.decoder import Decoder
from gspo.rollout.engine import GroupRequest
from gspo.rollout.kv_cache import LayerKV, SlotCache
from gspo.rollout.noise import uniform
from gspo.rollout.progress import GroupProgress, SequenceProgress, as_requests, begin
from gspo.rollout.sampling import RowSampling, choose
from gspo.rollout.slots import Slots
from gspo.types import Group, Rollout

_PREFILL_TOKENS = 8192  # padded tokens of one prefill forward: bounds its activations


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The prefilled prompt of a group whose last responses still wait for a slot."""

    key: tuple[int, int]
    layers: list[LayerKV]


class SlotPool:
    """Runs responses in `num_slots` rows of one decode batch; rows 0..B-1 are in use, in the order they were placed.

    A finished row is filled from the end of the batch and new rows are appended, so the batch is always compact and
    its layout is a function of the calls made.
    """

    def __init__(
        self,
        decoder: Decoder,
        detokenize: Callable[[Sequence[int]], str],
        eos_token_ids: Sequence[int],
        num_slots: int,
        max_length: int,
    ) -> None:
        self._decoder = decoder
        self._detokenize = detokenize
        self._eos = tuple(eos_token_ids)
        self._num_slots = num_slots
        self._cache = SlotCache(num_slots, max_length)
        self._slots = Slots(num_slots, max_length, decoder.device)
        # Reading a flag costs a device synchronisation on a GPU and nothing on a CPU.
        self._look_each_step = decoder.device.type == "cpu"
        self._num_arrivals = 0
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
        self._longest = 0
        self._prefix: _Prefix | None = None
        self._sampling: RowSampling | None = None

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def submit(self, request: GroupRequest) -> GroupProgress:
        """Queue the responses of a group behind those already waiting."""
        stops = request.params.stop_token_ids
        stops = stops if request.params.ignore_eos else (*self._eos, *stops)
        group, sequences = begin(request, self._num_arrivals, stops)
        self._num_arrivals += 1
        self._groups[group.arrival] = group
        self._waiting.extend(sequences)
        if group.is_whole:
            self._whole.append(group)
        return group

    def advance(self, num_steps: int, version: int) -> list[Group]:
        """Refill the slots, decode up to `num_steps` tokens a row, and return the groups that became whole."""
        with self._decoder.running():
            self._refill()
            with self._decoder.decoding():
                for step in range(num_steps):
                    if not self._rows:
                        break
                    self._decode()
                    if self._look_each_step or step == num_steps - 1:
                        self._retire(version)
        whole, self._whole = self._whole, []
        for group in whole:
            del self._groups[group.arrival]
        return [g.group() for g in sorted(whole, key=lambda g: (g.request.submission, g.arrival))]

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

    def _decode(self) -> None:
        """Draw the next token of every row; the host waits for nothing."""
        # Rows that ended since the host last looked stand still, so this bound may run past the longest row.
        slots, num_rows, width = self._slots, len(self._rows), min(self._longest + 1, self._cache.max_length)
        length, key, first = slots.length[:num_rows], slots.key[:num_rows], slots.first[:num_rows]
        self._cache.aim(length, width)
        logits = self._decoder.decode(slots.token[:num_rows], length, self._cache, width)
        if self._sampling is None:
            self._sampling = RowSampling.of([s.group.request.params for s in self._rows], slots.device)
        draws = None if self._sampling.all_greedy else uniform(key, length - first)
        slots.record(*choose(logits, self._sampling, draws))
        self._longest += 1

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
        num_left = num_rows - len(ended)
        gaps = [row for row in ended if row < num_left]
        movers = [row for row in range(num_left, num_rows) if not done[row]]
        if gaps:
            for gap, mover in zip(gaps, movers):
                self._rows[gap] = self._rows[mover]
            targets, sources = (torch.tensor(rows, device=self._slots.device) for rows in (gaps, movers))
            self._slots.move(targets, sources)
            self._cache.move(targets, sources, self._longest)
        del self._rows[num_left:]
        self._longest = int(self._slots.length[:num_left].max()) if num_left else 0
        self._sampling = None

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
                request = sequence.group.request
                raise FloatingPointError(
                    f"prompt {request.prompt.uid!r} (submission {request.submission}, response {sequence.index}): "
                    f"the model gave log-probs that are not finite under weights version {version}. Resume from an "
                    "earlier checkpoint with a lower learning rate, or in float32."
                )
            rollouts.append(sequence.extended(row_tokens[start:end], row_log_probs[start:end], version))
        return rollouts

    def _refill(self) -> None:
        """Give waiting responses the free slots, in order; every prompt is prefilled once for its group."""
        num_free = self._num_slots - len(self._rows)
        taken = [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]
        if not taken:
            return
        while taken:
            taken = taken[self._place(taken) :]
        self._longest = int(self._slots.length[: len(self._rows)].max())
        self._sampling = None

    def _place(self, sequences: list[SequenceProgress]) -> int:
        """Place a first part of `sequences` with one prefill; returns how many."""
        batch, contexts, sources = self._next_prefill(sequences)
        first_row = len(self._rows)
        prefix = self._prefix
        if prefix is not None and prefix.key == batch[0].prefix_key:
            layers = prefix.layers
        else:
            layers = self._decoder.prefill(contexts) if any(contexts) else []
        self._cache.store(first_row, torch.tensor(sources, device=self._slots.device), layers)
        self._slots.place(first_row, [s.start() for s in batch])
        self._rows.extend(batch)
        self._keep_prefix(batch[-1], layers, sources[-1])
        return len(batch)

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
        longest = 0
        for sequence in sequences:
            key = sequence.prefix_key
            if sources and (key == kept) != (sequences[0].prefix_key == kept):
                break
            if key not in known:
                context = sequence.context[:-1]
                longest = max(longest, len(context))
                if sources and longest * (len(contexts) + 1) > _PREFILL_TOKENS:
                    break
                known[key] = len(contexts)
                contexts.append(context)
            sources.append(known[key])
        return sequences[: len(sources)], contexts, sources

    def _keep_prefix(self, last: SequenceProgress, layers: list[LayerKV], source: int) -> None:
        """Keep the last group's prefilled prompt while responses that share it still wait."""
        siblings = islice(self._waiting, last.group.request.n)
        waits = any(s.prefix_key == last.prefix_key for s in siblings)
        if not waits:
            self._prefix = None
        elif self._prefix is None or self._prefix.key != last.prefix_key:
            row = slice(source, source + 1)
            self._prefix = _Prefix(last.prefix_key, [(k[row].clone(), v[row].clone()) for k, v in layers])
