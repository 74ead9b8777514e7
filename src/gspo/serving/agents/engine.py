"""An engine whose rollouts are written by agents: programs with an OpenAI client that talk to the inner engine.

A tick is one call of `step`. It first waits for the agents whose last answer is `lag` ticks old until each has made its
next request or has ended, then submits the requests in order of submission: what the inner engine is asked, and when,
depends on no clock. Draws depend on (seed, submission, response, position), as without an agent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from gspo.metrics import Metric, Metrics
from gspo.rollout.engine import GroupRequest, RolloutEngine, check_request
from gspo.serving.agents.play import Play, new_key, row_of
from gspo.serving.agents.runner import AgentRunner
from gspo.serving.agents.session import Session
from gspo.serving.app import Served, build_app
from gspo.serving.backend import Client
from gspo.serving.jobs import JobCounts, Jobs
from gspo.serving.prompts import PromptReader
from gspo.serving.server import serving
from gspo.types import Group

MODEL = "policy"  # the model's name for agents; they may name any


class AgentEpisodes(RolloutEngine):
    """A RolloutEngine over `engine`. Its web server starts with the first group and listens on loopback."""

    def __init__(
        self,
        engine: RolloutEngine,
        function: Callable[..., Any],
        reader: PromptReader,
        *,
        max_length: int,
        timeout: float,
        lag: int = 1,
    ) -> None:
        self._engine, self._reader = engine, reader
        self._max_length, self._timeout, self._lag = max_length, timeout, lag
        self._runner = AgentRunner(function)
        self._sessions: dict[str, Session] = {}  # by key
        self._started = contextlib.ExitStack()
        self._url = ""
        self._seconds, self._num_writing, self._num_thinking = 0.0, 0, 0
        self._num_timeouts = 0
        self._play = self._new_play()
        self._jobs = Jobs(engine, self._decode)

    @property
    def num_in_flight(self) -> int:
        return len(self._play.groups)

    def submit(self, request: GroupRequest) -> None:
        check_request(request, self._max_length)
        self._play.begin(request, self._session_maker(self._play))

    def step(self) -> list[Group]:
        if not self._play.groups:
            return []
        self._seconds += self._play.wait()
        self._begin_posted(self._play, self._jobs)
        sessions = self._play.sessions
        self._num_writing += sum(s.num_writing > 0 for s in sessions)
        self._num_thinking += sum(not s.num_writing and s.due > self._play.tick for s in sessions)
        if len(self._jobs):
            self._jobs.advance()
        return self._play.take_finished(self._engine.release)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Round by round: all agents make a request or end, then the engine generates all answers."""
        play, jobs, groups = self._new_play(), Jobs(_Rounds(self._engine), self._decode), {}
        for request in requests:
            check_request(request, self._max_length)
        for request in requests:
            play.begin(request, self._session_maker(play))
        try:
            while play.groups:
                play.wait()
                self._begin_posted(play, jobs)
                if len(jobs):
                    jobs.advance()
                groups |= {(g.submission, g.prompt.uid): g for g in play.take_finished(self._engine.release)}
        finally:
            play.stop()
            self._num_timeouts += play.num_timeouts
        return [groups[request.submission, request.prompt.uid] for request in requests]

    def load_weights(self, weights: Any, version: int) -> None:
        self._engine.load_weights(weights, version)
        for session in self._play.sessions:
            session.due = self._play.tick + self._lag

    def unfinished(self) -> list[GroupRequest]:
        """An answer that is being written is not kept: it is written again when its agent asks again."""
        return sorted((group.as_request() for group in self._play.groups), key=lambda request: request.submission)

    def clear(self) -> None:
        self._play.stop()
        self._sessions = {}
        self._engine.clear()
        self._jobs = Jobs(self._engine, self._decode)

    def close(self) -> None:
        self._play.stop()
        self._started.close()
        self._runner.close()
        self._engine.close()

    def num_wanted(self, limit: int) -> int | None:
        """As the engine says; a rollout that waits for its agent will be back."""
        wanted = self._engine.num_wanted(limit)
        return None if wanted is None else wanted - sum(not session.num_writing for session in self._play.sessions)

    @property
    def num_workers(self) -> int:
        return self._engine.num_workers

    def rest(self) -> None:
        self._engine.rest()

    def metrics(self) -> Metrics:
        present = self._num_writing + self._num_thinking
        return {
            **self._engine.metrics(),
            "environment/seconds": Metric("last", self._seconds),
            "environment/timeouts": Metric("last", self._num_timeouts + self._play.num_timeouts),
            "rollout/waiting_share": Metric("last", self._num_thinking / present if present else 0.0),
        }

    def stacks(self) -> str:
        return self._engine.stacks()

    def kill(self) -> None:
        self._engine.kill()

    # What the web application asks (backend.Backend).

    @property
    def is_alive(self) -> bool:
        return True

    @property
    def num_open(self) -> int:
        return len(self._jobs)

    @property
    def counts(self) -> JobCounts:
        return self._jobs.counts

    def client(self, key: str) -> Client | None:
        """The session of a rollout's key. Keys are random, so finding one by its hash tells nothing about others."""
        session = self._sessions.get(key)
        return None if session is None else Client(session, session)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._reader.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _new_play(self) -> Play:
        return Play(self._start_agent, self._timeout, self._lag)

    def _session_maker(self, play: Play) -> Callable[[GroupRequest, int], Session]:
        def make(request: GroupRequest, index: int) -> Session:
            return Session(request, index, self._reader, self._max_length, play.post)

        return make

    def _start_agent(self, session: Session, done: Callable[[Future[Any]], None]) -> Future[Any]:
        if not self._url:
            served = Served(MODEL, self, self._token_text, self._max_length, 1, any_model=True)
            self._url = self._started.enter_context(serving(build_app(served))) + "/v1"
        key = new_key()
        self._sessions[key] = session

        def forget(future: Future[Any]) -> None:
            self._sessions.pop(key, None)
            done(future)

        return self._runner.start(row_of(session.request.prompt), self._url, key, forget)

    def _token_text(self, token: int) -> str:
        return self._reader.tokenizer.decode([token])

    def _begin_posted(self, play: Play, jobs: Jobs) -> None:
        for job in play.take_posted():
            jobs.begin(job)


class _Rounds(RolloutEngine):
    """An engine that generates all that was submitted in one step, beside what the inner one has in flight."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._submitted: list[GroupRequest] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._submitted)

    def submit(self, request: GroupRequest) -> None:
        self._submitted.append(request)

    def step(self) -> list[Group]:
        submitted, self._submitted = self._submitted, []
        return self._engine.generate(submitted)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        return self._engine.generate(requests)

    def load_weights(self, weights: Any, version: int) -> None:
        self._engine.load_weights(weights, version)

    def unfinished(self) -> list[GroupRequest]:
        return list(self._submitted)

    def cancel(self, submission: int, response: int) -> None:
        """What was submitted in a round is generated whole."""

    def clear(self) -> None:
        self._submitted = []

    def close(self) -> None:
        self.clear()
