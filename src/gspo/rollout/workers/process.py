"""A rollout worker in a process of its own on this machine, over a socket.

    caller's thread     this process                                      worker process
      send ───────────▶ _outbox (queue) ─▶ writer thread ─▶ socket ─────▶ one call at a time
       └─ returns a Future, kept in _waiting
      result() ◀─────── set_result ◀────── reader thread ◀─ socket ◀───── answers in order

No caller waits for a full socket: only the writer does. When the process ends, the reader sees the end of the socket,
collects the process and fails every waiting Future with how it ended and the end of its log.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import IO, Any

from gspo.processes import describe_exit, kill_group, python_environment
from gspo.rollout.workers.connection import Args, Result, WorkerDied
from gspo.rollout.workers.worker import EngineSpec, RolloutWorker

CLOSE_SECONDS = 5.0
STACKS_SECONDS = 1.0
LOG_TAIL = 2000  # characters of the log quoted when the process ends


class ProcessConnection:
    """A `Connection` to a child process, whose output goes to `log`."""

    def __init__(self, spec: EngineSpec, index: int = 0, log: Path | None = None) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile() if log is None else open(log, "a+b")  # noqa: SIM115
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs.fileno(), self._log)
        self.pid = self._process.pid
        self.name = f"rollout worker {index} (process {self.pid})"
        self._pipe = Pipe(ours.detach())
        self._lock = threading.Lock()
        self._waiting: deque[Future[Any]] = deque()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ending: str | None = None  # how the process ended, once it was collected
        self._kill_reason: str | None = None
        self._outbox.put(pickle.dumps((list(sys.path), spec)))
        self._reader = threading.Thread(target=self._read, name=f"gspo-rollout-{index}-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"gspo-rollout-{index}-write", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def alive(self) -> bool:
        return self._ending is None and self._kill_reason is None

    def send(self, method: Callable[[RolloutWorker, *Args], Result], *args: *Args) -> Future[Result]:
        answer: Future[Result] = Future()
        message = pickle.dumps((method.__name__, args))
        with self._lock:
            if self._ending is None:
                self._waiting.append(answer)
                self._outbox.put(message)
                return answer
        answer.set_exception(WorkerDied(self._ending))
        return answer

    def stacks(self) -> str:
        """faulthandler's dump of every thread; "" from a process that is stopped or busy in a library."""
        if not self.alive:
            return ""
        start = os.fstat(self._log.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        end = time.monotonic() + STACKS_SECONDS
        while os.fstat(self._log.fileno()).st_size == start and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.05)  # the dump comes in several writes
        size = os.fstat(self._log.fileno()).st_size - start
        return os.pread(self._log.fileno(), size, start).decode(errors="replace")

    def kill(self, reason: str = "it was killed") -> None:
        if self._ending is not None:  # collected: its number may be another process's by now
            return
        self._kill_reason = self._kill_reason or reason
        kill_group(self.pid)

    def close(self) -> None:
        if self._ending is None:
            self.send(RolloutWorker.close)
        self._outbox.put(None)
        self._reader.join(CLOSE_SECONDS)
        if self._reader.is_alive():
            self.kill("it did not close")
            self._reader.join()
        self._writer.join()

    def _write(self) -> None:
        """Carry messages to the worker until `None` comes."""
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # the reader finds out that the worker is gone
                self._pipe.send_bytes(message)
        # The worker sees the end of the socket after the last call and exits.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        """Bring answers until the worker closes its end."""
        while True:
            try:
                succeeded, result = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                break
            except Exception as error:  # whatever unpickling an answer raises
                self.kill(f"gave an answer that cannot be read ({type(error).__name__}: {error}) and was ended")
                break
            with self._lock:
                answer = self._waiting.popleft()
            with contextlib.suppress(InvalidStateError):  # cancelled by its caller
                answer.set_result(result) if succeeded else answer.set_exception(result)
        self._collect()

    def _collect(self) -> None:
        """Wait for the process to end, free its resources, and fail what it left unanswered."""
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill("it closed its connection and did not end")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # processes that it started and left behind
        code = self._process.wait()
        by_whom = " (by a user, or by the system when memory ran out)" if code == -signal.SIGKILL else ""
        cause = self._kill_reason or describe_exit(code) + by_whom
        with self._lock:
            self._ending = f"{self.name}: {cause}{self._log_tail()}"
            waiting, self._waiting = list(self._waiting), deque()
        self._outbox.put(None)
        self._writer.join()
        self._pipe.close()
        self._log.close()
        for answer in waiting:
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(WorkerDied(self._ending))

    def _log_tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace").strip()
        return f"; the end of its log:\n{text}" if text else ""


@cache
def _spawner() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="gspo-spawn")


os.register_at_fork(after_in_child=_spawner.cache_clear)


def _spawn(fd: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the process from a thread that lives as long as this program: the child dies with its parent *thread*."""
    return (
        _spawner()
        .submit(
            subprocess.Popen,
            [sys.executable, "-P", "-m", "gspo.rollout.workers.process_main", str(fd), str(os.getpid())],
            pass_fds=[fd],
            env=python_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the trainer alone
        )
        .result()
    )
