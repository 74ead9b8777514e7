"""The judge between a test and the program it calls: passes lines, in turn, and takes the verdict."""

from __future__ import annotations

from .fork_server import Child
from .inside import plain
from .result import CallResult


class Relay:
    """Each line of the tester lets the program answer with one; what it says out of turn is not passed on."""

    def __init__(self, program: Child, tester: Child) -> None:
        self._program, self._tester = program, tester
        self._turns = 0
        self._verdict: dict | None = None

    def advance(self) -> bool:
        """Pass on what is there; True once the tester gave its verdict."""
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
            if "verdict" in message:
                self._verdict = message
            else:
                self._turns += 1
                program.requests.write(line)
        return self._verdict is not None

    def alive(self) -> bool:
        return is_alive(self._program) and is_alive(self._tester)

    def result(self, timed_out: bool) -> CallResult:
        """The verdict; without one, nothing is earned."""
        if self._verdict is None:
            return CallResult(False, None, "deadline" if timed_out else "the program ended early", timed_out)
        return CallResult(
            self._verdict.get("verdict") is True, None, str(self._verdict.get("why", "")), False
        )


def is_alive(child: Child) -> bool:
    """Still running, and not flooding a channel."""
    return not child.ended and not any(c.truncated for c in (child.stdout, child.replies) if c is not None)
