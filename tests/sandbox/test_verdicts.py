"""Verdicts without a program: what a case asks of the sandbox, how answers are compared, and what a broken answer is."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.rewards.graders.code import extract_code, grade_code, read_tests, same_output, same_value
from gspo.sandbox import levels
from gspo.sandbox.inside import plain
from gspo.sandbox.judge import DEFAULT_MEMORY, DEFAULT_WALL, _cpu_seconds, _read_reply, may_import_numpy
from gspo.sandbox.levels import LevelReport, choose
from gspo.sandbox.pipes import PipeReader, PipeWriter, close_all, sealed_file
from gspo.sandbox.relay import Relay, is_alive
from gspo.sandbox.result import CallResult, RunResult, SandboxError


class Box:
    """A sandbox that answers from a list and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []

    def _answer(self, *asked: Any) -> Any:
        self.asked.append(asked)
        return self.answers.pop(0)

    def run(self, source: str, stdin: bytes, *, wall: float, memory: int) -> Any:
        return self._answer("run", source, stdin, wall, memory)

    def call(self, source: str, name: str, args: tuple[Any, ...], *, wall: float, memory: int) -> Any:
        return self._answer("call", source, name, args, wall, memory)

    def check(self, source: str, test: str, *, name: str, wall: float, memory: int) -> Any:
        return self._answer("check", source, test, name, wall, memory)


def printed(text: bytes, exit_code: int | None = 0, timed_out: bool = False) -> RunResult:
    return RunResult(exit_code, None, text, b"", False, False, timed_out, 0.1)


def returned(value: Any, ok: bool = True, timed_out: bool = False) -> CallResult:
    return CallResult(ok, value, "", timed_out)


def graded(tests: Any, *answers: Any, **limits: Any) -> tuple[float, float, list[Any]]:
    box = Box(*answers)
    reward = grade_code("p", tests, sandbox=box, **limits)  # type: ignore[arg-type]
    assert reward.acc == reward.score
    return reward.score, reward.extra["tests_passed"], box.asked


def test_a_script_gets_its_input_and_limits_and_all_tests_count() -> None:
    tests = {"inputs": ["1", [2, 3]], "outputs": ["a", ["b", "c"]]}
    score, share, asked = graded(tests, printed(b"a\n"), printed(b"b\nc"), timeout=3.0, memory=99)
    assert (score, share) == (1.0, 1.0)
    assert asked == [("run", "p", b"1", 3.0, 99), ("run", "p", b"2\n3", 3.0, 99)]
    assert graded(tests, printed(b"a"), printed(b"b"))[:2] == (0.0, 0.5)
    assert graded(tests, printed(b"a", exit_code=1), printed(b"b\nc"))[:2] == (0.0, 0.5)
    assert graded(tests, printed(b"a"), printed(b"b\nc"))[2][0][3:] == (DEFAULT_WALL, DEFAULT_MEMORY)


def test_after_a_deadline_the_rest_counts_as_failed_and_is_not_run() -> None:
    tests = {"inputs": ["1"] * 4, "outputs": ["a"] * 4}
    score, share, asked = graded(tests, printed(b"a"), printed(b"", None, timed_out=True))
    assert (score, share, len(asked)) == (0.0, 0.25, 2)
    late = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 2]}
    assert graded(late, returned(None, ok=False, timed_out=True))[1:] == (
        0.0,
        [("call", "p", "f", (1,), DEFAULT_WALL, DEFAULT_MEMORY)],
    )
    asserts = {"assert_case": ["assert f(1)", "assert f(2)"]}
    assert len(graded(asserts, returned(None, ok=False, timed_out=True))[2]) == 1
    assert graded(asserts, returned(None, ok=False), returned(None))[1] == 0.5


