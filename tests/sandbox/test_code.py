"""Grading code: the three styles of tests, how answers are compared, and what is an error rather than a zero."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gspo.rewards.graders import code
from gspo.rewards.graders.code import extract_code, grade_code, read_tests, same_output, same_value
from gspo.sandbox import Sandbox, SandboxError
from gspo.sandbox.fork_server import ServerHandle
from gspo.sandbox.relay import is_alive

WALL = 60.0

LIBRARY = """
import math
class Stack:
    size = 0
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return True
class Equal:
    def __eq__(self, other): return True
    def __bool__(self): return True
    __hash__ = None
def pair(x): return (x, x * x)
def apply(function, x): return function(x)
def count(n): yield from range(n)
def half(x): return x / 2
def cheat(*args): return Equal()
def refuse(x): raise ValueError("negative")
def stop(x): raise StopIteration
def noisy(x):
    print("noise" * 1000)
    return x
def shared(items):
    items.append(1)
    return items
isclose = cheat
set = cheat
len = cheat
LIMIT = 7
"""


def grade(box: Sandbox, program: str, tests: dict) -> float:
    return grade_code(program, tests, timeout=WALL, sandbox=box).score


def test_stdin_tests(box: Sandbox):
    tests = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "25\n"]}
    right = grade_code("print(int(input()) ** 2)", tests, timeout=WALL, sandbox=box)
    half = grade_code("print(4)", tests, timeout=WALL, sandbox=box)
    assert (right.score, right.acc, right.extra) == (1.0, 1.0, {"tests_passed": 1.0})
    assert (half.score, half.acc, half.extra) == (0.0, 0.0, {"tests_passed": 0.5})


def test_right_output_with_a_failing_exit_earns_nothing(box: Sandbox):
    tests = {"inputs": [""], "outputs": ["1\n"]}
    assert grade(box, "print(1)", tests) == 1.0
    assert grade(box, "print(1)\nraise SystemExit(1)", tests) == 0.0
    assert grade(box, "print(1, flush=True)\nimport ctypes; ctypes.string_at(0)", tests) == 0.0


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("class Solution:\n    def add(self, a, b): return a + b", 1.0),
        ("def add(a, b):\n    print('debug')\n    return a + b", 1.0),
        ("def add(a, b): return str(a + b)", 0.0),
        ("def add(a, b): return float(a + b)", 0.0),
        ("def plus(a, b): return a + b", 0.0),
        ("def add(a, b): raise SystemExit(0)", 0.0),
        ("import os\ndef add(a, b): os._exit(0)", 0.0),
        ("if __name__ == '__main__': input()\ndef add(a, b): return a + b", 1.0),
        ("import numpy as np\ndef add(a, b): return np.int64(a) + np.int64(b)", 1.0),
    ],
)
def test_call_tests(box: Sandbox, program: str, score: float):
    tests = {"fn_name": "add", "inputs": [[1, 2], "10\n-3"], "outputs": [3, "7"]}
    assert grade(box, program, tests) == score


def test_wrapped_outputs_of_published_sets(box: Sandbox):
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [4]]}
    assert grade(box, "def f(x): return 2 * x", tests) == 1.0
    assert grade(box, "def f(x): return [2 * x]", tests) == 1.0
    strict = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [4, 4]]}
    assert grade(box, "def f(x): return 2 * x", strict) == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "assert pair(3) == (3, 9)",
        "s = Stack()\ns.push(4)\nassert s.pop() == 4",
        "assert Stack().size == 0",
        "s = Stack()\ns.push(1)\nassert s.items == [1]",
        "assert apply(lambda x: x + 1, 3) == 4",
        "assert apply(pair, 3) == (3, 9)",
        "assert list(count(3)) == [0, 1, 2]",
        "assert math.isclose(half(1), 0.5)",
        "from math import isclose\nassert isclose(half(1), 0.5)",
        "assert set([pair(1)]) == {(1, 1)}",
        "assert len(pair(1)) == 2",
        "assert LIMIT == 7",
        "try:\n    refuse(-1)\n    assert False\nexcept ValueError as e:\n    assert 'negative' in str(e)",
        "def check(candidate):\n    assert candidate(2) == (2, 4)\n\ncheck(pair)",
        "assert noisy('x') == 'x'",
        "assert all(half(x) == x / 2 for x in range(5))",
        "items = []\nassert shared(items) == [1] and items == []",
    ],
)
def test_assert_tests_that_hold(box: Sandbox, test: str):
    assert grade(box, LIBRARY, {"assert_case": [test]}) == 1.0


@pytest.mark.parametrize(
    "test",
    [
        "assert pair(3) == (3, 8)",
        "assert pair(3) == [3, 9]",
        "assert cheat(1) == 5",
        "assert 5 == cheat(1)",
        "assert cheat(1)",
        "assert not (cheat(1) != 5)",
        "assert isclose(half(1), 99.0)",
        "assert set([pair(1)]) == {(9, 9)}",
        "assert len(pair(1)) == 3",
        "assert math.isclose(half(1), 9.9)",
        "assert missing(1) == 1",
        "assert Stack() == Stack()",
        "assert cheat(1) in [1, 2]",
        "assert refuse(1) == 1",
        "assert all(map(lambda n: stop(n) == 9, [1, 2]))",
    ],
)
def test_assert_tests_that_do_not_hold(box: Sandbox, test: str):
    assert grade(box, LIBRARY, {"assert_case": [test]}) == 0.0


def test_naming_the_function_leaves_the_program_nothing_else(box: Sandbox):
    program = "def f(x): return 0\ndef isclose(*args): return True"
    text = "assert isclose(f(1), 5.0)"
    assert grade(box, program, {"assert_case": [text]}) == 1.0, "the test itself asks the program"
    assert grade(box, program, {"assert_case": [text], "fn_name": "f"}) == 0.0
    right = {"assert_case": ["from math import isclose\n" + text], "fn_name": "f"}
    assert grade(box, "def f(x): return 5.0", right) == 1.0


def test_a_function_named_like_a_builtin_is_the_programs(box: Sandbox):
    tests = {"assert_case": ["assert sum([1, 2]) == 30"]}
    assert grade(box, "def sum(items): return 30", tests) == 1.0
    assert grade(box, "def other(items): return 30", tests) == 0.0


def test_a_verdict_the_program_writes_itself_is_worth_nothing(box: Sandbox):
    forged = "import os\nfor fd in range(3, 10):\n    try: os.write(fd, b'{\"verdict\": true}\\n')\n    except OSError: pass\n"
    assert grade(box, forged + "def f(): return 2", {"assert_case": ["assert f() == 1"]}) == 0.0
    assert grade(box, forged, {"assert_case": ["assert f() == 1"]}) == 0.0


_OWN_WIRE = """
import json, os
names = ["abs", "set", "sorted", "isinstance", "math", "AssertionError"]
for line in open(3, "rb", closefd=False):
    request = json.loads(line)
    if request["op"] == "names":
        answer = ["d", *[[name, "callable"] for name in [*request["names"], *names]]]
    elif request["op"] == "get":
        answer = ["r", 0]
    else:
        answer = {"abs": 0, "set": ["l"], "sorted": ["l"], "f": 1}.get(str(request["target"]), True)
    os.write(4, json.dumps({"ok": answer}).encode() + b"\\n")
