"""Grading code: the tests run in the sandbox; the verdict is reached in this process, from plain data."""

from __future__ import annotations

import ast
import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gspo.sandbox import DEFAULT_MEMORY, DEFAULT_WALL, Sandbox
from gspo.types import Reward

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9

_FENCE = re.compile(r"[ \t]*(```+|~~~+)[ \t]*([\w+-]*)")
_PYTHON = ("python", "python3", "py", "")

_shared: Sandbox | None = None
_shared_lock = threading.Lock()


Case = Callable[..., tuple[bool, bool]]
"""Runs a test on (sandbox, source, wall=, memory=). Returns whether it passed and whether it reached its deadline."""


def grade_code(
    program: str,
    tests: Mapping[str, Any] | str,
    *,
    timeout: float = DEFAULT_WALL,
    memory: int = DEFAULT_MEMORY,
    sandbox: Sandbox | None = None,
) -> Reward:
    """Score 1.0 if the program passes every test, else 0.0; `extra["tests_passed"]` is the fraction passed.

    `tests` is `{"inputs": […], "outputs": […]}` (standard input), the same with `"fn_name"` (calls), or
    `{"assert_case": […]}` (with `"fn_name"`, only that function comes from the program); JSON text works too. Each test
    may use `timeout` seconds and `memory` bytes. After a test that reached its deadline the rest fail without being
    run. Raises SandboxError when the sandbox itself failed (the reward is then missing, not 0) and ValueError when the
    tests are malformed.
    """
    cases = read_tests(tests)
    source = extract_code(program)
    box = sandbox or shared_sandbox()
    num_passed = 0
    for case in cases:
        passed, timed_out = case(box, source, wall=timeout, memory=memory)
        num_passed += passed
        if timed_out:
            break
    score = 1.0 if num_passed == len(cases) else 0.0
    return Reward(score=score, acc=score, extra={"tests_passed": num_passed / len(cases)})


def shared_sandbox() -> Sandbox:
    """The sandbox of this process at its default level, started on first use."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Sandbox()
        return _shared


def extract_code(response: str) -> str:
    """The last fenced Python block of a response, also one without an end; without any block, the response itself."""
    blocks: list[list[str]] = []
    fence, keep = "", False
    for line in response.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if not fence and mark:
            fence, keep = mark[1], mark[2].lower() in _PYTHON
            if keep:
                blocks.append([])
        elif fence and line.strip() == fence:
            fence = ""
        elif fence and keep:
            blocks[-1].append(line)
    return "".join(blocks[-1]) if blocks else response


def _run_script(stdin: str, expected: str, sandbox: Sandbox, source: str, **limits: Any) -> tuple[bool, bool]:
    """Passed when the whole standard output is as expected."""
    result = sandbox.run(source, stdin.encode(), **limits)
    return result.ok and same_output(result.stdout, expected), result.timed_out


def _call_function(
    name: str, args: tuple[Any, ...], accepted: tuple[Any, ...], sandbox: Sandbox, source: str, **limits: Any
) -> tuple[bool, bool]:
    """Passed when the function returns one of the values `accepted`, which were read from JSON."""
    result = sandbox.call(source, name, args, **limits)
    return result.ok and any(same_value(result.value, expected) for expected in accepted), result.timed_out


def _run_asserts(text: str, name: str, sandbox: Sandbox, source: str, **limits: Any) -> tuple[bool, bool]:
    """Passed when every assertion holds; with `name`, only that function comes from the program."""
    result = sandbox.check(source, text, name=name, **limits)
    return result.ok, result.timed_out


def read_tests(tests: Mapping[str, Any] | str) -> list[Case]:
    """The cases of a tests mapping; raises ValueError that names what is wrong."""
    if isinstance(tests, str):
        tests = json.loads(tests)
    if not isinstance(tests, Mapping):
        raise ValueError(f"tests: expected a mapping, got {type(tests).__name__}")
    if "assert_case" in tests:
        return _assert_cases(tests["assert_case"], tests.get("fn_name") or "")
    if "inputs" not in tests or "outputs" not in tests:
        raise ValueError(f'tests: expected "inputs" and "outputs", or "assert_case"; got {sorted(tests)}')
    inputs, outputs = tests["inputs"], tests["outputs"]
    if len(inputs) != len(outputs) or not len(inputs):
        raise ValueError(
            f"tests: {len(inputs)} inputs and {len(outputs)} outputs; expected the same number, at least one"
        )
    if not tests.get("fn_name"):
        return [partial(_run_script, _text(i), _text(o)) for i, o in zip(inputs, outputs)]
    values = [_value(o) for o in outputs]
    # Some published sets wrap every expected value in a list of one.
    wrapped = all(isinstance(v, list) and len(v) == 1 for v in values)
    return [
        partial(_call_function, tests["fn_name"], _arguments(i), (v, v[0]) if wrapped else (v,))
        for i, v in zip(inputs, values)
    ]


def _assert_cases(texts: Any, name: str) -> list[Case]:
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise ValueError('tests: "assert_case" is empty; expected at least one test')
    for text in texts:
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, TypeError) as error:
            raise ValueError(f'tests: "assert_case" {str(text)[:80]!r} is not Python: {error}') from None
    return [partial(_run_asserts, text, name) for text in texts]


def _text(value: Any) -> str:
    """Standard input or output as text; a list is its lines."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> tuple[Any, ...]:
    """The arguments of a call: a list, or text with one JSON value per line."""
    if isinstance(value, str):
        return tuple(json.loads(line) for line in value.splitlines() if line.strip())
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"tests: the inputs of a call are {value!r}; expected a list of arguments, or text with one JSON value per line"
        )
    return tuple(value)


