"""The rounds strategy, limits, guards and the fates they give, for both strategies."""

from __future__ import annotations

import pytest

from gspo.sampling.errors import DataExhausted, GenerationLimit, RewardFailures, SamplingError, StarvedSampling
from gspo.types import Group, Reward
from tests.sampling.world import World, all_right, all_wrong, always_mixed, mixed_when, number

STRATEGIES = pytest.mark.parametrize("strategy", ["stream", "rounds"])


def numbers(groups: list[Group]) -> list[int]:
    return [number(g) for g in groups]


def test_rounds_accumulate_in_order_until_enough_are_kept():
    world = World(mixed_when(lambda p: p % 3 == 0), strategy="rounds", gen_batch_size=6)
    groups, report = world.step()
    assert numbers(groups) == [0, 3, 6, 9]
    assert (report.num_gen_batches, report.num_generated, report.fates["kept"]) == (2, 12, 4)
    assert (report.num_carried, world.engine.num_in_flight) == (0, 0)


def test_rounds_trim_the_surplus_and_put_its_prompts_back():
    world = World(always_mixed, strategy="rounds", gen_batch_size=6)
    assert numbers(world.step()[0]) == [0, 1, 2, 3]
    assert world.fates("surplus") == ["p4", "p5"]
    groups, report = world.step()
    assert numbers(groups) == [4, 5, 6, 7]
    assert [g.submission for g in groups] == [6, 7, 8, 9]
    assert (report.discarded["surplus"], report.staleness_max) == (2, 0)


def test_rounds_wait_for_the_whole_round_whatever_finishes_first():
    lengths = lambda request, i: 9 - request.submission  # noqa: E731
    world = World(always_mixed, strategy="rounds", gen_batch_size=8, lengths=lengths)
    assert numbers(world.step()[0]) == [0, 1, 2, 3]


def test_the_limit_raises_the_agreed_text():
    world = World(mixed_when(lambda p: p == 3), strategy="rounds", max_num_gen_batches=10, prompts=100)
    with pytest.raises(ValueError) as caught:
        world.step()
    assert isinstance(caught.value, GenerationLimit)
    text = str(caught.value)
    assert text.startswith(
        "num_gen_batches=10 >= max_num_gen_batches=10. Generated too many batches. "
        "Please check if your data are too difficult. "
    )
    assert "40 groups judged in this step: 1 kept, 0 all_right, 39 all_wrong" in text
    assert "easier prompts" in text
    assert "filter_groups.max_num_gen_batches" in text
    assert "on_limit=train_partial" in text


def test_the_stream_counts_the_limit_in_generation_batches():
    world = World(mixed_when(lambda p: p == 3), max_num_gen_batches=3, gen_batch_size=6, prompts=100)
    with pytest.raises(GenerationLimit, match=r"^num_gen_batches=3 >= max_num_gen_batches=3\. Generated") as caught:
        world.step()
    assert caught.value.report.num_submitted == 18
    assert caught.value.report.num_generated == 18


@STRATEGIES
def test_train_partial_hands_out_what_was_kept(strategy):
    world = World(mixed_when(lambda p: p % 6 == 0), strategy=strategy, max_num_gen_batches=3, on_limit="train_partial")
    groups, report = world.step()
    assert numbers(groups) == [0, 6]
    assert (report.num_trained, report.num_gen_batches) == (2, 3)
    assert numbers(world.step()[0]) == [12, 18]


@STRATEGIES
def test_train_partial_with_nothing_kept_is_starved(strategy):
    world = World(all_wrong, strategy=strategy, max_num_gen_batches=2, on_limit="train_partial")
    with pytest.raises(StarvedSampling, match=r"starved \(all_wrong\)") as caught:
        world.step()
    assert caught.value.reason == "all_wrong"


@STRATEGIES
def test_keep_unfiltered_fills_up_with_the_earliest_dropped(strategy):
    world = World(
        mixed_when(lambda p: p % 6 == 1), strategy=strategy, max_num_gen_batches=3, on_limit="keep_unfiltered"
    )
    groups, report = world.step()
    assert numbers(groups) == [0, 1, 2, 7]
    assert report.num_unfiltered == 2
    assert sorted(world.fates("unfiltered")) == ["p0", "p2"]
    assert len(world.records) == 12
    assert report.wasted_tokens == 8 * 2


