"""Working ahead while a batch is trained on: admission as published for asynchronous rollouts, the bound, and resume."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.types import Group
from tests.sampling.world import World, always_mixed, mixed_when


def capacity(max_concurrent: int, bound: int, version: int, batch: int, accepted: int, running: int) -> int:
    """AReaL's staleness control: what may be started, from counts over the whole run."""
    return min(max_concurrent - running, (bound + version + 1) * batch - (accepted + running))


class Ahead:
    """A world that works ahead for a few ticks while each batch is trained on, and checks every admission."""

    def __init__(self, bound: int, lengths: list[int], max_in_flight: int, every: int = 1) -> None:
        self.world = World(
            mixed_when(lambda p: p % every == 0),
            lengths=lambda request, i: lengths[request.submission % len(lengths)],
            max_staleness=bound,
            max_in_flight=max_in_flight,
        )
        self.bound, self.most = bound, min(max_in_flight, (bound + 1) * 4)
        self.num_trained = 0
        self.ages: list[int] = []
        sampler, room = self.world.sampler, self.world.sampler._admission.room

        def checked(*counts: Any) -> int:
            given = room(*counts)
            accepted = self.num_trained + len(sampler._taken) + len(sampler._queue)
            running, scoring = len(sampler._in_flight) + len(sampler._scoring), len(sampler._scoring)
            # A group that is being scored has left the engine: it counts against the budget, not against the slots.
            most = self.most + scoring
            expected = capacity(most, self.bound, sampler.version, 4, accepted, running)
            assert given == max(0, expected)
            return given

        sampler._admission.room = checked

    def step(self, ticks: int) -> list[Group]:
        sampler = self.world.sampler
        groups, report = sampler.next_batch()
        self.ages += [sampler.version - g.version for g in groups]
        assert report.version == sampler.version
        for _ in range(ticks):
            sampler.work_ahead()
        self.world.engine.load_weights(None, sampler.version + 1)
        sampler.release(groups)
        self.num_trained += len(groups)
        return groups


@settings(max_examples=40, deadline=None)
@given(
    bound=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    max_in_flight=st.integers(1, 20),
    ticks=st.lists(st.integers(0, 12), min_size=12, max_size=12),
    every=st.integers(1, 3),
)
def test_admission_is_the_published_rule_and_no_group_passes_the_bound(bound, lengths, max_in_flight, ticks, every):
    ahead = Ahead(bound, lengths, max_in_flight, every)
    trained = [group.submission for count in ticks for group in ahead.step(count)]
    assert len(trained) == len(set(trained)) == 48
    assert max(ahead.ages) <= bound
    assert not [r for r in ahead.world.records if r[2] == "stale_dropped"], "full batches leave nothing to go stale"


def test_with_a_budget_of_zero_nothing_runs_ahead():
    plain, ahead = World(always_mixed, max_staleness=0), Ahead(0, [1], 100)
    for _ in range(4):
        expected, _ = plain.step()
        assert ahead.step(ticks=5) == expected
    assert plain.engine.num_steps == ahead.world.engine.num_steps


def test_what_is_handed_out_holds_its_places_until_release():
    world = World(always_mixed, max_staleness=1, max_in_flight=100, lengths=lambda request, i: 50)
    sampler = world.sampler
    groups, _ = sampler.next_batch()
    while sampler.work_ahead() and world.engine.num_in_flight:
        pass
    assert sampler._next_submission == 8, "two batches: one in training, one ahead"
    sampler.release(groups)
    sampler.work_ahead()
    assert sampler._next_submission == 12


def test_work_ahead_is_counted_in_the_next_report_and_survives_a_resume():
    def make(state=None) -> World:
        return World(
            mixed_when(lambda p: p % 2 == 0), max_staleness=2, max_in_flight=8, state=state, lengths=lambda r, i: 2
        )

    world = make()
    groups, first = world.sampler.next_batch()
    for _ in range(3):
        world.sampler.work_ahead()
    world.engine.load_weights(None, 1)
    world.sampler.release(groups)
    state = world.sampler.state_dict()
    assert state["report"]["num_submitted"] > 0
    other = make(state)
    ours, theirs = world.sampler.next_batch(), other.sampler.next_batch()
    assert ours[0] == theirs[0]
    assert {k: m.result() for k, m in ours[1].metrics().items()} == {
        k: m.result() for k, m in theirs[1].metrics().items()
    }
    assert first.num_submitted + ours[1].num_submitted == world.sampler._next_submission


def test_groups_in_flight_follow_what_the_engine_holds_now():
    held = [3]
    world = World(always_mixed, max_staleness=2, lengths=lambda request, i: 50, num_held=lambda: held[0])
    assert world.sampler.work_ahead() and world.engine.num_in_flight == 3
    held[0] = 7
    assert world.sampler.work_ahead() and world.engine.num_in_flight == 7
    held[0] = 2  # what is under way goes on; nothing is added
    assert world.sampler.work_ahead() and world.engine.num_in_flight == 7
    held[0] = 1000
    assert world.sampler.work_ahead() and world.engine.num_in_flight == 12, "the staleness budget holds"
