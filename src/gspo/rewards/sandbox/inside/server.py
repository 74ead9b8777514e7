"""The fork-server: trusted, without secrets. It makes one confined child a request and says how each one ended.

The judge passes the child's descriptors; what flows through them never enters this process, so that no child finds
traces of an earlier one in the memory it inherits.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from . import identity, landlock, libc, limits, preload, program, seccomp, tester

TICK_MS = 20
READY_FD, RULESET_FD = 5, 6
_HIGH_FD = 40


@dataclass(slots=True)
class Child:
    """A running child: its process, the descriptor that signals its end, and the pipe on which it said "confined"."""

    pid: int
    pidfd: int
    ready: int
    started: float


class ForkServer:
    """Serves one judge over one socket until that socket closes."""

    def __init__(self, channel: socket.socket, level: int, numpy_parent: str) -> None:
        self.channel = channel
        self.level = level
        self.children: dict[int, Child] = {}
        networked = identity.enter_namespaces()
        preload.preload(numpy_parent, whole=level == 1)
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        self.identity = identity.plan(
            networked, landmark=os.path.realpath(os.__file__) if level >= 2 else "/"
        )
        self.ruleset = _ruleset(numpy_parent) if level >= 2 else -1
        self.filter = seccomp.Filter(seccomp.build(libc.machine(), 1, file_calls=level >= 2))
        self.cloner = identity.Cloner(self.identity.pid_namespace)
        if level >= 1:
            self.identity.assume_as_server()
        self.baseline = limits.address_space()

    def serve(self) -> None:
        """Answer until the judge closes the socket; then end every child."""
        self._reply({"namespaces": [self.identity.network_namespace, self.identity.pid_namespace]})
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        try:
            while True:
                events = poll.poll(TICK_MS if self.children else None)
                if any(fd == self.channel.fileno() for fd, _ in events) and not self._request(poll):
                    return
                self._reap(poll, {fd for fd, _ in events})
                if not events:
                    self._count_threads()
        finally:
            for child in self.children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _reply(self, message: dict[str, Any]) -> None:
        self.channel.send(json.dumps(message).encode())

    def _request(self, poll: select.poll) -> bool:
        """Handle one message; False when the judge is gone."""
        data, fds, _, _ = socket.recv_fds(self.channel, 4096, 8)
        if not data:
            return False
        request = json.loads(data)
        if "kill" in request:
            child = self.children.get(request["kill"])
            if child is not None:
                os.kill(child.pid, signal.SIGKILL)
            return True
        try:
            child = self._start(request, fds)
        except OSError as error:
            self._reply({"id": request["run"], "error": f"fork: {error}"})
            return True
        finally:
            for fd in fds:
                os.close(fd)
        self.children[request["run"]] = child
        poll.register(child.pidfd, select.POLLIN)
        return True

    def _start(self, request: dict[str, Any], fds: list[int]) -> Child:
        ready, ready_child = os.pipe()
        try:
            pid = self.cloner.fork()
            if pid == 0:
                self._be_child(request, fds, ready_child)
        except OSError:
            os.close(ready)
            raise
        finally:
            os.close(ready_child)
        try:
            return Child(pid, os.pidfd_open(pid), ready, time.monotonic())
        except OSError:
            os.close(ready)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _reap(self, poll: select.poll, signalled: set[int]) -> None:
        for number, child in list(self.children.items()):
            if child.pidfd not in signalled:
                continue
            _, status = os.waitpid(child.pid, 0)
            poll.unregister(child.pidfd)
            os.set_blocking(child.ready, False)
            confined = os.read(child.ready, 1) == b"1"
            os.close(child.pidfd)
            os.close(child.ready)
            del self.children[number]
            wall = time.monotonic() - child.started
            self._reply({"id": number, "status": status, "confined": confined, "wall": wall})

    def _count_threads(self) -> None:
        """End a child with too many threads, where the kernel's own count does not apply."""
        for child in self.children.values():
            try:
                with open(f"/proc/{child.pid}/stat", "rb") as file:
                    threads = int(file.read().rpartition(b")")[2].split()[17])
            except (OSError, ValueError, IndexError):
                continue
            if threads > limits.MAX_THREADS:
                os.kill(child.pid, signal.SIGKILL)

    def _be_child(self, request: dict[str, Any], fds: list[int], ready: int) -> NoReturn:
        try:
            job = _arrange(fds, ready, self.ruleset)
            self._confine(request["memory"], request["cpu"])
            os.write(READY_FD, b"1")
            os.close(READY_FD)
        except BaseException as error:
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
            os._exit(125)
        try:
            _run(job)
        finally:
            os._exit(120)  # whatever a program broke: its process never returns into the server's loop

    def _confine(self, memory: int, cpu: int) -> None:
        who = self.identity
        os.setsid()
        if self.level >= 1:
            identity.become(None, who.capabilities)
        # Had the server died before this, writing to READY_FD will fail.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        own_user = self.level >= 1 and (who.uid is not None or who.network_namespace)
        limits.apply(self.baseline + memory, cpu, count_processes=own_user)
        if self.level >= 2:
            landlock.enter(RULESET_FD)
            os.close(RULESET_FD)
        if self.level >= 1:
            self._own_filter().install()

    def _own_filter(self) -> seccomp.Filter:
        pid = os.getpid()
        if pid == 1:
            return self.filter
        return seccomp.Filter(seccomp.build(libc.machine(), pid, file_calls=self.level >= 2))


