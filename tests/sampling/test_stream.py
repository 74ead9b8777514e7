"""The stream strategy: order, refill, carry, staleness, limits and ends."""

from __future__ import annotations

import json

import pytest

from gspo.sampling.errors import DataExhausted, RewardFailures, StarvedSampling
from gspo.types import Group, Reward
from tests.sampling.world import World, all_right, always_mixed, mixed_when, number


def submissions(groups: list[Group]) -> list[int]:
    return [g.submission for g in groups]


def slow(*slow_submissions: int, ticks: int = 10):
    """One tick for every group but these."""
    return lambda request, i: ticks if request.submission in slow_submissions else 1


def test_a_batch_is_the_first_kept_groups_in_order():
    world = World(mixed_when(lambda p: p % 3 == 0))
    groups, report = world.step()
    assert [number(g) for g in groups] == [0, 3, 6, 9]
    assert submissions(groups) == [0, 3, 6, 9]
    assert report.num_trained == 4


def test_a_slow_group_is_carried_and_trained_in_its_turn():
    world = World(always_mixed, lengths=slow(1, ticks=3), gen_batch_size=5)
    assert submissions(world.step()[0]) == [0, 2, 3, 4]
    assert submissions(world.step()[0]) == [5, 6, 7, 8]
    assert submissions(world.step()[0]) == [1, 9, 10, 11]


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_a_step_waits_for_a_group_at_its_last_chance(staleness):
    world = World(always_mixed, lengths=slow(1, ticks=50), gen_batch_size=5, max_staleness=staleness)
    trained_at = {}
    for version in range(8):
        groups, report = world.step()
        trained_at |= {g.submission: version for g in groups}
        assert report.staleness_max <= staleness
    assert trained_at[1] == staleness
    assert world.engine.num_steps >= 50
    assert not world.fates("stale_dropped")


def test_slots_are_refilled_the_moment_a_group_ends():
    world = World(mixed_when(lambda p: p >= 8), lengths=slow(0, ticks=3), max_in_flight=2, max_staleness=2)
    world.step()
    # Submission 0 holds a slot for three ticks while the other passes 1, 2, 3; then two a tick until 11 ends in the
    # seventh; its rewards are there after the eighth.
    assert (world.engine.max_in_flight, world.engine.num_steps) == (2, 8)


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_rewards_are_collected_a_fixed_number_of_steps_later_and_a_resumed_run_waits_as_long(lag):
    def world(state=None) -> World:
        return World(
            mixed_when(lambda p: p % 2 == 0), lengths=slow(3, 8, ticks=4), reward_lag=lag, max_in_flight=3, state=state
        )

    alone = World(always_mixed, reward_lag=lag, max_in_flight=2, train_batch_size=3, max_staleness=9)
    alone.step()
    # The second pair ends in the second step, its rewards are there `lag` steps later.
    assert alone.engine.num_steps == 2 + lag
    whole, first = world(), world()
    expected = [submissions(whole.step()[0]) for _ in range(6)]
    got = [submissions(first.step()[0]) for _ in range(2)]
    resumed = world(json.loads(json.dumps(first.sampler.state_dict())))
    assert got + [submissions(resumed.step()[0]) for _ in range(4)] == expected


def test_surplus_is_carried_and_trained_next():
    world = World(always_mixed, gen_batch_size=12)
    first, report = world.step()
    assert submissions(first) == [0, 1, 2, 3]
    assert report.num_carried == 8
    steps = world.engine.num_steps
    second, report = world.step()
    assert submissions(second) == [4, 5, 6, 7]
    assert (world.engine.num_steps, report.num_generated, report.staleness_max) == (steps, 0, 1)


def test_admission_stops_at_the_budget():
    for staleness in (0, 1, 2):
        world = World(always_mixed, max_in_flight=1000, max_staleness=staleness, prompts=500)
        for _ in range(6):
            groups, report = world.step()
            assert world.engine.max_in_flight == (staleness + 1) * 4
            assert report.num_carried <= staleness * 4
            assert max(report.version - g.version for g in groups) <= staleness


def test_zero_staleness_is_strictly_on_policy_and_leaves_nothing_over():
    world = World(mixed_when(lambda p: p % 2 == 0), lengths=slow(2, 5, ticks=4), gen_batch_size=12, max_staleness=0)
    for version in range(5):
        groups, report = world.step()
        assert all(set(r.versions) == {version} for g in groups for r in g.rollouts)
        assert (report.num_carried, world.engine.num_in_flight) == (0, 0)


def test_nothing_grows_stale_however_slow():
    world = World(
        mixed_when(lambda p: p % 2 == 0),
        lengths=lambda request, i: 1 + 37 * (request.submission % 7 == 0),
        gen_batch_size=12,
        prompts=300,
    )
    for _ in range(20):
        _, report = world.step()
        assert report.discarded["stale_dropped"] == 0


