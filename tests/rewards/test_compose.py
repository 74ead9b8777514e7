"""Weighted composition, managers, shaping: values worked out by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.rewards.compose import Finishing, Grader, Overlong, RewardScale, as_specs, build_grading, manage
from gspo.rewards.functions import Response, RewardSpec, wrap_function
from gspo.rewards.protocol import RewardError
from gspo.rewards.shaping import format_reward, length_penalty, overlong_penalty, repetition_penalty
from gspo.types import Prompt, Reward, Rollout

PROMPT = Prompt("row-1", (), (), "exact", "abc")


def constant(score: float, **kwargs: Any) -> Any:
    def fn(prompt: Prompt, response: str) -> Reward:
        return Reward(score, **kwargs)

    return fn


def grade(rewards: Any, text: str = "abc") -> Any:
    return Grader(as_specs(rewards)).grade(PROMPT, [Response(text)])[0]


def test_weighted_sum_keeps_the_first_acc_and_each_part() -> None:
    parts = [
        wrap_function(constant(2.0, extra={"a": 1.0}), name="one", weight=0.5),
        wrap_function(constant(-1.0, acc=1.0), name="two", weight=3.0),
        wrap_function(constant(4.0, acc=0.0), name="three"),
    ]
    reward = grade(parts)
    assert reward.score == 0.5 * 2 - 3 + 4
    assert reward.acc == 1.0
    assert reward.extra == {"a": 1.0, "reward/one": 2.0, "reward/two": -1.0, "reward/three": 4.0}


def test_a_failed_part_makes_the_whole_missing() -> None:
    def failing(prompt: Prompt, response: str) -> float:
        raise KeyError("lost")

    assert "KeyError" in grade([constant(1.0), failing, constant(2.0)])


def test_a_sum_that_is_not_finite_makes_the_whole_missing() -> None:
    parts = [wrap_function(constant(1e308), name="huge", weight=10.0), wrap_function(constant(1.0), name="one")]
    assert grade(parts) == "the weighted sum of huge, one is inf, expected a finite number"


def test_a_single_reward_is_passed_on_untouched() -> None:
    assert grade(constant(0.25, acc=1.0, extra={"x": 2.0})) == Reward(0.25, 1.0, {"x": 2.0})


def test_the_weight_of_a_single_reward_counts_and_a_missing_acc_stays_missing() -> None:
    half = grade(wrap_function(constant(3.0, extra={"x": 2.0}), name="one", weight=0.5))
    assert half == Reward(1.5, None, {"x": 2.0, "reward/one": 3.0})
    assert grade([constant(1.0), constant(2.0)]).acc is None


def test_random_rewards_depend_on_the_row_and_the_responses_alone() -> None:
    """Whichever worker grades a response, and in which order, a reward that draws random numbers is the same."""

    def drawing(prompt: Prompt, response: str) -> float:
        return random.random() + float(np.random.rand())

    def scores(*texts: str) -> list[float]:
        handle, _ = build_grading([wrap_function(drawing)])
        return [handle((PROMPT, [Response(text)]))[0]["score"] for text in texts]

    state = random.getstate(), np.random.get_state()
    try:
        first, second = scores("a", "b"), scores("b", "a")
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
    assert first == second[::-1] and first[0] != first[1]


def test_default_is_chosen_by_data_source() -> None:
    assert grade(None).score == 1.0
    unknown = Prompt("row-9", (), (), "poetry", "abc")
    failure = Grader(as_specs(None)).grade(unknown, [Response("abc")])[0]
    assert isinstance(failure, str) and "'poetry'" in failure and "custom_reward_function.path" in failure


def test_specs_come_as_names_files_dicts_and_functions() -> None:
    assert as_specs("math") == [RewardSpec("math")]
    assert as_specs("dir/f.py:score") == [RewardSpec("score", "dir/f.py")]
    assert as_specs([{"name": "format", "weight": 0.1}]) == [RewardSpec("format", weight=0.1)]
    for bad in ([], {"nam": "x"}, 3):
        with pytest.raises(RewardError):
            as_specs(bad)  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="no built-in reward 'mth'"):
        Grader(as_specs("mth"))


def test_naive_changes_nothing_and_dapo_fills_acc() -> None:
    reward = Reward(0.5)
    assert manage(reward, 10, "naive", None) is reward
    assert manage(reward, 10, "dapo", None).acc == 0.5
    assert manage(Reward(0.5, acc=0.0), 10, "dapo", None).acc == 0.0


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (12, 0.0), (14, -0.5), (15, -0.75), (16, -1.0), (40, -1.0)])
def test_overlong_penalty_of_dapo(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=16, buffer=4) == penalty
    managed = manage(Reward(1.0), length, "dapo", Overlong(16, 4, factor=2.0, log=True))
    assert managed.score == 1.0 + 2 * penalty and managed.acc == 1.0
    assert managed.extra == {"overlong_reward": 2 * penalty, "overlong": float(penalty < 0)}
    quiet = manage(Reward(1.0, acc=0.0), length, "dapo", Overlong(16, 4, factor=2.0))
    assert quiet == Reward(1.0 + 2 * penalty, 0.0)


@pytest.mark.parametrize(
    ("scale", "scores", "noise"),
    [
        (RewardScale(), (-3.0, 0.5, 3.0), 0.25),
        (RewardScale(scale=2.0, bias=0.5), (-5.0, 2.0, 7.0), 0.5),
        (RewardScale(scale=2.0, bias=0.5, clip=4.0), (-4.0, 2.0, 4.0), 0.5),
        (RewardScale(scale=-1.0, clip=1.0), (1.0, -0.5, -1.0), 0.25),
    ],
)
def test_a_score_is_shifted_then_scaled_then_clipped_and_its_noise_is_scaled(scale, scores, noise) -> None:
    for before, after in zip((-3.0, 0.5, 3.0), scores, strict=True):
        assert scale.apply(Reward(before, 1.0, {"x": 3.0}, noise=0.25)) == Reward(after, 1.0, {"x": 3.0}, noise=noise)


def test_a_weighted_sum_keeps_the_noise_and_the_notes_of_its_parts() -> None:
    def unsure(prompt: Prompt, response: str) -> Reward:
        return Reward(1.0, noise=0.2, notes={"why": "vague"})

    grader = Grader([wrap_function(unsure, weight=-0.5), wrap_function(lambda prompt, response: 2.0, name="two")])
    (graded,) = grader.grade(Prompt("row", (), (), "nothing", None), [Response("x")])
    assert isinstance(graded, Reward)
    assert (graded.score, graded.noise, graded.notes) == (1.5, 0.1, {"why": "vague"})


def test_settings_of_the_default_reward_go_to_the_built_in_that_they_name() -> None:
    spec = RewardSpec("default", weight=0.5, kwargs={"format": {"tags": ("a",)}, "exact": {}})
    form = Prompt("row", (), (), "format", None)
    assert Grader([spec]).grade(form, [Response("<a>x</a>")]) == [Reward(0.5, None, {"reward/format": 1.0})]


def test_the_overlong_penalty_counts_what_the_model_wrote_and_comes_before_the_scale() -> None:
    rollout = Rollout((5,) * 20, (0.0,) * 20, (1,) * 14 + (0,) * 6, (0,) * 20, "stop", text="x" * 99)
    finishing = Finishing("dapo", Overlong(16, 4), RewardScale(scale=2.0))
    assert finishing.apply(rollout, Reward(1.0)).reward == Reward(2 * (1.0 - 0.5), 1.0)
    failed = finishing.apply(rollout, "it broke")
    assert failed.reward is None and failed.failure == "it broke"


def test_overlong_buffer_must_fit() -> None:
    assert [overlong_penalty(length, 16, 1, 3.0) for length in (15, 16, 17)] == [0.0, -3.0, -3.0]
    for buffer in (0, 17):
        with pytest.raises(ValueError, match="max_length=16"):
            overlong_penalty(1, 16, buffer)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("before <think>a</think><answer>b</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think> and <answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward(text: str, score: float) -> None:
    assert format_reward(text) == score


def test_repetition_penalty_counts_repeated_ngrams() -> None:
    assert repetition_penalty("a b c d e f", ngram=2) == 0.0
    assert repetition_penalty("a b a b a b", ngram=2) == pytest.approx(2 / 5 - 1)
    assert repetition_penalty("one two", ngram=4) == 0.0


@given(st.text(), st.integers(1, 5))
def test_repetition_penalty_is_between_minus_one_and_zero(text: str, ngram: int) -> None:
    assert -1.0 < repetition_penalty(text, ngram) <= 0.0


def test_length_shaping() -> None:
    assert [length_penalty(n, 100, free=50) for n in (0, 50, 75, 100, 300)] == [0.0, 0.0, -0.5, -1.0, -1.0]


def failing(text: str) -> Any:
    def fn(prompt: Prompt, response: str) -> float:
        raise RewardError(text)

    return fn


def part(fn: Any, weight: float, name: str = "f") -> Any:
    return wrap_function(fn, name=name, weight=weight)


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([part(failing("one"), 1.0), part(failing("two"), 2.0)], "one"),
        ([part(failing("one"), 0.0), part(failing("two"), 2.0)], "two"),  # the failure that left no reward is named
        ([part(failing("one"), 0.0), part(failing("two"), 2.0), part(constant(1.0), 1.0)], "two"),
        ([part(failing("one"), 0.0), part(failing("two"), 0.0)], "one"),
        ([part(failing("one"), 0.0)], "one"),
        ([part(failing("one"), -1.0), part(constant(1.0), 1.0)], "one"),
        ([part(constant(1.0), 0.0), part(failing("two"), 0.0)], Reward(0.0, None, {"reward/f": 1.0})),
        ([part(constant(3.0, acc=1.0), 0.0)], Reward(0.0, 1.0, {"reward/f": 3.0})),
        ([part(constant(3.0), -2.0)], Reward(-6.0, None, {"reward/f": 3.0})),
    ],
)
def test_weights_decide_which_failure_counts(parts: Any, wanted: str | Reward) -> None:
    got = grade(parts)
    if isinstance(wanted, Reward):
        assert got == wanted
    else:
        assert got.startswith("reward function f") and got.endswith(f"response 0: {wanted}")


def test_later_parts_overwrite_metrics_of_one_name_and_names_are_counted_up() -> None:
    parts = [
        part(constant(1.0, extra={"x": 1.0, "y": 1.0, "reward/f": 9.0}), 1.0),
        part(constant(2.0, extra={"x": 2.0}), 1.0),
        part(constant(4.0), 1.0),
    ]
    extra = {"x": 2.0, "y": 1.0, "reward/f": 1.0, "reward/f_2": 2.0, "reward/f_3": 4.0}
    assert grade(parts) == Reward(7.0, None, extra)


def test_every_response_of_a_row_without_a_reward_is_a_failure_of_its_own() -> None:
    prompt = Prompt("row-9", (), (), "poetry", "abc")
    failures = Grader(as_specs(None)).grade(prompt, [Response("a", index=4), Response("b", index=7)])
    assert [str(failure).partition(": ")[0] for failure in failures] == [
        "row 'row-9', response 4",
        "row 'row-9', response 7",
    ]


def test_several_responses_keep_their_order_through_several_rewards() -> None:
    def length(prompt: Prompt, response: str) -> float:
        return float(len(response))

    graded = Grader([part(length, 1.0, "a"), part(length, 10.0, "b")]).grade(PROMPT, [Response("xxx"), Response("y")])
    assert [reward.score for reward in graded if isinstance(reward, Reward)] == [33.0, 11.0]


def test_a_grading_handler_imports_first_and_says_what_its_functions_are(tmp_path: Any, monkeypatch: Any) -> None:
    def batched(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    imported = []
    for name in ("one", "two", "three"):
        imported.append(tmp_path / f"imported_before_grading_{name}.py")
        imported[-1].write_text(f"open({str(tmp_path / name)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, single = build_grading([wrap_function(constant(1.0), name="one"), RewardSpec("default")])
    _, whole = build_grading([wrap_function(constant(1.0), name="one"), wrap_function(batched, name="two")])
    assert single["whole_group"] is False and whole["whole_group"] is True
    assert [name.partition(" (")[0] for name in single["names"]] == ["one"]
    assert [name.partition(" (")[0] for name in whole["names"]] == ["one", "two"]
    assert all(__file__ in name for name in whole["names"])
    build_grading([RewardSpec("exact")], preload=["no_such_module_at_all", *map(str, imported[:2]), imported[2].stem])
    assert all((tmp_path / name).exists() for name in ("one", "two", "three"))


def test_random_rewards_differ_where_the_same_letters_are_cut_otherwise_and_may_keep_the_state() -> None:
    def drawing(prompt: Prompt, response: str) -> float:
        return random.random()

    def score(uid: str, *texts: str, seeded: bool = True) -> float:
        handle, _ = build_grading([wrap_function(drawing)], seeded=seeded)
        return handle((Prompt(uid, (), (), "exact", ""), [Response(text) for text in texts]))[0]["score"]

    state = random.getstate(), np.random.get_state()
    try:
        drawn = [
            score("r", "ab", "c"),
            score("r", "a", "bc"),
            score("ra", "b", "c"),
            score("r", "ab"),
            score("r", "\ud800"),
        ]
        assert len(set(drawn)) == len(drawn) and drawn[0] == score("r", "ab", "c")
        random.seed(5)
        expected = random.random()
        random.seed(5)
        assert score("r", "ab", seeded=False) == expected
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])


def test_specs_keep_all_their_settings() -> None:
    item = {"name": "f", "path": "a.py", "weight": -0.5, "kwargs": {"k": 1}}
    (spec,) = as_specs(item)
    assert spec == RewardSpec("f", "a.py", -0.5, {"k": 1}) and spec.key == "reward.functions: path"  # type: ignore[union-attr]
    assert as_specs(None) == [RewardSpec("default")]
    assert as_specs(("exact", RewardSpec("math"))) == [RewardSpec("exact"), RewardSpec("math")]
    assert as_specs("a:b.py:c.d") == [RewardSpec("c.d", "a:b.py")]
    assert as_specs(constant(1.0))[0].weight == 1.0
    loaded = wrap_function(constant(1.0))
    assert as_specs(loaded) == [loaded]
    with pytest.raises(RewardError, match="only name, path, weight and kwargs are known"):
        as_specs({"name": "f", "wieght": 1.0})


@pytest.mark.parametrize("manager", ["naive", "batch", "prime"])
def test_managers_other_than_dapo_leave_a_missing_accuracy_missing(manager: Any) -> None:
    rollout = Rollout((5,) * 20, (0.0,) * 20, (1,) * 20, (0,) * 20, "stop")
    assert Finishing(manager).apply(rollout, Reward(0.5)).reward == Reward(0.5)
    scaled = Finishing(manager, scale=RewardScale(scale=3.0)).apply(rollout, Reward(0.5, 1.0))
    assert scaled.reward == Reward(1.5, 1.0)


def test_the_overlong_penalty_leaves_the_rest_of_the_reward() -> None:
    before = Reward(1.0, None, {"x": 3.0}, noise=0.5, notes={"reason": "so"})
    after = manage(before, 13, "dapo", Overlong(16, 4, log=True))
    extra = {"x": 3.0, "overlong_reward": -0.25, "overlong": 1.0}
    assert after == Reward(0.75, 1.0, extra, noise=0.5, notes={"reason": "so"})
    assert manage(before, 12, "dapo", Overlong(16, 4, log=True)).extra["overlong"] == 0.0
    assert before.extra == {"x": 3.0}
    assert manage(before, 2, "dapo", Overlong(4, 4)).score == 0.5  # a buffer as long as the limit


@pytest.mark.parametrize(
    ("text", "tags", "score"),
    [
        ("<a>x</a>", ("a",), 1.0),
        ("<a>x</a><b>y</b><c>z</c>", ("a", "b", "c"), 1.0),
        ("<a>x</a><a>y</a>", ("a",), 0.0),
        ("<a>x</a></a>", ("a",), 0.0),
        ("<a>x</a><b> \n</b>", ("a", "b"), 0.0),
        ("<a>x<b>y</b></a>", ("a", "b"), 0.0),
        ("</a>x<a>", ("a",), 0.0),
        ("\n <a>x</a> \n <b>y</b> \n", ("a", "b"), 1.0),
        ("<a>x</a> <b>y</b> end", ("a", "b"), 0.0),
    ],
)
def test_the_format_of_other_tags(text: str, tags: tuple[str, ...], score: float) -> None:
    assert format_reward(text, tags) == score


def test_repetition_at_its_limits() -> None:
    assert repetition_penalty("a a", 1) == -0.5
    assert repetition_penalty("a b c d", 4) == 0.0 and repetition_penalty("a a a a a", 4) == -0.5
    assert repetition_penalty("a b c d a b c d") == pytest.approx(4 / 5 - 1)
    assert repetition_penalty(" ".join(map(str, range(20_000))) + " 0 0 0", 1) == 0.0  # words after 20,000 are not read
    with pytest.raises(ValueError, match="ngram=0"):
        repetition_penalty("a", 0)


def test_length_penalty_at_its_limits() -> None:
    assert [length_penalty(n, 10) for n in (0, 1, 9, 10, 11)] == [0.0, -0.1, -0.9, -1.0, -1.0]
    for free in (-1, 10):
        with pytest.raises(ValueError, match="less than max_length=10"):
            length_penalty(1, 10, free)
