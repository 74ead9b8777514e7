"""Requests in an engine, and the fields that say how they are answered."""

from __future__ import annotations

import dataclasses
import queue
import threading
from typing import Any

import pytest

from gspo.rollout.engine import GroupRequest, SamplingParams, Written
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.serving.batcher import Batcher
from gspo.serving.errors import ApiError
from gspo.serving.jobs import Job, Jobs
from gspo.serving.parameters import Ask, Fields, read_ask
from gspo.serving.prompts import Prompted
from gspo.serving.replies import Update
from gspo.types import Prompt, Rollout


def job(number: int, sent: list[Any], n: int = 2) -> Job:
    params = SamplingParams(4, 1.0)
    prompts = [Prompt(f"request {number}#{index}", (), (7,)) for index in range(n)]
    requests = [GroupRequest(p, number, 1, 0, params, 0, first_response=i) for i, p in enumerate(prompts)]
    return Job(Ask(params, n=n), requests, sent.append)


def test_a_dropped_job_leaves_the_engine_and_others_go_on() -> None:
    engine = ScriptedEngine(lambda prompt, submission, index: ScriptedAnswer((5, 6, 1)))
    jobs, left, stays = Jobs(engine, lambda ids: "x" * len(ids)), [], []
    gone, other = job(1, left), job(2, stays, n=1)
    jobs.begin(gone)
    jobs.begin(other)
    jobs.drop(gone)
    assert [request.submission for request in engine.unfinished()] == [2] and len(jobs) == 1
    while len(jobs):
        jobs.advance()
    assert not left and "".join(update.text for found in stays for update in found) == "xxx"
    assert jobs.counts.cancelled == 2 and engine.num_in_flight == 0


def test_a_cancelled_request_frees_only_the_choices_that_were_not_over() -> None:
    steps = threading.Semaphore(0)

    class Waiting(ScriptedEngine):
        def step(self) -> Any:
            steps.acquire()
            return super().step()

    answers = {0: ScriptedAnswer((5, 1)), 1: ScriptedAnswer((5,) * 50)}
    batcher = Batcher(Waiting(lambda prompt, submission, index: answers[index]), lambda ids: "x" * len(ids))
    try:
        over = threading.Event()
        begun = batcher.open(Prompted((7,)), Ask(SamplingParams(60, 1.0), n=2), lambda found: over.set())
        steps.release(2)
        assert over.wait(30) and batcher.num_open == 1
        batcher.cancel(begun)
        steps.release(1000)
        other = threading.Event()
        batcher.open(Prompted((7,)), Ask(SamplingParams(60, 1.0)), lambda found: other.set())
        assert other.wait(30) and batcher.num_open == 0
    finally:
        batcher.close()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 16),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
    ],
)
def test_the_newer_name_of_the_longest_answer_wins(fields: dict[str, int], expected: int) -> None:
    ask = read_ask(Fields(fields), num_top=0, log_probs=False, default_tokens=16)
    assert ask.params.max_tokens == expected


