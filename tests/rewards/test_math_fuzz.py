"""The math grader on anything: a verdict of 0 or 1 for every response, and equal numbers equal however they are written."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.rewards.graders.answers import extract_answer, extract_marked
from gspo.rewards.graders.math import compare_values, grade_math, is_symbolic, powers_are_tame, same_answer
from gspo.rewards.graders.values import Number, clean, read_number, read_value
from gspo.rewards.protocol import RewardError

PIECES = st.sampled_from(
    ["\\boxed{", "}", "{", "####", "answer is ", "\\frac{1}{2}", "\\dfrac", "10^", "{,}", "%", "$", "-", "e9999", ".", "/0", "1,000", "\\text{", "x=", "\n", "^", "!", "²", "٣", "∞", "\\left(", ")", "[1,2)", " and ", "1 1/2"]
)  # fmt: skip
texts = st.lists(PIECES | st.text(max_size=6) | st.integers(-999, 999).map(str), max_size=12).map("".join)
integers = st.integers(-(10**12), 10**12)


@settings(max_examples=50)
@given(texts, integers)
def test_any_response_is_right_or_wrong(response: str, truth: int):
    got = grade_math(response, truth, symbolic=False)
    assert got.score in (0.0, 1.0) and got.acc == got.score
    assert got.extra == {"answered": float(extract_answer(response) is not None)}


@settings(max_examples=50)
@given(texts)
def test_any_text_is_read_or_left(text: str):
    cleaned = clean(text)
    value = read_value(cleaned)
    assert value is None or compare_values(value, value) is True
    for read in (extract_answer, extract_marked):
        answer = read(text)
        assert answer is None or (answer.strip() == answer and answer)
    is_symbolic(cleaned), powers_are_tame(cleaned)


@settings(max_examples=60)
@given(texts, texts)
def test_any_truth_is_graded_or_refused(response: str, truth: str):
    try:
        grade_math(response, truth, symbolic=False)
    except RewardError as error:
        assert "ground truth" in str(error)


@settings(max_examples=60)
@given(texts, texts)
def test_equality_has_no_direction(a: str, b: str):
    a_value, b_value = read_value(clean(a)), read_value(clean(b))
    assert compare_values(a_value, b_value) == compare_values(b_value, a_value)


def written(number: int) -> list[str]:
    """Ways to write a whole number."""
    grouped = f"{number:,}"
    ways = [
        str(number),
        grouped,
        grouped.replace(",", "{,}"),
        f"{number}.",
        f"{number}.0",
        f"${number}$",
        f"{number} apples",
    ]
    return ways + [
        f"\\text{{{number}}}",
        f"x = {number}",
        f"\\frac{{{2 * number}}}{{2}}",
        f"{number} \\text{{ cm}}",
        f"({number})",
    ]


@settings(max_examples=80)
@given(integers, st.data())
def test_a_whole_number_is_itself_in_every_notation_and_no_other(number: int, data: st.DataObject):
    way = data.draw(st.sampled_from(written(number)))
    assert read_number(clean(way)).value == number
    for response in (f"\\boxed{{{way}}}", f"so 7.\n#### {way}"):
        assert grade_math(response, str(number), symbolic=False).score == 1.0
        assert grade_math(response, str(number + 1), symbolic=False).score == 0.0
        assert grade_math(response, str(-number - 1), symbolic=False).score == 0.0


@settings(max_examples=80)
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_a_fraction_is_read_exactly(above: int, below: int):
    wanted = Fraction(above, below)
    sign = "-" if above < 0 else ""
    for text in (f"{sign}\\frac{{{abs(above)}}}{{{below}}}", f"\\dfrac{{{above}}}{{{below}}}", f"{above}/{below}"):
        number = read_number(clean(text))
        assert isinstance(number, Number) and number.value == wanted and number.places is None
    if wanted.denominator != 1:
        assert not same_answer(f"{above}/{below}", f"{above + 1}/{below}", symbolic=False)


@settings(max_examples=80)
@given(st.decimals(-(10**6), 10**6, places=3))
def test_a_decimal_equals_its_own_digits_only(number):
    text = f"{number:f}"
    assert same_answer(text, text + "0", symbolic=False)
    assert same_answer(f"{text}\\%", text, symbolic=False)
    assert not same_answer(f"{number + 1:f}", text, symbolic=False)


@pytest.mark.parametrize("n", [10, 10_000])
def test_reading_is_linear_in_hostile_text(n: int):
    for text in (
        "\\boxed{" * n,
        "{" * n + "}" * n,
        "####" * n,
        "answer is " * n,
        "1" * n,
        "1," * n,
        "\\text{" * n,
        "9^" * n,
    ):
        grade_math(text, "5", symbolic=False)
