"""Host-side bookkeeping of groups in flight: what each response has so far, and when a group is complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gspo.rollout.counter_noise import sequence_key
from gspo.rollout.engine import GroupRequest
from gspo.rollout.native.slots import SlotStart
from gspo.types import FinishReason, Group, Rollout

EMPTY = Rollout((), (), (), (), "aborted")


@dataclass(eq=False, slots=True)
class GroupProgress:
    """A group in flight: its request, its arrival number in the engine, and its finished responses by index."""

    request: GroupRequest
    arrival: int
    stops: tuple[int, ...]
    finished: dict[int, Rollout] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.request.n

    def group(self) -> Group:
        """The finished group."""
        r = self.request
        rollouts = tuple(self.finished[i] for i in range(r.n))
        return Group(prompt=r.prompt, rollouts=rollouts, submission=r.submission, version=r.version)

    def as_request(self, unfinished: dict[int, Rollout]) -> GroupRequest:
        """The request that continues this group; `unfinished` holds the responses begun and not finished."""
        parts = {**unfinished, **self.finished}
        begun = max((i + 1 for i, part in parts.items() if part.token_ids), default=0)
        return dataclasses.replace(self.request, partial=tuple(parts.get(i, EMPTY) for i in range(begun)))


@dataclass(eq=False, slots=True)
class SequenceProgress:
    """One response in flight; `begun` holds the tokens it had when it was last queued."""

    group: GroupProgress
    index: int
    begun: Rollout
    num_reported: int = 0  # tokens that `written` has reported

    @property
    def context(self) -> tuple[int, ...]:
        """The prompt and the tokens of `begun`."""
        return (*self.group.request.prompt.token_ids, *self.begun.token_ids)

    @property
    def num_cached(self) -> int:
        """Tokens of the context that a cache holds when the response is placed: all but the last."""
        return len(self.group.request.prompt.token_ids) + len(self.begun.token_ids) - 1

    @property
    def number(self) -> int:
        """The number of the response in its whole group, of which the request may be a part."""
        return self.group.request.first_response + self.index

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: responses in the order in which a fresh engine would queue them."""
        return (self.group.request.submission, self.number, self.group.arrival)

    @property
    def prefix_key(self) -> tuple[int, int]:
        """Responses with equal keys have equal contexts: a group's fresh responses share one prefill."""
        return (self.group.request.submission, self.number if self.begun.token_ids else -1)

    @property
    def key(self) -> int:
        """The key of its random numbers."""
        request = self.group.request
        return sequence_key(request.seed, request.submission if request.draw is None else request.draw, self.number)

    def start(self) -> SlotStart:
        """How a slot starts this response: all tokens but the last are cached, the last one is fed first."""
        request, context = self.group.request, self.context
        first = len(request.prompt.token_ids) - 1
        return SlotStart(
            token=context[-1],
            length=len(context) - 1,
            first=first,
            last=first + request.params.max_tokens - 1,
            key=self.key,
            stops=self.group.stops,
        )

    def extended(self, tokens: Sequence[int], log_probs: Sequence[float], version: int) -> Rollout:
        """The response with the tokens generated since it was queued, all under `version`; not finished."""
        begun, num_new = self.begun, len(tokens)
        return Rollout(
            token_ids=(*begun.token_ids, *tokens),
            log_probs=(*begun.log_probs, *log_probs),
            loss_mask=(*begun.loss_mask, *[1] * num_new),
            versions=(*begun.versions, *[version] * num_new),
            finish_reason="aborted",
        )

    def finish(self, rollout: Rollout, text: str, reason: FinishReason) -> None:
        """Add the finished response to its group."""
        self.group.finished[self.index] = dataclasses.replace(rollout, finish_reason=reason, text=text)


def begin(
    request: GroupRequest, arrival: int, stops: tuple[int, ...] = ()
) -> tuple[GroupProgress, list[SequenceProgress]]:
    """Begin a request: its group, and the responses that still have to run, by index."""
    group = GroupProgress(request, arrival, stops)
    sequences = []
    for index in range(request.n):
        begun = request.partial[index] if index < len(request.partial) else EMPTY
        if begun.finish_reason == "aborted":
            sequences.append(SequenceProgress(group, index, begun, len(begun.token_ids)))
        else:
            group.finished[index] = begun
    return group, sequences


def as_requests(
    groups: Iterable[GroupProgress], unfinished: Iterable[tuple[SequenceProgress, Rollout]]
) -> list[GroupRequest]:
    """The requests that continue these groups, in order of submission; `unfinished` lists the responses in flight."""
    parts: dict[int, dict[int, Rollout]] = {}
    for sequence, rollout in unfinished:
        parts.setdefault(sequence.group.arrival, {})[sequence.index] = rollout
    requests = [group.as_request(parts.get(group.arrival, {})) for group in groups]
    return sorted(requests, key=lambda r: r.submission)
