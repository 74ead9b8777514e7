"""What every RolloutEngine must do, run on each implementation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.types import Prompt
from tests.rollout.models import drain, make_engine, make_model, make_request
from tests.rollout.workers.thread_connection import NoWeights, ThreadConnection, no_weights

_MODEL = make_model()


def _script(prompt: Prompt, submission: int, index: int) -> ScriptedAnswer:
    return ScriptedAnswer(
        tuple(range(5, 6 + (submission * 5 + index * 3) % 14)), text=f"{prompt.uid}/{index}"
    )


_ENGINES: dict[str, Callable[..., RolloutEngine]] = {
    "native": lambda version=0: make_engine(_MODEL, num_slots=5, decode_chunk=2, version=version),
    "scripted": lambda version=0: ScriptedEngine(_script, num_slots=5, version=version),
    "fleet": lambda version=0: _fleet(lambda: ScriptedEngine(_script, num_slots=3), version),
    "native fleet": lambda version=0: _fleet(
        lambda: make_engine(copy.deepcopy(_MODEL), num_slots=3, decode_chunk=2), version
    ),
}


def _fleet(make: Callable[[], RolloutEngine], version: int) -> LockstepFleet:
    return LockstepFleet(
        lambda index: ThreadConnection(make, index),
        2,
        weights=no_weights,
        store=NoWeights(),
        version=version,
    )


@pytest.fixture(params=sorted(_ENGINES))
def new_engine(request: Any) -> Callable[..., RolloutEngine]:
    return _ENGINES[request.param]


def _requests(numbers: range, **options: Any) -> list[GroupRequest]:
    return [make_request(i, n=1 + i % 3, **options) for i in numbers]


def _submit(engine: RolloutEngine, requests: list[GroupRequest]) -> RolloutEngine:
    for request in requests:
        engine.submit(request)
    return engine


def test_an_idle_engine_does_nothing(new_engine):
    engine = new_engine()
    assert engine.num_in_flight == 0
    assert engine.step() == [] and engine.unfinished() == [] and engine.generate([]) == []


def test_every_group_comes_out_once_whole_and_as_requested(new_engine):
    requests = _requests(range(9))
    engine = _submit(new_engine(), requests)
    assert engine.num_in_flight == 9
    groups = {g.submission: g for g in drain(engine)}
    assert engine.num_in_flight == 0 and sorted(groups) == list(range(9))
    for request in requests:
        group = groups[request.submission]
        assert group.prompt == request.prompt and group.version == request.version
        assert len(group.rollouts) == request.n
        for rollout in group.rollouts:
            length = len(rollout.token_ids)
            assert 1 <= length <= request.params.max_tokens
            assert len(rollout.log_probs) == len(rollout.versions) == length
            assert rollout.loss_mask == (1,) * length
            assert all(p <= 0.0 for p in rollout.log_probs)
            assert rollout.text and rollout.reward is None
            assert rollout.finish_reason in ("stop", "length")
            assert rollout.finish_reason == "stop" or length == request.params.max_tokens


def test_groups_come_out_as_they_finish_each_step_in_order_of_submission(new_engine):
    engine = _submit(new_engine(), _requests(range(9)))
    steps = []
    while engine.num_in_flight:
        before = engine.num_in_flight
        steps.append([g.submission for g in engine.step()])
        assert engine.num_in_flight == before - len(steps[-1])
    assert all(step == sorted(step) for step in steps)
    assert sum(bool(step) for step in steps) > 1, "groups of different lengths must not wait for each other"


def test_the_same_calls_give_the_same_groups(new_engine):
    def run() -> list:
        engine = _submit(new_engine(), _requests(range(6)))
        steps = [engine.step(), engine.step()]
        engine.load_weights(None, 1)
        _submit(engine, _requests(range(6, 8), version=1))
        return [*steps, drain(engine)]

    assert run() == run()


def test_generate_returns_in_the_order_given_and_leaves_groups_in_flight_alone(new_engine):
    undisturbed = _submit(new_engine(), _requests(range(4)))
    disturbed = _submit(new_engine(), _requests(range(4)))
    expected, got = [undisturbed.step()], [disturbed.step()]
    state = disturbed.unfinished()
    evaluation = [make_request(i, n=2, temperature=0.0) for i in (7, 3, 5)]
    groups = disturbed.generate(evaluation)
    assert [g.submission for g in groups] == [7, 3, 5]
    assert [g.prompt for g in groups] == [r.prompt for r in evaluation]
    assert disturbed.unfinished() == state and disturbed.num_in_flight == len(state)
    assert groups == new_engine().generate(evaluation)
    expected += [drain(undisturbed)]
    got += [drain(disturbed)]
    assert got == expected


def test_each_token_carries_the_version_it_was_drawn_under(new_engine):
    engine = _submit(new_engine(version=3), _requests(range(4), version=3))
    groups = engine.step()
    engine.load_weights(None, 4)
    groups += engine.step()
    engine.load_weights(None, 6)
    groups += drain(engine)
    versions = [r.versions for g in groups for r in g.rollouts]
    assert all(list(v) == sorted(v) for v in versions)
    assert {v for row in versions for v in row} == {3, 4, 6}
    assert {g.version for g in groups} == {3}


def test_unfinished_groups_are_requests_with_what_was_begun(new_engine):
    requests = _requests(range(6))
    engine = _submit(new_engine(), requests)
    assert engine.unfinished() == requests
    handed_out = {g.submission for _ in range(2) for g in engine.step()}
    state = engine.unfinished()
    assert [r.submission for r in state] == [i for i in range(6) if i not in handed_out]
    assert any(rollout.token_ids for r in state for rollout in r.partial)
    final = {g.submission: g for g in drain(engine)}
    for request in state:
        assert request.prompt == requests[request.submission].prompt
        for part, whole in zip(request.partial, final[request.submission].rollouts):
            assert whole.token_ids[: len(part.token_ids)] == part.token_ids
            assert whole.log_probs[: len(part.log_probs)] == part.log_probs
            assert part.finish_reason == "aborted" or part == whole


def test_a_fresh_engine_goes_on_from_unfinished_groups_to_the_same_bits(new_engine):
    running = _submit(new_engine(), _requests(range(8)))
    running.step()
    running.step()
    running.load_weights(None, 1)
    state = running.unfinished()
    fresh = _submit(new_engine(version=1), state)
    assert fresh.num_in_flight == running.num_in_flight and fresh.unfinished() == state
    while running.num_in_flight:
        assert fresh.step() == running.step()
    assert fresh.num_in_flight == 0


def test_a_group_whose_responses_are_all_done_is_handed_out(new_engine):
    request = make_request(2, n=2)
    (group,) = new_engine().generate([request])
    whole = GroupRequest(
        request.prompt, 2, 2, request.version, request.params, request.seed, partial=group.rollouts
    )
    assert new_engine().generate([whole]) == [group]
    assert drain(_submit(new_engine(), [whole])) == [group]


def test_max_tokens_cuts_with_the_reason_length(new_engine):
    groups = new_engine().generate(_requests(range(6), max_tokens=1))
    rollouts = [r for g in groups for r in g.rollouts]
    assert {len(r.token_ids) for r in rollouts} == {1}
    assert "length" in {r.finish_reason for r in rollouts}


def test_clear_forgets_what_is_in_flight_and_keeps_the_weights(new_engine):
    engine = _submit(new_engine(version=2), _requests(range(3)))
    engine.step()
    engine.clear()
    assert engine.num_in_flight == 0 and engine.step() == [] and engine.unfinished() == []
    groups = drain(_submit(engine, _requests(range(3, 5))))
    assert groups == drain(_submit(new_engine(version=2), _requests(range(3, 5))))


def test_close_drops_what_is_in_flight(new_engine):
    engine = _submit(new_engine(), _requests(range(3)))
    engine.step()
    engine.close()
    assert engine.num_in_flight == 0
