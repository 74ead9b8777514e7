"""The process of a test and the process of a program, joined in this one: which names, values and errors pass between them."""

from __future__ import annotations

import ast
import io
import json
import math
import sys
from typing import Any

import pytest

from gspo.sandbox.inside import plain, program
from gspo.sandbox.inside.program import FunctionServer
from gspo.sandbox.inside.tester import ProgramConnection, RemoteObject, _test_globals, program_names


def serve(source: str) -> FunctionServer:
    """A server of the functions of a program, without its pipes."""
    server = FunctionServer.__new__(FunctionServer)
    server.objects, server.module = [], program._module("solution")
    del sys.modules["solution"]
    exec(source, server.module.__dict__)
    return server


class Joined(ProgramConnection):
    """A connection whose requests a server answers at once; the program's callbacks go through `call_back`."""

    def __init__(self, source: str) -> None:
        self._functions, self.sent = [], []
        self.server = serve(source)
        self.server.send = self._note_callback  # type: ignore[method-assign]
        self.server.requests = self  # type: ignore[assignment]
        self._in: Any = self
        self._replies: list[bytes] = []
        self._callback: Any = None

    def send(self, message: Any) -> None:
        self.sent.append(message)
        line = plain.dump_line(message)
        try:
            answer = {"ok": self.server.answer(plain.load_line(line))}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        self._replies.append(plain.dump_line(answer))

    def _note_callback(self, message: Any) -> None:
        self._callback = self._call_back(json.loads(plain.dump_line(message)))

    def readline(self) -> bytes:
        if self._callback is not None:
            answer, self._callback = plain.dump_line(self._callback), None
            return answer
        return self._replies.pop(0)


def run(program_source: str, test: str, name: str = "") -> str | None:
    """Why a test fails; None when it passes."""
    connection = Joined(program_source)
    try:
        exec(compile(test, "test.py", "exec"), _test_globals(test, name, connection))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("assert add(1, 2) == 3", {"add"}),
        ("x = add(1, 2)\nassert x == abs(-3)", {"add"}),
        ("assert abs(-3) == 3", {"abs"}),  # about a function with the name of a built-in
        ("assert len(set([1])) == 1 and f()", {"f"}),
        ("import math as m\nassert m.floor(f(1.5)) == 1", {"f"}),
        ("from os import path as p\nassert p.join(f()) == 'a'", {"f"}),
        ("assert math.isclose(f(), 1.0)", {"f"}),
        ("assert collections.Counter(f()) == np.array(1)", {"f"}),
        ("assert statistics(1) == statistics.x", {"statistics"}),  # called: the program's, not the module
        ("def check(candidate):\n    assert candidate(1)\ncheck(f)", {"f"}),
        ("class A:\n    pass\nassert f(A())", {"f"}),
        ("try:\n    f()\nexcept ValueError as error:\n    assert error", {"f"}),
        ("for i in range(3):\n    assert f(i) in [g for g in (i,)]", {"f"}),
        ("assert (lambda x: x)(f(2)) == 2", {"f"}),
        ("async def go():\n    return h\nassert f", {"f", "h"}),
        ("assert TABLE[1] == 2", {"TABLE"}),
    ],
)
def test_the_names_that_a_test_has_from_the_program(test: str, names: set[str]) -> None:
    assert program_names(ast.parse(test)) == names