def test_keep_unfiltered_never_trains_on_failed_rewards():
    def rule(group: Group, i: int) -> Reward | None:
        return None if number(group) < 2 else all_right(group, i)

    world = World(rule, max_num_gen_batches=2, on_limit="keep_unfiltered", max_failure_rate=1.0)
    assert numbers(world.step()[0]) == [2, 3, 4, 5]


@STRATEGIES
@pytest.mark.parametrize(
    ("rule", "reason", "remedy"),
    [(all_right, "all_right", "harder prompts"), (all_wrong, "all_wrong", "easier prompts")],
)
def test_data_without_a_gradient_ends_with_its_name(strategy, rule, reason, remedy):
    world = World(rule, strategy=strategy, prompts=24, gen_batch_size=8)
    with pytest.raises(StarvedSampling, match=rf"starved \({reason}\): a full pass over the data") as caught:
        world.step()
    assert caught.value.reason == reason
    assert caught.value.report.fates[reason] >= 24
    assert remedy in str(caught.value)
    assert caught.value.report.fates[reason] <= 24 + 8


def test_several_reasons_are_counted_in_the_message():
    world = World(lambda g, i: Reward([0.0, 0.5, 1.0][number(g) % 3]), prompts=24, strategy="rounds")
    with pytest.raises(StarvedSampling, match=r"no_mixed_groups.*8 all_right, 8 all_wrong, 8 same_score"):
        world.step()


@STRATEGIES
def test_no_progress_goes_on_as_on_limit_says(strategy):
    world = World(all_wrong, strategy=strategy, prompts=24, on_limit="keep_unfiltered")
    groups, report = world.step()
    assert numbers(groups) == [0, 1, 2, 3]
    assert report.num_unfiltered == 4
    assert len(world.step()[0]) == 4


@STRATEGIES
def test_one_kept_group_a_pass_is_progress(strategy):
    world = World(mixed_when(lambda p: p == 5), strategy=strategy, prompts=24)
    groups, report = world.step()
    assert numbers(groups) == [5, 5, 5, 5]
    assert report.num_generated >= 72


@STRATEGIES
def test_end_of_data_in_the_middle_of_a_batch(strategy):
    world = World(mixed_when(lambda p: p % 2 == 0), strategy=strategy, prompts=13, epochs=1)
    world.step()
    with pytest.raises(DataExhausted) as caught:
        world.step()
    assert caught.value.num_leftover == 3


@STRATEGIES
def test_too_many_failed_rewards_stop_with_the_first(strategy):
    def rule(group: Group, i: int) -> Reward | None:
        return None if number(group) in (1, 3) else always_mixed(group, i)

    world = World(rule, strategy=strategy, n=4)
    with pytest.raises(RewardFailures, match=r"max_failure_rate=0\.2\. First failure: prompt 'p1': scripted failure"):
        world.step()


@STRATEGIES
def test_failures_up_to_the_rate_are_counted_and_excluded(strategy):
    def rule(group: Group, i: int) -> Reward | None:
        return None if i == 3 and number(group) % 2 else always_mixed(group, i)

    world = World(rule, strategy=strategy, n=4)
    groups, report = world.step()
    assert [len(g.rollouts) for g in groups] == [4, 3, 4, 3]
    assert report.failure_rate == 0.125
    assert report.metrics()["train/reward_failures"].result() == 2


def test_a_few_failures_among_fewer_than_eight_rewards_say_nothing():
    def rule(group: Group, i: int) -> Reward | None:
        return None if number(group) == 0 and i == 2 else always_mixed(group, i)

    world = World(rule, n=3, train_batch_size=1, max_staleness=0)
    assert numbers(world.step()[0]) == [0]


@STRATEGIES
def test_failing_everywhere_ends_although_nothing_is_ever_kept(strategy):
    world = World(lambda group, i: None, strategy=strategy)
    with pytest.raises(RewardFailures, match="100%"):
        world.step()


def test_nan_names_the_prompt():
    world = World(lambda group, i: Reward(float("nan") if number(group) == 2 else float(i)))
    with pytest.raises(ValueError, match="prompt 'p2'"):
        world.step()


@pytest.mark.parametrize(("rule", "limit"), [(all_right, 0), (all_right, 1), (lambda g, i: None, 0)])
def test_every_end_carries_the_report(rule, limit):
    with pytest.raises(SamplingError) as caught:
        World(rule, max_num_gen_batches=limit).step()
    assert caught.value.report.num_generated > 0
