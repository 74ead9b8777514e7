"""Math grading: extraction, values, verdicts, hostile answers, equal verdicts from everywhere."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.rewards.graders import symbolic
from gspo.rewards.graders.answers import extract_answer
from gspo.rewards.graders.math import compare_values, grade_math, is_symbolic
from gspo.rewards.graders.values import Number, clean, read_number, read_value
from gspo.rewards.protocol import RewardError
from tests.faults.hostile_math import hostile_answers
from tests.faults.reward_rows import pair_verdicts
from tests.support.math_pairs import make_pairs


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so\n#### 72", "72"),
        ("#### 1\n#### 2", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} #### 2", "2"),
        (r"#### 2 \boxed{1}", "1"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a_{1}^{2}} {x}", "a_{1}^{2}"),
        (r"\boxed 7 is it", "7"),
        (r"\boxed{5", "5"),
        ("The answer is 12. I hope it helps.", "12"),
        ("answer is 1; no, the answer is: **3.5**", "3.5"),
        ("Answer: $x+1$", "$x+1$"),
        ("we get 3, then 1,234.50 dollars", "1,234.50"),
        ("about 3/4 of it", "3/4"),
        ("no number at all", None),
        ("", None),
    ],
)
def test_extraction(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("1,234,567", 1234567),
        ("1{,}234", 1234),
        ("0.125", Fraction(1, 8)),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"\frac34", Fraction(3, 4)),
        (r"2\frac{1}{4}", Fraction(9, 4)),
        ("2 1/4", Fraction(9, 4)),
        (r"1.5 \times 10^{3}", 1500),
        ("2e-3", Fraction(1, 500)),
        ("$5.00", 5),
        (r"\$5", 5),
        ("5 cm", 5),
        (r"5\text{ cm}^2", 5),
        ("60 miles per hour", 60),
        ("5 meters squared", 5),
        (r"90^\circ", 90),
        ("x = -3", -3),
        ("４２", 42),
        ("−3", -3),
    ],
)
def test_numbers_are_read_exactly(text: str, value: Any) -> None:
    number = read_value(clean(text))
    assert isinstance(number, Number) and number.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "5x",
        "2 + 3",
        r"\sqrt{2}",
        "1/0",
        r"\frac{1}{0}",
        "1,23",
        "1e9999",
        "4²",
        "٤٢",
        "2ab",
        "x^2",
        "9**9",
        "3!",
        "5 million dollars",
        "5 squared",
        "5 plus six",
    ],
)
def test_what_is_not_a_plain_number_is_not_read_as_one(text: str) -> None:
    assert read_number(clean(text)) is None


@given(st.fractions(max_denominator=10**6), st.booleans())
def test_every_fraction_is_read_back(value: Fraction, latex: bool) -> None:
    a, b = abs(value.numerator), value.denominator
    text = ("-" if value < 0 else "") + (f"\\frac{{{a}}}{{{b}}}" if latex else f"{a}/{b}")
    number = read_number(clean(text))
    assert number is not None and number.value == value


@given(st.integers(-(10**30), 10**30))
def test_thousands_separators_do_not_matter(value: int) -> None:
    assert grade_math(f"#### {value:,}", str(value)).score == 1.0
    assert grade_math(f"#### {value + 1:,}", str(value)).score == 0.0


@given(st.text(alphabet="0123456789.,/%$\\frac{}()- ex^*=[]", max_size=40), st.text(max_size=60))
def test_grading_never_raises_on_a_response(answer: str, noise: str) -> None:
    for response in (answer, noise, f"\\boxed{{{answer}}}", f"{noise}#### {answer}{noise}"):
        reward = grade_math(response, "17", symbolic=False)
        assert reward.score in (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("0.5", "50%", True),
        ("5%", "0.5", False),
        ("0.333333", "1/3", True),
        ("0.3333", "1/3", False),
        ("5.0000001", "5", False),
        ("1, 2", "2, 1", True),
        (r"\{1,2\}", "2, 1", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "(1, 2)", True),
        ("x=1 or x=2", "1, 2", True),
        ("(C)", r"\text{C}", True),
        ("B", "C", False),
        ("Tuesday", r"\text{tuesday}", True),
        ("seven", "7", False),
    ],
)
def test_plain_values_are_compared_here(answer: str, truth: str, same: bool) -> None:
    assert compare_values(read_value(clean(answer)), read_value(clean(truth))) is same


def test_symbolic_answers_are_graded_in_another_process() -> None:
    code = r"""