ADD = """
TABLE = {1: 2}

def add(a, b=1):
    return a + b

class Point:
    def __init__(self, x): self.x = x
    def up(self): self.x += 1; return self.x
    def __len__(self): return 7
    def __str__(self): return 'point'
    def __iter__(self): return iter([self.x, 9])
    def __getitem__(self, key): return key * 2
    def __eq__(self, other): return True
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3 and add(1) == 2 and add(b=4, a=1) == 5",
        "assert TABLE[1] == 2 and TABLE == {1: 2}",
        "p = Point(3)\nassert p.x == 3 and p.up() == 4 and p.x == 4\np.x = 9\nassert p.up() == 10",
        "p = Point(3)\nassert len(p) == 7 and str(p) == 'point' and list(p) == [3, 9] and p[5] == 10",
        "assert [add(i, 1) for i in range(3)] == [1, 2, 3]",
        "try:\n    add('a', 1)\n    raise SystemError\nexcept TypeError:\n    pass",
        "assert add((1,), (2,)) == (1, 2) and add([1], [b'x']) == [1, b'x']",
        "assert math.floor(add(1.5, 0)) == 1",
    ],
)
def test_a_test_that_holds_passes(test: str) -> None:
    assert run(ADD, test) is None


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("assert add(1, 2) == 4", "AssertionError"),
        ("assert add(1)(2)", "TypeError"),
        ("assert Point(3)", "TypeError: the truth of a program's own object proves nothing"),
        ("assert Point(3) == 3", "TypeError: a program's own object does not decide equality"),
        ("assert 3 == Point(3)", "TypeError"),
        ("assert Point(3) != 3", "TypeError"),
        *((f"assert Point(3) {sign} 3", "TypeError") for sign in ("<", "<=", ">", ">=")),
        ("assert Point(3) in {1, 2}", "TypeError"),
        ("assert Point(3) in [3]", "TypeError"),
        ("assert missing() == 3", "NameError"),
        ("assert Point(3).__class__ == 3", "TypeError|AssertionError"),
        ("assert add(Point, object()) == 1", "NotPlain: a test cannot pass object to the program"),
    ],
)
def test_a_test_that_does_not_hold_fails(test: str, why: str) -> None:
    found = run(ADD, test)
    assert found is not None and any(found.startswith(each) for each in why.split("|")), found


def test_the_size_and_the_text_of_an_object_are_of_their_types() -> None:
    source = "class Odd:\n    def __getattr__(self, name): return name\nodd = Odd()\ndef make(): return odd\n"
    connection = Joined(source)
    connection.server.answer = lambda request: ["l", 1]  # type: ignore[method-assign]
    remote = RemoteObject(connection, "make")
    for ask, kind in ((len, "int"), (str, "str")):
        with pytest.raises(TypeError, match=f"expected {kind}"):
            ask(remote)


@pytest.mark.parametrize(
    ("name", "raised"),
    [
        ("ValueError", ValueError),
        ("ZeroDivisionError", ZeroDivisionError),
        ("StopIteration", RuntimeError),  # it would end a loop of the test
        ("KeyboardInterrupt", RuntimeError),
        ("SystemExit", RuntimeError),
        ("print", RuntimeError),
        ("Unknown", RuntimeError),
    ],
)
def test_an_error_of_the_program_is_raised_by_its_name_where_that_ends_no_loop(name: str, raised: type) -> None:
    connection = Joined("")
    with pytest.raises(raised, match="why") as caught:
        connection._result({"error": [name, "why"]})
    assert type(caught.value) is raised


def test_only_the_named_function_is_the_programs_where_one_is_named() -> None:
    cheat = "def f(x): return x\ndef abs(x): return 7\nmath = 3\n"
    assert run(cheat, "assert f(-2) == -2 and abs(-2) == 2 and math.floor(2.5) == 2") is None
    assert run(cheat, "assert f(abs(-2)) == 2", name="f") is None
    scope = _test_globals("assert f(g)", "f", Joined("def f(): ...\ndef g(): ..."))
    assert isinstance(scope["f"], RemoteObject) and "g" not in scope


def test_what_the_program_adds_to_its_reply_is_ignored() -> None:
    connection = Joined("def f(): return 1")
    connection.name_kinds = lambda names: {"f": "callable", "abs": "callable", "math": "value"}  # type: ignore[method-assign]
    scope = _test_globals("assert f() == abs(1)", "", connection)
    assert "abs" not in scope and "math" not in scope and scope["__name__"] == "test"


def test_modules_of_a_test_are_the_real_ones() -> None:
    scope = _test_globals("assert math.pi > np.float64(f())", "", Joined("def f(): return 1"))
    assert scope["math"] is math and scope["np"].__name__ == "numpy"


def test_functions_of_the_test_are_called_back_with_plain_values_and_objects() -> None:
    source = "def apply(g, x): return g(x) + 1\nclass Box:\n    v = 5\ndef boxed(g): return g(Box())\n"
    assert run(source, "assert apply(lambda x: x * 2, 5) == 11") is None
    assert run(source, "assert boxed(lambda box: box.v) == 5") is None
    failed = run(source, "assert apply(lambda x: 1 / 0, 5) == 11")
    assert failed is not None and "division by zero" in failed


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        ({"op": "names", "names": ["f", "x", "y"]}, ["d", ["f", "callable"], ["x", "value"], ["y", "missing"]]),
        ({"op": "call", "target": "f", "args": [2], "plain": True}, 4),
        ({"op": "call", "target": "f", "kwargs": {"a": 3}}, 6),
        ({"op": "value", "target": "x"}, ["l", 1, 2]),
        ({"op": "item", "target": "x", "args": [1]}, 2),
        ({"op": "len", "target": "x"}, 2),
        ({"op": "str", "target": "x"}, "[1, 2]"),
        ({"op": "iter", "target": "endless"}, ["l", *[0] * 100_000]),
        ({"op": "call", "target": "method", "args": [3]}, 30),
        ({"op": "call", "target": "made", "plain": False}, ["r", 0]),
    ],
)
def test_what_a_program_answers(request_: dict[str, Any], answer: Any) -> None:
    source = (
        "import itertools\ndef f(a): return 2 * a\nx = [1, 2]\nendless = itertools.repeat(0)\n"
        "class Solution:\n    def method(self, n): return 10 * n\nclass Thing: ...\ndef made(): return Thing()\n"
    )
    assert serve(source).answer(request_) == answer


def test_a_plain_call_returns_no_objects_and_an_unknown_name_is_an_error() -> None:
    server = serve("class Thing: ...\ndef made(): return Thing()\n")
    with pytest.raises(plain.NotPlain, match="Thing is not a plain type"):
        server.answer({"op": "call", "target": "made", "plain": True})
    with pytest.raises(NameError, match="name 'nothing' is not defined by the program"):
        server.answer({"op": "call", "target": "nothing"})


def test_a_loop_answers_every_request_and_errors_are_short() -> None:
    server = serve("def fail(): raise ValueError('x' * 5000)\ndef one(): return 1\n")
    sent: list[Any] = []
    server.send = sent.append  # type: ignore[method-assign]
    lines = [plain.dump_line({"op": "call", "target": name}) for name in ("fail", "one")]
    server.requests = io.BytesIO(b"".join([*lines, b"no json\n"]))  # type: ignore[assignment]
    server.loop()
    assert sent[0] == {"error": ["ValueError", "x" * 1000]} and sent[1] == {"ok": 1} and "error" in sent[2]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(259)", 3),
        ("import sys; sys.exit(200)", 200),
        ("import sys; sys.exit('why')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 1),
    ],
)
def test_the_exit_code_is_that_of_python(source: str, code: int, capsys: Any) -> None:
    assert program._exit_code_of(lambda: exec(source), source) == code
    said = capsys.readouterr().err
    assert bool(said) == (code == 1)
