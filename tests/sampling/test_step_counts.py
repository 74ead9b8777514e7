"""The numbers of a step, and prediction."""

from __future__ import annotations

import pytest

from gspo.types import Group, Reward
from tests.sampling.world import World, always_mixed, mixed_when, number


def test_metrics_of_a_step():
    def rule(group: Group, i: int) -> Reward:
        return Reward([1.0, 0.0, 0.25, float(i == 0)][number(group) % 4])

    world = World(rule, strategy="rounds", gen_batch_size=10, n=2, lengths=lambda request, i: 3)
    groups, report = world.step()
    assert [number(g) for g in groups] == [3, 7, 11, 15]
    values = {name: metric.result() for name, metric in report.metrics().items()}
    expected = {
        "train/num_gen_batches": 2,
        "train/groups_generated": 20,
        "train/groups_kept": 5,
        "train/groups_all_right": 5,
        "train/groups_all_wrong": 5,
        "train/groups_same_score": 5,
        "train/groups_reward_failed": 0,
        "train/groups_surplus": 1,
        "train/groups_trained": 4,
        "train/groups_carried": 0,
        "train/groups_stale_dropped": 0,
        "train/groups_skipped": 0,
        "train/groups_unfiltered": 0,
        "train/filtered_prompts_ratio": 0.25,
        "train/generated_tokens": 20 * 6,
        "train/wasted_tokens": 16 * 6,
        "train/reward_failures": 0,
        "train/staleness/mean": 0,
        "train/staleness/max": 0,
        "critic/score_all/mean": (5 * 1.0 + 5 * 0.25 + 5 * 0.5) / 20,
    }
    assert values == pytest.approx(expected)


def test_a_step_that_judged_no_group_has_no_score_and_no_keep_rate():
    """It lives on what earlier steps kept: 0 would read as a reward that fell."""
    world = World(always_mixed, gen_batch_size=12)
    world.step()
    groups, report = world.step()
    assert groups and report.num_generated == 0
    assert not {"critic/score_all/mean", "train/filtered_prompts_ratio"} & report.metrics().keys()
    assert report.metrics()["train/groups_generated"].result() == 0


def test_num_gen_batches_of_the_stream_counts_a_begun_one():
    world = World(mixed_when(lambda p: p % 2 == 0), gen_batch_size=3, max_in_flight=1)
    _, report = world.step()
    assert (report.num_submitted, report.num_gen_batches) == (8, 3)


def test_staleness_of_the_batch_is_reported():
    world = World(always_mixed, gen_batch_size=12)
    world.step()
    world.step()
    _, report = world.step()
    assert report.metrics()["train/staleness/mean"].result() == 2
    assert report.metrics()["train/staleness/max"].result() == 2


def test_each_group_is_recorded_once_under_the_step_of_its_fate():
    world = World(mixed_when(lambda p: p % 3 == 0), gen_batch_size=12, prompts=200)
    for _ in range(5):
        world.step()
    recorded = [submission for submission, *_ in world.records]
    assert len(recorded) == len(set(recorded))
    assert [v for _, _, fate, v in world.records if fate == "kept"] == [v for v in range(5) for _ in range(4)]


def prediction_world(**settings) -> World:
    return World(
        mixed_when(lambda p: p % 4 == 0, otherwise=1.0), prompts=40, n=8, predict="skip", max_staleness=0, **settings
    )


def test_prediction_skips_only_prompts_seen_to_be_equal():
    world = prediction_world()
    reports = [world.step()[1] for _ in range(40)]
    first_pass, later = reports[:2], reports[20:]
    assert sum(r.num_skipped for r in first_pass) == 0
    assert sum(r.num_skipped for r in later) > sum(r.num_generated for r in later) / 2
    kept = sum(r.fates["kept"] for r in later) / sum(r.num_generated for r in later)
    assert kept > 0.4  # 0.25 without prediction
    assert {number(g) for _ in range(10) for g in world.step()[0]} == set(range(0, 40, 4))


