"""Grading reasoning-gym answers with the package's own scorers, made safe for untrusted answers.

Several of them call `eval` or sympy's `parse_expr` (an `eval` as well) on the response. Before the first answer is
scored, `eval` in those modules becomes `ast.literal_eval`, and `parse_expr` reads expressions of known names only.
As a second defence, an audit hook refuses to start processes, open connections, load libraries or write files while an
answer is scored. All of this happens in a reward worker, which can be killed and has a memory limit.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Mapping
from typing import Any

from gspo.rewards.graders.math import powers_are_tame
from gspo.rewards.protocol import RewardError
from gspo.types import Reward

MAX_ANSWER = 10_000
_RECIPE = ("task", "options", "seed", "size", "index")
_MAX_EXPRESSION = 1_000
_MAX_POWERS = 40
_FUNCTION_NAMES = """
    sqrt cbrt sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln abs Abs pi oo zoo E I C
    Symbol Integer Float Rational
"""
_NAMES = frozenset(_FUNCTION_NAMES.split())
_CHARACTERS = re.compile(r"[0-9a-zA-Z_+\-*/^().,\s|!=<>]*")
_FORBIDDEN = re.compile(
    r"subprocess\.|socket\.|shutil\.|ctypes\.|pty\.|ftplib\.|smtplib\.|urllib\."
    r"|os\.(system|exec|posix_spawn|spawn|fork|forkpty|kill|killpg|remove|rename|rmdir|mkdir|link|symlink|truncate|chmod"
    r"|chown|setxattr|putenv|unsetenv)"
)
_guarding = False  # whether an answer is being scored: `_audit` refuses actions then


def grade_gym(response: str, truth: Any, extra: Mapping[str, Any]) -> Reward:
    """The package's score, 0 to 1; `acc` is 1 for a full score.

    An answer on which the scorer raises is wrong: the row's own answer was scored before, so the scorer works.
    """
    from gspo.data.tasks.reasoning_gym import final_answer

    _make_safe()
    if truth is not None:
        _check_row(str(truth), *(extra[key] for key in _RECIPE))
    answer = final_answer(response)
    if len(answer) > MAX_ANSWER:
        return Reward(0.0, acc=0.0)
    try:
        value = _score(answer, extra)
    except Exception:
        if truth is None:
            raise
        value = 0.0
    return Reward(value, acc=float(value >= 1.0))


@functools.lru_cache(maxsize=65536)
def _check_row(truth: str, *recipe: Any) -> None:
    """RewardError when the problem generated from the row's recipe is another one: the row's own answer scores below 1."""
    value = _score(truth, dict(zip(_RECIPE, recipe)))
    if value < 1.0:
        raise RewardError(
            f"the row's own answer {truth[:80]!r} scores {value:g} with reasoning-gym's task {recipe[0]}: the package now "
            "generates another problem. Another version of the package made the row, or the task depends on Python's hash "
            "seed (start with PYTHONHASHSEED=0 in the environment). Otherwise leave the task out"
        )


def _score(answer: str, extra: Mapping[str, Any]) -> float:
    from gspo.data.tasks.reasoning_gym import score

    global _guarding
    _guarding = True
    try:
        return score(f"<answer>{answer}</answer>", extra)
    finally:
        _guarding = False


@functools.cache
def _make_safe() -> None:
    """Replace `eval` and `parse_expr` in the package's scorers, once per process."""
    if "GSPO_REWARD_WORKER" not in os.environ:
        raise RewardError("reasoning-gym answers are scored in a reward worker only; use make_scorer")
    import reasoning_gym
    import sympy
    from sympy.parsing import sympy_parser

    guarded = functools.partial(_parse_expression, sympy_parser.parse_expr)
    original = sympy_parser.parse_expr
    # Not in the module of the parser: sympy itself depends on it.
    for module in (sympy, *_modules(reasoning_gym)):
        if getattr(module, "parse_expr", None) is original:
            module.__dict__["parse_expr"] = guarded
        if module.__name__.startswith("reasoning_gym.") and _evaluates_answers(module):
            module.__dict__["eval"] = ast.literal_eval
    sys.addaudithook(_audit)


def _modules(package: Any) -> list[Any]:
    names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    found = []
    for name in names:
        with contextlib.suppress(ImportError):  # parts of the package need further packages
            found.append(importlib.import_module(name))
    return found


def _evaluates_answers(module: Any) -> bool:
    """Whether a class of the module calls `eval` to score answers."""
    classes = [item for item in vars(module).values() if isinstance(item, type)]
    codes: list[Any] = [getattr(vars(item).get("score_answer"), "__code__", None) for item in classes]
    return any("eval" in code.co_names for code in codes if code)


def _parse_expression(parse: Any, text: str, *args: Any, **kwargs: Any) -> Any:
    """sympy's parser for text made of numbers, operators, single letters and well-known functions."""
    names = re.findall(r"[a-zA-Z_][a-zA-Z_0-9]*", text)
    tame = len(text) <= _MAX_EXPRESSION and _CHARACTERS.fullmatch(text) and "__" not in text
    known = all(name in _NAMES or re.fullmatch(r"[a-zA-Z][0-9]?", name) for name in names)
    if not tame or not known or re.search(r"\.\s*[a-zA-Z_]", text) or not powers_are_tame(text, most=_MAX_POWERS):
        raise ValueError("this expression is not accepted")
    return parse(text, *args, **kwargs)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _guarding:
        return
    writes = event == "open" and len(args) > 2 and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or _FORBIDDEN.match(event):
        raise PermissionError(f"an answer may not cause {event}")
