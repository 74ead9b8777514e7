"""The fork server: trusted, without secrets. It forks one confined child per request and reports how each one ended.

It waits for requests and for the end of its children; the judge's `fork_server.py` has the drawing. The judge passes
the descriptors of the child. What flows through them never enters this process, so that no child finds traces of an
earlier one in the memory that it inherits.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from . import identity, landlock, libc, limits, preload, program, tester
from .confinement import Confinement
from .wire import ENDED, FAILED, KILL, MAX_BYTES, MESSAGE, READY, REQUEST

TICK_MS = 20
# The server's own descriptors are numbered above all that a child uses.
FIRST_FD = 40
_FDS_SPACE = socket.CMSG_SPACE(8 * 4)


@dataclass(slots=True)
class Child:
    """A running child: the judge's number for it, its process, the pipe on which it reports that it is confined."""

    number: int
    pid: int
    ready: int
    started: float


class ForkServer:
    """Serves one judge on one socket until that socket closes."""

    def __init__(self, channel: socket.socket, level: int, numpy_parent: str, with_numpy: bool) -> None:
        self.channel = channel
        self.children: dict[int, Child] = {}  # by the descriptor that signals their end
        self.poll = select.poll()
        self.poll.register(channel, select.POLLIN)
        network_namespace = identity.enter_namespaces()
        preload.preload(numpy_parent if with_numpy or level == 1 else "", everything=level == 1)
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        self.identity = identity.probe(
            network_namespace, must_read=os.path.realpath(os.__file__) if level >= 2 else "/"
        )
        ruleset = _ruleset(numpy_parent) if level >= 2 else -1
        self.cloner = identity.Cloner(self.identity.pid_namespace)
        if level >= 1:
            self.identity.assume_as_server()
        self.confinement = Confinement(level, self.identity, ruleset)

    def serve(self) -> None:
        """Handle requests until the judge closes the socket; then end every child."""
        self.channel.send(MESSAGE.pack(READY, 0, 0, True, 0.0))
        judge = self.channel.fileno()
        try:
            while True:
                events = self.poll.poll(TICK_MS if self.children else None)
                for fd, _ in events:
                    if fd != judge:
                        self._reap(fd)
                    elif not self._handle_request():
                        return
                if not events:
                    self._count_threads()
        finally:
            for child in self.children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _handle_request(self) -> bool:
        """Handle one request; False when the judge is gone."""
        data, passed, _, _ = self.channel.recvmsg(MAX_BYTES, _FDS_SPACE)
        if not data:
            return False
        what, number, memory, cpu = REQUEST.unpack(data)
        if what == KILL:
            for child in self.children.values():
                if child.number == number:
                    os.kill(child.pid, signal.SIGKILL)
            return True
        fds = memoryview(passed[0][2]).cast("i").tolist() if passed else []
        try:
            self._start(number, memory, cpu, fds)
        except OSError as error:
            self.channel.send(MESSAGE.pack(FAILED, number, 0, False, 0.0) + f"fork: {error}".encode())
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, number: int, memory: int, cpu: int, fds: list[int]) -> None:
        ready, ready_child = os.pipe()
        try:
            pid = self.cloner.fork()
            if pid == 0:
                self._become_program(memory, cpu, fds, ready_child)
        except OSError:
            os.close(ready)
            raise
        finally:
            os.close(ready_child)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.close(ready)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self.children[pidfd] = Child(number, pid, ready, time.monotonic())
        self.poll.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        child = self.children.pop(pidfd)
        _, status = os.waitpid(child.pid, 0)
        self.poll.unregister(pidfd)
        os.set_blocking(child.ready, False)
        confined = os.read(child.ready, 1) == b"1"
        os.close(pidfd)
        os.close(child.ready)
        wall = time.monotonic() - child.started
        self.channel.send(MESSAGE.pack(ENDED, child.number, status, confined, wall))

    def _count_threads(self) -> None:
        """End a child with too many threads, in case the kernel's own limit does not apply."""
        for child in self.children.values():
            try:
                with open(f"/proc/{child.pid}/stat", "rb") as file:
                    threads = int(file.read().rpartition(b")")[2].split()[17])
            except (OSError, ValueError, IndexError):
                continue
            if threads > limits.MAX_THREADS:
                os.kill(child.pid, signal.SIGKILL)

    def _become_program(self, memory: int, cpu: int, fds: list[int], ready: int) -> NoReturn:
        """Turn this fresh child into the program: streams in place, confined, all other descriptors closed."""
        try:
            job_fd, *streams = fds
            job = os.pread(job_fd, os.fstat(job_fd).st_size, 0)
            for place, fd in enumerate(streams):
                os.dup2(fd, place)
            self.confinement.enter(memory, cpu)
            os.closerange(len(streams), ready)
            os.closerange(ready + 1, 1 << 20)
            self.confinement.seal()
            os.write(ready, b"1")
            os.close(ready)
        except BaseException as error:
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
            os._exit(125)
        try:
            _run_job(job)
        finally:
            os._exit(120)  # whatever the program broke, its process must not return into the server's loop


def _ruleset(numpy_parent: str) -> int:
    readable = preload.readable_paths(numpy_parent)
    return landlock.make_ruleset(readable, preload.listable_paths(), devices=["/dev/null"])


ACTIONS = {b"S": program.run_script, b"F": program.serve_functions, b"T": tester.run_test}


def _run_job(job: bytes) -> None:
    """Run a job: a letter for the action, then the source."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    source = job[1:].decode("utf-8", "surrogatepass")
    program.seed_randomness(source)
    ACTIONS[job[:1]](source)


def _prepare() -> None:
    """Make this interpreter look like a fresh one to its children."""
    import site

    limits.lift()
    threading.stack_size(8 << 20)
    site.setquit()  # `-S` left these out
    site.setcopyright()
    sys.argv = [program.FILE_NAME]
    # The streams are opened here, once, on pipes; children replace the descriptors below them.
    for place, fd in enumerate(os.pipe()):
        os.dup2(fd, place)
        os.close(fd)
    for place in range(3, FIRST_FD):
        os.dup2(0, place)
    program.open_streams()


def prepare(descriptor: int, level: int, numpy_parent: str, with_numpy: bool) -> ForkServer:
    """A server for the judge on the open socket `descriptor`, with all modules loaded and a clean interpreter."""
    channel = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FD))
    os.close(descriptor)
    _prepare()
    server = ForkServer(channel, level, numpy_parent, with_numpy)
    os.environ.clear()  # not earlier: numpy's BLAS reads its number of threads there, and threads do not survive a fork
    time.tzset()
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    atexit._clear()
    gc.collect()
    gc.freeze()
    return server
