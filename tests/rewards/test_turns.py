"""Rewards of turns, of a reward function, and of both."""

from __future__ import annotations

import pytest

from gspo.rewards.scoring import make_scorer
from gspo.rewards.turns import TurnScorer
from gspo.types import Group, Prompt, Reward, Rollout, Turn


def rollout(*rewards: float | None, failure: str | None = None, text: str = "7", acc: float | None = None) -> Rollout:
    metrics = {} if acc is None else {"acc": acc, "depth": 2.0}
    turns = tuple(Turn(i, i + 1, text, reward, metrics=metrics) for i, reward in enumerate(rewards))
    size = len(rewards)
    return Rollout((5,) * size, (-1.0,) * size, (1,) * size, (0,) * size, "environment", text, None, failure, turns)


def score(group: Group, reward=None, *, adds: bool = False) -> list[Rollout]:
    scorer = TurnScorer(make_scorer(reward), adds_function=adds)
    scorer.submit(group)
    scorer.submit(group)
    first, second = scorer.collect()
    assert first == second
    scorer.close()
    return list(first.rollouts)


def test_the_environments_rewards_are_summed_and_kept_by_turn() -> None:
    prompt = Prompt("p", (), (1,), "no such source", "7")
    one, two = score(Group(prompt, (rollout(0.25, None, -0.5, acc=1.0), rollout(1.0)), 0, 0))
    assert one.reward == Reward(-0.25, 1.0, {"depth": 2.0}, turns=(0.25, 0.0, -0.5))
    assert two.reward == Reward(1.0, turns=(1.0,))


def test_without_rewards_of_the_environment_the_function_grades_the_last_turn() -> None:
    prompt = Prompt("p", (), (1,), "calculator", "7")
    right, wrong = score(Group(prompt, (rollout(None, None), rollout(None, text="8")), 0, 0))
    assert right.reward == Reward(1.0, 1.0, turns=(0.0, 1.0)) and wrong.reward == Reward(0.0, 0.0, turns=(0.0,))


def test_a_function_that_is_set_adds_to_the_last_turn() -> None:
    prompt = Prompt("p", (), (1,), "calculator", "7")
    (both,) = score(Group(prompt, (rollout(0.5, -0.25, acc=0.0),), 0, 0), "exact", adds=True)
    assert both.reward is not None and both.reward.turns == (0.5, 0.75)
    assert both.reward.score == 1.25 and both.reward.acc == 1.0 and both.reward.extra == {"depth": 2.0}


def test_groups_are_collected_in_order_as_many_as_asked_for() -> None:
    rewarded, graded = rollout(0.25), rollout(None)
    scorer = TurnScorer(make_scorer("exact"), adds_function=False)
    for uid, truth, member in (("a", "7", graded), ("b", "7", rewarded), ("c", "8", graded), ("d", "7", graded)):
        scorer.submit(Group(Prompt(uid, (), (1,), "calculator", truth), (member,), 0, 0))
    done = [*scorer.collect(2), *scorer.collect(1), *scorer.collect()]
    found = [(g.prompt.uid, r.reward.score) for g in done for r in g.rollouts if r.reward is not None]
    assert found == [("a", 1.0), ("b", 0.25), ("c", 0.0), ("d", 1.0)]


def test_a_function_that_fails_on_a_rewarded_rollout_leaves_no_reward() -> None:
    prompt = Prompt("p", (), (1,), "no such source", "7")
    (done,) = score(Group(prompt, (rollout(0.5),), 0, 0), adds=True)
    assert done.reward is None and "no such source" in str(done.failure)


@pytest.mark.parametrize("adds", [False, True])
def test_a_failed_environment_is_a_missing_reward(adds: bool) -> None:
    prompt = Prompt("p", (), (1,), "calculator", "7")
    failed, fine = score(Group(prompt, (rollout(1.0, failure="gone"), rollout(None)), 0, 0), adds=adds)
    assert failed.reward is None and failed.failure == "gone"
    assert fine.reward is not None and fine.reward.score == 1.0


def turned(*turns: tuple[float | None, dict[str, float]], text: str = "7") -> Rollout:
    made = tuple(Turn(i, i + 1, text, reward, metrics=metrics) for i, (reward, metrics) in enumerate(turns))
    size = len(made)
    return Rollout((5,) * size, (-1.0,) * size, (1,) * size, (0,) * size, "environment", text, turns=made)


def test_the_last_turns_metrics_and_accuracy_count() -> None:
    prompt = Prompt("p", (), (1,), "no such source", "7")
    rollout = turned((0.5, {"acc": 1.0, "depth": 1.0, "seen": 4.0}), (0.0, {"acc": 0.0, "depth": 3.0}), (None, {}))
    (done,) = score(Group(prompt, (rollout,), 0, 0))
    assert done.reward == Reward(0.5, 0.0, {"depth": 3.0, "seen": 4.0}, turns=(0.5, 0.0, 0.0))


def test_a_reward_of_0_is_a_reward_and_the_function_is_not_asked() -> None:
    prompt = Prompt("p", (), (1,), "calculator", "7")
    zero, none = score(Group(prompt, (turned((0.0, {})), turned((None, {}), (None, {"depth": 2.0}))), 0, 0))
    assert zero.reward == Reward(0.0, None, turns=(0.0,))
    assert none.reward == Reward(1.0, 1.0, {"depth": 2.0}, turns=(0.0, 1.0))


def test_the_environments_accuracy_counts_where_the_function_has_none() -> None:
    def half(prompt: Prompt, response: str) -> dict[str, float]:
        return {"score": 0.5, "depth": 9.0}

    prompt = Prompt("p", (), (1,), "calculator", "7")
    rollout = turned((1.0, {"acc": 0.25, "depth": 2.0, "seen": 1.0}))
    (done,) = score(Group(prompt, (rollout,), 0, 0), half, adds=True)
    assert done.reward == Reward(1.5, 0.25, {"depth": 9.0, "seen": 1.0}, turns=(1.5,))


def test_rollouts_without_turns_are_the_functions_alone() -> None:
    prompt = Prompt("p", (), (1,), "calculator", "7")
    plain = Rollout((5,), (-1.0,), (1,), (0,), "stop", "7")
    for adds in (False, True):
        alone, rewarded = score(Group(prompt, (plain, turned((0.5, {}), text="8")), 0, 0), adds=adds)
        assert alone.reward == Reward(1.0, 1.0)
        assert rewarded.reward is not None and rewarded.reward.score == 0.5  # "8" is wrong


def test_closing_drops_what_was_not_collected() -> None:
    scorer = TurnScorer(make_scorer("exact"), adds_function=True)
    scorer.submit(Group(Prompt("p", (), (1,), "calculator", "7"), (rollout(1.0),), 0, 0))
    scorer.close()
    assert scorer.collect() == []
