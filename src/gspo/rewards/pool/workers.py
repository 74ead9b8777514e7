"""Where workers come from: a fork server (processes that can be killed) or threads (which can only be abandoned)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from gspo.processes import kill_group, python_environment
from gspo.rewards.pool import frames as wire
from gspo.rewards.pool.fork_server import MAX_STARTS, Handler, Setup, work
from gspo.rewards.protocol import RewardError

LOAD_TIMEOUT = 120.0
STUCK_NICENESS = 10


@dataclass(slots=True)
class Member:
    """One worker as the pool sees it: a socket, and what is needed to end it."""

    sock: socket.socket
    ready: bool = True  # False: it loads the function first, and says so when it has
    pid: int = 0
    stack_file: IO[bytes] | None = None
    thread: threading.Thread | None = None


class Crew(Protocol):
    """Starts and ends workers. Called from one thread at a time."""

    info: Any

    def start(self, num_workers: int) -> list[Member]: ...

    def stop(self, member: Member) -> str:
        """End a worker, whatever it is doing, and say how it ended."""
        ...

    def kill(self, member: Member) -> None:
        """Begin to end a worker; `stop` must follow."""
        ...

    def mark(self, member: Member) -> None:
        """Ask a worker for its stack, to be read by `stack` a moment later."""
        ...

    def stack(self, member: Member) -> str: ...

    def slow(self, member: Member) -> None:
        """Lower a stuck worker's priority."""
        ...

    def close(self) -> None: ...


class ProcessCrew:
    """Workers forked from a server that has imported the reward function; see `gspo.rewards.pool.fork_server`."""

    def __init__(self, factory: str, args: tuple[Any, ...], *, memory: int = 1024) -> None:
        self._setup = Setup(factory, args, memory, tuple(sys.path))
        self._launch()
        if self._threads > 1:
            # Forking would leave locks of those threads held for ever: let each worker import for itself.
            self.close()
            self._setup = dataclasses.replace(self._setup, preload=False)
            self._launch()

    @property
    def pid(self) -> int:
        """The server's process, which leads a session of its own."""
        return self._server.pid

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "gspo.rewards.pool.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
                start_new_session=True,  # Ctrl-C is for the trainer alone
            )
        self._control = ours
        ours.settimeout(LOAD_TIMEOUT)
        try:
            wire.send(ours, pickle.dumps(self._setup))
            hello = json.loads(wire.receive(ours))
        except (OSError, EOFError) as error:
            self.close()
            why = (
                f"did not load within {LOAD_TIMEOUT:g} s"
                if isinstance(error, TimeoutError)
                else "ended while loading"
            )
            raise RewardError(
                f"the reward process {why} ({self._setup.factory}, {self._setup.args})"
            ) from error
        if "error" in hello:
            self.close()
            raise RewardError(hello["error"])
        self.info, self._threads = hello["info"], hello["threads"]

    def start(self, num_workers: int) -> list[Member]:
        """New workers, as many as asked for up to MAX_STARTS; a server that was killed is started again."""
        num_workers = min(num_workers, MAX_STARTS)
        try:
            return self._start(num_workers)
        except (OSError, EOFError):
            self.close()
            self._launch()
            return self._start(num_workers)

    def _start(self, num_workers: int) -> list[Member]:
        with contextlib.ExitStack() as ours_on_error, contextlib.ExitStack() as theirs_always:
            members, fds = [], []
            for _ in range(num_workers):
                ours, theirs = socket.socketpair()
                stack_file = ours_on_error.enter_context(tempfile.TemporaryFile())
                members.append(Member(ours_on_error.enter_context(ours), stack_file=stack_file))
                fds += [theirs_always.enter_context(theirs).fileno(), stack_file.fileno()]
            socket.send_fds(self._control, [b"start"], fds)
            pids = json.loads(wire.receive(self._control))
            ours_on_error.pop_all()
        for member, pid in zip(members, pids):
            member.pid, member.ready = pid, self._setup.preload
        return members

    def stop(self, member: Member) -> str:
        member.sock.close()
        if member.stack_file:
            member.stack_file.close()
        try:
            self._control.sendall(f"stop {member.pid}".encode())
            return "its process " + wire.receive(self._control).decode()
        except (OSError, EOFError):
            return "its process ended with the reward server"

    def kill(self, member: Member) -> None:
        kill_group(member.pid)  # not reaped before `stop`, so the id is still this worker's

    def mark(self, member: Member) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGUSR1)

    def stack(self, member: Member) -> str:
        if member.stack_file is None:
            return ""
        member.stack_file.seek(0)
        return _user_part(member.stack_file.read(1 << 16).decode(errors="replace"))

    def slow(self, member: Member) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, member.pid, STUCK_NICENESS)

    def close(self) -> None:
        """End the server and every worker; returns when they are gone."""
        self._control.close()
        try:
            self._server.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


class ThreadCrew:
    """Threads of this process, for functions that exist only here (closures, notebook cells).

    A hung thread cannot be killed: it is abandoned, reported like any other and replaced. There is no memory limit.
    """

    def __init__(self, handler: Handler, info: Any = None) -> None:
        self.info = info
        self._handler = handler

    def start(self, num_workers: int) -> list[Member]:
        members = []
        for _ in range(num_workers):
            ours, theirs = socket.socketpair()
            thread = threading.Thread(target=self._work, args=(theirs,), name="gspo-reward", daemon=True)
            thread.start()
            members.append(Member(ours, thread=thread))
        return members

    def _work(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(EOFError, OSError):
            work(sock, self._handler)

    def stop(self, member: Member) -> str:
        member.sock.close()
        return "its thread was abandoned"

    def kill(self, member: Member) -> None:
        pass

    def mark(self, member: Member) -> None:
        pass

    def stack(self, member: Member) -> str:
        frame = sys._current_frames().get(member.thread.ident or 0) if member.thread else None
        return "".join(traceback.format_stack(frame)[-8:]).rstrip() if frame else ""

    def slow(self, member: Member) -> None:
        pass

    def close(self) -> None:
        pass


def _environment() -> dict[str, str]:
    """The trainer's environment, with gspo importable, one thread a process and a fixed hash seed."""
    single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    return python_environment(PYTHONHASHSEED="0", GSPO_REWARD_WORKER="1", **single)


def _has_fileno(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def _user_part(dump: str) -> str:
    """faulthandler's dump without the frames of the worker's own loop."""
    own = str(Path(__file__).parents[1])
    lines = [line for line in dump.splitlines() if own not in line and "<frozen runpy>" not in line]
    return "\n".join(lines[:24])
