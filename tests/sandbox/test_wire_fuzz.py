"""The judge reads whatever a program writes: plain data, or a refusal; never another exception, never a verdict of its own."""

from __future__ import annotations

import json
import os

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo.sandbox.inside import plain
from gspo.sandbox.inside.wire import ENDED, FAILED, MESSAGE, read_message
from gspo.sandbox.judge import _read_reply
from gspo.sandbox.pipes import PipeReader, PipeWriter, close_all
from gspo.sandbox.relay import Relay

TAGS = ["l", "t", "s", "f", "d", "b", "i", "c", "r", "k", "x", ""]
tagged = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(TAGS),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(st.sampled_from(TAGS), inner, inner).map(list)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=10,
)
lines = st.binary(max_size=40) | tagged.map(lambda v: json.dumps(v).encode())


@settings(max_examples=50)
@given(tagged)
@example(["d", ["l", 1]])
@example(["d", [1, 2, 3]])
@example(["s", ["d"]])
@example(["i", 1])
@example(["b", "0"])
@example(["c", "1", []])
@example(["r", -1])
@example(["k", True])
def test_any_json_is_plain_data_or_refused(data: object):
    for reference in (None, lambda tag, number: (tag, number)):
        try:
            value = plain.decode(data, reference)
        except plain.NotPlain:
            continue
        if reference is None and "nan" not in repr(value):
            assert plain.decode(plain.load_line(plain.dump_line(plain.encode(value)))) == value


@settings(max_examples=50)
@given(st.none() | lines | tagged.map(lambda v: json.dumps({"ok": v}).encode()), st.booleans())
@example(b'{"ok": ["r", 0]}', False)
@example(b'["ok"]', False)
@example(b'{"error": ["ValueError", "no"]}', False)
@example(b"{}", True)
def test_any_reply_of_a_program_is_a_result(line: bytes | None, timed_out: bool):
    got = _read_reply(line, timed_out)
    assert got.ok == (got.error == "")
    assert got.timed_out == (line is None and timed_out)
    if not got.ok:
        assert got.value is None


class Ends:
    """Both ends of a child's link, in this process."""

    def __init__(self) -> None:
        self.requests, self.replies = PipeWriter(), PipeReader(1 << 20)

    def says(self, data: bytes) -> None:
        os.write(self.replies.child_fd, data)
        self.replies.drain()

    def heard(self) -> bytes:
        os.set_blocking(self.requests.child_fd, False)
        try:
            return os.read(self.requests.child_fd, 1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        close_all([self.requests.fd, self.requests.child_fd, self.replies.fd, self.replies.child_fd])


@settings(max_examples=80)
@given(st.lists(lines, max_size=4), st.integers(0, 3))
def test_a_program_cannot_speak_out_of_turn_or_give_the_verdict(said: list[bytes], num_requests: int):
    """For each request of the test one line is passed on, whatever else the program writes."""
    said = [line.replace(b"\n", b" ") + b"\n" for line in [*said, b'{"verdict": true}']]
    program, tester = Ends(), Ends()
    try:
        relay = Relay(program, tester)  # type: ignore[arg-type]
        program.says(b"".join(said))
        assert not relay.advance() and tester.heard() == b""  # nobody asked
        for _ in range(num_requests):
            tester.says(b'{"op": "call"}\n')
        assert not relay.advance()
        relay.advance()
        assert tester.heard() == b"".join(said[:num_requests])
        assert not relay.result(timed_out=False).ok
        assert relay.result(timed_out=True).timed_out
    finally:
        program.close(), tester.close()


@settings(max_examples=80)
@given(lines)
@example(b'{"verdict": 1}')
@example(b'{"verdict": "true"}')
@example(b'{"verdict": true}')
@example(b"[]")
@example(b"7")
@example(b'"verdict"')
@example(b"null")
def test_only_a_verdict_of_true_passes(line: bytes):
    program, tester = Ends(), Ends()
    try:
        relay = Relay(program, tester)  # type: ignore[arg-type]
        tester.says(line.replace(b"\n", b" ") + b"\n")
        relay.advance()
        try:
            passed = json.loads(line).get("verdict") is True
        except (ValueError, AttributeError):
            passed = False
        assert relay.result(timed_out=False).ok is passed
    finally:
        program.close(), tester.close()


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 60))
def test_a_pipe_keeps_the_first_bytes_and_says_when_there_were_more(chunks: list[bytes], limit: int):
    reader = PipeReader(limit)
    try:
        whole = b"".join(chunks)
        os.write(reader.child_fd, whole)
        reader.drain()
        assert bytes(reader.data) == whole[:limit] and reader.truncated == (len(whole) > limit)
        found = []
        while (line := reader.take_line()) is not None:
            found.append(line)
        assert b"".join(found) + bytes(reader.data) == whole[:limit]
        assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in found)
    finally:
        close_all([reader.fd, reader.child_fd])


@settings(max_examples=60)
@given(
    st.sampled_from([ENDED, FAILED]),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.booleans(),
    st.binary(max_size=30),
)
def test_a_server_message_is_read_as_it_was_sent(what: int, number: int, status: int, confined: bool, reason: bytes):
    got = read_message(MESSAGE.pack(what, number, status, confined, 1.5) + reason)
    assert got == (what, number, status, confined, 1.5, reason.decode(errors="replace"))
