"""Estimates over several answers, and intervals."""

from __future__ import annotations

import itertools

import pytest

from gspo.evaluation.evaluator import Evaluator, best_of, summarise, wilson
from gspo.rollout.engine import SamplingParams
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.types import Group, Prompt, Reward, Rollout, Turn


def test_best_of_is_the_mean_over_all_subsets():
    values = [0.1, 0.9, 0.4, 0.4, 0.0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(values, k))
        assert best_of(values, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


def test_wilson_interval():
    assert wilson(0.9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)  # 9 of 10: the textbook example
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-4)
    low, high = wilson(0.0, 10)
    assert low == 0.0 and high == pytest.approx(0.27753, abs=1e-4)
    assert wilson(0.3, 0) == (0.0, 1.0)


def group(source: str, answers: list[tuple[str, float | None]]) -> Group:
    rollouts = tuple(
        Rollout((1,), (0.0,), (1,), (0,), "stop", text, None if right is None else Reward(right, right))
        for text, right in answers
    )
    return Group(Prompt(f"{source}/{len(answers)}", (), (1,), source), rollouts, 0, 0)


def test_sources_are_apart_missing_rewards_are_left_out_and_the_majority_votes():
    groups = [
        group("a", [("4", 1.0), ("5", 0.0), ("4", 1.0)]),
        group("a", [("1", 0.0), ("1", 0.0), ("2", 1.0)]),
        group("b", [("x", None), ("y", 1.0), ("y", 1.0)]),
    ]
    found = summarise(groups)
    values = {k: m.result() for k, m in found.metrics.items()}
    assert values["val-core/a/acc/mean@3"] == pytest.approx(0.5)
    assert values["val-core/a/acc/best@3"] == 1.0
    assert values["val-core/a/acc/maj@3"] == 0.5
    assert values["val-core/b/acc/mean@3"] == 1.0
    assert values["val-aux/b/reward_failures"] == 1
    assert found.accuracy == pytest.approx((2 / 3 + 1 / 3 + 1.0) / 3)


def test_a_mean_that_is_no_share_has_no_interval():
    """verl's dapo reward manager takes a missing accuracy from the score, which may be -1."""
    assert wilson(-0.5, 10) is None and wilson(1.5, 10) is None
    rewards = [Reward(-1.0, acc=-1.0), Reward(1.0, acc=1.0), Reward(-1.0, acc=-1.0)]
    groups = [
        Group(Prompt(str(i), (), (1,), "task"), (Rollout((1,), (0.0,), (1,), (0,), "stop", reward=reward),), i, 0)
        for i, reward in enumerate(rewards)
    ]
    evaluation = summarise(groups)
    assert evaluation.accuracy == pytest.approx(-1 / 3) and evaluation.interval is None
    assert evaluation.metrics["val-core/task/acc/mean@1"].result() == pytest.approx(-1 / 3)
    assert not any("ci_" in name for name in evaluation.metrics)


def test_the_majority_is_read_from_the_answers_that_have_a_reward():
    """Two of three graded answers are "5", which is wrong; an ungraded one before them shifts nothing."""
    found = summarise([group("a", [("7", None), ("5", 0.0), ("4", 1.0), ("5", 0.0)])])
    assert found.metrics["val-core/a/acc/maj@4"].result() == 0.0
    last = summarise([group("a", [("7", None), ("4", 1.0), ("5", 0.0), ("5", 0.0)])])
    assert last.metrics["val-core/a/acc/maj@4"].result() == 0.0
    tie = summarise([group("a", [("7", None), ("4", 1.0), ("5", 0.0)])])
    assert tie.metrics["val-core/a/acc/maj@3"].result() == 1.0  # the earliest wins


def test_an_interval_counts_questions_whatever_the_number_of_answers():
    one = [group("a", [("x", float(i < 9))]) for i in range(10)]
    four = [group("a", [("x", float(i < 9))] * 4) for i in range(10)]
    for groups in (one, four):
        found = summarise(groups)
        bounds = tuple(found.metrics[f"val-aux/a/acc/ci_{end}"].result() for end in ("low", "high"))
        assert bounds == found.interval == pytest.approx((0.5958, 0.9821), abs=1e-4)


