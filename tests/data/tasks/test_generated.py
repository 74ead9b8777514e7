"""Generated problems: each family's answers are found again by other means than the generator's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from fractions import Fraction

import pytest

from gspo.data.datasets import load_rows
from gspo.data.rows import Row
from gspo.data.tasks.splits import is_held_out


def ints(text: str) -> list[int]:
    return [int(t) for t in re.findall(r"-?\d+", text)]


def text_of(row: Row) -> str:
    return row.messages[0]["content"].split("\n")[0]


def only(values: list) -> object:
    assert len(values) == 1, values
    return values[0]


def by_eval(text: str) -> object:
    return eval(text.removeprefix("What is ").removesuffix("?"))


def fraction_sum(text: str) -> object:
    a, b = re.findall(r"\d+(?:/\d+)?", text)
    return Fraction(a) + Fraction(b)


def linear(text: str) -> object:
    sides = text.removeprefix("Solve for x: ").removesuffix(".").replace("x", "*x").split("=")
    return only([x for x in range(-99, 100) if eval(sides[0], {"x": x}) == eval(sides[1], {"x": x})])


def gcd(text: str) -> object:
    a, b = ints(text)
    return max(d for d in range(1, a + 1) if a % d == 0 and b % d == 0)


def lcm(text: str) -> object:
    a, b = ints(text)
    return next(m for m in itertools.count(1) if m % a == 0 and m % b == 0)


def modular(text: str) -> object:
    base, exponent, modulus = ints(text)
    return base**exponent % modulus


def quadratic(text: str) -> object:
    left = text.split("of ")[1].split(" =")[0].replace("^", "**").replace("x ", "*x ").replace("*x **", "x**")
    left = re.sub(r"(\d)\s*\*?x", r"\1*x", left)
    return max(x for x in range(-50, 51) if eval(left, {"x": x}) == 0)


def series(text: str) -> object:
    count, first, second, _ = ints(text)
    return sum(range(first, first + (second - first) * count, second - first))


def choose(text: str) -> object:
    k, n = ints(text)
    return sum(1 for _ in itertools.combinations(range(n), k))


def two_equations(text: str) -> object:
    total, a, b, value = (int(t) for t in re.findall(r"-?\d+", text.replace("- ", "")))
    return only([x for x in range(-60, 61) if a * x - b * (total - x) == value])


def divisors(text: str) -> object:
    (n,) = ints(text)
    return sum(n % d == 0 for d in range(1, n + 1))


def ages(text: str) -> object:
    gap, years, total = ints(text)
    return only([age for age in range(200) if (age + years) + (age + gap + years) == total])


def race(text: str) -> object:
    pairs = re.findall(r"(\w+) finished right before (\w+)", text)
    runners = sorted({name for pair in pairs for name in pair})
    orders = [o for o in itertools.permutations(runners) if all(o.index(a) + 1 == o.index(b) for a, b in pairs)]
    match = re.search(r"did (\w+) take", text)
    assert match
    return only(orders).index(match[1]) + 1  # type: ignore[attr-defined]


def boxes(text: str) -> object:
    state = {name: int(n) for name, n in re.findall(r"the (\w+) box holds (\d+)", text)}
    for n, source, target in re.findall(r"(\d+) goe?s? from (\w+) to (\w+)", text):
        state[source] -= int(n)
        state[target] += int(n)
        assert state[source] >= 0
    match = re.search(r"in the (\w+) box now", text)
    assert match
    return state[match[1]]


def lamps(text: str) -> object:
    on: set[int] = set()
    for n in ints(text.split("in turn:")[1].split(".")[0]):
        on ^= {n}
    return len(on)


def weekday(text: str) -> object:
    _, _, day, days = ints(text)
    for _ in range(days):
        day = day % 7 + 1
    return day


def clubs(text: str) -> object:
    total, chess, choir, none = ints(text)
    return only([both for both in range(total + 1) if (chess - both) + (choir - both) + both + none == total])


CHECKS: dict[str, dict[str, Callable[[str], object]]] = {
    "math": {
        "expression": by_eval,
        "fraction_sum": fraction_sum,
        "percentage": lambda text: ints(text)[0] * ints(text)[1] // 100,
        "linear_equation": linear,
        "common_divisor": gcd,
        "common_multiple": lcm,
        "modular_power": modular,
        "quadratic": quadratic,
        "series": series,
        "choices": choose,
        "two_equations": two_equations,
        "divisors": divisors,
    },
    "reasoning": {"ages": ages, "race": race, "boxes": boxes, "lamps": lamps, "weekday": weekday, "clubs": clubs},
}


@pytest.mark.parametrize("name", CHECKS)
def test_answers_are_right(name: str) -> None:
    rows = load_rows(name, limit=360)
    for row in rows:
        found = CHECKS[name][row.extra["family"]](text_of(row))
        assert str(found) == row.ground_truth, (text_of(row), found, row.ground_truth)
        assert row.answer is not None
        assert row.answer.endswith(f"\\boxed{{{row.ground_truth}}}")
    assert {(r.extra["family"], r.extra["level"]) for r in rows} == set(itertools.product(CHECKS[name], (1, 2, 3)))


@pytest.mark.parametrize("name", CHECKS)
def test_splits_never_meet_and_seeds_differ(name: str) -> None:
    held_out = {text_of(r) for r in load_rows(name, "val")}
    assert len(held_out) == 512
    for seed in (0, 1):
        train = {text_of(r) for r in load_rows(name, seed=seed, limit=1500)}
        assert len(train) == 1500
        assert not train & held_out
        assert not any(map(is_held_out, train))
    assert load_rows(name, limit=40) == load_rows(name, limit=80)[:40]
    assert load_rows(name, limit=40) != load_rows(name, limit=40, seed=1)


def test_mixed_takes_turns_and_keeps_sources() -> None:
    rows = load_rows("mixed", limit=30)
    assert [r.data_source for r in rows[:6]] == ["math", "reasoning", "code"] * 2
    assert len({r.uid for r in load_rows("mixed", limit=400)}) == 400
    sources = [r.data_source for r in load_rows("mixed", "val")]
    assert {s: sources.count(s) for s in set(sources)}["code"] >= 8


def test_every_built_in_row_has_a_reward_that_takes_its_own_answer() -> None:
    from gspo.rewards.builtin import by_source

    for name in ("arithmetic", "math", "reasoning", "code", "mixed"):
        for row in load_rows(name, limit=12):
            assert by_source(row.data_source)