import sys
from gspo.rewards import grade_math
assert grade_math("\\boxed{\\sqrt{12}}", "2\\sqrt{3}").score == 1.0
assert grade_math("\\boxed{1+x^2}", "x^2+1").score == 1.0
assert grade_math("\\boxed{1-x^2}", "x^2+1").score == 0.0
assert grade_math("\\boxed{x^2+1}", ["y", "1+x^2"]).score == 1.0
print([m for m in ("sympy", "math_verify", "torch") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_symbolic_is_off_for_gsm8k_and_an_unreadable_truth_is_no_zero() -> None:
    assert grade_math(r"\boxed{2+3}", "5", symbolic=False).score == 0.0
    with pytest.raises(RewardError, match="not a number"):
        grade_math("#### 5", "x+1", symbolic=False)
    with pytest.raises(RewardError, match="empty"):
        grade_math("#### 5", " ")
    for nothing in (None, [], ["5", None]):
        with pytest.raises(RewardError, match="expected an answer"):
            grade_math("#### 5", nothing)


def test_running_out_of_time_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallow(answer: str, truth: str) -> bool:
        try:
            while True:
                pass
        except Exception:
            return False

    monkeypatch.setattr(symbolic, "TIME_LIMIT", 0.05)
    monkeypatch.setattr(symbolic, "_compare", swallow)
    with pytest.raises(RewardError, match="more than"):
        symbolic._limited("a", "b")


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9}}",
        "9**9**9",
        "(a+b)^{99}",
        "999!",
        "x!!",
        r"\binom{99999}{50}",
        "2^{1000}",
        "__class__",
        r"\int x",
        "1e99",
    ],
)
def test_wild_expressions_never_reach_math_verify(text: str) -> None:
    assert not is_symbolic(text)


@pytest.mark.parametrize(
    "text", [r"2\sqrt{3}", "x^2+1", r"\frac{\pi}{4}", "2^{64}", "5!", r"(x+1)^{3}", r"\binom{10}{3}"]
)
def test_ordinary_expressions_do(text: str) -> None:
    assert is_symbolic(text)


def test_exponents_of_the_truth_are_allowed() -> None:
    assert not is_symbolic("(1+x)^{20}") and is_symbolic("(1+x)^{20}", largest=20)


def test_hostile_answers_get_the_right_verdict_and_nothing_runs(tmp_path: Any) -> None:
    canary = tmp_path / "canary"
    answers = hostile_answers(str(canary))
    assert len(answers) == 22
    for answer in answers:
        assert grade_math(answer.response, answer.truth).score == answer.score, answer.name
    assert not canary.exists()


def test_verdicts_are_right_and_the_same_from_threads_and_another_process() -> None:
    count = 100
    one = pair_verdicts(count, 5, 1)
    assert one == "10" * count
    assert pair_verdicts(count, 5, 8) == one
    code = f"from tests.faults.reward_rows import pair_verdicts; print(pair_verdicts({count}, 5, 1))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == one


def test_pairs_cover_every_kind_and_differ() -> None:
    pairs = make_pairs(100)
    assert len({pair.kind for pair in pairs}) == 17
    assert all(pair.right != pair.wrong for pair in pairs)


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("6.67e-11", "6.02e-11", False),
        ("1e-9", "1e-30", False),
        ("1e-300", "1e-299", False),
        ("-1e-9", "1e-9", False),
        ("0.0000001", "0.0000009", False),
        (r"6.67 \times 10^{-11}", "6.02e-11", False),
        ("0.00000012%", "0.00000034%", False),
        ("(1e-9, 2e-9)", "(3e-9, 2e-9)", False),
        ("6.67e-11", "0.0000000000667", True),
        ("6.67431e-11", "6.674e-11", True),
        ("0.333333", "1/3", True),
        ("0.33333333", "1/3", True),
        ("3.1415926", "3.14159265", True),
        ("0.001234567", "0.0012345678", True),
        ("0.052360", "0.0523598776", True),
    ],
)
def test_small_numbers_are_equal_only_when_their_digits_are(answer: str, truth: str, same: bool) -> None:
    assert grade_math(rf"\boxed{{{answer}}}", truth, symbolic=False).score == float(same)
    assert grade_math(rf"\boxed{{{truth}}}", answer, symbolic=False).score == float(same)


@given(st.integers(1, 9999), st.integers(1, 9999), st.integers(5, 250))
def test_numbers_of_different_digits_differ_at_every_scale(a: int, b: int, exponent: int) -> None:
    assert grade_math(rf"\boxed{{{a}e-{exponent}}}", f"{b}e-{exponent}", symbolic=False).score == float(a == b)