def _value(value: Any) -> Any:
    """An expected value; text that is JSON is read as such."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def same_output(got: bytes, expected: str) -> bool:
    """Whether the whole output is as expected, line by line, apart from white space around and between words.

    Where a number with a decimal point is expected, a relative difference of 1e-6 is allowed.
    """
    try:
        lines = _lines(got.decode())
    except UnicodeDecodeError:
        return False
    wanted = _lines(expected)
    return len(lines) == len(wanted) and all(a == b or _same_tokens(a, b) for a, b in zip(lines, wanted))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_tokens(got: str, expected: str) -> bool:
    ours, theirs = got.split(), expected.split()
    return len(ours) == len(theirs) and all(a == b or _close_text(a, b) for a, b in zip(ours, theirs))


_DECIMAL = re.compile(r"[+-]?\d+\.\d*(?:[eE][+-]?\d+)?|[+-]?\d+[eE][+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?", re.ASCII)


def _close_text(got: str, expected: str) -> bool:
    if len(got) > 400 or not _DECIMAL.fullmatch(expected) or not _NUMBER.fullmatch(got):
        return False
    return _close(float(got), float(expected))


def _close(got: float, expected: float) -> bool:
    try:
        return math.isclose(got, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


def same_value(got: Any, expected: Any) -> bool:
    """Whether plain data is equal, with exact types; but a tuple may be a list, an int may be a float, floats are close.

    `expected` comes from JSON, which turns the keys of mappings into text: a number matches its text as a key.
    """
    kind = type(expected)
    if kind is float:
        return type(got) in (int, float) and _close(got, expected)
    if kind in (list, tuple):
        return (
            type(got) in (list, tuple)
            and len(got) == len(expected)
            and all(same_value(a, b) for a, b in zip(got, expected))
        )
    if kind is dict:
        return type(got) is dict and _same_mapping(got, expected)
    return type(got) is kind and got == expected


def _same_mapping(got: dict, expected: dict) -> bool:
    keys = {_key_text(k): v for k, v in got.items()}
    wanted = {_key_text(k): v for k, v in expected.items()}
    return (
        len(keys) == len(got)
        and keys.keys() == wanted.keys()
        and all(same_value(keys[key], value) for key, value in wanted.items())
    )


def _key_text(key: Any) -> Any:
    """A key as JSON writes it; unchanged where JSON or Python cannot write it."""
    if type(key) not in (int, float, bool, type(None)):
        return key
    try:
        return json.dumps(key)
    except ValueError:
        return key
