"""What every RolloutEngine must do.

A test class derives from EngineContract, or from DeterministicEngineContract when the same calls give the same bits,
and gives it a fixture `new_engine`: a function of the weights version that returns an engine with nothing in flight.
Only the engine it returned last is used, so an implementation that is expensive to start may return the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.rollout.scripted import ScriptedAnswer
from gspo.types import Group, Prompt, Rollout
from tests.rollout.models import drain, make_request

NewEngine = Callable[..., RolloutEngine]


def scripted_answer(prompt: Prompt, submission: int, index: int) -> ScriptedAnswer:
    """Answers of 1 to 14 tokens, for engines that recite."""
    return ScriptedAnswer(tuple(range(5, 6 + (submission * 5 + index * 3) % 14)), text=f"{prompt.uid}/{index}")


def make_requests(numbers: range, **options: Any) -> list[GroupRequest]:
    return [make_request(i, n=1 + i % 3, **options) for i in numbers]


def submit(engine: RolloutEngine, requests: list[GroupRequest]) -> RolloutEngine:
    for request in requests:
        engine.submit(request)
    return engine


def finish(engine: RolloutEngine) -> list[Group]:
    """Everything in flight, in order of submission."""
    return sorted(drain(engine, limit=5000), key=lambda group: group.submission)


class EngineContract:
    """What holds for every engine, also where batches depend on time."""

    def check_rollout(self, rollout: Rollout, request: GroupRequest) -> None:
        """What holds for every response."""
        check_rollout(rollout, request)

    def test_an_idle_engine_does_nothing(self, new_engine: NewEngine) -> None:
        engine = new_engine()
        assert engine.num_in_flight == 0
        assert engine.step() == [] and engine.unfinished() == [] and engine.generate([]) == []

    def test_every_group_comes_out_once_complete_and_as_requested(self, new_engine: NewEngine) -> None:
        requests = make_requests(range(9))
        engine = submit(new_engine(), requests)
        assert engine.num_in_flight == 9
        groups = drain(engine, limit=5000)
        assert engine.num_in_flight == 0 and sorted(g.submission for g in groups) == list(range(9))
        for group in groups:
            request = requests[group.submission]
            assert group.prompt == request.prompt and group.version == request.version
            assert len(group.rollouts) == request.n
            for rollout in group.rollouts:
                self.check_rollout(rollout, request)

    def test_each_step_returns_groups_in_order_of_submission(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(), make_requests(range(9)))
        steps = []
        while engine.num_in_flight:
            before = engine.num_in_flight
            steps.append([g.submission for g in engine.step()])
            assert engine.num_in_flight == before - len(steps[-1])
        assert all(step == sorted(step) for step in steps)

    def test_generate_returns_in_the_order_of_its_requests(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(), make_requests(range(4)))
        requests = [make_request(i, n=2, temperature=0.0) for i in (7, 3, 5)]
        groups = engine.generate(requests)
        assert [g.prompt for g in groups] == [r.prompt for r in requests]
        assert sorted(g.submission for g in drain(engine, limit=5000)) == [0, 1, 2, 3]

    def test_a_cancelled_request_is_forgotten_and_the_others_finish(self, new_engine: NewEngine) -> None:
        requests = make_requests(range(6))
        engine = submit(new_engine(), requests)
        returned = {group.submission for group in engine.step()}
        engine.cancel(4, 0)
        engine.cancel(5, 1)  # not in flight
        assert engine.num_in_flight == len({0, 1, 2, 3, 5} - returned)
        groups = drain(engine, limit=5000)
        assert returned | {group.submission for group in groups} == {0, 1, 2, 3, 5} | (returned & {4})
        for group in groups:
            for rollout in group.rollouts:
                self.check_rollout(rollout, requests[group.submission])

    def test_what_is_written_adds_up_to_the_responses(self, new_engine: NewEngine) -> None:
        """Of watched requests only; an engine that does not stream reports nothing."""
        requests = [dataclasses.replace(r, watch=r.submission != 2) for r in make_requests(range(5))]
        engine = submit(new_engine(), requests)
        written: dict[tuple[int, int], list[Any]] = {}
        groups = []
        while engine.num_in_flight:
            groups += engine.step()
            for piece in engine.written():
                written.setdefault((piece.submission, piece.response), []).extend(zip(piece.token_ids, piece.log_probs))
        if written:
            assert written == {
                (group.submission, index): list(zip(rollout.token_ids, rollout.log_probs))
                for group in groups
                for index, rollout in enumerate(group.rollouts)
                if group.submission != 2
            }

    def test_what_a_continued_response_has_already_is_not_written_again(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(), make_requests(range(3)))
        while not any(part.token_ids for request in engine.unfinished() for part in request.partial):
            assert engine.num_in_flight
            engine.step()
        state = [dataclasses.replace(request, watch=True) for request in engine.unfinished()]
        engine.clear()
        submit(engine, state)
        written: dict[tuple[int, int], list[int]] = {}
        groups = {}
        while engine.num_in_flight:
            groups |= {group.submission: group for group in engine.step()}
            for piece in engine.written():
                written.setdefault((piece.submission, piece.response), []).extend(piece.token_ids)
        for (submission, index), tokens in written.items():
            begun = next(request for request in state if request.submission == submission).partial[index:][:1]
            size = len(begun[0].token_ids) if begun else 0
            assert tokens == list(groups[submission].rollouts[index].token_ids[size:])

    def test_versions_of_a_response_never_decrease(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(version=3), make_requests(range(4), version=3))
        groups = engine.step()
        engine.load_weights(None, 4)
        groups += drain(submit(engine, make_requests(range(4, 6), version=4)), limit=5000)
        assert {g.submission: g.version for g in groups} == {0: 3, 1: 3, 2: 3, 3: 3, 4: 4, 5: 4}
        for group in groups:
            for rollout in group.rollouts:
                assert list(rollout.versions) == sorted(rollout.versions)
                assert group.version <= rollout.versions[0] and rollout.versions[-1] <= 4

    def test_unfinished_and_returned_groups_are_all_that_were_submitted(self, new_engine: NewEngine) -> None:
        requests = make_requests(range(6))
        engine = submit(new_engine(), requests)
        returned = {g.submission for _ in range(2) for g in engine.step()}
        state = engine.unfinished()
        assert [r.submission for r in state] == [i for i in range(6) if i not in returned]
        final = {g.submission: g for g in drain(engine, limit=5000)}
        for request in state:
            assert request.prompt == requests[request.submission].prompt
            for part, complete in zip(request.partial, final[request.submission].rollouts):
                assert complete.token_ids[: len(part.token_ids)] == part.token_ids
                assert complete.log_probs[: len(part.log_probs)] == part.log_probs
                assert part.finish_reason == "aborted" or part == complete

    def test_a_group_whose_responses_are_all_finished_comes_out_as_it_is(self, new_engine: NewEngine) -> None:
        request = make_request(2, n=2)
        (group,) = new_engine().generate([request])
        complete = dataclasses.replace(request, partial=group.rollouts)
        assert new_engine().generate([complete]) == [group]
        assert drain(submit(new_engine(), [complete])) == [group]

    def test_max_tokens_cuts_with_the_reason_length(self, new_engine: NewEngine) -> None:
        groups = new_engine().generate(make_requests(range(6), max_tokens=1))
        rollouts = [r for g in groups for r in g.rollouts]
        assert {len(r.token_ids) for r in rollouts} == {1}
        assert "length" in {r.finish_reason for r in rollouts}

    def test_clear_forgets_what_is_in_flight(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(version=2), make_requests(range(3)))
        engine.step()
        engine.clear()
        assert engine.num_in_flight == 0 and engine.step() == [] and engine.unfinished() == []
        groups = drain(submit(engine, make_requests(range(3, 5))), limit=5000)
        assert sorted(g.submission for g in groups) == [3, 4]
        assert {v for g in groups for r in g.rollouts for v in r.versions} == {2}

    def test_resting_between_steps_loses_nothing(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(), make_requests(range(4)))
        groups = engine.step()
        engine.rest()
        groups += drain(submit(engine, make_requests(range(4, 6))), limit=5000)
        assert sorted(g.submission for g in groups) == list(range(6))

    def test_the_loop_may_ask_for_workers_metrics_and_stacks(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(), make_requests(range(2)))
        has_workers = engine.num_workers > 0
        assert ("rollout/num_workers" in engine.metrics()) == bool(engine.stacks()) == has_workers
        drain(engine, limit=5000)


class DeterministicEngineContract(EngineContract):
    """What holds in addition where the same calls give the same bits."""

    def same(self, groups: list[Group], others: list[Group]) -> bool:
        """Whether two runs gave the same; an engine whose log-probs depend on the batch compares tokens."""
        return groups == others

    def test_groups_of_different_lengths_do_not_wait_for_each_other(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(), make_requests(range(9)))
        steps = []
        while engine.num_in_flight:
            steps.append(len(engine.step()))
        assert sum(map(bool, steps)) > 1

    def test_the_same_calls_give_the_same_groups_at_the_same_steps(self, new_engine: NewEngine) -> None:
        def run() -> list[list[Group]]:
            engine = submit(new_engine(), make_requests(range(6)))
            steps = [engine.step(), engine.step()]
            engine.load_weights(None, 1)
            submit(engine, make_requests(range(6, 8), version=1))
            return [*steps, finish(engine)]

        assert all(self.same(a, b) for a, b in zip(run(), run(), strict=True))

    def test_generate_leaves_groups_in_flight_as_they_are(self, new_engine: NewEngine) -> None:
        evaluation = [make_request(i, n=2, temperature=0.0) for i in (7, 3, 5)]
        alone = new_engine().generate(evaluation)
        engine = submit(new_engine(), make_requests(range(4)))
        undisturbed = [engine.step(), finish(engine)]
        engine = submit(new_engine(), make_requests(range(4)))
        disturbed = [engine.step()]
        state = engine.unfinished()
        groups = engine.generate(evaluation)
        assert engine.unfinished() == state and engine.num_in_flight == len(state)
        disturbed += [finish(engine)]
        assert self.same(groups, alone)
        assert all(self.same(a, b) for a, b in zip(disturbed, undisturbed, strict=True))

    def test_each_token_carries_the_version_it_was_drawn_under(self, new_engine: NewEngine) -> None:
        engine = submit(new_engine(version=3), make_requests(range(4), version=3))
        groups = engine.step()
        engine.load_weights(None, 4)
        groups += engine.step()
        engine.load_weights(None, 6)
        groups += drain(engine)
        assert {v for g in groups for r in g.rollouts for v in r.versions} == {3, 4, 6}

    def test_unfinished_groups_hold_what_was_begun(self, new_engine: NewEngine) -> None:
        requests = make_requests(range(6))
        engine = submit(new_engine(), requests)
        assert engine.unfinished() == requests
        engine.step()
        assert any(rollout.token_ids for r in engine.unfinished() for rollout in r.partial)

    def test_a_fresh_engine_continues_unfinished_groups_to_the_same_bits(self, new_engine: NewEngine) -> None:
        running = submit(new_engine(), make_requests(range(8)))
        running.step()
        running.step()
        running.load_weights(None, 1)
        state = running.unfinished()
        expected = [running.step() for _ in range(3)] + [finish(running)]
        fresh = submit(new_engine(version=1), state)
        assert fresh.num_in_flight == len(state) and fresh.unfinished() == state
        continued = [fresh.step() for _ in range(3)] + [finish(fresh)]
        assert all(self.same(a, b) for a, b in zip(continued, expected, strict=True))

    def test_an_engine_that_was_cleared_gives_the_groups_of_a_fresh_one(self, new_engine: NewEngine) -> None:
        expected = finish(submit(new_engine(version=2), make_requests(range(3, 5))))
        engine = submit(new_engine(version=2), make_requests(range(3)))
        engine.step()
        engine.clear()
        assert self.same(finish(submit(engine, make_requests(range(3, 5)))), expected)


def check_rollout(rollout: Rollout, request: GroupRequest) -> None:
    length = len(rollout.token_ids)
    assert 1 <= length <= request.params.max_tokens
    assert len(rollout.log_probs) == len(rollout.versions) == length
    assert rollout.loss_mask == (1,) * length
    assert all(p <= 0.0 for p in rollout.log_probs)
    assert rollout.text and rollout.reward is None
    assert rollout.finish_reason in ("stop", "length")
    assert rollout.finish_reason == "stop" or length == request.params.max_tokens
