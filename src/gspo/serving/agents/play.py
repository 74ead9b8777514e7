"""The agents of some groups, from their begin to their rollouts: who waits for whom, and in which order."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from gspo.rewards.results import as_number
from gspo.rollout.engine import GroupRequest
from gspo.rollout.progress import EMPTY
from gspo.serving.agents.conversation import Conversation
from gspo.serving.agents.session import Session
from gspo.serving.errors import ApiError
from gspo.serving.jobs import Job
from gspo.serving.replies import Update
from gspo.types import FinishReason, Group, Prompt, Rollout, Turn


@dataclass(eq=False, slots=True)
class AgentGroup:
    """A group in flight: a session for each rollout that is not finished, and the finished rollouts."""

    request: GroupRequest
    sessions: dict[int, Session] = field(default_factory=dict)
    finished: dict[int, Rollout] = field(default_factory=dict)

    def group(self) -> Group:
        r = self.request
        return Group(r.prompt, tuple(self.finished[i] for i in range(r.n)), r.submission, r.version)

    def as_request(self) -> GroupRequest:
        """The request that continues this group: its agents run again and get the answers recorded so far."""
        parts = {i: _recorded(session, "aborted") for i, session in self.sessions.items()} | self.finished
        begun = max((i + 1 for i, part in parts.items() if part.turns), default=0)
        return dataclasses.replace(self.request, partial=tuple(parts.get(i, EMPTY) for i in range(begun)))


class Play:
    """Groups of agents. `start(session)` runs an agent; its requests wait in `take_posted` for the engine's thread."""

    def __init__(
        self, start: Callable[[Session, Callable[[Future[Any]], None]], Future[Any]], timeout: float, lag: int
    ) -> None:
        self._start, self._timeout = start, timeout
        self._lag = max(1, lag)  # answers go out at the end of a tick: nobody is due within the same one
        self.tick = 0
        self._changed = threading.Condition()
        self._posted: list[tuple[Session, Job]] = []
        self._agents: dict[Session, Future[Any]] = {}
        self.groups: list[AgentGroup] = []
        self.num_timeouts = 0

    def begin(self, request: GroupRequest, new_session: Callable[[GroupRequest, int], Session]) -> None:
        """Start the agents of a group."""
        group = AgentGroup(request)
        self.groups.append(group)
        for index in range(request.n):
            part = request.partial[index] if index < len(request.partial) else EMPTY
            if part.finish_reason != "aborted":
                group.finished[index] = part
                continue
            session = group.sessions[index] = new_session(request, index)
            self._agents[session] = self._start(session, lambda future, s=session: self._end(s, future))

    @property
    def sessions(self) -> list[Session]:
        """The sessions whose rollouts were not taken yet, in order of submission. Their agents may have ended."""
        found = [session for group in self.groups for session in group.sessions.values()]
        return sorted(found, key=lambda session: session.number)

    def post(self, session: Session, job: Job) -> None:
        """Hand a request to the engine's thread; its answer makes the agent think again. From any thread."""
        inner = job.send

        def answered(found: list[Update] | ApiError) -> None:
            is_last = isinstance(found, ApiError) or any(update.reason is not None for update in found)
            inner(found)
            if is_last:
                session.due = self.tick + self._lag
                session.num_writing -= 1
                session.answered()

        job.send = answered
        with self._changed:
            self._posted.append((session, job))
            self._changed.notify_all()

    def _end(self, session: Session, future: Future[Any]) -> None:
        """The agent has returned, raised, or was cancelled."""
        try:
            failure = _reward(session, future.result())
        except CancelledError:
            failure = session.failure or "it was stopped"
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
        with self._changed:
            if not session.is_over:
                session.finish(failure)
            self._changed.notify_all()

    def wait(self) -> float:
        """Begin a tick: wait until no agent thinks whose request is due; one that thinks too long fails. Returns seconds."""
        start = time.monotonic()
        self.tick += 1
        with self._changed:
            while thinking := [s for s in self.sessions if s.is_thinking and s.due <= self.tick]:
                now = time.monotonic()
                for session in thinking:
                    if now >= session.thinking_since + self._timeout:
                        self.num_timeouts += 1
                        session.finish(f"it made no request and did not end within {self._timeout:g} s")
                        self._agents[session].cancel()
                left = [s.thinking_since + self._timeout - now for s in thinking if not s.is_over]
                if left:
                    self._changed.wait(max(0.0, min(left)))
        return time.monotonic() - start

    def take_posted(self) -> list[Job]:
        """The requests of this tick, in order of submission; those of agents that are early wait for theirs."""
        with self._changed:
            posted = sorted(self._posted, key=lambda pair: pair[0].number)
            self._posted = [(session, job) for session, job in posted if session.due > self.tick]
        taken = [(session, job) for session, job in posted if session.due <= self.tick and not session.is_over]
        for session, _ in taken:
            session.num_writing += 1
        return [job for _, job in taken]

    def take_finished(self, release: Callable[[int, int], None]) -> list[Group]:
        """The groups all of whose agents are over. `release` frees what the engine holds of a conversation.

        An agent that has ended before its due tick counts in that one: how fast agents are must not matter.
        """
        for group in self.groups:
            for index, session in list(group.sessions.items()):
                if session.is_over and session.due <= self.tick:
                    group.finished[index] = _finished(group.request.prompt, session)
                    for conversation in session.conversations:
                        release(*conversation.place)
                    del group.sessions[index]
                    self._agents.pop(session, None)
        over = [group for group in self.groups if not group.sessions]
        self.groups = [group for group in self.groups if group.sessions]
        return sorted((group.group() for group in over), key=lambda group: group.submission)

    def stop(self) -> None:
        """Stop every agent; their groups are forgotten."""
        with self._changed:
            agents, self._agents, self.groups, self._posted = self._agents, {}, [], []
            for session in agents:
                session.finish("it was stopped")
        for future in agents.values():
            future.cancel()


