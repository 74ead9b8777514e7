"""A thread that writes a step's files to disk while the next batch is generated.

    main thread                              gspo-writer thread
    do(job 1), do(job 2) ── queue ─────────► job 1 ── job 2
    generate, score                            each calls `beat` now and then
    wait ◄── until the queue is empty ───────┘
    update the weights, which the jobs read

Jobs run one after another, in order. `wait` raises the error of a job; the jobs after it are dropped. Code that changes
data of a job calls `wait` first.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from gspo.processes import num_cores
from gspo.runs.clock import Clock

Job = Callable[[Callable[[], None]], None]  # calls its argument, `beat`, now and then as a sign of progress
SWITCH_SECONDS = 0.0005  # after which a thread that runs Python lets another one run: the main thread feeds a device
ABANDON_SECONDS = 5.0  # for the current file when a run is stopped at once


class Abandoned(RuntimeError):
    """The run is stopped at once; the current job stays unfinished."""


class BackgroundWriter:
    """Runs jobs in a thread. As a context it waits for all jobs at its end, except after Ctrl-C.

    `cost` is the time that jobs of each stage cost the run: seconds for which the main thread waited, plus processor
    seconds of the writer thread divided by the number of cores.
    """

    def __init__(self, clock: Clock, warn: Callable[[str], None]) -> None:
        self._clock, self._warn = clock, warn
        self._tasks: deque[tuple[str, Job]] = deque()  # stage and job; the first is running
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._abandoned = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.cost: dict[str, float] = {}

    def do(self, stage: str, job: Job) -> None:
        """Queue a job for the thread."""
        with self._changed:
            if self._abandoned:
                raise Abandoned("the run was stopped at once; nothing more is written")
            if self._error is not None:
                return
            self._closed = False  # a closed writer starts again
            self._tasks.append((stage, job))
            self._changed.notify_all()
        if self._thread is None:
            sys.setswitchinterval(SWITCH_SECONDS)
            self._thread = threading.Thread(target=self._run, name="gspo-writer", daemon=True)
            self._thread.start()

    def do_now(self, stage: str, job: Job) -> None:
        """Run a job in this thread, after all queued ones."""
        self.wait()
        with self._clock(stage):
            start = time.monotonic()
            try:
                job(self._clock.beat)
            finally:
                self.charge(stage, time.monotonic() - start)

    def wait(self) -> None:
        """Return when every job is done, or raise a job's error. The clock counts the time to the job's stage."""
        while True:
            with self._changed:
                if not self._tasks or self._abandoned:
                    error, self._error = self._error, None
                    if error is not None:
                        raise error
                    return
                task = self._tasks[0]
            with self._clock(task[0]):
                start = time.monotonic()
                with self._changed:
                    self._changed.wait_for(lambda task=task: not self._tasks or self._tasks[0] is not task)
                self.charge(task[0], time.monotonic() - start)

    def charge(self, stage: str, seconds: float) -> None:
        """Add to the cost of a stage."""
        with self._changed:
            self.cost[stage] = self.cost.get(stage, 0.0) + seconds

    def abandon(self) -> None:
        """Drop queued jobs and stop the running one at its next `beat`.

        A slow file is not waited for: the thread ends after it, or with the process.
        """
        self._abandoned = True
        with self._changed:
            while len(self._tasks) > 1:
                self._tasks.pop()
        self._end(ABANDON_SECONDS)

    def close(self) -> None:
        """End the thread when every job is done; raises as `wait`."""
        try:
            self.wait()
        finally:
            self._end(None)

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            try:
                self.wait()
            except Exception as error:  # the error that ended the run is being raised
                self._warn(f"error: {error}")
        else:
            self.abandon()

    def _end(self, seconds: float | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None

    def _beat(self) -> None:
        if self._abandoned:
            raise Abandoned
        self._clock.beat()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
            error = self._run_first()
            with self._changed:
                if error is None:
                    self._tasks.popleft()
                else:
                    self._tasks.clear()
                    self._error = None if isinstance(error, Abandoned) else error
                self._changed.notify_all()
            del error  # its frames hold the job's data

    def _run_first(self) -> BaseException | None:
        (stage, job), start = self._tasks[0], time.thread_time()
        try:
            job(self._beat)
            return None
        except BaseException as error:
            return error
        finally:
            self.charge(stage, (time.thread_time() - start) / num_cores())