def test_calls_get_their_arguments_and_one_of_the_accepted_values() -> None:
    tests = {"fn_name": "f", "inputs": [[1, "x"], '2\n\n"y"'], "outputs": ["[3]", [4]]}
    score, _, asked = graded(tests, returned(3), returned([4]), timeout=3.0, memory=9)
    assert score == 1.0  # each wrapped in a list of one: either form is right
    assert asked == [("call", "p", "f", (1, "x"), 3.0, 9), ("call", "p", "f", (2, "y"), 3.0, 9)]
    mixed = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], [4, 5]]}
    assert graded(mixed, returned(3), returned([4, 5]))[1] == 0.5  # not all are wrapped
    assert graded(mixed, returned([3]), returned((4, 5)))[1] == 1.0
    assert graded({"fn_name": "f", "inputs": [[]], "outputs": ["no json"]}, returned("no json"))[0] == 1.0
    assert graded({"fn_name": "f", "inputs": [[]], "outputs": [1]}, returned(1, ok=False))[0] == 0.0


def test_assertions_get_their_text_and_the_functions_name() -> None:
    score, _, asked = graded({"assert_case": "assert f(1)", "fn_name": "f"}, returned(None), timeout=3.0, memory=9)
    assert score == 1.0 and asked == [("check", "p", "assert f(1)", "f", 3.0, 9)]
    assert graded({"assert_case": ["assert 1"]}, returned(None))[2][0][3] == ""


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ({"assert_case": []}, "is empty"),
        ({"assert_case": ["assert (", "assert 1"]}, "is not Python"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": ["1"]}, r"got \['inputs'\]"),
        ({"fn_name": "f", "inputs": [3], "outputs": [1]}, "the inputs of a call are 3"),
        ([1], "expected a mapping, got list"),
    ],
)
def test_malformed_tests_say_what_is_wrong(tests: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tests(tests)


@pytest.mark.parametrize(
    ("response", "source"),
    [
        ("~~~python3\na\n~~~", "a\n"),
        ("```PYTHON\na\n```", "a\n"),
        ("```c++\na\n```", "```c++\na\n```"),
        ("```python\na\n```\n```python\n```", ""),
        ("```python\na\n~~~\nb\n```", "a\n~~~\nb\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("```python\na\n   ```  \nb", "a\n"),
        ("x ```python\na", "x ```python\na"),
        ("```python\na\n```\n```js\nb\n```\nc", "a\n"),
    ],
)
def test_code_in_its_fence(response: str, source: str) -> None:
    assert extract_code(response) == source


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (b"a  b", "a b", True),
        (b"a\tb", "a b", True),
        (b"ab", "a b", False),
        (b"1.0000009", "1.0", True),
        (b"1.0000011", "1.0", False),
        (b"1e-10", "0.0", True),
        (b"1e-8", "0.0", False),
        (b"+1", "1.", True),
        (b"10", "1e1", True),
        (b"1e1", "10", False),
        (b"1,0", "1.0", False),
        (b"1.5 x", "1.5 y", False),
        (b"0" * 400, "0.0", True),
        (b"0" * 401, "0.0", False),
        (b"\n1", "1", False),
        (b"1\n\n", "1", True),
        (b"1", "1\n\n\n", True),
    ],
)
def test_outputs_are_compared_by_lines_and_words(got: bytes, expected: str, same: bool) -> None:
    assert same_output(got, expected) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1.0000009, 1.0, True),
        (1.0000011, 1.0, False),
        (1e-10, 0.0, True),
        (1e-8, 0.0, False),
        ([1, [2]], (1, (2,)), True),
        ([1], [1, 2], False),
        ([], (), True),
        ({}, [], False),
        ([], {}, False),
        ({1.5: 2}, {"1.5": 2}, True),
        ({True: 2}, {"true": 2}, True),
        ({None: 2}, {"null": 2}, True),
        ({(1,): 2}, {"(1,)": 2}, False),
        ({"a": [1.0]}, {"a": [1]}, False),
        ({"a": 1}, {"b": 1}, False),
        ("a", "a", True),
        (True, True, True),
        (True, False, False),
    ],
)
def test_values_are_compared_with_their_types(got: Any, expected: Any, same: bool) -> None:
    assert same_value(got, expected) is same


