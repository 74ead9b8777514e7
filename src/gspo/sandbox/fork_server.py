"""The judge's handle on one fork server: starting it, requesting children, moving their bytes, ending them.

    judge ── request, with the child's descriptors ──▶ fork server ── fork ──▶ child
      │ ◀── message: ready, ended (status), failed ──────┘                       │
      └─────────── pipes: requests ──▶ ◀── stdout, stderr, replies ──────────────┘

The judge waits in `step` for whichever comes first: bytes on a pipe, a message, or the deadline. The fork server waits
for requests and for the end of its children, never for their output. A child waits for its pipes alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any, Literal

from gspo.processes import children_of

from .inside import wire
from .inside.plain import MAX_BYTES
from .launch import launch
from .pipes import PipeReader, PipeWriter, close_all, sealed_file
from .result import RunResult, SandboxError

STDOUT_LIMIT = 8 << 20
STDERR_LIMIT = 64 << 10
START_SECONDS = 60.0
GRACE_SECONDS = 5.0

Kind = Literal["script", "functions", "test"]
_LETTERS: dict[Kind, bytes] = {"script": b"S", "functions": b"F", "test": b"T"}


class Child:
    """One confined process as the judge sees it."""

    def __init__(self, number: int, linked: bool) -> None:
        self.number = number
        self.stdout = PipeReader(STDOUT_LIMIT)
        self.stderr = PipeReader(STDERR_LIMIT)
        self.requests = PipeWriter() if linked else None
        self.replies = PipeReader(2 * MAX_BYTES) if linked else None
        pipes = [p for p in (self.stdout, self.stderr, self.requests, self.replies) if p is not None]
        self.readers = [p for p in pipes if isinstance(p, PipeReader)]
        self.own_fds = [p.fd for p in pipes]
        self.child_fds = [p.child_fd for p in pipes]
        self.started = time.monotonic()
        self.wall = 0.0
        self.status: int | None = None
        self.error: str | None = None

    @property
    def ended(self) -> bool:
        return self.status is not None or self.error is not None

    def result(self, timed_out: bool) -> RunResult:
        """How it ended; raises SandboxError when it could not be confined or the server failed."""
        if self.error is not None or self.status is None:
            raise SandboxError(f"the sandbox could not run a program: {self.error or 'no status'}")
        code = os.waitstatus_to_exitcode(self.status)
        return RunResult(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=bytes(self.stdout.data),
            stderr=bytes(self.stderr.data),
            stdout_truncated=self.stdout.truncated,
            stderr_truncated=self.stderr.truncated,
            timed_out=timed_out,
            wall=self.wall,
        )


class ServerHandle:
    """One fork server process, with or without numpy loaded. Used by one thread at a time."""

    def __init__(self, level: int, with_numpy: bool = False) -> None:
        self.with_numpy = with_numpy
        self.children: dict[int, Child] = {}
        self.failed = False
        self._numbers = itertools.count(1)
        self._channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self.process, self._inner_pid = launch(level, far.fileno(), with_numpy)
        if self._receive(START_SECONDS) is None:
            reason = self._stderr_tail()
            self.close()
            raise SandboxError(f"the sandbox's fork server did not start at level {level}: {reason}")

    @property
    def pid(self) -> int:
        """The server's process; at level 3 the one inside bubblewrap."""
        inner = children_of(self._inner_pid) if self._inner_pid != self.process.pid else []
        return inner[0] if inner else self._inner_pid

    def start(self, kind: Kind, source: str, stdin: bytes, memory: int, cpu: int, linked: bool = False) -> Child:
        """Have the server fork a child for the source; raises SandboxError when the server is gone."""
        child = Child(next(self._numbers), linked)
        inputs = [sealed_file(_LETTERS[kind] + source.encode("utf-8", "surrogatepass")), sealed_file(stdin)]
        request = wire.REQUEST.pack(wire.RUN, child.number, memory, cpu)
        try:
            socket.send_fds(self._channel, [request], [*inputs, *child.child_fds])
        except OSError as error:
            close_all(child.own_fds)
            raise SandboxError(f"the sandbox's fork server is gone: {error}") from error
        finally:
            close_all([*inputs, *child.child_fds])
        self.children[child.number] = child
        return child

    def kill(self, child: Child) -> None:
        """Ask the server to end the child; `step` receives the message that it ended."""
        if not child.ended:
            with contextlib.suppress(OSError):
                self._channel.send(wire.REQUEST.pack(wire.KILL, child.number, 0, 0))

    def step(self, seconds: float) -> None:
        """Move bytes and messages for at most `seconds`; returns after the first events."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        sources: dict[int, Callable[[], Any]] = {}
        for child in self.children.values():
            for reader in child.readers:
                if not reader.closed:
                    poll.register(reader.fd, select.POLLIN)
                    sources[reader.fd] = reader.read
            if child.requests is not None and child.requests.pending:
                poll.register(child.requests.fd, select.POLLOUT)
                sources[child.requests.fd] = child.requests.write
        for fd, _ in poll.poll(max(0.0, seconds) * 1000 + 1):
            if fd == self._channel.fileno():
                self._read_message()
            else:
                sources[fd]()

    def pump(self, done: Callable[[], bool], deadline: float) -> bool:
        """Move bytes and messages until `done` or the deadline; False at the deadline.

        Messages that came in time count even if this thread was too busy to read them before.
        """
        while not done():
            if time.monotonic() >= deadline:
                self.step(0.0)
                return done()
            self.step(deadline - time.monotonic())
        return True

    def finish(self, child: Child) -> None:
        """End the child if it still runs, wait for its status, read its last output, close its descriptors."""
        self.kill(child)
        give_up = time.monotonic() + GRACE_SECONDS
        while not child.ended:
            if time.monotonic() > give_up:
                self.failed = True
                child.error = f"the fork server did not answer within {GRACE_SECONDS:g} s"
                break
            self.step(give_up - time.monotonic())
        for reader in child.readers:
            reader.drain()
        close_all(child.own_fds)
        self.children.pop(child.number, None)

    def _read_message(self) -> None:
        message = self._receive(0.0)
        if message is None:
            self.failed = True
            for child in self.children.values():
                child.error = child.error or f"the fork server died: {self._stderr_tail()}"
            return
        child = self.children.get(message.number)
        if child is None:
            return
        if message.what == wire.FAILED:
            child.error = message.reason
        elif not message.confined:
            child.stderr.drain()
            child.error = f"a child was not confined: {bytes(child.stderr.data).decode(errors='replace').strip()}"
        else:
            child.status, child.wall = message.status, message.wall

    def _receive(self, seconds: float) -> wire.ServerMessage | None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return None
        try:
            data = self._channel.recv(wire.MAX_BYTES)
        except OSError:
            return None
        return wire.read_message(data) if data else None

    def _stderr_tail(self) -> str:
        stream = self.process.stderr
        if stream is None:
            return "no reason given"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        os.set_blocking(stream.fileno(), False)
        text = (stream.read() or b"").decode(errors="replace").strip()
        return text.splitlines()[-1] if text else f"no reason given (exit status {self.process.poll()})"

    def close(self) -> None:
        """End the server and all its children; returns when they are gone."""
        for child in list(self.children.values()):
            close_all(child.own_fds)
        self.children.clear()
        self._channel.close()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.kill(self._inner_pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def forget(self) -> None:
        """Close the descriptors of a server that belongs to the process from which this one was forked."""
        self._channel.close()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.process.returncode = 0