def test_an_unfinished_group_that_grew_stale_is_dropped_and_its_prompt_generated_again():
    world = World(always_mixed, lengths=slow(1, ticks=9), gen_batch_size=6, max_staleness=1)
    world.step()
    world.sampler.version += 1  # as if weights had been updated without a batch from here
    for _ in range(12):
        _, report = world.step()
        assert report.staleness_max <= 1
    assert world.fates("stale_dropped").count("p1") == 1
    trained = [s for s, uid, fate, _ in world.records if uid == "p1" and fate == "kept"]
    assert len(trained) == 1
    assert trained[0] > 1  # under a new submission number


def test_a_queued_group_that_grew_stale_is_dropped_at_the_take():
    world = World(always_mixed, gen_batch_size=12, max_staleness=2)
    world.step()
    world.sampler.version += 5  # as if weights had been updated without this sampler
    groups, report = world.step()
    assert report.discarded["stale_dropped"] == 8
    assert [number(g) for g in groups] == [4, 5, 6, 7]
    assert report.staleness_max == 0


def test_disabled_filter_trains_on_everything_in_order():
    world = World(all_right, enable=False)
    assert [submissions(world.step()[0]) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_missing_rewards_are_left_out_and_the_group_dropped_when_too_few_are_left():
    def rule(group: Group, i: int):
        if number(group) == 0:
            return None
        return None if number(group) == 1 and i == 0 else always_mixed(group, i - 1)

    world = World(rule, n=3, max_failure_rate=1.0)
    groups, report = world.step()
    assert [number(g) for g in groups] == [1, 2, 3, 4]
    assert [len(g.rollouts) for g in groups] == [2, 3, 3, 3]
    assert world.fates("reward_failed") == ["p0"]
    assert report.num_failed_rewards == 4
    assert report.first_failure == "prompt 'p0': scripted failure"


def test_the_last_epoch_ends_cleanly_and_keeps_the_leftover():
    world = World(always_mixed, prompts=10, epochs=1)
    world.step()
    world.step()
    with pytest.raises(DataExhausted, match="2 kept groups are left and a batch needs 4") as caught:
        world.step()
    assert caught.value.num_leftover == 2
    state = world.sampler.state_dict()
    longer = World(always_mixed, prompts=10, epochs=2, state=state)
    assert [number(g) for g in longer.step()[0]] == [8, 9, 0, 1]


def test_release_is_required_between_batches():
    world = World(always_mixed)
    groups, _ = world.sampler.next_batch()
    with pytest.raises(RuntimeError, match="before release"):
        world.sampler.next_batch()
    with pytest.raises(RuntimeError, match="expects the groups of the last"):
        world.sampler.release(groups[:2])
    world.sampler.release(groups)
    assert world.sampler.version == 1


def test_a_lost_group_is_an_error_and_not_a_hang():
    world = World(always_mixed)
    world.engine.loses = {2}
    with pytest.raises(RuntimeError, match=r"lost submissions \[2\]"):
        for _ in range(20):
            world.step()


def test_state_of_a_batch_in_training_puts_it_back_in_front():
    world = World(always_mixed, gen_batch_size=8)
    groups, _ = world.sampler.next_batch()
    again = World(always_mixed, gen_batch_size=8, state=world.sampler.state_dict())
    assert again.step()[0] == groups


def test_state_loads_into_a_new_sampler_only():
    world = World(always_mixed)
    world.step()
    with pytest.raises(RuntimeError, match="new sampler"):
        world.sampler.load_state_dict(world.sampler.state_dict())


def test_starved_run_can_be_saved_and_goes_on_for_another_pass():
    world = World(all_right, prompts=20)
    with pytest.raises(StarvedSampling):
        world.step()
    num_before = len(world.records)
    again = World(all_right, prompts=20, state=world.sampler.state_dict())
    with pytest.raises(StarvedSampling):
        again.step()
    assert num_before >= 20
    assert len(again.records) >= 20


def test_a_resumed_run_starves_at_the_same_group():
    def rule(group: Group, i: int) -> Reward:
        return always_mixed(group, i) if group.submission < 4 else Reward(0.0)

    arguments = {"rule": rule, "prompts": 40, "gen_batch_size": 12}
    whole, world = World(**arguments), World(**arguments)
    whole.step()
    world.step()
    resumed = World(**arguments, state=world.sampler.state_dict())
    for each in (whole, resumed):
        with pytest.raises(StarvedSampling, match=r"kept: \d+ all_wrong\."):
            each.step()
    assert world.records + resumed.records == whole.records


def test_a_resumed_sampler_knows_the_age_of_what_is_pending():
    world = World(always_mixed, lengths=slow(1, ticks=9), gen_batch_size=6)
    world.step()
    state = world.sampler.state_dict()
    assert state["scored"]
    assert state["unfinished"]
    resumed = World(always_mixed, lengths=slow(1, ticks=9), gen_batch_size=6, state=state)
    assert +resumed.sampler._pending_versions == +world.sampler._pending_versions


def test_failures_of_a_step_with_few_new_groups_are_still_noticed():
    def rule(group: Group, i: int) -> Reward | None:
        return None if number(group) == 7 and i > 5 else always_mixed(group, i)

    world = World(rule, n=8, gen_batch_size=7, max_staleness=1)
    world.step()  # judges prompts 0 to 6; prompt 7 is being scored
    with pytest.raises(RewardFailures, match="2 of 8 rewards"):
        world.step()
