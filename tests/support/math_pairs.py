"""Pairs of a right and a wrong response to the same question, GSM8K-style and LaTeX, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one question: one that is right and one that is not."""

    kind: str
    truth: str
    right: str
    wrong: str


Answers = tuple[str, list[str], list[str]]
"""A truth, ways to write it, and answers that are wrong."""


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    """`count` pairs, the kinds in turn."""
    rng = random.Random(seed)
    return [_make_pair(rng, *_KINDS[index % len(_KINDS)]) for index in range(count)]


def _make_pair(rng: random.Random, kind: str, make: Callable[[random.Random], Answers]) -> Pair:
    truth, right, wrong = make(rng)
    frame = rng.choice(_GSM8K_FRAMES if kind.startswith("gsm8k") else _LATEX_FRAMES)
    return Pair(kind, truth, frame.format(rng.choice(right)), frame.format(rng.choice(wrong)))


_GSM8K_FRAMES = [
    "She had 3 bags, so 3 x 4 = 12.\n#### {}",
    "First we add 17 and 5 to get 22.\n\nThe answer is {}.",
    "There are 100 in all. **Answer: {}**",
    "After 2 steps the total comes to {}",
]
_LATEX_FRAMES = [
    "We solve for $x$ and find 2 cases.\n\n$$\\boxed{{{}}}$$",
    "Thus, by symmetry ($n=4$), the answer is $\\boxed{{{}}}$.",
    "So $\\boxed{{17}}$ would be too much; instead \\[\\boxed{{{}}}\\]",
]


def _integer(rng: random.Random) -> Answers:
    n = rng.randint(2, 9999)
    wrong = [str(n + 1), str(n * 10), str(-n), f"{n}.5", str(n - 1)]
    return str(n), [str(n), f"{n:,}", f"{n}.00", f"${n}", f"{n} dollars", f"${n:,}.00"], wrong


