"""The judge's side of the sandbox: runs untrusted programs in confined processes and says how they ended."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from . import levels
from .fork_server import ServerHandle, children_of
from .inside import plain
from .relay import Relay, is_alive
from .result import CallResult, RunResult, SandboxError

DEFAULT_WALL = 10.0
DEFAULT_MEMORY = 1 << 30

T = TypeVar("T")


def run_script(server: ServerHandle, source: str, stdin: bytes, wall: float, memory: int) -> RunResult:
    """Run a script on one server until it ends, floods its output or meets the deadline."""
    child = server.start("script", source, stdin, memory, _cpu(wall))
    over = server.pump(lambda: child.ended or child.stdout.truncated, child.started + wall)
    server.finish(child)
    return child.result(timed_out=not over)


# Words without which a program imports only what its import statements name.
_WAYS_TO_NUMPY = ("numpy", "__import__", "importlib", "builtins", "exec", "eval", "pickle", "modules")


def may_import_numpy(source: str) -> bool:
    """Whether the source could import numpy, by its text; other programs are forked without its memory."""
    return not source.isascii() or any(word in source for word in _WAYS_TO_NUMPY)


class Sandbox:
    """Runs untrusted Python at an isolation level that was tested by effect. Safe to use from many threads.

    `level` None takes the default (2) or the best below it; a number insists on that level. Level 0 isolates nothing:
    it must be asked for with `allow_unsandboxed` and is refused when CI=true. One fork-server a core is started when
    needed, a second one for programs that may import numpy. Raises SandboxError when no level can be had, with how to get one.
    """

    def __init__(
        self, level: int | None = None, *, allow_unsandboxed: bool = False, num_servers: int | None = None
    ) -> None:
        self.level = levels.choose(level, allow_unsandboxed)
        self.num_servers = num_servers or len(os.sched_getaffinity(0))
        self._idle: list[ServerHandle] = []
        self._slots = threading.BoundedSemaphore(self.num_servers)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False

    def run(
        self, source: str, stdin: bytes = b"", *, wall: float = DEFAULT_WALL, memory: int = DEFAULT_MEMORY
    ) -> RunResult:
        """Run the source as a script for at most `wall` seconds and `memory` bytes; raises SandboxError."""
        return self._with_server(lambda server: run_script(server, source, stdin, wall, memory), source)

    def call(
        self,
        source: str,
        name: str,
        args: Sequence[Any],
        *,
        wall: float = DEFAULT_WALL,
        memory: int = DEFAULT_MEMORY,
    ) -> CallResult:
        """Call function `name` of the program (or of its class Solution) with plain data; what it returned, as data."""
        request = {"op": "call", "plain": True, "target": name, "args": [plain.encode(a) for a in args]}

        def attempt(server: ServerHandle) -> CallResult:
            child = server.start("functions", source, b"", memory, _cpu(wall), linked=True)
            assert child.requests is not None and child.replies is not None
            child.requests.write(plain.dump_line(request))
            replies = child.replies
            over = server.pump(lambda: replies.has_line() or not is_alive(child), child.started + wall)
            server.finish(child)
            if child.error is not None:
                raise SandboxError(f"the sandbox could not run a program: {child.error}")
            return _read_reply(replies.take_line(), timed_out=not over)

        return self._with_server(attempt, source)

    def check(
        self,
        source: str,
        test: str,
        *,
        name: str = "",
        wall: float = DEFAULT_WALL,
        memory: int = DEFAULT_MEMORY,
    ) -> CallResult:
        """Run an assert-style test in a second confined process that calls the program's; `ok` when it held.

        With `name`, that function alone is the program's; else every name that neither the test nor Python defines.
        """

        def attempt(server: ServerHandle) -> CallResult:
            program = server.start("functions", source, b"", memory, _cpu(wall), linked=True)
            tester = server.start("test", f"{name}\n{test}", b"", memory, _cpu(wall), linked=True)
            relay = Relay(program, tester)
            over = server.pump(lambda: relay.advance() or not relay.alive(), program.started + wall)
            # A program that ended by itself decides; its tester may be ended before it was even confined.
            decided = over and program.status is not None
            server.finish(program)
            server.finish(tester)
            error = program.error or (None if decided and not server.failed else tester.error)
            if error is not None:
                raise SandboxError(f"the sandbox could not run a test: {error}")
            return relay.result(timed_out=not over)

        return self._with_server(attempt, source, test)

    def server_pids(self) -> list[int]:
        """Processes of the servers that are idle now."""
        with self._lock:
            return [server.pid for server in self._idle]

    def processes(self) -> list[int]:
        """Children that idle servers still have: none, unless something escaped its end."""
        return [child for pid in self.server_pids() for child in children_of(pid)]

    def close(self) -> None:
        """End every fork-server; one that another thread is using ends when it is done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for server in idle:
            server.close() if self._owner == os.getpid() else server.forget()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _with_server(self, attempt: Callable[[ServerHandle], T], *texts: str) -> T:
        """Do it on a free server fit for the texts; where the sandbox itself failed, once more on a fresh one."""
        with_numpy = self.level != 1 and any(map(may_import_numpy, texts))
        with self._lease(with_numpy) as server, contextlib.suppress(SandboxError):
            return attempt(server)
        with self._lease(with_numpy) as server:
            return attempt(server)

    @contextlib.contextmanager
    def _lease(self, with_numpy: bool = False) -> Iterator[ServerHandle]:
        self._after_fork()
        with self._slots:
            with self._lock:
                if self._closed:
                    raise SandboxError("this sandbox was closed")
                server = next((s for s in self._idle if s.with_numpy == with_numpy), None)
                if server is not None:
                    self._idle.remove(server)
            server = server or ServerHandle(self.level, with_numpy)
            healthy = False
            try:
                yield server
                healthy = not server.failed
            finally:
                with self._lock:
                    keep = healthy and not self._closed
                    if keep:
                        self._idle.append(server)
                if not keep:
                    server.close()

    def _after_fork(self) -> None:
        """Leave the servers to the process that started them, when this one was forked from it."""
        if self._owner == os.getpid():
            return
        for server in self._idle:
            server.forget()
        self._idle = []
        self._slots = threading.BoundedSemaphore(self.num_servers)
        self._lock = threading.Lock()
        self._owner = os.getpid()


def _cpu(wall: float) -> int:
    """Seconds of processor time a program may use: a backstop behind the judge's clock, loose for its threads."""
    return 4 * math.ceil(wall) + 2


def _read_reply(line: bytes | None, timed_out: bool) -> CallResult:
    if line is None:
        return CallResult(
            False, None, "deadline" if timed_out else "the program ended without an answer", timed_out
        )
    try:
        reply = plain.load_line(line, plain.MAX_BYTES)
        if isinstance(reply, dict) and "ok" in reply:
            return CallResult(True, plain.decode(reply["ok"]), "", False)
        return CallResult(False, None, str(reply)[:500], False)
    except plain.NotPlain as error:
        return CallResult(False, None, f"the answer is not plain data: {error}", False)