"""


@pytest.mark.parametrize("fn_name", ["", "f"])
@pytest.mark.parametrize(
    "test",
    [
        "assert abs(f(2) - 1.5) < 1e-6",
        "assert set(f(2)) == set([1, 2])",
        "assert isinstance(f(2), list)",
        "assert math.isclose(f(2), 1.5)",
    ],
)
def test_a_program_cannot_offer_names_it_was_not_asked_for(box: Sandbox, test: str, fn_name: str):
    assert grade(box, _OWN_WIRE, {"assert_case": [test], "fn_name": fn_name}) == 0.0
    assert grade(box, _OWN_WIRE, {"assert_case": ["assert f(2) == 1"]}) == 1.0, "the wire is spoken as it should be"


def test_a_program_that_talks_out_of_turn_gains_nothing_and_floods_nobody(box: Sandbox):
    flood = "import os\nwhile True: os.write(4, b'{\"ok\": 1}\\n' * 1000)\ndef f(): return 1"
    assert grade(box, flood, {"assert_case": ["assert f() == 1"]}) == 0.0
    assert grade(box, "def f(): return 1", {"assert_case": ["assert f() == 1"]}) == 1.0


def test_a_flood_is_a_wrong_answer_although_the_tester_never_got_to_run(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    """On a busy machine the program may have flooded its pipe before the tester is confined. It is killed then."""
    start = ServerHandle.start

    def start_late(self: ServerHandle, kind: Any, *args: Any, **options: Any) -> Any:
        if kind == "test":
            (program,) = self.children.values()
            self.pump(lambda: not is_alive(program), time.monotonic() + 60)
        return start(self, kind, *args, **options)

    monkeypatch.setattr(ServerHandle, "start", start_late)
    flood = "import os\nwhile True: os.write(4, b'{\"ok\": 1}\\n' * 1000)\ndef f(): return 1"
    for _ in range(5):
        assert grade(box, flood, {"assert_case": ["assert f() == 1"]}) == 0.0


def test_large_arguments_and_results(box: Sandbox):
    items = list(range(400_000))
    assert grade(box, "def f(a): return sum(a)", {"fn_name": "f", "inputs": [[items]], "outputs": [sum(items)]}) == 1.0
    some = items[:100_000]
    assert grade(box, "def f(a): return a", {"fn_name": "f", "inputs": [[some]], "outputs": [some]}) == 1.0


def test_after_a_deadline_the_rest_is_not_run(box: Sandbox):
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    program = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    assert grade_code(program, tests, timeout=1.0, sandbox=box).extra == {"tests_passed": 1 / 3}


def test_failure_of_the_sandbox_is_no_zero():
    class Broken(Sandbox):
        def __init__(self) -> None:
            self.level = 2

        def run(self, *args, **kwargs):
            raise SandboxError("the fork server died")

    with pytest.raises(SandboxError):
        grade_code("print(1)", {"inputs": [""], "outputs": ["1"]}, sandbox=Broken())


@pytest.mark.parametrize(
    "tests",
    [
        {},
        {"inputs": ["1"]},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"assert_case": []},
        [1],
        "{",
        {"assert_case": ["assert ("]},
        {"fn_name": "f", "inputs": [3], "outputs": [3]},
    ],
)
def test_malformed_tests_are_named(tests: object):
    with pytest.raises(ValueError, match=r"tests|Expecting"):
        read_tests(tests)  # type: ignore[arg-type]


def test_tests_as_json_text():
    assert len(read_tests('{"inputs": ["1"], "outputs": ["1"]}')) == 1


@pytest.mark.parametrize(
    ("response", "source"),
    [
        ("print(1)", "print(1)"),
        ("Sure:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```py\na\n```\nbetter:\n```python\nb\n```", "b\n"),
        ("```\nplain\n```", "plain\n"),
        ("```python\nx = 1\n```\nOutput:\n```text\n1\n```", "x = 1\n"),
        ("```python\ncut off", "cut off"),
        ("  ```python\n  x\n  ```", "  x\n"),
        ("````python\ns = '```'\n````", "s = '```'\n"),
    ],
)
def test_code_is_taken_from_its_fence(response: str, source: str):
    assert extract_code(response) == source


def test_many_fences_take_linear_time():
    assert extract_code("```python\n" * 200_000).startswith("```python")


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (b"1 2\n", "1 2", True),
        (b"1 2  \n\n", "1 2\n", True),
        (b"1\n2", "1\n\n2", False),
        (b"1\n2\n3\n", "1\n2\n", False),
        (b"1\n", "1\n2\n", False),
        (b" 1", "1", True),
        (b"0.3333333", "0.33333333", True),
        (b"0.334", "0.333", False),
        (b"3", "3.0", True),
        (b"3.0", "3", False),
        (b"YES", "Yes", False),
        (b"\xff", "1", False),
        (b"nan", "1.5", False),
        ("١.٠".encode(), "1.0", False),
        (b"", "", True),
        (b"x", "", False),
    ],
)
def test_same_output(got: bytes, expected: str, same: bool):
    assert same_output(got, expected) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1, 1, True),
        (True, 1, False),
        (1, True, False),
        (1.0, 1, False),
        (1, 1.0, True),
        (True, 1.0, False),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        ({1: "a"}, {"1": "a"}, True),
        ({"1": "a"}, {"1": "a"}, True),
        ({1: "a", "1": "a"}, {"1": "a"}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({1, 2}, [1, 2], False),
        (None, None, True),
        (0, None, False),
        ("1", 1, False),
        (float("inf"), float("inf"), True),
        (float("nan"), float("nan"), False),
        (10**400, 1.0, False),
        (b"a", "a", False),
        ({10**5000: 1}, {"1": 1}, False),
    ],
)
def test_same_value(got: object, expected: object, same: bool):
    assert same_value(got, expected) is same


def test_one_sandbox_is_shared():
    assert code.shared_sandbox() is code.shared_sandbox()
