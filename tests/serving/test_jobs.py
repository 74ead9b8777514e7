"""Requests in an engine, and the fields that say how they are answered."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.serving.batcher import Batcher
from gspo.serving.jobs import Job, Jobs
from gspo.serving.parameters import Ask, Fields, read_ask
from gspo.serving.prompts import Prompted
from gspo.types import Prompt


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
