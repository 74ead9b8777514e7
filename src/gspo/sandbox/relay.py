"""The judge between a test and the program that it calls: passes lines on and receives the verdict.

    tester ── request ──▶ judge ── request ──▶ program     the tester waits for the reply
    tester ◀── reply ──── judge ◀── reply ──── program     the program waits for the next request
    tester ── verdict ──▶ judge                            the judge waits for a line, an end or the deadline

The program's reply may be a callback, which the tester answers like a request: still one line per turn.
"""

from __future__ import annotations

from .fork_server import Child
from .inside import plain
from .result import CallResult


class Relay:
    """For each line of the tester the program may send one; further lines are not passed on."""

    def __init__(self, program: Child, tester: Child) -> None:
        self._program, self._tester = program, tester
        self._turns = 0
        self._verdict: dict | None = None

    def advance(self) -> bool:
        """Pass on the lines that have arrived; True once the tester sent its verdict."""
        program, tester = self._program, self._tester
        assert program.requests and program.replies and tester.requests and tester.replies
        while self._turns and (line := program.replies.take_line()) is not None:
            self._turns -= 1
            tester.requests.write(line)
        while self._verdict is None and (line := tester.replies.take_line()) is not None:
            try:
                message = plain.load_line(line)
            except plain.NotPlain as error:
                message = {"verdict": False, "why": str(error)}
            if not isinstance(message, dict):
                message = {"verdict": False, "why": "the test sent something that is no message"}
            if "verdict" in message:
                self._verdict = message
            else:
                self._turns += 1
                program.requests.write(line)
        return self._verdict is not None

    def result(self, timed_out: bool) -> CallResult:
        """The verdict; without one the test failed."""
        if self._verdict is None:
            return CallResult(False, None, "deadline" if timed_out else "the program ended early", timed_out)
        return CallResult(self._verdict.get("verdict") is True, None, str(self._verdict.get("why", "")), False)


def is_alive(child: Child) -> bool:
    """Whether a child still runs and has not exceeded the limit of a pipe."""
    return not child.ended and not any(c.truncated for c in (child.stdout, child.replies) if c is not None)
