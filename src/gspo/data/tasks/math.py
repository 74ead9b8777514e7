"""`math`: generated problems of twelve families in three levels; exact integer and fraction answers."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from gspo.data.rows import Row
from gspo.data.tasks.generated import Family, Problem, generate_rows


def expression(rng: random.Random, level: int) -> Problem:
    a, b, c, d = (rng.randint(2, 9 * level) for _ in range(4))
    if level == 1:
        return Problem(
            f"What is {a} + {b} * {c}?", str(a + b * c), f"{b} * {c} = {b * c}; {a} + {b * c} = {a + b * c}."
        )
    value = (a + b) * c - d
    steps = f"{a} + {b} = {a + b}; {a + b} * {c} = {(a + b) * c}; {(a + b) * c} - {d} = {value}."
    return Problem(f"What is ({a} + {b}) * {c} - {d}?", str(value), steps)


def fraction_sum(rng: random.Random, level: int) -> Problem:
    b, d = rng.randint(2, 4 * level), rng.randint(2, 4 * level)
    x, y = Fraction(rng.randint(1, b), b), Fraction(rng.randint(1, d), d)
    total = x + y
    common = math.lcm(x.denominator, y.denominator)
    steps = f"Over {common} the sum is {x * common}/{common} + {y * common}/{common} = {total * common}/{common}."
    return Problem(
        f"What is {x} + {y}, as a fraction in lowest terms?", str(total), f"{steps} In lowest terms: {total}."
    )


def percentage(rng: random.Random, level: int) -> Problem:
    percent = 10 * rng.randint(1, 9) if level == 1 else rng.randint(1, 99)
    whole = 100 * rng.randint(1, 10 * level)
    part = percent * whole // 100
    return Problem(
        f"What is {percent}% of {whole}?", str(part), f"{whole} / 100 = {whole // 100}; times {percent} is {part}."
    )


def linear_equation(rng: random.Random, level: int) -> Problem:
    x = rng.randint(-5 * level, 5 * level)
    a, b, c = rng.randint(level + 1, 5 * level + 3), rng.randint(1, 20 * level), rng.randint(1, level)
    if level == 1:
        return Problem(
            f"Solve for x: {a}x + {b} = {a * x + b}.", str(x), f"{a}x = {a * x + b} - {b} = {a * x}, so x = {x}."
        )
    right = (a - c) * x + b
    steps = f"Subtract {c}x: {a - c}x + {b} = {right}. Then {a - c}x = {right - b}, so x = {x}."
    return Problem(f"Solve for x: {a}x + {b} = {c}x {_signed(right)}.", str(x), steps)


def common_divisor(rng: random.Random, level: int) -> Problem:
    shared = rng.randint(2, 6 * level)
    a, b = shared * rng.randint(2, 8 * level), shared * rng.randint(2, 8 * level)
    trail, x, y = [], a, b
    while y:
        trail.append(f"{x} mod {y} = {x % y}")
        x, y = y, x % y
    return Problem(f"What is the greatest common divisor of {a} and {b}?", str(x), "; ".join(trail) + ".")


def common_multiple(rng: random.Random, level: int) -> Problem:
    a, b = rng.randint(2, 12 * level), rng.randint(2, 12 * level)
    divisor = math.gcd(a, b)
    steps = f"Their greatest common divisor is {divisor}; {a} * {b} / {divisor} = {math.lcm(a, b)}."
    return Problem(f"What is the least common multiple of {a} and {b}?", str(math.lcm(a, b)), steps)


def modular_power(rng: random.Random, level: int) -> Problem:
    base, exponent, modulus = rng.randint(2, 9), rng.randint(2, 4 * level), rng.randint(3, 10 * level)
    power, steps = 1, []
    for _ in range(exponent):
        steps.append(f"{power} * {base} = {power * base % modulus}")
        power = power * base % modulus
    question = f"What is the remainder when {base}^{exponent} is divided by {modulus}?"
    return Problem(question, str(power), f"Modulo {modulus}: " + "; ".join(steps) + ".")


def quadratic(rng: random.Random, level: int) -> Problem:
    p, q = sorted((rng.randint(-4 * level, 4 * level), rng.randint(-4 * level, 4 * level)))
    b, c = -(p + q), p * q
    question = f"What is the larger solution of x^2 {_signed(b)}x {_signed(c)} = 0? A double solution counts once."
    return Problem(question, str(q), f"The numbers with sum {p + q} and product {c} are {p} and {q}.")


def series(rng: random.Random, level: int) -> Problem:
    first, step, count = rng.randint(1, 10 * level), rng.randint(1, 3 * level), rng.randint(4, 6 * level)
    last = first + step * (count - 1)
    total = (first + last) * count // 2
    question = f"What is the sum of the first {count} terms of the arithmetic sequence {first}, {first + step}, {first + 2 * step}, ...?"
    return Problem(question, str(total), f"The last term is {last}; ({first} + {last}) * {count} / 2 = {total}.")


def choices(rng: random.Random, level: int) -> Problem:
    n = rng.randint(3 + level, 5 + 3 * level)
    k = rng.randint(2, min(n - 1, 1 + level))
    value = math.comb(n, k)
    top = " * ".join(str(n - i) for i in range(k))
    question = f"In how many ways can {k} of {n} people be chosen for a team, when order does not matter?"
    return Problem(
        question, str(value), f"{top} = {math.perm(n, k)}; divided by {k}! = {math.factorial(k)} it is {value}."
    )


def two_equations(rng: random.Random, level: int) -> Problem:
    x, y = rng.randint(-4 * level, 4 * level), rng.randint(-4 * level, 4 * level)
    a, b = rng.randint(2, 3 + level), rng.randint(2, 3 + level)
    question = f"If x + y = {x + y} and {a}x - {b}y = {a * x - b * y}, what is x?"
    steps = f"With y = {x + y} - x: {a + b}x = {a * x - b * y} + {b} * ({x + y}) = {(a + b) * x}, so x = {x}."
    return Problem(question, str(x), steps)


def divisors(rng: random.Random, level: int) -> Problem:
    n = rng.randint(10 * level, 60 * level * level)
    found = [d for d in range(1, n + 1) if n % d == 0]
    return Problem(
        f"How many positive divisors does {n} have?", str(len(found)), f"They are {', '.join(map(str, found))}."
    )


def _signed(value: int) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value)}"


FAMILIES: dict[str, Family] = {
    f.__name__: f
    for f in (
        expression,
        fraction_sum,
        percentage,
        linear_equation,
        common_divisor,
        common_multiple,
        modular_power,
        quadratic,
        series,
        choices,
        two_equations,
        divisors,
    )
}


def load_math(split: str = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Problems of all families and levels in turn; 8,192 to train on and 512 held out by default."""
    return generate_rows("math", FAMILIES, split, limit=limit, seed=seed)
