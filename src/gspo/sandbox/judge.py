"""The judge's side of the sandbox: runs untrusted programs in confined processes and reports how they ended.

    caller's thread ── run, call, check ──▶ Sandbox
        1. waits for a free slot: at most `num_servers` jobs run at a time
        2. uses an idle fork server, or starts one (waits for its "ready" message)
        3. requests a child, then waits in `pump` for its end, its answer or the deadline
        4. `finish`: requests the child's end and waits for its status, at most 5 s

A server that does not answer is closed, and its job is tried once more on a fresh one.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from . import levels
from .fork_server import ServerHandle
from .inside import plain
from .relay import Relay, is_alive
from .result import CallResult, RunResult, SandboxError

DEFAULT_WALL = 10.0
DEFAULT_MEMORY = 1 << 30

T = TypeVar("T")


def run_script(server: ServerHandle, source: str, stdin: bytes, wall: float, memory: int) -> RunResult:
    """Run a script on one server until it ends, exceeds the output limit or reaches the deadline."""
    child = server.start("script", source, stdin, memory, _cpu_seconds(wall))
    done = server.pump(lambda: child.ended or child.stdout.truncated, child.started + wall)
    server.finish(child)
    return child.result(timed_out=not done)


# A program without any of these words imports only what its import statements name, and none of them names numpy.
_WAYS_TO_NUMPY = ("numpy", "__import__", "importlib", "builtins", "exec", "eval", "pickle", "modules")


def may_import_numpy(source: str) -> bool:
    """Whether the source could import numpy, judged by its text; others run on a server without it, which forks faster."""
    return not source.isascii() or any(word in source for word in _WAYS_TO_NUMPY)


class Sandbox:
    """Runs untrusted Python at an isolation level whose self-test passed. May be used from many threads.

    `level` None means the default (2) or the best below it; a number requires that level. Level 0 isolates nothing: it
    needs `allow_unsandboxed` and is refused when CI=true. Fork servers start when needed, one per core, and a second
    one per core for programs that may import numpy. Raises SandboxError, with the remedy, when no level is available.
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
        self, source: str, name: str, args: Sequence[Any], *, wall: float = DEFAULT_WALL, memory: int = DEFAULT_MEMORY
    ) -> CallResult:
        """Call function `name` of the program (or of its class Solution) with plain data; returns plain data."""
        request = {"op": "call", "plain": True, "target": name, "args": [plain.encode(a) for a in args]}

        def attempt(server: ServerHandle) -> CallResult:
            child = server.start("functions", source, b"", memory, _cpu_seconds(wall), linked=True)
            assert child.requests is not None and child.replies is not None
            child.requests.write(plain.dump_line(request))
            replies = child.replies
            done = server.pump(lambda: b"\n" in replies.data or not is_alive(child), child.started + wall)
            server.finish(child)
            if child.error is not None:
                raise SandboxError(f"the sandbox could not run a program: {child.error}")
            return _read_reply(replies.take_line(), timed_out=not done)

        return self._with_server(attempt, source)

    def check(
        self, source: str, test: str, *, name: str = "", wall: float = DEFAULT_WALL, memory: int = DEFAULT_MEMORY
    ) -> CallResult:
        """Run an assert-style test in a second confined process, which calls the program; `ok` when it passed.

        With `name`, only that function comes from the program; else every name that neither the test nor Python
        defines.
        """

        def attempt(server: ServerHandle) -> CallResult:
            program = server.start("functions", source, b"", memory, _cpu_seconds(wall), linked=True)
            tester = server.start("test", f"{name}\n{test}", b"", memory, _cpu_seconds(wall), linked=True)
            relay = Relay(program, tester)
            done = server.pump(
                lambda: relay.advance() or not is_alive(program) or not is_alive(tester), program.started + wall
            )
            # When the program ended by itself or wrote beyond a limit, an error of the tester does not matter: it may be
            # killed below before it is even confined.
            decided = done and program.error is None and not is_alive(program)
            server.finish(program)
            server.finish(tester)
            error = program.error or (None if decided and not server.failed else tester.error)
            if error is not None:
                raise SandboxError(f"the sandbox could not run a test: {error}")
            return relay.result(timed_out=not done)

        return self._with_server(attempt, source, test)

    def server_pids(self) -> list[int]:
        """Processes of the servers that are idle now."""
        with self._lock:
            return [server.pid for server in self._idle]

    def close(self) -> None:
        """End every fork server; one that another thread uses ends when that thread is done."""
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
        """Run `attempt` on a server that suits the texts; when the sandbox itself failed, once more on a fresh one."""
        with_numpy = self.level != 1 and any(map(may_import_numpy, texts))
        with self._lease(with_numpy) as server, contextlib.suppress(SandboxError):
            return attempt(server)
        with self._lease(with_numpy) as server:
            return attempt(server)

    @contextlib.contextmanager
    def _lease(self, with_numpy: bool = False) -> Iterator[ServerHandle]:
        self._leave_inherited_servers()
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

    def _leave_inherited_servers(self) -> None:
        """In a process that was forked from the owner: leave the servers to the owner and start with none."""
        if self._owner == os.getpid():
            return
        for server in self._idle:
            server.forget()
        self._idle = []
        self._slots = threading.BoundedSemaphore(self.num_servers)
        self._lock = threading.Lock()
        self._owner = os.getpid()


def _cpu_seconds(wall: float) -> int:
    """Seconds of processor time for a program: a second limit behind the judge's clock, wide enough for threads."""
    return 4 * math.ceil(wall) + 2


def _read_reply(line: bytes | None, timed_out: bool) -> CallResult:
    if line is None:
        return CallResult(False, None, "deadline" if timed_out else "the program ended without an answer", timed_out)
    try:
        reply = plain.load_line(line, plain.MAX_BYTES)
        if isinstance(reply, dict) and "ok" in reply:
            return CallResult(True, plain.decode(reply["ok"]), "", False)
        return CallResult(False, None, str(reply)[:500], False)
    except plain.NotPlain as error:
        return CallResult(False, None, f"the answer is not plain data: {error}", False)
