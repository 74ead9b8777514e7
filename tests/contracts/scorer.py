"""What every Scorer must do. A test class derives from ScorerContract and gives it a fixture `scorer`."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.rewards.protocol import Scorer
from gspo.types import Group, Prompt, Reward, Rollout


def make_group(texts: Sequence[str], number: int) -> Group:
    """A group of responses; a scorer of this suite gives a response its length, or fails if it begins with "raise"."""
    prompt = Prompt(f"row-{number}", ({"role": "user", "content": "?"},), (5, 6), "contract", "0")
    rollouts = tuple(Rollout((7, 8), (-0.5, -1.0), (1, 1), (3, 3), "stop", text=text) for text in texts)
    return Group(prompt, rollouts, number, 3)


def scores(group: Group) -> list[float | None]:
    return [rollout.reward.score if rollout.reward else None for rollout in group.rollouts]


def without_rewards(group: Group) -> Group:
    return group.with_rollouts(tuple(rollout.with_reward(None) for rollout in group.rollouts))


class ScorerContract:
    """`scorer` scores by the rule of `make_group`; a response "pause S" takes S seconds where it can wait."""

    def test_groups_come_back_in_order_of_submission_whatever_takes_long(self, scorer: Scorer) -> None:
        groups = [make_group([text, "ccc"], n) for n, text in enumerate(["pause 0.3", "a", "pause 0.1", "bb"])]
        for group in groups:
            scorer.submit(group)
        scored = scorer.collect()
        assert [scores(group) for group in scored] == [[9, 3], [1, 3], [9, 3], [2, 3]]
        assert [without_rewards(group) for group in scored] == groups

    def test_a_group_is_collected_once(self, scorer: Scorer) -> None:
        assert scorer.collect() == []
        for number in (4, 5):
            scorer.submit(make_group(["abc"], number))
            assert [group.submission for group in scorer.collect()] == [number]
        assert scorer.collect() == []

    def test_the_first_groups_may_be_collected_before_the_others(self, scorer: Scorer) -> None:
        for number in range(4):
            scorer.submit(make_group(["a" * number], number))
        assert [group.submission for group in scorer.collect(1)] == [0]
        assert [group.submission for group in scorer.collect(2)] == [1, 2]
        assert scorer.collect(0) == []
        assert [group.submission for group in scorer.collect()] == [3]

    def test_a_group_may_be_submitted_twice(self, scorer: Scorer) -> None:
        for _ in range(2):
            scorer.submit(make_group(["a", "bb"], 1))
        first, second = scorer.collect()
        assert first == second and scores(first) == [1, 2]

    def test_a_reward_that_cannot_be_computed_is_missing_and_has_a_reason(self, scorer: Scorer) -> None:
        scorer.submit(make_group(["abc", "raise it", "abcd"], 0))
        scorer.submit(make_group(["raise again"], 1))
        first, second = scorer.collect()
        assert scores(first) == [3, None, 4] and scores(second) == [None]
        assert [rollout.failure is not None for rollout in first.rollouts] == [False, True, False]
        assert second.rollouts[0].failure

    def test_a_group_without_rollouts_comes_back(self, scorer: Scorer) -> None:
        scorer.submit(make_group([], 0))
        (group,) = scorer.collect()
        assert group.rollouts == ()

    def test_rewards_are_finite_numbers(self, scorer: Scorer) -> None:
        scorer.submit(make_group(["abc"], 0))
        (group,) = scorer.collect()
        reward = group.rollouts[0].reward
        assert isinstance(reward, Reward) and type(reward.score) is float and type(reward.final) is float

    def test_close_drops_what_was_not_collected_and_may_come_twice(self, scorer: Scorer) -> None:
        scorer.submit(make_group(["abc", "pause 0.1"], 0))
        scorer.close()
        scorer.close()
        assert scorer.collect() == []