@pytest.mark.parametrize(
    ("line", "timed_out", "result"),
    [
        (None, True, CallResult(False, None, "deadline", True)),
        (None, False, CallResult(False, None, "the program ended without an answer", False)),
        (b'{"ok": ["t", 1]}', False, CallResult(True, (1,), "", False)),
        (b'{"ok": ["t", 1]}', True, CallResult(True, (1,), "", False)),
        (b'{"error": "x"}', False, CallResult(False, None, "{'error': 'x'}", False)),
        (b"[1]", False, CallResult(False, None, "[1]", False)),
        (b'"' + b"x" * 600 + b'"', False, CallResult(False, None, "x" * 500, False)),
        (
            b'{"ok": ["z"]}',
            False,
            CallResult(False, None, "the answer is not plain data: bad 'z': unknown tag 'z'", False),
        ),
    ],
)
def test_the_answer_of_a_call(line: bytes | None, timed_out: bool, result: CallResult) -> None:
    assert _read_reply(line, timed_out) == result


def test_an_answer_beyond_the_limit_is_refused() -> None:
    fitting = b'{"ok":"' + b"x" * (plain.MAX_BYTES - 9) + b'"}'
    assert len(fitting) == plain.MAX_BYTES and _read_reply(fitting, False).ok
    assert not _read_reply(fitting + b" ", False).ok


def test_processor_time_and_numpy() -> None:
    assert [_cpu_seconds(wall) for wall in (0.1, 1.0, 1.1, 10.0)] == [6, 6, 10, 42]
    for word in ("numpy", "__import__", "importlib", "builtins", "exec", "eval", "pickle", "modules", "é"):
        assert may_import_numpy(f"x = 1  # {word}")
    assert not may_import_numpy("import math\nprint(math.pi)")


class Pipe:
    """Lines that were received, and those that were written."""

    def __init__(self, *lines: bytes) -> None:
        self.lines, self.written, self.truncated = list(lines), [], False

    def take_line(self) -> bytes | None:
        return self.lines.pop(0) if self.lines else None

    def write(self, line: bytes) -> None:
        self.written.append(line)


def ends(program: tuple[bytes, ...] = (), tester: tuple[bytes, ...] = ()) -> tuple[Any, Any]:
    return tuple(SimpleNamespace(requests=Pipe(), replies=Pipe(*lines)) for lines in (program, tester))  # type: ignore[return-value]


def test_for_each_request_of_the_test_one_reply_of_the_program_is_passed_on() -> None:
    program, tester = ends(program=(b"early", b"second", b"third"), tester=(b'{"op": 1}', b'{"op": 2}'))
    relay = Relay(program, tester)
    assert not relay.advance()
    assert tester.requests.written == [] and program.requests.written == [b'{"op": 1}', b'{"op": 2}']
    assert not relay.advance()
    assert tester.requests.written == [b"early", b"second"] and program.replies.lines == [b"third"]


@pytest.mark.parametrize(
    ("line", "ok", "why"),
    [
        (b'{"verdict": true}', True, ""),
        (b'{"verdict": true, "why": "held"}', True, "held"),
        (b'{"verdict": false, "why": "no"}', False, "no"),
        (b'{"verdict": 1}', False, ""),
        (b"[true]", False, "the test sent something that is no message"),
        (b"{", False, "not JSON"),
    ],
)
def test_the_verdict_of_a_test(line: bytes, ok: bool, why: str) -> None:
    program, tester = ends(tester=(line, b'{"verdict": true}'))
    relay = Relay(program, tester)
    assert relay.advance() and program.requests.written == []
    result = relay.result(timed_out=True)
    assert (result.ok, result.timed_out) == (ok, False) and result.error.startswith(why)
    assert tester.replies.lines == [b'{"verdict": true}']  # only the first verdict counts


