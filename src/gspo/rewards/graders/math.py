"""Grading a math answer: our own parser for plain values, math-verify in a killable process for symbolic answers.

Nothing in a response is evaluated in this process.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from gspo.rewards.graders.answers import extract_answer, extract_marked
from gspo.rewards.graders.symbolic import symbolic_equal
from gspo.rewards.graders.values import Items, Number, Value, clean, read_value
from gspo.rewards.protocol import RewardError
from gspo.types import Reward

_ROUNDED_PLACES = 6
_SIGNIFICANT = 4

_MAX_SYMBOLIC = 300
_MAX_DEPTH = 10
_MAX_DIGITS = 30
_MAX_POWERS = 6
_MAX_FUNCTIONS = 4
_FUNCTIONS = r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp)"
_COMMAND_NAMES = """
    frac dfrac tfrac cfrac sqrt pi cdot times div pm mp le leq ge geq lt gt ne neq in cup cap infty emptyset varnothing
    sin cos tan cot sec csc arcsin arccos arctan log ln exp binom mathbb text mathrm left right begin end pmatrix bmatrix
    matrix alpha beta gamma theta phi lambda mu sigma omega epsilon delta to quad overline ldots dots circ
"""
_COMMANDS = frozenset(_COMMAND_NAMES.split())
_WORDS = frozenset({"sqrt", "pi", "sin", "cos", "tan", "log", "ln", "exp", "or", "and", "pmatrix", "bmatrix", "matrix"})


def grade_math(response: str, truth: Any, *, symbolic: bool = True) -> Reward:
    """Score 1 when the response's final answer equals `truth` (or one of a list of truths), else 0; `acc` is the same.

    RewardError when the truth itself cannot be read. With `symbolic=False` math-verify is never called.
    """
    truths = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    if not truths or None in truths:
        raise RewardError(f"the ground truth is {truth!r}, expected an answer")
    answer = extract_answer(response)
    right = answer is not None and any(same_answer(answer, str(t), symbolic=symbolic) for t in truths)
    return Reward(float(right), acc=float(right), extra={"answered": float(answer is not None)})


def same_answer(answer: str, truth: str, *, symbolic: bool = True) -> bool:
    """Whether two answers are the same: by text, by value, or, when neither decides, by math-verify."""
    truth_text = clean(extract_marked(truth) or truth)
    if not truth_text:
        raise RewardError(f"the ground truth {truth!r} is empty, expected an answer")
    answer_text = clean(answer)
    if "".join(answer_text.split()) == "".join(truth_text.split()):
        return True
    truth_value = read_value(truth_text)
    verdict = compare_values(read_value(answer_text), truth_value)
    if verdict is not None:
        return verdict
    if truth_value is None and (not symbolic or len(truth_text) > _MAX_SYMBOLIC):
        long = f"longer than {_MAX_SYMBOLIC} characters"
        problem = long if symbolic else "not a number (use the reward `math` for other answers)"
        raise RewardError(f"the ground truth {truth[:80]!r} cannot be graded: it is {problem}")
    largest = max(map(int, re.findall(r"(?<![0-9])[0-9]{1,4}(?![0-9])", truth_text)), default=0)
    return symbolic and is_symbolic(answer_text, largest) and symbolic_equal(answer_text, truth_text)


def compare_values(answer: Value | None, truth: Value | None) -> bool | None:
    """Whether two values are the same; None when one of them is None or they cannot be compared here."""
    if answer is None or truth is None:
        return None
    if isinstance(answer, Number) and isinstance(truth, Number):
        return _same_number(answer, truth)
    if isinstance(answer, Items) and isinstance(truth, Items):
        return _same_items(answer, truth)
    if isinstance(answer, Items) or isinstance(truth, Items):
        return None
    return answer == truth


def _same_number(a: Number, b: Number) -> bool:
    """Exact, with two exceptions: `n%` equals n and n/100, and a long decimal equals the numbers that round to it."""
    if a.percent != b.percent:
        percent, plain = (a, b) if a.percent else (b, a)
        return _close(percent.value, percent.places, plain) or _close(percent.value / 100, percent.places, plain)
    return _close(a.value, a.places, b)


def _close(value: Fraction, places: int | None, other: Number) -> bool:
    """Equal; or both not whole, one a decimal of six places or more, and equal when rounded to six places.

    Numbers below 0.001 are rounded to four significant digits instead: to six places all small ones are 0.
    """
    if value == other.value:
        return True
    long = any(p is not None and p >= _ROUNDED_PLACES for p in (places, other.places))
    whole = value.denominator == 1 or other.value.denominator == 1
    if not long or whole:
        return False
    digits = max(_ROUNDED_PLACES, _SIGNIFICANT - 1 - _exponent(max(abs(value), abs(other.value))))
    return round(value, digits) == round(other.value, digits)


def _exponent(value: Fraction) -> int:
    """The power of ten of a positive number's first digit: -3 for 0.001. Exact, however small the number is."""
    exponent = len(str(value.numerator)) - len(str(value.denominator))
    return exponent if value >= Fraction(10) ** exponent else exponent - 1


def _same_items(a: Items, b: Items) -> bool | None:
    """Sets and bare lists are compared in any order, equal brackets item by item; None for different brackets."""
    if len(a.items) != len(b.items):
        return False
    if {a.brackets, b.brackets} <= {"{}", ""}:
        ordered = (sorted(items, key=lambda number: number.value) for items in (a.items, b.items))
        return all(map(_same_number, *ordered))
    return all(map(_same_number, a.items, b.items)) if a.brackets == b.brackets else None


def is_symbolic(text: str, largest: int = 0) -> bool:
    """Whether an answer may go to math-verify: short, shallow, of known commands, without extreme powers.

    A refused answer is wrong unless it was equal as text: a tower of powers or a thousand-digit number is no answer.
    `largest` is the largest number in the truth; exponents up to it are allowed.
    """
    if len(text) > _MAX_SYMBOLIC or not text.isascii() or "__" in text or re.search(r"[0-9.][eE][-+]?[0-9]", text):
        return False
    if not _COMMANDS.issuperset(re.findall(r"\\([a-zA-Z]+)", text)):
        return False
    words = re.findall(r"[a-zA-Z]{2,}", re.sub(r"\\[a-zA-Z]+", " ", text))
    if not all(word.lower() in _WORDS or len(word) == 2 for word in words):
        return False
    long_number = re.search(rf"[0-9]{{{_MAX_DIGITS + 1}}}", text)
    return _depth(text) <= _MAX_DEPTH and not long_number and powers_are_tame(text, largest)


def powers_are_tame(text: str, largest: int = 0, most: int = _MAX_POWERS) -> bool:
    """Few powers, none in the exponent of another, and small numbers in exponents, factorials and binomials."""
    text = text.replace("**", "^")
    if text.count("^") > most or text.count("!") > 2 or len(re.findall(_FUNCTIONS, text)) > _MAX_FUNCTIONS:
        return False
    if re.search(r"![ )}]*!|[0-9]{3}[ )}]*!|[)}]\s*!|\\binom\s*\{[^}]*([0-9]{3}|[^0-9}])|\^\s*\{[^}]*[\^{!]", text):
        return False
    powers = re.findall(r"([)}\]]?)\s*\^\s*(\{[^}]*\}|\([^)]*\)|-?[0-9]+|.)(\s*\^)?", text)
    return all(not tower and _is_small(exponent, max(largest, 9 if base else 99)) for base, exponent, tower in powers)


def _is_small(exponent: str, limit: int) -> bool:
    return all(int(digits) <= limit for digits in re.findall(r"[0-9]+", exponent))


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest
