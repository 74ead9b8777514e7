"""Requests of clients in an engine: submitted, advanced step by step, each sent what it gained. For one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.serving.errors import ApiError
from gspo.serving.parameters import Ask
from gspo.serving.replies import Decode, Reason, Reply, Update
from gspo.types import Group

Send = Callable[["list[Update] | ApiError"], None]
Place = tuple[int, int]  # submission and response: what a response is called in the engine
FINISHED: dict[str, Reason] = {"stop": "stop", "length": "length"}


@dataclass(eq=False, slots=True)
class Job:
    """A request: `requests` has one response each, its choices in order. `send` gets its updates, or an error."""

    ask: Ask
    requests: Sequence[GroupRequest]
    send: Send
    open: dict[Place, Reply] = field(default_factory=dict)  # the choices that are not over


@dataclass(slots=True)
class JobCounts:
    """Totals since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    failures: int = 0


class Jobs:
    """The jobs in one engine. Every choice is a request of its own, so that one can end before the others."""

    def __init__(self, engine: RolloutEngine, decode: Decode) -> None:
        self.engine = engine
        self._decode = decode
        self._by_place: dict[Place, Job] = {}
        self.counts = JobCounts()

    def __len__(self) -> int:
        """Choices in the engine."""
        return len(self._by_place)

    def begin(self, job: Job) -> None:
        """Submit a job; one that the engine refuses is sent the reason."""
        ask = job.ask
        for index, request in enumerate(job.requests):
            place = (request.submission, request.first_response)
            job.open[place] = Reply(index, self._decode, ask.stop, ask.include_stop, ask.call_end)
            self._by_place[place] = job
        self.counts.prompt_tokens += len(job.requests[0].prompt.token_ids)
        try:
            for request in job.requests:
                self.engine.submit(request)
        except ValueError as error:
            self.drop(job)
            job.send(ApiError(400, str(error)))

    def drop(self, job: Job) -> None:
        """Take what is left of a job out of the engine."""
        for place in job.open:
            self._by_place.pop(place, None)
            self.engine.cancel(*place)
        self.counts.cancelled += len(job.open)
        job.open = {}

    def advance(self) -> None:
        """One step of the engine; every job is sent what it gained."""
        groups = self.engine.step()
        updates: dict[Job, list[Update]] = {}
        for piece in self.engine.written():
            place = (piece.submission, piece.response)
            if (job := self._by_place.get(place)) is not None:
                reply = job.open[place]
                new = (piece.token_ids, piece.log_probs, piece.versions, piece.top)
                updates.setdefault(job, []).append(reply.feed(*new))
                if reply.is_over:
                    self.engine.cancel(*place)
                    self._end(job, place)
        for group in groups:
            place = _place_of(group)
            if (job := self._by_place.get(place)) is not None:
                updates.setdefault(job, []).append(self._last_update(job, place, group))
                self._end(job, place)
        for job, found in updates.items():
            job.send(found)

    def fail_all(self, error: ApiError) -> None:
        """Send every job the error; the engine is empty afterwards."""
        jobs, self._by_place = list(dict.fromkeys(self._by_place.values())), {}
        for job in jobs:
            job.open = {}
            job.send(error)
        self.engine.clear()

    def _last_update(self, job: Job, place: Place, group: Group) -> Update:
        """The tokens of a finished response that were not reported while it ran."""
        reply, rollout = job.open[place], group.rollouts[0]
        begun = job.requests[reply.index].partial
        first = reply.num_tokens + (len(begun[0].token_ids) if begun else 0)
        new = (rollout.token_ids[first:], rollout.log_probs[first:], rollout.versions[first:])
        return reply.feed(*new, reason=FINISHED[rollout.finish_reason])

    def _end(self, job: Job, place: Place) -> None:
        self.counts.generated_tokens += job.open.pop(place).num_tokens
        del self._by_place[place]


def name_of(uid: str, response: int) -> str:
    """The uid of a prompt whose response of this number is in the engine."""
    return f"{uid}#{response}"


def _place_of(group: Group) -> Place:
    return group.submission, int(group.prompt.uid.rpartition("#")[2])