def test_every_question_counts_once_in_every_mean():
    """A question with one graded answer weighs as much as one with four."""
    groups = [group("a", [("x", 1.0)] + [("x", 0.0)] * 3), group("a", [("x", 1.0)] + [("x", None)] * 3)]
    found = summarise(groups)
    for kind in ("acc", "reward"):
        assert found.metrics[f"val-core/a/{kind}/mean@4"].result() == pytest.approx((0.25 + 1.0) / 2)
        assert found.metrics[f"val-core/a/{kind}/best@2"].result() == pytest.approx((0.5 + 1.0) / 2)
    assert found.accuracy == pytest.approx(0.625)
    assert found.metrics["val-aux/a/reward_failures"].result() == 3


def test_best_of_fewer_than_all_is_below_the_best_of_all():
    values = {k: m.result() for k, m in summarise([group("a", [("x", 1.0)] + [("y", 0.0)] * 3)]).metrics.items()}
    assert [values[f"val-core/a/acc/best@{k}"] for k in (2, 4)] == [pytest.approx(0.5), 1.0]


def test_an_accuracy_that_is_missing_anywhere_is_not_reported_at_all():
    """A reward without `acc` says nothing about right and wrong: it is neither 0 nor left out of the mean."""
    rewards = (Reward(0.7, acc=1.0), Reward(0.3))
    rollouts = tuple(Rollout((1,), (0.0,), (1,), (0,), "stop", reward=reward) for reward in rewards)
    found = summarise([Group(Prompt("a/0", (), (1,), "a"), rollouts, 0, 0)])
    assert found.accuracy is None and found.interval is None
    assert not any("/acc/" in name for name in found.metrics)
    assert found.metrics["val-core/a/reward/mean@2"].result() == pytest.approx(0.5)


def test_a_record_has_score_accuracy_length_and_text_of_every_answer():
    rollouts = (
        Rollout((1, 2), (0.0, 0.0), (1, 1), (0, 0), "length", "long", Reward(0.25, acc=1.0)),
        Rollout((1,), (0.0,), (1,), (0,), "stop", "short"),
    )
    prompt = Prompt("a/0", ({"role": "user", "content": "q"},), (1,), "a", ground_truth="4")
    (record,) = summarise([Group(prompt, rollouts, 0, 0)]).records()
    assert record["responses"] == [
        {"text": "long", "score": 0.25, "acc": 1.0, "num_tokens": 2, "finish_reason": "length"},
        {"text": "short", "score": None, "acc": None, "num_tokens": 1, "finish_reason": "stop"},
    ]
    assert {k: record[k] for k in record if k != "responses"} == {
        "uid": "a/0",
        "data_source": "a",
        "ground_truth": "4",
        "messages": [{"role": "user", "content": "q"}],
    }


