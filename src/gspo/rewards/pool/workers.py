"""Where workers come from: a fork server (processes that can be killed) or threads (which can only be abandoned).

    WorkerPool's thread ── start, stop ──▶ WorkerSource    waits milliseconds, for the fork server's reply
                        ── kill, request_stack ──▶         does not wait
                        ◀── Worker.channel ──▶ worker      waits for payloads; the pool never waits for one worker

Only the pool's thread calls a WorkerSource.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from gspo.processes import kill_group, python_environment
from gspo.rewards.pool import frames
from gspo.rewards.pool.fork_server import MAX_STARTS, Handler, ServerSetup, run_jobs
from gspo.rewards.pool.frames import Channel
from gspo.rewards.protocol import RewardError

log = logging.getLogger("gspo.rewards")
LOAD_TIMEOUT = 120.0  # for the import of the reward function
SAY_AFTER = 8.0  # seconds of importing without a word
STUCK_NICENESS = 10


@dataclass(slots=True, eq=False)
class Job:
    """One payload on its way to a worker, and the future that gets its result."""

    data: bytes
    future: Future[Any]
    num_deaths: int = 0  # of workers that ran it


@dataclass(slots=True, eq=False)
class Worker:
    """One worker: the channel to it, what its source needs to end it, and what it is doing."""

    channel: Channel
    ready: bool = True  # False: the worker loads the function first, then sends one message
    pid: int = 0
    stack_file: IO[bytes] | None = None
    thread: threading.Thread | None = None
    since: float = field(default_factory=time.monotonic)  # when it was started, got its job, or was killed
    job: Job | None = None
    stack_requested: bool = False
    low_priority: bool = False


class WorkerSource(Protocol):
    """Starts and ends workers. `info` is what the handler's factory returned.

    The methods that return None do nothing here; a source implements those that its workers need.
    """

    info: Any
    pid: int = 0  # the process that all workers descend from; 0 when they are threads of this one
    what: str = "reward"  # what the workers compute, for messages

    def start(self, num_workers: int) -> list[Worker]:
        """Start workers: at least one, at most `num_workers`."""
        ...

    def stop(self, worker: Worker) -> str:
        """End a worker, whatever it is doing. Returns how it ended."""
        ...

    def kill(self, worker: Worker) -> None:
        """Begin to end a worker; `stop` must follow."""

    def request_stack(self, worker: Worker) -> None:
        """Ask a worker for its stack, which `stack` returns a moment later."""

    def stack(self, worker: Worker) -> str:
        """The stack of a worker as text; "" when there is none."""
        ...

    def lower_priority(self, worker: Worker) -> None:
        """Give a stuck worker less processor time. This cannot be undone."""

    def close(self) -> None:
        """End all workers; returns when they are gone."""


class ForkedWorkers(WorkerSource):
    """Workers forked from a server that has imported the reward function; see `gspo.rewards.pool.fork_server`."""

    def __init__(self, factory: str, args: tuple[Any, ...], *, memory: int = 1024, what: str = "reward") -> None:
        self.what = what
        self._setup = ServerSetup(factory, args, memory, tuple(sys.path))
        self._launch()
        if self._num_threads > 1:
            # A fork has none of the other threads, but the locks that they hold. Let each worker import for itself.
            self.close()
            self._setup = dataclasses.replace(self._setup, preload=False)
            self._launch()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        single_threaded = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "gspo.rewards.pool.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=python_environment(PYTHONHASHSEED="0", GSPO_REWARD_WORKER="1", **single_threaded),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints must not mix with what the trainer prints
                start_new_session=True,  # Ctrl-C is for the trainer alone
            )
        self.pid = self._server.pid
        self._control = ours
        ours.settimeout(LOAD_TIMEOUT)
        try:
            frames.send(ours, pickle.dumps(self._setup))
            if not select.select([ours], [], [], SAY_AFTER)[0]:
                log.warning(
                    f"the reward function is still being imported after {SAY_AFTER:g} s ({self._setup.factory}, "
                    f"{self._setup.args}); it is stopped after {LOAD_TIMEOUT:g} s"
                )
            reply = json.loads(frames.receive(ours))
        except (OSError, EOFError) as error:
            self.close()
            late = isinstance(error, TimeoutError)
            problem = f"did not load within {LOAD_TIMEOUT:g} s" if late else "ended while loading"
            raise RewardError(
                f"the {self.what} process {problem} ({self._setup.factory}, {self._setup.args})"
            ) from error
        if "error" in reply:
            self.close()
            raise RewardError(reply["error"])
        self.info, self._num_threads = reply["info"], reply["threads"]

    def start(self, num_workers: int) -> list[Worker]:
        """Start at most MAX_STARTS workers; a server that was killed is started again."""
        num_workers = min(num_workers, MAX_STARTS)
        try:
            return self._start(num_workers)
        except (OSError, EOFError):
            self.close()
            self._launch()
            return self._start(num_workers)

    def _start(self, num_workers: int) -> list[Worker]:
        with contextlib.ExitStack() as ours_on_error, contextlib.ExitStack() as theirs_always:
            workers, fds = [], []
            for _ in range(num_workers):
                ours, theirs = socket.socketpair()
                stack_file = ours_on_error.enter_context(tempfile.TemporaryFile())
                workers.append(Worker(Channel(ours_on_error.enter_context(ours)), stack_file=stack_file))
                fds += [theirs_always.enter_context(theirs).fileno(), stack_file.fileno()]
            socket.send_fds(self._control, [b"start"], fds)
            pids = json.loads(frames.receive(self._control))
            ours_on_error.pop_all()
        for worker, pid in zip(workers, pids):
            worker.pid, worker.ready = pid, self._setup.preload
        return workers

    def stop(self, worker: Worker) -> str:
        worker.channel.sock.close()
        if worker.stack_file:
            worker.stack_file.close()
        try:
            self._control.sendall(f"stop {worker.pid}".encode())
            return "its process " + frames.receive(self._control).decode()
        except (OSError, EOFError):
            return f"its process ended with the {self.what} server"

    def kill(self, worker: Worker) -> None:
        kill_group(worker.pid)  # the server reaps it in `stop`, so the id still belongs to this worker

    def request_stack(self, worker: Worker) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR1)

    def stack(self, worker: Worker) -> str:
        if worker.stack_file is None:
            return ""
        worker.stack_file.seek(0)
        return _user_part(worker.stack_file.read(1 << 16).decode(errors="replace"))

    def lower_priority(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, worker.pid, STUCK_NICENESS)

    def close(self) -> None:
        """End the server, which ends every worker; returns when they are gone."""
        self._control.close()
        try:
            self._server.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            kill_group(self.pid)
            self._server.wait()


class ThreadWorkers(WorkerSource):
    """Threads of this process, for functions that exist only here (closures, notebook cells).

    A hung thread cannot be killed: it is reported like a hung process, abandoned and replaced. There is no memory
    limit.
    """

    def __init__(self, handler: Handler, info: Any = None) -> None:
        self.info = info
        self._handler = handler

    def start(self, num_workers: int) -> list[Worker]:
        workers = []
        for _ in range(num_workers):
            ours, theirs = socket.socketpair()
            thread = threading.Thread(target=self._run, args=(theirs,), name="gspo-reward", daemon=True)
            thread.start()
            workers.append(Worker(Channel(ours), thread=thread))
        return workers

    def _run(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(EOFError, OSError):
            run_jobs(sock, self._handler)

    def stop(self, worker: Worker) -> str:
        worker.channel.sock.close()
        return "its thread was abandoned"

    def stack(self, worker: Worker) -> str:
        frame = sys._current_frames().get(worker.thread.ident or 0) if worker.thread else None
        return "".join(traceback.format_stack(frame)[-8:]).rstrip() if frame else ""


def _user_part(dump: str) -> str:
    """faulthandler's dump without the frames of the worker's loop."""
    own = str(Path(__file__).parents[1])
    lines = [line for line in dump.splitlines() if own not in line and "<frozen runpy>" not in line]
    return "\n".join(lines[:24])
