"""When the sampler gives up, to the group: no progress, failed rewards, limits and the end of the data."""

from __future__ import annotations

import pytest

from gspo.sampling.errors import DataExhausted, GenerationLimit, RewardFailures, StarvedSampling
from gspo.types import Group, Reward
from tests.sampling.world import World, all_right, all_wrong, always_mixed, mixed_when, number


def numbers(groups: list[Group]) -> list[int]:
    return [number(g) for g in groups]


def alone(rule, **settings) -> World:
    """One group at a time, so that every group is judged before the next is started."""
    return World(rule, **{"max_in_flight": 1, **settings})


@pytest.mark.parametrize(
    ("prompts", "gen_batch_size", "num_judged"), [(24, 8, 24), (3, 8, 8), (5, 5, 5), (24, None, 24)]
)
def test_a_pass_without_progress_is_one_over_the_data_and_at_least_a_generation_batch(
    prompts, gen_batch_size, num_judged
):
    world = alone(all_wrong, prompts=prompts, gen_batch_size=gen_batch_size)
    with pytest.raises(StarvedSampling, match=rf"kept: {num_judged} all_wrong\.") as caught:
        world.step()
    assert caught.value.report.num_generated == num_judged


def test_a_kept_group_begins_the_pass_anew_and_so_does_giving_up():
    """Submission 5 is the only kept one: six groups, then a pass of ten, and another pass after the error."""
    world = alone(lambda group, i: Reward(float(i == 0 and group.submission == 5)), prompts=10)
    for judged in (16, 10):
        with pytest.raises(StarvedSampling, match=r"kept: 10 all_wrong\.") as caught:
            world.step()
        assert caught.value.report.num_generated == judged
    assert world.sampler.state_dict()["dropped_since_kept"] == {}


def test_with_a_limit_a_step_is_never_starved_before_it():
    world = alone(all_wrong, prompts=3, gen_batch_size=4, max_num_gen_batches=3)
    with pytest.raises(GenerationLimit) as caught:
        world.step()
    assert caught.value.report.num_generated == 12


def test_each_step_gets_its_whole_limit():
    world = alone(mixed_when(lambda p: p % 6 == 0), max_num_gen_batches=2, on_limit="train_partial")
    reports = [world.step()[1] for _ in range(3)]
    assert [report.num_submitted for report in reports] == [8, 8, 8]
    assert [report.num_trained for report in reports] == [2, 1, 1]


@pytest.mark.parametrize(("max_failure_rate", "stops"), [(0.0, True), (0.24, True), (0.25, False), (1.0, False)])
def test_a_share_of_failures_at_the_limit_is_allowed(max_failure_rate, stops):
    """One reward in each group of four fails."""
    world = World(
        lambda group, i: None if i == 3 else always_mixed(group, i),
        strategy="rounds",
        n=4,
        max_failure_rate=max_failure_rate,
    )
    if stops:
        with pytest.raises(RewardFailures, match=r"4 of 16 rewards of this step failed \(25%\)"):
            world.step()
    else:
        assert world.step()[1].failure_rate == 0.25


@pytest.mark.parametrize(("train_batch_size", "n", "num_rollouts"), [(4, 4, 16), (4, 2, 8), (1, 2, 8), (1, 3, 9)])
def test_failures_are_judged_once_a_batch_of_rewards_and_at_least_eight_are_there(train_batch_size, n, num_rollouts):
    world = alone(lambda group, i: None, train_batch_size=train_batch_size, n=n)
    with pytest.raises(RewardFailures) as caught:
        world.step()
    assert caught.value.report.num_rollouts == num_rollouts


@pytest.mark.parametrize(("n", "stops"), [(7, False), (8, True)])
def test_a_full_batch_of_fewer_than_eight_rewards_is_not_judged_by_its_failures(n, stops):
    world = World(
        lambda group, i: None if i > n - 3 else always_mixed(group, i), strategy="rounds", train_batch_size=1, n=n
    )
    if stops:
        with pytest.raises(RewardFailures, match="2 of 8"):
            world.step()
    else:
        assert numbers(world.step()[0]) == [0]


def test_after_failed_rewards_the_prompts_under_way_are_tried_again():
    def rule(group: Group, i: int) -> Reward | None:
        return None if group.submission < 4 else always_mixed(group, i)

    lengths = lambda request, i: 9 if request.submission in (4, 5) else 1  # noqa: E731
    world = World(rule, max_in_flight=6, lengths=lengths)
    with pytest.raises(RewardFailures) as caught:
        world.step()
    report = caught.value.report
    assert world.engine.num_in_flight == 0
    pending = report.num_submitted - report.num_generated
    assert report.discarded["surplus"] == pending >= 2
    assert report.wasted_tokens == report.num_rollouts + sum(
        2 * ticks for ticks in [world.engine.num_steps] * 2 + [1] * (pending - 2)
    )
    assert report.generated_tokens == report.wasted_tokens
    groups, after = world.step()
    assert groups[0].submission == report.num_submitted and after.num_failed_rewards == 0
    assert sorted(numbers(groups + world.step()[0])) == list(range(4, 12))


def test_the_end_of_the_data_before_the_limit_is_the_end_of_the_data():
    world = alone(mixed_when(lambda p: p < 2), prompts=5, epochs=1, max_num_gen_batches=9, on_limit="keep_unfiltered")
    with pytest.raises(DataExhausted, match="2 kept groups are left") as caught:
        world.step()
    assert caught.value.report.num_submitted == 5
    assert world.fates("all_wrong") == ["p2", "p3", "p4"], "what was in reserve is recorded"
    assert caught.value.report.wasted_tokens == 6


def test_failures_are_named_where_the_data_ends_and_where_the_limit_is():
    for settings in ({"epochs": 1, "prompts": 5}, {"max_num_gen_batches": 1, "gen_batch_size": 5}):
        with pytest.raises(RewardFailures, match="10 of 10 rewards"):
            World(lambda group, i: None, train_batch_size=8, **settings).step()


def test_keep_unfiltered_records_what_it_trained_on_and_what_it_did_not():
    world = alone(all_right, max_num_gen_batches=3, on_limit="keep_unfiltered", lengths=lambda request, i: 3)
    groups, report = world.step()
    assert (numbers(groups), report.num_unfiltered, report.num_trained) == ([0, 1, 2, 3], 4, 4)
    assert world.fates("unfiltered") == ["p0", "p1", "p2", "p3"]
    assert sorted(world.fates("all_right")) == sorted(f"p{i}" for i in range(4, 12))
    assert report.wasted_tokens == 8 * 2 * 3
    again, report = world.step()
    assert numbers(again) == [12, 13, 14, 15], "the reserve of a step ends with it"


def test_nothing_to_fall_back_on_names_the_setting_and_the_first_error():
    world = alone(all_right, max_num_gen_batches=2, on_limit="train_partial")
    with pytest.raises(StarvedSampling, match=r"on_limit=train_partial found nothing.*kept: 8 all_right\.") as caught:
        world.step()
    assert isinstance(caught.value.__cause__, GenerationLimit)
