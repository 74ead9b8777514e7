"""Rewards of several kinds added up: weights, missing parts, names, disagreement with the rule."""

from __future__ import annotations

from typing import Any

from gspo.metrics import Metric, Metrics
from gspo.rewards.compose import Finishing, Grader, RewardScale, as_specs
from gspo.rewards.functions import wrap_function
from gspo.rewards.mixed import MixedScorer, Part, wrong_order, wrong_verdicts
from gspo.rewards.scoring import responses_of
from gspo.types import Group, Prompt, Reward, Rollout

PROMPT = Prompt("row", (), (), "nothing", "5")


class Fixed:
    """A scorer that gives the n-th response of every group the n-th outcome."""

    def __init__(self, *outcomes: Reward | str, budget: str | None = None) -> None:
        self.outcomes, self.groups, self.budget, self.is_closed = outcomes, [], budget, False

    def submit(self, group: Group) -> None:
        self.groups.append(group)

    def collect(self, num: int | None = None) -> list[Group]:
        done, self.groups = self.groups[:num], self.groups[len(self.groups[:num]) :]
        return [g.with_rollouts(tuple(map(_with, g.rollouts, self.outcomes))) for g in done]

    def observe(self) -> Metrics:
        return {"judge/calls": Metric("sum", 1.0)}

    def over_budget(self) -> str | None:
        return self.budget

    def close(self) -> None:
        self.is_closed = True


def _with(rollout: Rollout, outcome: Reward | str) -> Rollout:
    return rollout.with_reward(None, outcome) if isinstance(outcome, str) else rollout.with_reward(outcome)


def group(n: int) -> Group:
    return Group(PROMPT, tuple(Rollout((), (), (), (), "stop", text=str(i)) for i in range(n)), 0, 0)


def mixed(*parts: Part, finishing: Any = None, n: int = 1) -> tuple[list[Rollout], MixedScorer]:
    scorer = MixedScorer(parts, finishing or Finishing())
    scorer.submit(group(n))
    return list(scorer.collect()[0].rollouts), scorer


def test_scores_are_weighted_and_each_part_is_logged() -> None:
    rule = Part("math", Fixed(Reward(1.0, acc=1.0, extra={"answered": 1.0})), 1.0)
    judge = Part("judge", Fixed(Reward(0.5, acc=0.0, noise=0.2, notes={"reason": "so"})), 0.5, "judge")
    (done,), _ = mixed(rule, judge, finishing=Finishing(scale=RewardScale(scale=2.0)))
    assert done.reward == Reward(
        2.5,
        acc=1.0,
        extra={"answered": 1.0, "reward/math": 1.0, "reward/judge": 0.5},
        noise=0.2,
        notes={"judge": {"reason": "so"}},
    )


def test_a_part_that_failed_leaves_no_reward_unless_it_only_logs() -> None:
    good, bad = Fixed(Reward(1.0)), Fixed("it broke")
    (done,), _ = mixed(Part("a", good), Part("b", bad, 0.1))
    assert done.reward is None and done.failure == "b: it broke"
    (done,), _ = mixed(Part("a", good), Part("b", bad, 0.0))
    assert done.reward == Reward(1.0, extra={"reward/a": 1.0})


def test_disagreement_counts_verdicts_or_the_order_of_pairs() -> None:
    rule = Part("rule", Fixed(*(Reward(acc, acc=acc) for acc in (1.0, 0.0, 0.0, 1.0))), 0.0)
    judge = Part("judge", Fixed(*map(Reward, (0.9, 0.7, 0.1, 0.2))), 1.0, "judge")
    model = Part("model", Fixed(*map(Reward, (5.0, -3.0, -4.0, -3.0))), 1.0, "model", orders=True)
    _, scorer = mixed(rule, judge, model, n=4)
    found = {name: metric.result() for name, metric in scorer.observe().items()}
    assert found["judge/disagreement"] == 0.5  # the second and the last
    assert found["reward_model/disagreement"] == 0.5 / 4  # one tie in four pairs
    assert "judge/disagreement" not in scorer.observe()


def test_the_first_accuracy_counts_and_parts_of_functions_keep_their_names() -> None:
    own = {"reward/format": 0.5, "reward/math": 1.0, "answered": 1.0}
    rule = Part("functions", Fixed(Reward(2.0, acc=None, extra=own)), -1.0)
    judge = Part("judge", Fixed(Reward(0.5, acc=0.0, noise=0.25)), -2.0, "judge")
    second = Part("judge", Fixed(Reward(0.75, acc=1.0, noise=0.5)), 1.0, "judge")
    (done,), _ = mixed(rule, judge, second)
    parts = {"reward/judge": 0.5, "reward/judge_2": 0.75}
    assert done.reward == Reward(-2.25, acc=0.0, extra={**own, **parts}, noise=1.0)


def test_groups_are_collected_in_order_as_many_as_asked_for() -> None:
    scorer = MixedScorer([Part("a", Fixed(Reward(1.0))), Part("b", Fixed(Reward(2.0)))])
    prompts = [Prompt(name, (), (), "nothing", "5") for name in ("first", "second", "third")]
    for prompt in prompts:
        scorer.submit(Group(prompt, group(1).rollouts, 0, 0))
    done = [*scorer.collect(2), *scorer.collect()]
    assert [g.prompt.uid for g in done] == ["first", "second", "third"] and scorer.collect() == []
    assert [r.reward.score for g in done for r in g.rollouts if r.reward is not None] == [3.0] * 3


