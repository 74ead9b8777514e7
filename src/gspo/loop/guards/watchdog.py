"""The watchdog: a thread that notices when a run makes no progress, says in which stage, and ends it when it must.

Progress is a stage that begins or ends, or a beat within one (the sampler gives one every engine step). After `seconds`
without any it names the stage and writes what every thread of every process is doing to `stalls.log` in the run folder;
after `stop_seconds` it ends the run with exit code 9. The main thread may hang in a library that nothing can interrupt,
so the end is hard: checkpoints are whole at any moment, and the run goes on from the last one.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gspo.exit_codes import EXIT_STALLED
from gspo.runs.clock import Clock

FILE = "stalls.log"


class Watchdog:
    """A context in which a run is watched. `stacks` returns the stacks of its other processes; `kill` ends them at once."""

    def __init__(
        self,
        clock: Clock,
        folder: Path,
        *,
        seconds: float,
        stop_seconds: float,
        warn: Callable[[str], None],
        stacks: Callable[[], str],
        kill: Callable[[], None],
    ) -> None:
        self.clock, self.file = clock, folder / FILE
        self._seconds, self._stop_seconds = seconds, stop_seconds
        self._warn, self._stacks, self._kill = warn, stacks, kill
        self._limits = [limit for limit in (seconds, stop_seconds) if limit > 0]
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._limits:
            self._thread = threading.Thread(target=self._watch, name="gspo-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        beats, since, said = self.clock.beats, time.monotonic(), False
        while not self._end.wait(min(1.0, min(self._limits) / 4)):
            if self.clock.beats != beats:
                beats, since, said = self.clock.beats, time.monotonic(), False
                continue
            idle = time.monotonic() - since
            if 0 < self._stop_seconds <= idle:
                self._stop(idle)
            if 0 < self._seconds <= idle and not said:
                said = True
                self._report(idle)

    def _report(self, idle: float) -> None:
        where = self._dump(idle)
        self._warn(
            f"{self._what(idle)}; what every thread is doing is {where}. The run goes on waiting"
            + (f", and stops after {self._stop_seconds:g} s" if self._stop_seconds else "")
        )

    def _stop(self, idle: float) -> None:
        try:
            where = self._dump(idle)
            self._warn(
                f"error: {self._what(idle)}, the limit of trainer.watchdog_stop_seconds={self._stop_seconds:g}; what "
                f"every thread was doing is {where}. The run is ended; the same command goes on from its last checkpoint"
            )
            self._kill()
        finally:  # whatever went wrong before
            os._exit(EXIT_STALLED)

    def _what(self, idle: float) -> str:
        return f"no progress for {idle:.0f} s in stage {self.clock.stage or 'between steps'!r}"

    def _dump(self, idle: float) -> str:
        """Write the stacks of all threads here, then of the other processes; where they are, or why they are not.

        A full disk, or a worker that ends meanwhile, must not end the watch.
        """
        try:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {self._what(idle)}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write(f"{self._stacks()}\n")
        except Exception as error:
            return f"not known in full, {self.file} could not be written ({type(error).__name__}: {error})"
        return f"in {self.file}"