def test_weights_survive_a_resume_and_are_then_forgotten():
    def rule(group: Group, i: int) -> Reward:
        doubted = number(group) % 2 == 0 and group.submission < 8
        return Reward(1.0 if doubted or i == 0 else 0.0)

    arguments = {"rule": rule, "prompts": 8, "n": 8, "gen_batch_size": 12, "predict": "skip", "predict_weight": True}
    whole = World(**arguments)
    expected = [whole.step()[1].weights for _ in range(8)]
    found, state, carried = [], None, 0
    for _ in range(8):
        world = World(**arguments, state=state)
        groups, report = world.step()
        found.append(report.weights)
        state = world.sampler.state_dict()
        probabilities = state["prompts"]["probabilities"]
        carried += len(probabilities)
        assert not probabilities.keys() & {str(g.submission) for g in groups}
    assert found == expected
    assert carried > 0
    assert max(max(w) for w in expected if w) > 1


def test_nothing_is_remembered_of_doubted_groups_that_were_dropped_before_their_end():
    """Every third group is slow: those behind the last group of a batch are dropped unfinished."""
    world = prediction_world(lengths=lambda request, i: 1 + 9 * (request.submission % 3 == 2), predict_weight=True)
    unfinished, clear = [], world.engine.clear
    world.engine.clear = lambda: (unfinished.append(world.engine.num_in_flight), clear())[1]
    for _ in range(12):
        world.step()
        assert world.sampler.state_dict()["prompts"]["probabilities"] == {}
    assert sum(unfinished) > 5


def test_prediction_weights_are_one_over_q_and_off_by_default():
    assert prediction_world().step()[1].weights is None
    # Prompt 0 is all right at first and mixed afterwards, so it is trained on after having been doubted.
    seen: dict[int, int] = {}

    def rule(group: Group, i: int) -> Reward:
        first = seen.setdefault(number(group), group.submission)
        return Reward(float(i == 0)) if number(group) or group.submission != first else Reward(1.0)

    world = World(rule, prompts=8, n=8, predict="skip", predict_weight=True, max_staleness=0)
    for _ in range(20):
        groups, report = world.step()
        assert report.weights is not None
        assert len(report.weights) == 4
        doubted = [w for g, w in zip(groups, report.weights) if number(g) == 0]
        if doubted:
            # One group of 8 right: Beta(9, 1), P(mixed) = 1 - 9/17, doubled and capped at 1.
            assert doubted == [pytest.approx(1 / min(1.0, 2 * (1 - 9 / 17 - _all_wrong())))]
            return
    pytest.fail("prompt 0 was never trained on")


def _all_wrong() -> float:
    """B(9, 1+8)/B(9, 1) = 9! 8! ... as a product: the chance of eight wrong under Beta(9, 1)."""
    product = 1.0
    for k in range(8):
        product *= (1 + k) / (10 + k)
    return product


def test_the_progress_watcher_sees_kept_and_needed():
    seen: list[tuple[int, int]] = []
    world = World(always_mixed, lengths=lambda request, i: 1 + request.submission)
    world.sampler._watch = lambda kept, needed: seen.append((kept, needed))
    world.step()
    assert seen[-1] == (4, 4)
    assert {needed for _, needed in seen} == {4}


def test_missing_rewards_count_neither_in_the_mean_score_nor_as_zero():
    def rule(group: Group, i: int) -> Reward | None:
        return None if i == 2 else Reward(float(i == 0))

    _, report = World(rule, strategy="rounds", n=3, max_failure_rate=1.0).step()
    values = {name: metric.result() for name, metric in report.metrics().items()}
    assert values["critic/score_all/mean"] == pytest.approx(0.5)
    assert values["train/reward_failures"] == 4
    assert (report.num_scored, report.failure_rate) == (8, pytest.approx(1 / 3))


def test_a_prediction_is_made_before_its_group_is_known():
    """The first group of a prompt is not predicted; the second is predicted from the first alone."""
    world = World(always_mixed, strategy="rounds", prompts=4, predict="skip", predict_min_prob=1.0)
    reports = [world.step()[1] for _ in range(2)]
    assert reports[0].num_predicted == 0
    assert "train/predicted_mixed_ratio" not in reports[0].metrics()
    # One right and one wrong answer: Beta(2, 2), of which two answers are mixed with probability 1 - 2·(2·3)/(4·5).
    assert reports[1].metrics()["train/predicted_mixed_ratio"].result() == pytest.approx(0.4)
