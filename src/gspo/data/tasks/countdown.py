"""`countdown`: make a target between 10 and 99 from three or four numbers, each used once, with + - * and /.

The game of arXiv 2404.03683, with numbers from 1 to 99. Every question has a solution with whole numbers on the way;
`answer` works it out one operation per line, so a model can be warmed up on it.
"""

from __future__ import annotations

import ast
import itertools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Literal

from gspo.data.rows import Row, user_message
from gspo.data.tasks.splits import is_held_out, num_rows
from gspo.seeding import derive_seed

TARGETS = range(10, 100)
_MAX_EXPRESSION = 200
_SYMBOLS = "+-*/"
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def load_countdown(split: Literal["train", "val"] = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """`limit` distinct questions (8,192 to train on, 512 held out by default), the same for the same seed."""
    questions = itertools.islice(_questions(split, seed), num_rows(split, limit))
    return [
        Row(
            uid=f"countdown/{split}/{index}",
            messages=user_message(_question(numbers, target)),
            data_source="countdown",
            ground_truth=str(target),
            answer="\n".join([*steps, f"<answer>{expression}</answer>"]),
            extra={"numbers": list(numbers)},
        )
        for index, (numbers, target, expression, steps) in enumerate(questions)
    ]


def final_answer(text: str) -> str | None:
    """The text between the last `<answer>` and its `</answer>`; None without one."""
    _, opened, rest = text.rpartition("<answer>")
    expression, closed, _ = rest.partition("</answer>")
    return expression.strip() if opened and closed else None


def score(text: str, target: int, numbers: Sequence[int]) -> float:
    """1.0 when the final answer uses every number exactly once and equals the target, exactly computed; else 0.0."""
    expression = final_answer(text)
    if not expression or len(expression) > _MAX_EXPRESSION:
        return 0.0
    used: list[int] = []
    try:
        value = _compute(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return 0.0
    return float(value == target and sorted(used) == sorted(numbers))


def _compute(node: ast.expr, used: list[int]) -> Fraction:
    """The value of an expression of whole numbers, which are added to `used`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_compute(node.left, used), _compute(node.right, used))
    raise ValueError("not an expression of whole numbers and + - * /")


def _questions(split: str, seed: int) -> Iterator[tuple[tuple[int, ...], int, str, list[str]]]:
    """Numbers, target, a solution and its steps, without end and without repeats."""
    rng = random.Random(derive_seed(seed, f"countdown/{split}"))
    seen: set[str] = set()
    while True:
        numbers = tuple(1 + int(rng.random() * 99) for _ in range(3 + int(rng.random() * 2)))
        target, expression, steps = _solution(rng, numbers)
        question = _question(numbers, target)
        if target in TARGETS and question not in seen and is_held_out(question) == (split == "val"):
            seen.add(question)
            yield numbers, target, expression, steps


def _solution(rng: random.Random, numbers: Sequence[int]) -> tuple[int, str, list[str]]:
    """Combine two of the terms at a time until one is left. Differences are positive and quotients whole."""
    terms = [(number, str(number)) for number in numbers]
    steps = []
    while len(terms) > 1:
        (a, left), (b, right) = (terms.pop(int(rng.random() * len(terms))) for _ in range(2))
        symbol = _SYMBOLS[int(rng.random() * 4)]
        if symbol == "/" and (b == 0 or a % b):
            symbol = "*"
        if symbol == "-" and a < b:
            (a, left), (b, right) = (b, right), (a, left)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[symbol]
        steps.append(f"{a} {symbol} {b} = {value}")
        terms.append((value, f"({left} {symbol} {right})"))
    value, expression = terms[0]
    return value, expression[1:-1], steps


def _question(numbers: Sequence[int], target: int) -> str:
    return (
        f"Make {target} from the numbers {', '.join(map(str, numbers))}. Use each number exactly once, with +, -, *, / and "
        "parentheses. Work step by step, then write the expression between <answer> and </answer>."
    )
