"""The agents of a few groups: what their return values mean, in which order requests go out, and what is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from gspo.environments.formats import HERMES
from gspo.rollout.engine import GroupRequest
from gspo.serving.agents.play import Play, row_of
from gspo.serving.agents.session import FIRST_PLACE, Session
from gspo.serving.errors import ApiError
from gspo.serving.jobs import Job
from gspo.serving.prompts import PromptReader
from gspo.types import Group, Prompt, Rollout
from tests.rollout.models import VOCAB
from tests.serving.agents.test_session import HI, TOKENIZER, Agent, group_request, ids, said, user


class Stage:
    """A play whose agents are driven from here: `agents` are their sessions, `ends` their futures."""

    def __init__(self, timeout: float = 60.0, lag: int = 1) -> None:
        self.ends: list[Future[Any]] = []
        self.released: list[tuple[int, int]] = []
        self.agents: list[Agent] = []
        self.play = Play(self._start, timeout, lag)

    def _start(self, session: Session, done: Callable[[Future[Any]], None]) -> Future[Any]:
        future: Future[Any] = Future()
        future.add_done_callback(done)
        self.ends.append(future)
        return future

    def begin(self, request: GroupRequest) -> None:
        self.play.begin(request, self._session)

    def _session(self, request: GroupRequest, index: int) -> Session:
        agent = Agent(request, index)
        agent.session = Session(
            request, index, PromptReader(TOKENIZER, VOCAB, HERMES, {}), 64, lambda s, job: self.play.post(s, job)
        )
        self.agents.append(agent)
        return agent.session

    def answer(self, agent: Agent, job: Job, text: str, **options: Any) -> None:
        """As an engine would; `Play.post` notes the answer itself."""
        agent.session.num_open += 1
        agent.session.num_writing += 1
        agent.answer(job, text, **options)

    def finish(self) -> list[Group]:
        """What is finished one tick later."""
        self.play.tick += 1
        return self.play.take_finished(lambda *place: self.released.append(place))


def one(result: Any, *, branch: bool = False) -> tuple[Rollout, Stage]:
    """A rollout of two turns, `first` and `second`, and with `branch` a further conversation."""
    stage = Stage()
    stage.begin(dataclasses.replace(group_request(), n=1))
    (agent,) = stage.agents
    stage.answer(agent, agent.chat(HI, name="first"), "a")
    stage.answer(agent, agent.chat(HI, said("a"), user("b"), name="second"), "c", reason="length")
    if branch:
        stage.answer(agent, agent.chat(user("other"), name="third"), "d")
    if isinstance(result, Exception):
        stage.ends[0].set_exception(result)
    else:
        stage.ends[0].set_result(result)
    (group,) = stage.finish()
    assert stage.play.groups == [] and stage.play.sessions == []
    return group.rollouts[0], stage


@pytest.mark.parametrize(
    ("result", "rewards"),
    [
        (None, [None, None]),
        (0.5, [None, 0.5]),
        (True, [None, 1.0]),
        ({"first": 0.25}, [0.25, None]),
        ({"first": 0.25, "second": 1}, [0.25, 1.0]),
        ({"third": 2.0}, [None, 2.0]),
        ({"second": 1.0, "third": 2.0}, [None, 3.0]),
        ({}, [None, None]),
    ],
)
def test_what_an_agent_returns_is_the_reward_of_its_turns(result: Any, rewards: list[float | None]) -> None:
    rollout, _ = one(result, branch=True)
    assert [turn.reward for turn in rollout.turns] == rewards
    assert rollout.failure is None and rollout.finish_reason == "length"
    (branch,) = rollout.branches
    assert [turn.reward for turn in branch.turns] == [None] and branch.context == ids("other")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"nobody": 1.0}, "it gave a reward to 'nobody', which is no id of an answer that it got"),
        ("good", "the reward of an agent"),
        (float("nan"), "the reward of an agent"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_an_agent_that_fails_leaves_its_turns_without_a_reward(result: Any, reason: str) -> None:
    rollout, _ = one(result)
    assert rollout.failure is not None and reason in rollout.failure
    assert rollout.failure.startswith("the agent failed on row 'p', response 0: ")
    assert rollout.finish_reason == "environment" and [turn.text for turn in rollout.turns] == ["a", "c"]


def test_an_agent_without_a_request_failed_and_one_that_was_cancelled_was_stopped() -> None:
    stage = Stage()
    stage.begin(group_request())
    stage.ends[0].set_result(1.0)
    stage.ends[1].cancel()
    (group,) = stage.finish()
    assert [rollout.failure for rollout in group.rollouts] == [
        "the agent failed on row 'p', response 0: it made no request to the model",
        "the agent failed on row 'p', response 1: it was stopped",
    ]
    assert [(r.finish_reason, r.token_ids) for r in group.rollouts] == [("environment", ())] * 2


def test_a_request_without_an_answer_is_no_part_of_the_rollout() -> None:
    """The agent did not wait for its first request: the conversation that was answered has the reward."""
    stage = Stage()
    stage.begin(dataclasses.replace(group_request(), n=1))
    (agent,) = stage.agents
    agent.chat(HI)
    stage.answer(agent, agent.chat(user("other"), name="second"), "d", reason="length")
    stage.ends[0].set_result(0.5)
    (group,) = stage.finish()
    (rollout,) = group.rollouts
    assert (rollout.failure, rollout.finish_reason, rollout.branches) == (None, "length", ())
    assert [(turn.text, turn.reward) for turn in rollout.turns] == [("d", 0.5)]


def test_what_the_engine_holds_of_every_conversation_is_released_by_its_own_name() -> None:
    _, stage = one(None, branch=True)
    assert stage.released[0] == (3, 0) and stage.released[1][0] >= FIRST_PLACE and stage.released[1][1] == 0
    part = Stage()
    part.begin(dataclasses.replace(group_request(), n=1, first_response=4))
    part.answer(part.agents[0], part.agents[0].chat(HI), "a")
    part.ends[0].set_result(None)
    part.finish()
    assert part.released == [(3, 4)]


def test_a_conversation_ends_with_its_last_turn() -> None:
    """What an agent added after it, without an answer, is not part of the rollout."""
    stage = Stage()
    stage.begin(dataclasses.replace(group_request(), n=1))
    (agent,) = stage.agents
    stage.answer(agent, agent.chat(HI), "a")
    agent.chat(HI, said("a"), user("b"))
    stage.ends[0].set_result(1.0)
    (group,) = stage.finish()
    (rollout,) = group.rollouts
    assert len(rollout.token_ids) == len(rollout.log_probs) == len(rollout.versions) == 2
    assert rollout.loss_mask == (1, 1) and rollout.turns[0].reward == 1.0


def test_finished_rollouts_of_a_resumed_group_are_kept_and_the_others_run_again() -> None:
    done = Rollout((5,), (-1.0,), (1,), (0,), "stop", "x")
    stage = Stage()
    stage.begin(dataclasses.replace(group_request(), n=3, partial=(done,)))
    assert [agent.session.number for agent in stage.agents] == [(3, 1), (3, 2)]
    stage.answer(stage.agents[0], stage.agents[0].chat(HI), "a")
    (group,) = stage.play.groups
    saved = group.as_request()
    assert [part.finish_reason for part in saved.partial] == ["stop", "aborted"] and saved.partial[0] is done
    assert dataclasses.replace(saved, partial=(done,)) == group.request
    stage.ends[0].set_result(None)
    assert stage.finish() == [], "one agent still runs"
    stage.ends[1].set_result(None)
    (whole,) = stage.finish()
    assert whole.rollouts[0] is done and (whole.submission, whole.version) == (3, 1)


def test_requests_go_out_in_order_of_submission_once_they_are_due() -> None:
    stage = Stage(lag=2)
    for submission in (7, 4):
        stage.begin(dataclasses.replace(group_request(), submission=submission))
    late, early = stage.agents[:2], stage.agents[2:]
    jobs = {agent.session.number: agent.chat(HI) for agent in (late[1], early[1], late[0], early[0])}
    assert stage.play.wait() >= 0
    taken = stage.play.take_posted()
    assert taken == [jobs[4, 0], jobs[4, 1], jobs[7, 0], jobs[7, 1]] and stage.play.take_posted() == []
    early[0].answer(jobs[4, 0], "a")  # answered in tick 1: what follows is due in tick 3
    early[0].session.num_open += 1
    again = early[0].chat(HI, said("a"), user("b"))
    for tick in (2, 3):
        stage.play.wait()
        assert stage.play.tick == tick
        assert stage.play.take_posted() == ([again] if tick == 3 else [])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_agent_that_ends_at_once_is_taken_in_the_tick_in_which_a_slow_one_would_be(lag: int) -> None:
    stage = Stage(lag=lag)
    stage.begin(dataclasses.replace(group_request(), n=1))
    (agent,) = stage.agents
    agent.chat(HI)
    stage.play.wait()
    (job,) = stage.play.take_posted()
    assert agent.session.num_writing == 1
    agent.answer(job, "a")
    stage.ends[0].set_result(None)  # within the tick of its answer
    assert agent.session.is_over and agent.session.num_writing == 0
    taken = [stage.play.take_finished(lambda *place: None)]
    for _ in range(max(1, lag)):
        stage.play.wait()
        taken.append(stage.play.take_finished(lambda *place: None))
    assert [len(groups) for groups in taken] == [0] * max(1, lag) + [1]


def test_an_error_is_an_answer_too() -> None:
    stage = Stage()
    stage.begin(dataclasses.replace(group_request(), n=1))
    (agent,) = stage.agents
    agent.chat(HI)
    stage.play.wait()
    (job,) = stage.play.take_posted()
    assert not agent.session.is_thinking
    job.send(ApiError(500, "broken"))
    assert agent.session.is_thinking and agent.session.due == 2


def test_an_agent_that_thinks_for_too_long_fails_and_its_requests_are_not_run() -> None:
    stage = Stage(timeout=0.0)
    stage.begin(group_request())
    stage.agents[1].chat(HI)
    stage.play.wait()
    assert stage.play.num_timeouts == 1 and stage.ends[0].cancelled() and not stage.ends[1].done()
    assert stage.agents[0].session.failure == "it made no request and did not end within 0 s"
    stage.agents[1].session.finish("gone")
    assert stage.play.take_posted() == []


def test_stopped_agents_are_forgotten() -> None:
    stage = Stage()
    stage.begin(group_request())
    stage.agents[0].chat(HI)
    stage.play.stop()
    assert all(end.cancelled() for end in stage.ends) and stage.play.groups == [] and stage.play.take_posted() == []
    assert {agent.session.failure for agent in stage.agents} == {"it was stopped"}


def test_groups_come_out_in_order_of_submission() -> None:
    stage = Stage()
    for submission in (7, 4):
        stage.begin(dataclasses.replace(group_request(), submission=submission, n=1))
    for end in stage.ends:
        end.set_result(None)
    assert [group.submission for group in stage.finish()] == [4, 7]


def test_a_row_has_the_columns_of_the_data_and_those_that_every_row_has() -> None:
    prompt = Prompt("u", (HI,), (1,), "maths", 5, {"level": 2, "uid": "other"})
    assert row_of(prompt) == {
        "level": 2,
        "uid": "u",
        "messages": [HI],
        "ground_truth": 5,
        "answer": 5,
        "data_source": "maths",
    }
