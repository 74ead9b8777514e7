"""A rollout engine without a model: responses come from a script, with lengths and timing that the caller chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.rollout.progress import GroupProgress, SequenceProgress, as_requests, begin
from gspo.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """The tokens of a response (the last one ends it) and its text."""

    token_ids: tuple[int, ...]
    text: str = ""


Script = Callable[[Prompt, int, int], ScriptedAnswer]  # (prompt, submission, response index)


class ScriptedEngine(RolloutEngine):
    """A RolloutEngine that recites `script`, one token per response and step.

    At most `num_slots` responses run at once (all, when None); the others wait in order of submission. A response
    is cut at the request's max_tokens ("length"). Every token has the log-prob -1. `loads` lists the versions
    loaded, for tests that check when weights are updated.
    """

    def __init__(self, script: Script, *, num_slots: int | None = None, version: int = 0) -> None:
        self._script, self._num_slots, self._version = script, num_slots, version
        self._num_arrivals = 0
        self._groups: list[GroupProgress] = []
        self._running: list[SequenceProgress] = []
        self.loads: list[int] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._groups)

    def submit(self, request: GroupRequest) -> None:
        group, sequences = begin(request, self._num_arrivals)
        self._num_arrivals += 1
        self._groups.append(group)
        self._running.extend(sequences)

    def step(self) -> list[Group]:
        for sequence in self._running[: self._num_slots]:
            self._recite(sequence)
        self._running = [s for s in self._running if s.index not in s.group.finished]
        complete = [g.group() for g in self._groups if g.is_complete]
        self._groups = [g for g in self._groups if not g.is_complete]
        return sorted(complete, key=lambda g: g.submission)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        groups = []
        for request in requests:
            group, sequences = begin(request, arrival=0)
            for sequence in sequences:
                while sequence.index not in group.finished:
                    self._recite(sequence)
            groups.append(group.group())
        return groups

    def load_weights(self, weights: Any, version: int) -> None:
        self._version = version
        self._running.sort(key=lambda sequence: sequence.order)
        self.loads.append(version)

    def unfinished(self) -> list[GroupRequest]:
        return as_requests(self._groups, ((s, s.begun) for s in self._running))

    def clear(self) -> None:
        self._groups, self._running = [], []

    def close(self) -> None:
        self.clear()

    def _recite(self, sequence: SequenceProgress) -> None:
        """Add the next token of a response, and finish it at the script's end or at max_tokens."""
        request = sequence.group.request
        answer = self._script(request.prompt, request.submission, sequence.number)
        if not answer.token_ids:
            raise ValueError(f"script for prompt {request.prompt.uid!r}: a response needs at least one token")
        position = len(sequence.begun.token_ids)
        sequence.begun = sequence.extended([answer.token_ids[position]], [-1.0], self._version)
        ended = position + 1 == len(answer.token_ids)
        if ended or position + 1 == request.params.max_tokens:
            sequence.finish(sequence.begun, answer.text, "stop" if ended else "length")
