"""The keep rule, metric by metric."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from gspo.registry import PluginError
from gspo.sampling.filters import is_right, judge, metric_value
from gspo.types import Group, Prompt, Reward, Rollout


def group(*rewards: Reward | None) -> Group:
    rollouts = tuple(Rollout((1,), (-0.5,), (1,), (0,), "stop", reward=r) for r in rewards)
    return Group(Prompt("row-7", (), (1, 2)), rollouts, submission=3, version=0)


def same(value: float, count: int = 4) -> list[Reward]:
    return [Reward(value) for _ in range(count)]


def test_mixed_scores_are_kept():
    verdict = judge(group(Reward(1.0), Reward(0.0)))
    assert (verdict.keep, verdict.reason) == (True, "kept")


@pytest.mark.parametrize(
    ("value", "reason"), [(1.0, "all_right"), (0.0, "all_wrong"), (-1.0, "all_wrong"), (0.3, "same_score")]
)
def test_equal_scores_are_dropped_by_name(value, reason):
    verdict = judge(group(*same(value)))
    assert (verdict.keep, verdict.reason) == (False, reason)


def test_accuracy_names_the_reason_where_the_score_cannot():
    assert judge(group(Reward(0.7, acc=1.0), Reward(0.7, acc=1.0))).reason == "all_right"
    assert judge(group(Reward(0.2, acc=0.0), Reward(0.2, acc=0.0))).reason == "all_wrong"
    assert judge(group(Reward(0.2, acc=0.0), Reward(0.2, acc=1.0))).reason == "same_score"


def test_equal_non_dyadic_rewards_are_dropped_although_their_std_is_positive():
    values = [0.1] * 6
    assert np.std(values) > 0
    assert not judge(group(*(Reward(v) for v in values))).keep


def test_the_smallest_difference_is_kept():
    assert judge(group(Reward(0.1), Reward(np.nextafter(0.1, 1.0)))).keep


def test_single_response_is_always_kept():
    assert judge(group(Reward(1.0))).keep


def test_single_response_without_reward_is_dropped():
    assert judge(group(None)).reason == "reward_failed"


def test_missing_rewards_are_left_out_and_never_zero():
    right = judge(group(Reward(1.0), None, Reward(1.0)))
    assert (right.keep, right.reason, len(right.group.rollouts)) == (False, "all_right", 2)
    mixed = judge(group(Reward(1.0), None, Reward(0.0)))
    assert mixed.keep
    assert [r.reward.score for r in mixed.group.rollouts if r.reward] == [1.0, 0.0]
    assert [r.reward for r in mixed.group.failed] == [None]


@pytest.mark.parametrize("enable", [True, False])
def test_fewer_than_two_rewards_left_drop_the_group(enable):
    for rewards in ([None, Reward(1.0)], [None, None]):
        verdict = judge(group(*rewards), enable=enable)
        assert (verdict.keep, verdict.reason) == (False, "reward_failed")


def test_disabled_filter_keeps_equal_scores():
    assert judge(group(*same(1.0)), enable=False).keep


def test_each_metric_is_read_from_its_place():
    reward = Reward(0.5, acc=1.0, extra={"format": 0.25}, kl_penalty=0.2)
    found = [metric_value(reward, m) for m in ("seq_reward", "score", "seq_final_reward", "acc", "format")]
    assert found == [0.5, 0.5, 0.5 - 0.2, 1.0, 0.25]


def test_the_metric_decides():
    rewards = [
        Reward(1.0, acc=1.0, extra={"length": 3.0}, kl_penalty=0.1),
        Reward(1.0, acc=1.0, extra={"length": 4.0}, kl_penalty=0.2),
    ]
    kept = [judge(group(*rewards), m).keep for m in ("seq_reward", "acc", "seq_final_reward", "length")]
    assert kept == [False, False, True, True]


def test_unknown_metric_lists_what_there_is():
    with pytest.raises(ValueError, match=r"filter_groups\.metric='accuracy'.*score, format\. "):
        judge(group(Reward(1.0, extra={"format": 1.0}), Reward(0.0)), "accuracy")
    with pytest.raises(ValueError, match=r"metric='acc'"):
        metric_value(Reward(1.0), "acc")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("enable", [True, False])
def test_non_finite_metric_names_the_prompt(bad, enable):
    with pytest.raises(ValueError, match=r"'row-7' \(submission 3\).*seq_reward=(nan|inf)"):
        judge(group(Reward(0.0), Reward(bad)), enable=enable)


def test_success_is_accuracy_else_a_positive_score():
    assert [is_right(r) for r in (Reward(-1.0, acc=1.0), Reward(1.0, acc=0.0), Reward(0.1), Reward(0.0))] == [
        True,
        False,
        True,
        False,
    ]


def test_a_filter_of_the_user_replaces_the_rule_and_needs_no_metric():
    seen = []

    def keep(scored):
        seen.append(len(scored.rollouts))
        return scored.rollouts[0].reward.score > 0

    equal = judge(group(*same(1.0)), "unknown", keep=keep)
    mixed = judge(group(Reward(0.0), Reward(1.0), None), "unknown", keep=keep)
    assert (equal.keep, equal.reason) == (True, "kept")
    assert (mixed.keep, mixed.reason) == (False, "filtered")
    assert seen == [4, 2]
    assert judge(group(Reward(1.0), None), keep=keep).reason == "reward_failed"
    assert judge(group(*same(0.0)), enable=False, keep=keep).keep and len(seen) == 2


@pytest.mark.parametrize("answer", [True, np.bool_(True), torch.tensor(True), torch.tensor([True])])
def test_a_filter_may_answer_with_a_scalar_of_torch_or_numpy(answer):
    assert judge(group(*same(1.0)), keep=lambda _: answer).reason == "kept"
    assert judge(group(*same(1.0)), keep=lambda _: ~answer if answer is not True else False).reason == "filtered"


def named(group: Group) -> bool:
    return {}["missing"]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (named, r"named raised KeyError: 'missing' \(.*test_filters\.py, line \d+\)"),
        (lambda group: None, "returned None; expected True or False"),
        (lambda group: "no", "returned 'no'; expected True or False"),
        (lambda group: torch.tensor([True, False]), "raised RuntimeError: .*2 elements"),
        (lambda: True, "raised TypeError"),
    ],
)
def test_a_filter_that_gives_no_answer_is_named_with_the_prompt(keep, message):
    uid = group().prompt.uid
    with pytest.raises(PluginError, match=rf"algorithm\.filter_groups\.function: prompt '{uid}': .*{message}"):
        judge(group(*same(1.0)), keep=keep)


def test_a_spread_within_the_noise_is_no_difference():
    pair = group(Reward(0.5), Reward(0.75), Reward(0.5))
    assert judge(pair, min_spread=0.2).keep
    verdict = judge(pair, min_spread=0.25)
    assert (verdict.keep, verdict.reason) == (False, "same_score")
    assert judge(pair, enable=False, min_spread=1.0).keep
    assert judge(group(Reward(0.5)), min_spread=1.0).keep


def test_repeated_scores_of_one_response_set_the_smallest_spread():
    noisy = group(Reward(0.5, acc=0.0, noise=0.4), Reward(0.75, acc=1.0, noise=0.0))
    assert judge(noisy).keep  # 0.25 is more than the mean noise of 0.2
    noisy = group(Reward(0.5, acc=0.0, noise=0.4), Reward(0.75, acc=1.0, noise=0.2))
    assert not judge(noisy).keep
    assert judge(noisy, "acc").keep  # the noise is that of the score


def expected_verdict(rewards: list[Reward | None], metric: str, enable: bool, min_spread: float) -> str:
    """The rule of the documentation, written out from the counts of what is there."""
    present = [r for r in rewards if r is not None]
    if not present or (len(present) == 1 and len(rewards) > 1):
        return "reward_failed"
    if not enable or len(rewards) == 1:
        return "kept"
    read = {
        "seq_reward": lambda r: r.score,
        "seq_final_reward": lambda r: r.score - r.kl_penalty,
        "size": lambda r: r.extra["size"],
    }[metric]
    values = sorted(read(r) for r in present)
    spread = values[-1] - values[0]
    noise = 0.0 if metric == "size" else sum(r.noise for r in present) / len(present)
    if spread > min_spread and spread > noise:
        return "kept"
    marks = [values[0] if r.acc is None else r.acc for r in present]
    if spread == 0 and all(mark >= 1 for mark in marks):
        return "all_right"
    if spread == 0 and all(mark <= 0 for mark in marks):
        return "all_wrong"
    return "same_score"


def test_every_verdict_is_that_of_the_written_rule():
    """All numbers are dyadic, so that spreads often equal the limit they are compared with."""
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    for _ in range(700):
        few = rng.choice([(0.0,), (1.0,), (0.0, 1.0), (0.0, 0.5, 1.0), (-1.0, 0.0), (1.0, 2.0)])
        noises = rng.choice([(0.0,), (0.0, 0.5), (0.5,), (0.0, 1.0, 2.0)])
        rewards: list[Reward | None] = [
            None
            if rng.random() < 0.15
            else Reward(
                rng.choice(few),
                acc=rng.choice([None, None, 0.0, 0.5, 1.0]) if rng.random() < 0.4 else None,
                extra={"size": rng.choice([0.0, 1.0])},
                kl_penalty=rng.choice([0.0, 0.0, 0.5]),
                noise=rng.choice(noises),
            )
            for _ in range(rng.randint(1, 5))
        ]
        metric = rng.choice(["seq_reward", "seq_final_reward", "size"])
        enable, min_spread = rng.random() < 0.9, rng.choice([0.0, 0.0, 0.5, 1.0])
        verdict = judge(group(*rewards), metric, enable=enable, min_spread=min_spread)
        assert verdict.reason == expected_verdict(rewards, metric, enable, min_spread), (rewards, metric, min_spread)
        assert verdict.keep is (verdict.reason == "kept")
        assert [r.reward for r in verdict.group.rollouts] == [r for r in rewards if r is not None]
        assert [r.reward for r in verdict.group.failed] == [r for r in rewards if r is None]
        seen[verdict.reason] += 1
    assert min(seen[reason] for reason in ("kept", "all_right", "all_wrong", "same_score", "reward_failed")) > 20


def test_the_noise_counts_for_every_name_of_the_reward_and_for_no_other_metric():
    noisy = [Reward(0.0, acc=0.0, extra={"size": 0.0}, noise=1.0), Reward(1.0, acc=1.0, extra={"size": 1.0}, noise=1.0)]
    kept = [judge(group(*noisy), m).keep for m in ("seq_reward", "score", "seq_final_reward", "acc", "size")]
    assert kept == [False, False, False, True, True]


def test_only_the_metric_that_is_compared_must_be_finite():
    broken = [Reward(1.0, acc=float("nan")), Reward(0.0, acc=1.0)]
    assert judge(group(*broken)).keep
    assert judge(group(*broken), "acc", enable=False).keep
    assert judge(group(*broken), "acc", keep=lambda _: True).keep
    with pytest.raises(ValueError, match="returned acc=nan"):
        judge(group(*broken), "acc")


def test_the_choices_named_for_an_unknown_metric_are_those_of_the_reward():
    with pytest.raises(ValueError) as caught:
        metric_value(Reward(1.0, acc=0.0, extra={"z": 1.0, "score": 2.0, "b": 0.0}), "no")
    assert "expected one of seq_reward, seq_final_reward, score, acc, b, z." in str(caught.value)


def test_success_begins_at_an_accuracy_of_one_half():
    assert [is_right(Reward(1.0, acc=acc)) for acc in (0.49, 0.5, 0.51)] == [False, True, True]
    assert not is_right(Reward(-0.5))


def test_a_spread_of_the_user_does_not_bind_the_filter_of_the_user():
    assert judge(group(*same(1.0)), keep=lambda _: True, min_spread=5.0).reason == "kept"