class Judge:
    """Rewards the answer "right"."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def submit(self, group: Group) -> None:
        self.groups.append(group)

    def collect(self, num: int | None = None) -> list[Group]:
        groups, self.groups = self.groups, []
        return [g.with_rollouts(tuple(r.with_reward(_of(r)) for r in g.rollouts)) for g in groups]

    def close(self) -> None: ...


def _of(rollout: Rollout) -> Reward:
    right = float(rollout.text == "right")
    return Reward(right, acc=right)


@pytest.mark.parametrize("batch_size", [None, 2, 5])
def test_every_question_is_asked_once_with_randomness_of_its_own(batch_size):
    """Batches divide the work only: question i has submission i, whatever their size."""
    seen = []

    def script(prompt: Prompt, submission: int, index: int) -> ScriptedAnswer:
        seen.append((prompt.uid, submission, index))
        return ScriptedAnswer((1, 2), "right" if submission == 4 and index else "wrong")

    prompts = [Prompt(f"a/{i}", (), (1,), "a") for i in range(5)]
    params = SamplingParams(max_tokens=2)
    evaluator = Evaluator(ScriptedEngine(script), Judge(), prompts, params, n=2, seed=7, batch_size=batch_size)
    evaluation = evaluator.run(version=3)
    assert sorted(set(seen)) == [(f"a/{i}", i, j) for i in range(5) for j in range(2)]
    assert [g.prompt.uid for g in evaluation.groups] == [p.uid for p in prompts]
    assert {g.version for g in evaluation.groups} == {3}
    assert evaluation.accuracy == pytest.approx(0.1)


def test_failed_rewards_are_counted_and_the_first_is_named():
    broken = [Rollout((1,), (0.0,), (1,), (0,), "stop", "x", None, text) for text in ("it broke", "later")]
    fine = group("a", [("4", 1.0), ("5", 0.0)])
    assert summarise([fine]).problem() is None
    some = Group(Prompt("b", (), (1,), "a"), (*fine.rollouts, *broken), 0, 0)
    assert summarise([fine, some]).problem() == (
        "2 of 6 rewards of the evaluation failed and its accuracy leaves them out; the first: it broke"
    )


def test_an_evaluation_says_its_share_of_missing_rewards_and_when_that_is_too_large_to_be_a_best_one():
    def mixed(source: str, present: int, missing: int) -> Group:
        lost = Rollout((1,), (0.0,), (1,), (0,), "stop", "x", None, "it broke")
        there = Rollout((1,), (0.0,), (1,), (0,), "stop", "x", Reward(1.0, 1.0))
        return Group(Prompt(source, (), (1,), source), (*[there] * present, *[lost] * missing), 0, 0)

    whole = summarise([mixed("a", 2, 0)])
    assert not any(name.endswith("reward_failures/share") for name in whole.metrics)
    found = summarise([mixed("a", 3, 1), mixed("a", 0, 1), mixed("b", 1, 0), mixed("org/c", 2, 2)])
    shares = {name: m.result() for name, m in found.metrics.items() if name.endswith("reward_failures/share")}
    assert shares == {"val-aux/a/reward_failures/share": 0.4, "val-aux/org/c/reward_failures/share": 0.5}
    assert "never a best one" not in (found.problem() or "")
    assert "more than half of a data source: it is never a best one" in (summarise([mixed("a", 1, 2)]).problem() or "")


def test_the_length_of_an_answer_counts_the_tokens_of_the_model_alone():
    masks = (1, 1, 1, 1), (0, 1, 0, 0)
    rollouts = tuple(Rollout((1,) * 4, (0.0,) * 4, mask, (0,) * 4, "stop", "x", Reward(1.0, 1.0)) for mask in masks)
    found = summarise([Group(Prompt("a", (), (1,), "task"), rollouts, 0, 0)])
    assert found.metrics["val-aux/task/response_length/mean"].result() == 2.5
    assert [r["num_tokens"] for r in found.records()[0]["responses"]] == [4, 1]


@pytest.mark.parametrize(
    ("k", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (5, [2, 4, 5]), (8, [2, 4, 8]), (9, [2, 4, 8, 9])]
)
def test_best_of_powers_of_2_and_of_all_answers_are_reported(k, sizes):
    found = summarise([group("a", [("x", float(i == 0)) for i in range(k)])]).metrics
    core = {name for name in found if name.startswith("val-core/a/acc/")}
    majority = [f"val-core/a/acc/maj@{k}"] if k > 1 else []
    assert core == {f"val-core/a/acc/mean@{k}", *majority, *(f"val-core/a/acc/best@{size}" for size in sizes)}
    for size in sizes:  # one right answer of k: the chance that a draw of `size` holds it
        assert found[f"val-core/a/acc/best@{size}"].result() == pytest.approx(size / k)


def test_questions_without_any_reward_count_as_failures_only():
    groups = [
        group("a", [("4", 1.0), ("5", 1.0)]),
        group("a", [("4", None), ("5", None)]),
        group("a", [("4", 0.0), ("5", None)]),
        group("b", [("4", None)]),
    ]
    found = summarise(groups)
    values = {name: metric.result() for name, metric in found.metrics.items()}
    assert found.accuracy == values["val-core/a/acc/mean@2"] == 0.5
    bounds = (values["val-aux/a/acc/ci_low"], values["val-aux/a/acc/ci_high"])
    assert found.interval == bounds == wilson(0.5, 2)
    assert values["val-core/a/acc/best@2"] == values["val-core/a/acc/maj@2"] == 0.5
    assert (values["val-aux/a/reward_failures"], values["val-aux/b/reward_failures"]) == (3, 1)
    failures = {"val-aux/b/reward_failures", "val-aux/b/reward_failures/share"}
    assert {name for name in values if "/b/" in name} == failures | {"val-aux/b/response_length/mean"}
    assert found.metrics["val-aux/a/reward_failures"].kind == "sum"
    empty = summarise([])
    assert (empty.metrics, empty.accuracy, empty.interval, empty.problem()) == ({}, None, None, None)


def test_a_source_without_accuracy_leaves_that_of_another_source_alone():
    plain = Rollout((1,), (0.0,), (1,), (0,), "stop", "x", Reward(3.0))
    found = summarise([group("a", [("x", 1.0)]), Group(Prompt("b", (), (1,), "b"), (plain,), 0, 0)])
    assert found.accuracy is None is found.interval  # of all sources there is none
    assert found.metrics["val-core/a/acc/mean@1"].result() == 1.0
    assert "val-core/b/acc/mean@1" not in found.metrics
    assert found.metrics["val-core/b/reward/mean@1"].result() == 3.0


def test_answers_vote_by_their_final_value_however_it_is_written():
    texts = [("so \\boxed{4}", 1.0), ("7", 0.0), (" the answer is \\boxed{4}", 1.0), ("7 ", 0.0), ("#### 4", 1.0)]
    assert summarise([group("a", texts)]).metrics["val-core/a/acc/maj@5"].result() == 1.0
    assert (
        summarise([group("a", [("x", 1.0), (" y", 0.0), ("y\n", 0.0)])]).metrics["val-core/a/acc/maj@3"].result() == 0.0
    )


def test_a_record_has_the_parts_of_a_reward_and_the_notes_of_a_judge_where_there_are_any():
    reward = Reward(1.0, extra={"reward/style": 0.5, "length": 9.0}, notes={"verdict": "good"})
    rollouts = (
        Rollout((1,), (0.0,), (1,), (0,), "stop", "x", reward, turns=(Turn(0, 1, text="hello"),)),
        Rollout((1,), (0.0,), (1,), (0,), "stop", "y", Reward(0.0, extra={"length": 1.0})),
    )
    first, second = summarise([Group(Prompt("a", (), (1,)), rollouts, 0, 0)]).records()[0]["responses"]
    assert (first["extra"], first["notes"]) == ({"reward/style": 0.5}, {"verdict": "good"})
    assert [turn["text"] for turn in first["turns"]] == ["hello"]
    assert set(second) == {"text", "score", "acc", "num_tokens", "finish_reason"}


def test_figures_of_turns_are_reported_by_source_as_means_and_shares():
    turns = (Turn(0, 1, num_calls=2, num_errors=1), Turn(1, 2))
    agent = Rollout((1, 1), (0.0,) * 2, (1, 1), (0, 0), "stop", "x", Reward(1.0, acc=1.0), turns=turns)
    found = summarise([Group(Prompt("a", (), (1,), "a"), (agent,), 0, 0), group("b", [("x", 1.0)])]).metrics
    names = {name for name in found if name.startswith("val-aux/a/turns") or "tool" in name}
    assert names and all(name.startswith("val-aux/a/") and name.endswith(("/mean", "/share")) for name in names)


def test_an_evaluation_asks_with_its_own_seed_sampling_and_version():
    seen = []

    class Recording(ScriptedEngine):
        def generate(self, requests):
            seen.append(list(requests))
            return super().generate(seen[-1])

    prompts = [Prompt(f"a/{i}", (), (1,), "a") for i in range(3)]
    params = SamplingParams(max_tokens=2, temperature=0.3)
    engine = Recording(lambda prompt, submission, index: ScriptedAnswer((1, 2), "right"))
    Evaluator(engine, Judge(), prompts, params, n=2, seed=7, batch_size=2).run(version=3)
    assert [len(requests) for requests in seen] == [2, 1]
    flat = [request for requests in seen for request in requests]
    assert [(r.submission, r.n, r.version, r.seed) for r in flat] == [(i, 2, 3, 7) for i in range(3)]
    assert all(r.params == params for r in flat)
    nobody = Evaluator(engine, Judge(), [], params, n=2, seed=7).run(version=0)
    assert nobody.groups == [] and nobody.accuracy is None


def test_an_interval_lies_within_0_and_1_at_both_ends():
    assert wilson(1.0, 3) == (pytest.approx(0.43850, abs=1e-4), 1.0)
    assert wilson(0.0, 3) == (0.0, pytest.approx(0.56150, abs=1e-4))
    assert wilson(1.0, 0) == (0.0, 1.0) and wilson(-1e-9, 0) is None


def test_a_metric_keeps_its_name_when_a_reward_of_every_question_is_missing():
    whole = summarise([group("a", [("4", 1.0), ("5", 0.0), ("6", 0.0)]), group("a", [("4", 1.0)] * 3)])
    part = summarise(
        [group("a", [("4", 1.0), ("5", 0.0), ("6", None)]), group("a", [("4", None), ("4", 1.0), ("4", 1.0)])]
    )
    assert set(part.metrics) - set(whole.metrics) == {"val-aux/a/reward_failures/share"}
    assert set(whole.metrics) <= set(part.metrics)
    assert part.metrics["val-core/a/acc/mean@3"].result() == 0.75
    assert part.metrics["val-core/a/acc/best@3"].result() == 1.0  # of the two that are known
    assert part.metrics["val-core/a/acc/best@2"].result() == 1.0
