"""A rollout worker in a process of its own on this machine, over a socket."""

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
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import IO, Any

from gspo.processes import describe_exit, kill_group, python_environment
from gspo.rollout.workers.connection import Ticket, WorkerDied
from gspo.rollout.workers.worker import EngineSpec

CLOSE_SECONDS = 5.0
STACKS_SECONDS = 1.0
TAIL = 2000  # characters of the log that an obituary quotes


class ProcessConnection:
    """A `Connection` to a child process. Its output goes to `log`, the end of which is quoted when it dies."""

    def __init__(self, spec: EngineSpec, index: int = 0, log: Path | None = None) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile() if log is None else open(log, "a+b")  # noqa: SIM115
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs.fileno(), self._log)
        self.pid = self._process.pid
        self.name = f"rollout worker {index} (process {self.pid})"
        self._pipe = Pipe(ours.detach())
        self._lock = threading.Lock()
        self._waiting: deque[Ticket[Any]] = deque()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._death: str | None = None
        self._reason: str | None = None
        self._outbox.put(pickle.dumps((list(sys.path), spec)))
        self._reader = threading.Thread(target=self._read, name=f"gspo-rollout-{index}-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"gspo-rollout-{index}-write", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def alive(self) -> bool:
        return self._death is None and self._reason is None

    def send(self, method: str, *args: Any) -> Ticket[Any]:
        ticket: Ticket[Any] = Ticket()
        message = pickle.dumps((method, args))
        with self._lock:
            if self._death is None:
                self._waiting.append(ticket)
                self._outbox.put(message)
                return ticket
        ticket.set_exception(WorkerDied(self._death))
        return ticket

    def stacks(self) -> str:
        """faulthandler's dump of every thread. A process that is stopped, or deep in a library, may not answer."""
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
        if self._death is not None:  # collected: its number may be another process's by now
            return
        self._reason = self._reason or reason
        kill_group(self.pid)  # what it started goes with it

    def close(self) -> None:
        if self._death is None:
            self.send("close")
        self._outbox.put(None)
        self._reader.join(CLOSE_SECONDS)
        if self._reader.is_alive():
            self.kill("it did not close")
            self._reader.join()
        self._writer.join()

    def _write(self) -> None:
        """Carry messages to the worker; a worker that does not read holds up this thread and nobody else."""
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # the reader finds out that it is gone
                self._pipe.send_bytes(message)
        # The worker reads its end after the last call and leaves.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        while True:
            try:
                good, answer = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                break
            except Exception as error:  # whatever an answer's own pickling raises
                self.kill(
                    f"gave an answer that cannot be read ({type(error).__name__}: {error}) and was ended"
                )
                break
            with self._lock:
                ticket = self._waiting.popleft()
            with contextlib.suppress(InvalidStateError):  # somebody gave up on it
                ticket.set_result(answer) if good else ticket.set_exception(answer)
        self._bury()

    def _bury(self) -> None:
        """Reap the process, free what it held, and fail what it left unanswered."""
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill("it closed its connection and did not end")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it had started and left behind
        code = self._process.wait()
        cause = self._reason or _how(code)
        with self._lock:
            self._death = f"{self.name}: {cause}{self._tail()}"
            waiting, self._waiting = list(self._waiting), deque()
        self._outbox.put(None)
        self._writer.join()
        self._pipe.close()
        self._log.close()
        for ticket in waiting:
            with contextlib.suppress(InvalidStateError):
                ticket.set_exception(WorkerDied(self._death))

    def _tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip()
        return f"; the end of its log:\n{text}" if text else ""


def _how(code: int) -> str:
    """How a process ended, in words."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (by somebody, or by the system for want of memory)"
    return describe_exit(code)


_spawner: ThreadPoolExecutor | None = None


def _forget_spawner() -> None:
    global _spawner
    _spawner = None


os.register_at_fork(after_in_child=_forget_spawner)


def _spawn(fd: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the process from a thread that lives as long as this program: the child asks to die with that thread."""
    global _spawner
    if _spawner is None:
        _spawner = ThreadPoolExecutor(1, thread_name_prefix="gspo-spawn")
    return _spawner.submit(
        subprocess.Popen,
        [sys.executable, "-P", "-m", "gspo.rollout.workers.process_main", str(fd), str(os.getpid())],
        pass_fds=[fd],
        env=python_environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for the trainer alone
    ).result()