def _ruleset(numpy_parent: str) -> int:
    readable = preload.readable_paths(numpy_parent)
    return landlock.make_ruleset(readable, preload.listable_paths(), devices=["/dev/null"])


def _arrange(fds: list[int], ready: int, ruleset: int) -> bytes:
    """Put the child's descriptors in their places and close all others; the job that was passed."""
    job_fd, *streams = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]
    ready = fcntl.fcntl(ready, fcntl.F_DUPFD, _HIGH_FD)
    if ruleset >= 0:
        ruleset = fcntl.fcntl(ruleset, fcntl.F_DUPFD, _HIGH_FD)
    job = os.pread(job_fd, os.fstat(job_fd).st_size, 0)
    os.closerange(len(streams), _HIGH_FD)
    for place, fd in enumerate(streams):
        os.dup2(fd, place)
    os.dup2(ready, READY_FD)
    if ruleset >= 0:
        os.dup2(ruleset, RULESET_FD)
    os.closerange(RULESET_FD + 1, 1 << 20)
    return job


ACTIONS = {b"S": program.run_script, b"F": program.serve_functions, b"T": tester.run_test}


def _run(job: bytes) -> None:
    """Do the job: a letter for what is to be done, then the source."""
    source = job[1:].decode("utf-8", "surrogatepass")
    program.seed_randomness(source)
    ACTIONS[job[:1]](source)


def _prepare() -> None:
    """Make this interpreter look to its children like a fresh one."""
    import site

    limits.lift()
    threading.stack_size(8 << 20)
    site.setquit()  # `-S` left these out
    site.setcopyright()
    sys.argv = [program.NAME]
    # Streams are made here, once, on pipes; children put their own descriptors under them.
    for place, fd in enumerate(os.pipe()):
        os.dup2(fd, place)
        os.close(fd)
    program.open_streams()


def main(descriptor: int, level: int, numpy_parent: str) -> None:
    """Serve the judge on the open socket `descriptor` until it is closed."""
    channel = socket.socket(fileno=descriptor)
    _prepare()
    server = ForkServer(channel, level, numpy_parent)
    os.environ.clear()  # not before: numpy's BLAS reads its number of threads there, and threads do not survive a fork
    time.tzset()
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    atexit._clear()
    gc.collect()
    gc.freeze()
    server.serve()