def test_without_a_verdict_a_test_failed() -> None:
    assert Relay(*ends()).result(True) == CallResult(False, None, "deadline", True)
    assert Relay(*ends()).result(False) == CallResult(False, None, "the program ended early", False)


def test_a_child_is_alive_until_it_ends_or_floods_a_pipe() -> None:
    def child(ended: bool = False, out: bool = False, replies: bool | None = False) -> Any:
        pipe = None if replies is None else SimpleNamespace(truncated=replies)
        return SimpleNamespace(ended=ended, stdout=SimpleNamespace(truncated=out), replies=pipe)

    assert is_alive(child()) and is_alive(child(replies=None))
    assert not any(map(is_alive, (child(ended=True), child(out=True), child(replies=True))))


def test_a_pipe_keeps_the_first_bytes_and_hands_out_lines() -> None:
    reader = PipeReader(limit=8)
    try:
        assert not reader.read() and not reader.closed
        os.write(reader.child_fd, b"one\ntwo\n")
        reader.drain()
        assert not reader.truncated and [reader.take_line() for _ in range(3)] == [b"one\n", b"two\n", None]
        for part in (b"12345", b"6789"):
            assert not reader.truncated
            os.write(reader.child_fd, part)
            reader.drain()
        assert reader.truncated and bytes(reader.data) == b"12345678"
        os.close(reader.child_fd)
        assert not reader.read() and reader.closed
    finally:
        close_all([reader.fd, reader.child_fd])


def test_what_a_pipe_has_no_room_for_is_kept_and_dropped_when_the_reader_is_gone() -> None:
    writer = PipeWriter()
    try:
        writer.write(b"x" * (1 << 20))
        left = len(writer.pending)
        assert 0 < left < 1 << 20 and not writer.broken
        taken = len(os.read(writer.child_fd, 1 << 16))
        writer.write(b"y")
        assert len(writer.pending) == left - taken + 1
        os.close(writer.child_fd)
        writer.write()
        assert writer.broken and not writer.pending
    finally:
        close_all([writer.fd, writer.child_fd])


def test_a_sealed_file_holds_its_data_and_cannot_be_changed() -> None:
    fd = sealed_file(b"input")
    try:
        assert os.read(fd, 99) == b"input"
        for change in (lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 99)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(fd)


def test_the_best_granted_level_is_chosen_and_never_less_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    granted: set[int] = set()
    monkeypatch.setattr(levels, "examine_level", lambda n: LevelReport(n, n in granted, f"no {n}"))
    monkeypatch.delenv("CI", raising=False)
    for has, asked, allowed, level in (
        ({1, 2, 3}, None, False, 2),
        ({1, 3}, None, False, 1),
        ({3}, None, True, 0),
        ({1, 2}, None, True, 2),
        ({3}, 3, False, 3),
        ({1}, 1, False, 1),
        (set(), 0, True, 0),
    ):
        granted.clear()
        granted.update(has)
        assert choose(asked, allowed) == level
    granted.clear()
    for asked, allowed, reason in (
        (None, False, r"no sandbox level is available \(level 2: no 2; level 1: no 1\)"),
        (2, True, "sandbox level 2 is not available: no 2"),
        (0, False, "isolates nothing"),
        (4, True, "expected 0, 1, 2 or 3"),
        (-1, True, "expected 0, 1, 2 or 3"),
    ):
        with pytest.raises(SandboxError, match=reason):
            choose(asked, allowed)
    for value in ("true", "TRUE", "1"):
        monkeypatch.setenv("CI", value)
        with pytest.raises(SandboxError, match="CI=true"):
            choose(None, True)
    monkeypatch.setenv("CI", "false")
    assert choose(0, True) == 0