def row_of(prompt: Prompt) -> dict[str, Any]:
    """A row of the data as agents see it."""
    return {
        **prompt.extra,
        "uid": prompt.uid,
        "messages": [dict(message) for message in prompt.messages],
        "ground_truth": prompt.ground_truth,
        "answer": prompt.ground_truth,
        "data_source": prompt.data_source,
    }


def new_key() -> str:
    return f"rollout-{secrets.token_urlsafe(24)}"


def _reward(session: Session, result: Any) -> str | None:
    """Give the turns what the agent returned: a number, numbers by the id of the answer, or None for the reward function.

    Returns why that is not possible.
    """
    turns = {name: (c, i) for c in session.conversations for i, name in enumerate(c.names)}
    if not turns:
        return "it made no request to the model"
    if result is None:
        return None
    first = _answered(session)[0]
    rewards = result if isinstance(result, Mapping) else {first.names[-1]: result}
    for name, value in rewards.items():
        if name not in turns:
            return f"it gave a reward to {name!r:.100}, which is no id of an answer that it got"
        conversation, index = turns[name]
        if conversation is not first:  # a branch: the reward belongs to the rollout
            conversation, index = first, len(first.turns) - 1
        turn: Turn = conversation.turns[index]
        value = as_number(value, "the reward of an agent")
        conversation.turns[index] = dataclasses.replace(turn, reward=(turn.reward or 0.0) + value)
    return None


def _finished(prompt: Prompt, session: Session) -> Rollout:
    answered = _answered(session)
    reason = answered[0].reason if answered else "environment"
    rollout = _recorded(session, reason if reason != "aborted" else "environment")
    if session.failure is None:
        return rollout
    failure = f"the agent failed on row {prompt.uid!r}, response {session.number[1]}: {session.failure}"
    return dataclasses.replace(rollout, failure=failure, finish_reason="environment")


def _recorded(session: Session, reason: FinishReason) -> Rollout:
    """What is recorded of a rollout: its first conversation, with the others as branches, each up to its last turn."""
    prompt = session.request.prompt.token_ids
    parts = [c.rollout(reason, prompt) for c in _answered(session)]
    if not parts:
        return dataclasses.replace(EMPTY, finish_reason=reason)
    return dataclasses.replace(_up_to_last_turn(parts[0]), branches=tuple(map(_up_to_last_turn, parts[1:])))


def _answered(session: Session) -> list[Conversation]:
    """The conversations in which the model has written a turn. The first one is the rollout, the others are branches."""
    return [conversation for conversation in session.conversations if conversation.turns]


def _up_to_last_turn(rollout: Rollout) -> Rollout:
    end = rollout.turns[-1].end
    cut = {name: getattr(rollout, name)[:end] for name in ("token_ids", "log_probs", "loss_mask", "versions")}
    return dataclasses.replace(rollout, **cut)