class Watching(ScriptedEngine):
    """Reports the tokens of every response as they are written, and what was cancelled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cancelled: list[tuple[int, int]] = []
        self._seen: dict[tuple[int, int], int] = {}

    def written(self) -> list[Written]:
        found = []
        for sequence in self._running:
            place, tokens = (sequence.group.request.submission, sequence.number), sequence.begun.token_ids
            first = self._seen.get(place, 0)
            self._seen[place] = len(tokens)
            if tokens[first:]:
                rest = sequence.begun.log_probs[first:], sequence.begun.versions[first:]
                found.append(Written(*place, tokens[first:], *rest))
        return found

    def cancel(self, submission: int, response: int) -> None:
        self.cancelled.append((submission, response))
        super().cancel(submission, response)


def watched(tokens: tuple[int, ...], **ask: Any) -> tuple[Watching, Jobs, list[Update]]:
    """One job of a scripted response, run to its end; its text has one letter per token."""
    engine = Watching(lambda prompt, submission, index: ScriptedAnswer(tokens))
    running, sent = Jobs(engine, lambda ids: "".join(chr(i) for i in ids)), []
    begun = job(1, sent, n=1)
    begun.ask = dataclasses.replace(begun.ask, **ask)
    running.begin(begun)
    while len(running):
        running.advance()
    return engine, running, [update for found in sent for update in found]


def test_every_token_is_sent_once_with_the_text_and_the_last_one_ends_the_answer() -> None:
    engine, jobs, updates = watched((97, 98, 99))
    assert "".join(update.text for update in updates) == "abc"
    assert [token for update in updates for token in update.token_ids] == [97, 98, 99]
    assert [update.reason for update in updates] == [None, None, "stop"]
    assert (jobs.counts.prompt_tokens, jobs.counts.generated_tokens, jobs.counts.cancelled) == (1, 3, 0)
    assert engine.cancelled == []


def test_an_answer_that_a_stop_text_ends_leaves_the_engine() -> None:
    engine, jobs, updates = watched((97, 98, 99, 100), stop=("b",))
    assert "".join(update.text for update in updates) == "a"
    assert (updates[-1].reason, updates[-1].stop_text) == ("stop", "b")
    assert jobs.counts.generated_tokens == 2 and engine.cancelled == [(1, 0)] and engine.num_in_flight == 0


def test_a_stop_text_may_be_shown_and_a_tool_call_ends_an_answer_too() -> None:
    for ask in ({"stop": ("b",), "include_stop": True}, {"call_end": lambda text: 2 if len(text) >= 2 else None}):
        engine, _, updates = watched((97, 98, 99, 100), **ask)
        assert "".join(update.text for update in updates) == "ab" and engine.cancelled == [(1, 0)]


def test_an_answer_at_its_length_limit_says_so() -> None:
    _, _, updates = watched((97,) * 9)
    assert updates[-1].reason == "length" and sum(len(update.token_ids) for update in updates) == 4


def test_a_continued_response_sends_only_what_is_new() -> None:
    engine = ScriptedEngine(lambda prompt, submission, index: ScriptedAnswer((97, 98, 99)))
    jobs, sent = Jobs(engine, lambda ids: "".join(chr(i) for i in ids)), []
    begun = job(1, sent, n=1)
    part = Rollout((97,), (-1.0,), (1,), (0,), "aborted")
    begun.requests = [dataclasses.replace(begun.requests[0], partial=(part,))]
    jobs.begin(begun)
    while len(jobs):
        jobs.advance()
    assert "".join(update.text for found in sent for update in found) == "bc" and jobs.counts.generated_tokens == 2


def test_a_request_that_the_engine_refuses_is_sent_the_reason() -> None:
    class Refusing(ScriptedEngine):
        def submit(self, request: GroupRequest) -> None:
            if request.first_response == 1:
                raise ValueError("too long")
            super().submit(request)

    engine, sent = Refusing(lambda prompt, submission, index: ScriptedAnswer((97,))), []
    jobs = Jobs(engine, lambda ids: "")
    jobs.begin(job(1, sent))
    (error,) = sent
    assert (error.status, error.message) == (400, "too long") and len(jobs) == 0 and engine.num_in_flight == 0


def test_a_failure_reaches_every_job_once_and_empties_the_engine() -> None:
    engine = ScriptedEngine(lambda prompt, submission, index: ScriptedAnswer((97, 98)))
    jobs, first, second = Jobs(engine, lambda ids: ""), [], []
    begun = [job(1, first), job(2, second)]
    for each in begun:
        jobs.begin(each)
    error = ApiError(500, "broken")
    jobs.fail_all(error)
    assert (first, second) == ([error], [error]) and len(jobs) == 0 and engine.num_in_flight == 0
    assert all(each.open == {} for each in begun)


def test_what_is_queued_when_a_batcher_closes_fails_and_nothing_is_accepted_afterwards() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Waiting(ScriptedEngine):
        def step(self) -> Any:
            begun.set()
            go_on.wait()
            return super().step()

    batcher = Batcher(Waiting(lambda prompt, submission, index: ScriptedAnswer((5,) * 50)), lambda ids: "")
    sent: dict[str, list[Any]] = {"running": [], "queued": []}
    ask = Ask(SamplingParams(60, 1.0))
    batcher.open(Prompted((7,)), ask, sent["running"].append)
    begun.wait()
    batcher.open(Prompted((7,)), ask, sent["queued"].append)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    go_on.set()
    closing.join()
    assert all(isinstance(found[-1], ApiError) and found[-1].status == 503 for found in sent.values())
    assert batcher.num_open == 0 and not batcher.is_alive
    with pytest.raises(ApiError, match="stopping"):
        batcher.open(Prompted((7,)), ask, sent["queued"].append)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_be_cleared_leaves_no_request_without_an_answer() -> None:
    class Broken(ScriptedEngine):
        def step(self) -> Any:
            raise FloatingPointError("not finite")

        def clear(self) -> None:
            raise RuntimeError("the worker is gone")

    batcher = Batcher(Broken(lambda prompt, submission, index: ScriptedAnswer((5,))), lambda ids: "")
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ask = Ask(SamplingParams(4, 1.0))
    batcher.open(Prompted((7,)), ask, sent.put)
    assert "not finite" in sent.get().message
    batcher.close()
    with pytest.raises(ApiError, match="stopping"):
        batcher.open(Prompted((7,)), ask, sent.put)
