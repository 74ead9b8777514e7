"""A worker refuses groups that its engine made up, lost or cut short, and names the prompt."""

from __future__ import annotations

import dataclasses

import pytest

from gspo.rollout.engine import EngineError, GroupRequest, SamplingParams, check_generated
from gspo.rollout.workers.worker import EngineSpec, RolloutWorker, build_engine
from gspo.types import Group, Prompt
from tests.rollout.workers.toy_engine import ToyEngine, make_spec


def make_request(submission: int = 7) -> GroupRequest:
    prompt = Prompt(uid="p", messages=(), token_ids=(3,), data_source="d", ground_truth=None)
    return GroupRequest(prompt, submission, n=2, version=0, params=SamplingParams(max_tokens=4), seed=1)


def answer_of(request: GroupRequest) -> Group:
    engine = ToyEngine()
    engine.submit(request)
    (group,) = engine.step()
    return group


def change_rollouts(group: Group, **fields) -> Group:
    return group.with_rollouts(tuple(dataclasses.replace(r, **fields) for r in group.rollouts))


WRONG = [
    (lambda g: None, "returned a NoneType; expected a list"),
    (lambda g: ["text"], r"returned a str; expected a gspo\.Group"),
    (lambda g: [g, g], "prompt 'p' .* was not submitted or was returned before"),
    (lambda g: [dataclasses.replace(g, submission=8)], r"prompt 'p' \(submission 8\).*was not submitted"),
    (lambda g: [g.with_rollouts(g.rollouts[:1])], "prompt 'p' .* 1 rollouts; expected n=2"),
    (lambda g: [change_rollouts(g, log_probs=())], "prompt 'p' .* 0 log_probs for 1 tokens in response 0"),
    (lambda g: [change_rollouts(g, versions=(0, 0))], "prompt 'p' .* 2 versions for 1 tokens in response 0"),
    (lambda g: [], r"lost submissions \[7\]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_groups_of_a_step_that_do_not_answer_the_requests_are_refused(monkeypatch, change, message):
    worker, right = RolloutWorker(make_spec()), ToyEngine.step
    monkeypatch.setattr(ToyEngine, "step", lambda self: change(right(self)[0]))
    worker.submit([make_request()])
    with pytest.raises(EngineError, match=message):
        worker.pump(0.0)


def test_a_group_that_was_taken_back_may_be_submitted_again():
    worker = RolloutWorker(make_spec())
    worker.submit([make_request(), make_request(9)])
    assert worker.pump(0.0) == [answer_of(make_request()), answer_of(make_request(9))] and worker.pump(0.0) == []
    worker.submit([make_request()])
    worker.engine._requests = [dataclasses.replace(make_request(), partial=())]
    worker.take_back()
    worker.submit([make_request()])
    assert worker.step() == [answer_of(make_request())]


@pytest.mark.parametrize(("change", "message"), [(lambda g: [], "0 groups for 1 requests"), *WRONG[:2], *WRONG[3:7]])
def test_groups_of_an_evaluation_that_do_not_answer_the_requests_are_refused(change, message):
    group = answer_of(make_request())
    assert check_generated([make_request()], [group]) == [group]
    with pytest.raises(EngineError, match=message):
        check_generated([make_request()], change(group))


def test_log_probs_that_are_not_finite_are_named():
    group = change_rollouts(answer_of(make_request()), log_probs=(float("nan"),))
    with pytest.raises(FloatingPointError, match=r"prompt 'p' \(submission 7, response 0\)"):
        check_generated([make_request()], [group])


def test_a_function_that_makes_no_engine_is_refused():
    spec: EngineSpec = dataclasses.replace(make_spec(), kind="builtins:repr")
    with pytest.raises(EngineError, match=r"rollout\.name='builtins:repr' returned a str; expected a RolloutEngine"):
        build_engine(spec)
