"""The built-in environments: a calculator, Python, guessing a number, a small grid to cross."""

from __future__ import annotations

import ast
import functools
import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from gspo.environments.protocol import Action, Message, Step
from gspo.environments.tools import ToolEnvironment, ToolError
from gspo.sandbox.judge import Sandbox
from gspo.types import Prompt

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_EXPRESSION, _MAX_DIGITS = 200, 50


class Calculator(ToolEnvironment):
    """One tool, `calculator`, for sums, differences, products and quotients. The reward function grades the answer."""

    tool_format = "tag"

    def __init__(self) -> None:
        super().__init__([calculator])


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with +, -, *, /, //, % and parentheses.
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ToolError(f"the expression is longer than {_MAX_EXPRESSION} characters")
    try:
        value = _compute(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ToolError("this is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    if abs(value) >= 10**_MAX_DIGITS:
        raise ToolError("the result is too large")
    return str(int(value)) if float(value).is_integer() else repr(value)


def _compute(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_compute(node.operand) if isinstance(node.op, ast.USub) else _compute(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
    raise ToolError("only numbers, +, -, *, /, //, % and parentheses are allowed")


class PythonTool(ToolEnvironment):
    """One tool, `python`, that runs code in the sandbox. Names and values stay from call to call.

    Every call runs the earlier code of the episode again, without its output, and then the new code: no process lives
    between two calls. Code that did not come to an end is left out. Each run draws the same random numbers. `level` is
    the sandbox's isolation level, by default the best available; with `allow_unsandboxed_code` code runs without
    isolation where no level is available.
    """

    def __init__(self, level: int | None = None, memory: int = 512, allow_unsandboxed_code: bool = False) -> None:
        super().__init__([self.python])
        self._sandbox, self._memory = _sandbox(level, allow_unsandboxed_code), memory << 20
        self._cells: list[str] = []
        self._seed = 0

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        self._seed = seed
        return ()

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last line.

        Args:
            code: The code. Variables and functions of earlier calls are still there.
        """
        wall = self.tool_timeout or 10.0
        program = f"{_SESSION}\nrun_session({self._seed}, {self._cells!r}, {code!r})\n"
        result = self._sandbox.run(program, wall=wall * 0.9, memory=self._memory)
        # Code that hangs, crashes or leaves with os._exit would do so in every call.
        if not result.timed_out and result.exit_code in (_ENDED, _RAISED):
            self._cells.append(code)
        text = result.stdout.decode(errors="replace").rstrip("\n")
        if result.timed_out:
            raise ToolError(f"no answer within {wall:g} s")
        if result.exit_code != _ENDED:
            last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ToolError("\n".join(filter(None, [text, last or "the program was stopped"])))
        return text


@functools.cache
def _sandbox(level: int | None, allow_unsandboxed: bool) -> Sandbox:
    """The sandbox of a worker process, for all its episodes."""
    return Sandbox(level, allow_unsandboxed=allow_unsandboxed, num_servers=1)


_ENDED, _RAISED = 100, 101  # how a session exits whose code came to its end, or raised
_SESSION = """
import ast, contextlib, io, random, sys, traceback

def run_session(seed, earlier, code):
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)
    names = {"__name__": "__main__"}
    for cell in earlier:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                run_cell(cell, names)
            except BaseException:
                pass
    try:
        run_cell(code, names)
    except BaseException as error:
        sys.stdout.flush()
        print("".join(traceback.format_exception_only(error)).strip(), file=sys.stderr)
        sys.exit(101)
    sys.exit(100)

def run_cell(code, names):
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
        if value is not None:
            print(repr(value))
"""


class Guess:
    """Guess a whole number from 1 to `high` in at most `guesses` turns; the answers are `higher` and `lower`.

    The row's ground truth is the number; without one the seed draws it. The right number earns 1, every guess costs
    `cost`. A text without a number counts as a guess.
    """

    tools = ()

    def __init__(self, high: int = 64, guesses: int = 6, cost: float = 0.05) -> None:
        self._high, self._guesses, self._cost = high, guesses, cost

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        truth = prompt.ground_truth
        self._number = random.Random(seed).randint(1, self._high) if truth is None else int(truth)
        return ()

    def step(self, action: Action) -> Step:
        found = re.findall(r"\d+", action)
        guess = int(found[-1][:9]) if found else None
        solved, last = guess == self._number, action.turn + 1 >= self._guesses
        hint = "no number" if guess is None else "higher" if guess < self._number else "lower"
        return Step(
            () if solved else ({"role": "user", "content": hint},),
            reward=float(solved) - self._cost,
            done=solved,
            truncated=last and not solved,
            metrics={"acc": float(solved), "guesses": action.turn + 1.0},
        )

    def close(self) -> None:
        """Nothing is held."""


class GridWorld:
    """A gymnasium-shaped environment: walk from the top left of a grid to its goal, around the walls, in few moves."""

    moves = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

    def __init__(self, size: int = 4, num_walls: int = 2, max_moves: int = 12) -> None:
        self._size, self._num_walls, self._max_moves = size, num_walls, max_moves

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        squares = [(r, c) for r in range(self._size) for c in range(self._size)][1:]
        self._goal, *self._walls = random.Random(seed).sample(squares, 1 + self._num_walls)
        self._place, self._num_moves = (0, 0), 0
        return self._draw(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        words = [word for word in re.findall(r"[a-z]+", action.lower()) if word in self.moves]
        self._num_moves += 1
        if words:
            row, column = (a + b for a, b in zip(self._place, self.moves[words[-1]]))
            if 0 <= row < self._size and 0 <= column < self._size and (row, column) not in self._walls:
                self._place = (row, column)
        won, late = self._place == self._goal, self._num_moves >= self._max_moves
        return self._draw(), float(won), won, late and not won, {"acc": float(won)}

    def _draw(self) -> str:
        marks = {**dict.fromkeys(self._walls, "#"), self._goal: "G", self._place: "A"}
        lines = ["".join(marks.get((r, c), ".") for c in range(self._size)) for r in range(self._size)]
        return "\n".join(lines) + "\nup, down, left or right?"