def _big_integer(rng: random.Random) -> Answers:
    n = rng.randint(10_000, 10**9)
    wrong = [f"{n + 1:,}", str(n // 10), str(n)[::-1] + "7", f"{n}.1"]
    return f"{n:,}", [str(n), f"{n:,}", f"{n}.0", f"${n:,}"], wrong


def _money(rng: random.Random) -> Answers:
    cents = 100 * rng.randint(1, 500) + 10 * rng.randint(1, 9)
    text = f"{cents / 100:.2f}"
    wrong = [f"{(cents + 1) / 100:.2f}", str(cents), str(cents // 100)]
    return text, [text, f"${text}", text.rstrip("0"), f"{text} dollars"], wrong


def _percent(rng: random.Random) -> Answers:
    n = rng.randint(2, 99)
    return str(n), [f"{n}%", f"{n} percent", str(n)], [f"{n + 1}%", f"{n * 10}%", f"0.{n + 1:02d}%"]


def _fraction(rng: random.Random) -> Answers:
    b = rng.randint(2, 40)
    a = rng.randint(1, 60)
    value = Fraction(a, b)
    sign = rng.choice(["", "-"])
    forms = [
        f"{sign}\\frac{{{a}}}{{{b}}}",
        f"{sign}\\dfrac{{{2 * a}}}{{{2 * b}}}",
        f"{sign}{a}/{b}",
        f"\\frac{{{sign}{a}}}{{{b}}}",
    ]
    other = value + Fraction(1, b)
    wrong = [f"{sign}\\frac{{{b}}}{{{a + b}}}" if Fraction(b, a + b) != value else "0", f"{sign}{other}"]
    wrong.append(f"\\frac{{{'' if sign else '-'}{a}}}{{{b}}}")
    return f"{sign}\\frac{{{value.numerator}}}{{{value.denominator}}}", forms, wrong


def _decimal(rng: random.Random) -> Answers:
    value = Fraction(rng.randint(1, 999), rng.choice([2, 4, 5, 8, 10, 20, 25, 40]))
    text = f"{float(value):g}"
    forms = [text, f"\\frac{{{value.numerator}}}{{{value.denominator}}}"]
    if "." in text:
        forms.append(text + "0")
    return text, forms, [f"{float(value) + 0.01:g}", f"{float(value) * 10:g}", f"-{text}"]


def _mixed(rng: random.Random) -> Answers:
    b = rng.randint(3, 12)
    a, whole = rng.randint(1, b - 1), rng.randint(1, 20)
    value = whole + Fraction(a, b)
    forms = [f"{whole}\\frac{{{a}}}{{{b}}}", f"\\frac{{{whole * b + a}}}{{{b}}}", f"{whole * b + a}/{b}"]
    wrong = [f"{whole + 1}\\frac{{{a}}}{{{b}}}", str(whole), f"\\frac{{{whole * a}}}{{{b}}}"]
    wrong = [w for w in wrong if w != f"\\frac{{{whole * a}}}{{{b}}}" or Fraction(whole * a, b) != value]
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}", forms, wrong


def _scientific(rng: random.Random) -> Answers:
    digits, exponent = rng.randint(11, 99), rng.randint(3, 9)
    value = digits * 10 ** (exponent - 1)
    mantissa = f"{digits / 10:g}"
    forms = [f"{mantissa} \\times 10^{{{exponent}}}", str(value), f"{value:,}"]
    return str(value), forms, [f"{mantissa} \\times 10^{{{exponent + 1}}}", str(value + 1)]


def _united(rng: random.Random) -> Answers:
    n = rng.randint(2, 900)
    unit = rng.choice(["cm", "\\text{ cm}", "\\text{ square units}", "\\text{ m}", "^\\circ", "\\text{ cm}^2"])
    return str(n), [f"{n}{unit}", f"{n}", f"{n} {unit}" if "circ" not in unit else str(n)], [f"{n + 2}{unit}"]


def _pair_of(rng: random.Random) -> Answers:
    a, b = rng.sample(range(-20, 20), 2)
    return f"({a},{b})", [f"({a}, {b})", f"\\left({a},{b}\\right)"], [f"({b},{a})", f"({a},{b + 1})"]


def _set_of(rng: random.Random) -> Answers:
    a, b, c = rng.sample(range(-20, 20), 3)
    forms = [f"\\{{{b}, {a}, {c}\\}}", f"\\{{{a},{b},{c}\\}}"]
    return f"\\{{{a},{b},{c}\\}}", forms, [f"\\{{{a},{b}\\}}", f"\\{{{a},{b},{c + 25}\\}}"]


def _interval(rng: random.Random) -> Answers:
    a = rng.randint(-9, 9)
    b = a + rng.randint(1, 9)
    return f"[{a},{b})", [f"[{a}, {b})", f"\\left[{a},{b}\\right)"], [f"[{a},{b + 1})", f"[{a - 1},{b})"]


def _assigned(rng: random.Random) -> Answers:
    n = rng.randint(-50, 50)
    return str(n), [f"x = {n}", f"x={n}", str(n)], [f"x = {n + 1}", f"{n + 1}"]


def _choice(rng: random.Random) -> Answers:
    letters = list("ABCDE")
    right = letters.pop(rng.randrange(5))
    return right, [right, f"\\text{{{right}}}", f"\\text{{({right})}}", f"({right})"], letters


def _word(rng: random.Random) -> Answers:
    names = ["Evelyn", "Monday", "even", "odd", "blue", "ellipse", "parabola"]
    right = names.pop(rng.randrange(len(names)))
    return (f"\\text{{{right}}}", [f"\\text{{{right}}}", f"\\text{{{right.lower()}}}"], [f"\\text{{{names[0]}}}"])


def _surd(rng: random.Random) -> Answers:
    k, n = rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7])
    forms = [f"{k}\\sqrt{{{n}}}", f"\\sqrt{{{k * k * n}}}", f"\\sqrt{{{n}}} \\cdot {k}"]
    return (f"{k}\\sqrt{{{n}}}", forms, [f"{k + 1}\\sqrt{{{n}}}", f"{n}\\sqrt{{{k}}}" if n != k else "1", str(k * n)])


def _polynomial(rng: random.Random) -> Answers:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    forms = [f"x^2+{a}x+{b}", f"{b}+{a}x+x^2", f"x^2 + {a}x + {b}"]
    return f"x^2+{a}x+{b}", forms, [f"x^2+{a}x+{b + 1}", f"x^2-{a}x+{b}"]


_NUMERIC_LATEX: list[tuple[str, Callable[[random.Random], Answers]]] = [
    ("latex/fraction", _fraction),
    ("latex/decimal", _decimal),
    ("latex/mixed", _mixed),
    ("latex/scientific", _scientific),
    ("latex/unit", _united),
    ("latex/tuple", _pair_of),
    ("latex/set", _set_of),
    ("latex/interval", _interval),
    ("latex/assigned", _assigned),
    ("latex/choice", _choice),
    ("latex/word", _word),
]
_GSM8K: list[tuple[str, Callable[[random.Random], Answers]]] = [
    ("gsm8k/integer", _integer),
    ("gsm8k/big", _big_integer),
    ("gsm8k/money", _money),
    ("gsm8k/percent", _percent),
]
_SYMBOLIC: list[tuple[str, Callable[[random.Random], Answers]]] = [
    ("latex/surd", _surd),
    ("latex/polynomial", _polynomial),
]
# Symbolic answers take a hundred times as long as the others: one pair in twelve.
_KINDS = [*_GSM8K, *_NUMERIC_LATEX, *_GSM8K, *_NUMERIC_LATEX[:4], *_SYMBOLIC]