def test_disagreement_leaves_out_missing_opinions_and_survives_a_restart() -> None:
    rule = Part("rule", Fixed(Reward(1.0, acc=1.0), "broken", Reward(1.0), Reward(1.0, acc=1.0)))
    judge = Part("judge", Fixed(Reward(0.0), Reward(0.0), Reward(0.0), "no answer"), 0.0, "judge")
    _, scorer = mixed(rule, judge, n=4)
    resumed = MixedScorer([rule, judge])
    resumed.load_state_dict(scorer.state_dict())
    resumed.submit(group(4))
    resumed.collect()
    assert resumed.observe()["judge/disagreement"] == Metric.mean(2.0, 2)


def test_without_a_rule_nothing_disagrees() -> None:
    _, scorer = mixed(
        Part("judge", Fixed(Reward(0.0, acc=0.0)), 1.0, "judge"), Part("m", Fixed(Reward(1.0)), 1.0, "model")
    )
    assert set(scorer.observe()) == {"judge/calls"}


def test_the_first_part_over_its_budget_ends_the_run_and_all_parts_are_closed() -> None:
    parts = [Fixed(), Fixed(budget="the first is spent"), Fixed(budget="the second is spent")]
    scorer = MixedScorer([Part(str(i), part) for i, part in enumerate(parts)])
    assert scorer.over_budget() == "the first is spent"
    assert MixedScorer([Part("a", parts[0])]).over_budget() is None
    scorer.close()
    assert all(part.is_closed for part in parts)


def test_wrong_verdicts_and_wrong_order() -> None:
    assert wrong_verdicts([(1, 0.5), (0, 0.49), (1, 0.0)]) == (1.0, 3)
    assert wrong_order([(1, 2.0), (0, 3.0), (0, 1.0)]) == (1.0, 2)
    assert wrong_order([(1, 2.0), (1, 3.0)]) == (0.0, 0)


def graded(*functions: Any) -> Reward | str:
    return Grader(list(functions)).grade(PROMPT, responses_of(group(1)))[0]


def test_functions_of_one_name_are_logged_under_two() -> None:
    def make(value: float) -> Any:
        def score(prompt: Prompt, response: str) -> float:
            return value

        return wrap_function(score, name="score")

    reward = graded(make(1.0), make(2.0))
    assert isinstance(reward, Reward) and reward.extra == {"reward/score": 1.0, "reward/score_2": 2.0}


def test_a_function_of_weight_0_is_logged_and_may_fail() -> None:
    def one(prompt: Prompt, response: str) -> float:
        return 1.0

    def broken(prompt: Prompt, response: str) -> float:
        raise ValueError("no")

    assert graded(wrap_function(one), wrap_function(broken, weight=0.0)) == Reward(
        1.0, extra={"reward/" + wrap_function(one).name: 1.0}
    )
    assert isinstance(graded(wrap_function(one, weight=0.0), wrap_function(broken)), str)
    assert isinstance(graded(*as_specs({"name": "default", "weight": 0.0})), str)  # no rule for this row


def test_each_part_may_fail_on_another_response_and_only_that_one_has_no_reward() -> None:
    a = Part("a", Fixed(Reward(1.0), "one broke", Reward(3.0), "both broke"))
    b = Part("b", Fixed(Reward(10.0), Reward(20.0), "two broke", "both broke too"), -1.0)
    done, _ = mixed(a, b, n=4)
    found = [r.reward.score if r.reward is not None else r.failure for r in done]
    assert found == [-9.0, "a: one broke", "b: two broke", "a: both broke"]


def test_a_logged_part_gives_its_accuracy_notes_and_score_but_no_noise() -> None:
    logged = Part("judge", Fixed(Reward(0.5, 1.0, {"x": 1.0}, noise=0.5, notes={"reason": "so"})), 0.0, "judge")
    main = Part("rule", Fixed(Reward(2.0, 0.0, {"x": 2.0})))
    (done,), _ = mixed(logged, main)
    assert done.reward == Reward(
        2.0, 1.0, {"x": 2.0, "reward/judge": 0.5, "reward/rule": 2.0}, noise=0.0, notes={"judge": {"reason": "so"}}
    )


def test_disagreement_adds_up_over_groups_and_over_parts_of_a_kind() -> None:
    rule = Part("rule", Fixed(Reward(1.0, acc=1.0), Reward(0.0, acc=0.0)))
    first = Part("one", Fixed(Reward(0.0), Reward(1.0)), 1.0, "judge")
    second = Part("two", Fixed(Reward(0.5), Reward(0.5)), 1.0, "judge")
    model = Part("three", Fixed(Reward(1.0), Reward(2.0)), 0.0, "model", orders=True)
    scorer = MixedScorer([first, second, rule, model])
    for _ in range(3):
        scorer.submit(group(2))
    scorer.collect(1)
    assert scorer.state_dict() == {"judge": [3.0, 4], "model": [1.0, 1]}
    scorer.collect()
    metrics = scorer.observe()
    assert metrics["judge/disagreement"] == Metric.mean(9.0, 12)
    assert metrics["reward_model/disagreement"] == Metric.mean(3.0, 3)
    assert metrics["judge/calls"] == Metric("sum", 4.0) and scorer.state_dict() == {}  # of all four


def test_closing_drops_groups_that_were_not_collected() -> None:
    scorer = MixedScorer([Part("a", Fixed(Reward(1.0)))])
    scorer.submit(group(1))
    scorer.close()
    scorer.parts[0].scorer.collect()
    assert scorer.collect() == []


def test_sides_of_one_half() -> None:
    assert wrong_verdicts([(0.5, 0.5), (0.5, 0.49), (0.49, 0.5), (0.0, 1.0), (1.0, 0.0)]) == (4.0, 5)
    assert wrong_verdicts([]) == (0.0, 0)
    assert wrong_order([(0.5, 1.0), (0.0, 1.0), (1.0, 0.0)]) == (2.5, 3)
