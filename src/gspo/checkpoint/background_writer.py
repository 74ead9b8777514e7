"""The writer: a thread that puts on disk what a step leaves behind, while the next batch is generated.

Jobs are done one after another in the order in which they were given. What a job raises is raised by the next `wait`;
the jobs after it are not done. Whoever is about to change what a job reads waits first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gspo.runs.clock import Clock

Job = Callable[[Callable[[], None]], None]  # calls what it is given now and then, as a sign of progress
ABANDON_SECONDS = 5.0  # for the file that is being written when a run is stopped at once


class Abandoned(RuntimeError):
    """The run is stopped at once: what is being written is left unfinished."""


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    stage: str
    job: Job


class BackgroundWriter:
    """Does jobs in a thread of its own. As a context it ends with everything on disk, unless Ctrl-C cut it short.

    `cost` adds up, by stage, what jobs took from the run: seconds for which it stood still, and of processor time spent
    beside it the share of this machine that it was.
    """

    def __init__(self, clock: Clock, warn: Callable[[str], None]) -> None:
        self._clock, self._warn = clock, warn
        self._tasks: deque[_Task] = deque()  # the first is under way
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._abandoned = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.cost: dict[str, float] = {}

    def do(self, stage: str, job: Job) -> None:
        """Have a job done aside."""
        with self._changed:
            if self._abandoned:
                raise Abandoned("the run was stopped at once; nothing more is written")
            if self._error is not None:
                return
            self._closed = False  # a writer that was closed starts again
            self._tasks.append(_Task(stage, job))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gspo-writer", daemon=True)
            self._thread.start()

    def do_now(self, stage: str, job: Job) -> None:
        """Do a job here, after those that were given before it."""
        self.wait()
        with self._clock(stage):
            start = time.monotonic()
            try:
                job(self._clock.beat)
            finally:
                self.charge(stage, time.monotonic() - start)

    def wait(self) -> None:
        """Return when every job is done; raises what one of them raised. The clock counts it to the stage waited for."""
        while True:
            with self._changed:
                if not self._tasks or self._abandoned:
                    error, self._error = self._error, None
                    if error is not None:
                        raise error
                    return
                task = self._tasks[0]
            with self._clock(task.stage):
                start = time.monotonic()
                with self._changed:
                    self._changed.wait_for(lambda task=task: not self._tasks or self._tasks[0] is not task)
                self.charge(task.stage, time.monotonic() - start)

    def charge(self, stage: str, seconds: float) -> None:
        """Count seconds for which the run stood still on account of a stage."""
        with self._changed:
            self.cost[stage] = self.cost.get(stage, 0.0) + seconds

    def abandon(self) -> None:
        """Stop at the next point at which that leaves nothing half done, and drop what has not begun.

        A file that takes long is not waited for: the thread ends after it, or with the process.
        """
        self._abandoned = True
        with self._changed:
            while len(self._tasks) > 1:
                self._tasks.pop()
        self._end(ABANDON_SECONDS)

    def close(self) -> None:
        """End the thread when every job is done; raises as `wait` does."""
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
            except Exception as error:  # what ended the run is on its way, and is what must be told
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
            error = self._do_first()
            with self._changed:
                if error is None:
                    self._tasks.popleft()
                else:
                    self._tasks.clear()
                    self._error = None if isinstance(error, Abandoned) else error
                self._changed.notify_all()
            del error  # its frames hold what the job read

    def _do_first(self) -> BaseException | None:
        task, start = self._tasks[0], time.thread_time()
        try:
            task.job(self._beat)
            return None
        except BaseException as error:
            return error
        finally:
            cores = len(os.sched_getaffinity(0))
            self.charge(task.stage, (time.thread_time() - start) / cores)
