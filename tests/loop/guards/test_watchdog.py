"""The watchdog: names the stage that makes no progress, dumps stacks, and ends a run that hangs for good."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from gspo.exit_codes import EXIT_STALLED
from gspo.loop.guards.watchdog import FILE, Watchdog
from gspo.runs.clock import Clock


def watch(clock: Clock, folder: Path, said: list[str], **options) -> Watchdog:
    options = {"seconds": 0.2, "stop_seconds": 0.0, "stacks": lambda: "worker 0: asleep", **options}
    return Watchdog(clock, folder, warn=said.append, kill=lambda: None, **options)


def wait_for(said: list[str], count: int = 1) -> None:
    end = time.monotonic() + 20
    while len(said) < count and time.monotonic() < end:
        time.sleep(0.01)


def stuck_here(said: list[str]) -> None:
    wait_for(said)


def test_a_stage_without_progress_is_named_once_and_every_stack_is_written(tmp_path):
    clock, said = Clock(), []
    release = threading.Event()
    helper = threading.Thread(target=release.wait, name="another")
    helper.start()
    with watch(clock, tmp_path, said), clock("update_actor"):
        stuck_here(said)
        time.sleep(0.6)
    release.set()
    helper.join()
    assert len(said) == 1 and "stage 'update_actor'" in said[0] and FILE in said[0]
    written = (tmp_path / FILE).read_text()
    assert "update_actor" in written and "in stuck_here" in written and "worker 0: asleep" in written
    assert "in wait" in written, "the other thread's stack"


def test_beats_and_stages_are_progress_and_a_second_stall_is_told_again(tmp_path):
    clock, said = Clock(), []
    with watch(clock, tmp_path, said, seconds=0.5):
        with clock("gen"):
            for _ in range(20):
                time.sleep(0.05)
                clock.beat()
        assert said == []
        with clock("testing"):
            wait_for(said, 1)
        with clock("save_checkpoint"):
            wait_for(said, 2)
    assert "'testing'" in said[0] and "'save_checkpoint'" in said[1]


def test_stacks_that_cannot_be_had_do_not_end_the_watch(tmp_path):
    clock, said = Clock(), []

    def gone() -> str:
        raise ValueError("I/O operation on closed file")

    with watch(clock, tmp_path, said, stacks=gone):
        with clock("gen"):
            wait_for(said, 1)
        with clock("testing"):
            wait_for(said, 2)
    assert "closed file" in said[0] and "'testing'" in said[1]


def test_zero_switches_it_off(tmp_path):
    with watch(Clock(), tmp_path, [], seconds=0.0) as dog:
        assert dog._thread is None


HANGS = """
import time
from pathlib import Path
from gspo.loop.guards.watchdog import Watchdog
from gspo.runs.clock import Clock

clock = Clock()
dog = Watchdog(clock, Path({folder!r}), seconds=0.1, stop_seconds=0.5, warn=lambda text: print(text, flush=True),
               stacks=lambda: "", kill={kill})
with dog, clock("ref"):
    time.sleep(1000)
"""


def test_a_run_that_hangs_past_the_second_limit_ends_with_its_own_code(tmp_path):
    code = HANGS.format(folder=str(tmp_path), kill='lambda: print("workers ended", flush=True)')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_STALLED == 9, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first.startswith("no progress for 0 s in stage 'ref'")
    assert second.startswith("error: no progress") and "watchdog_stop_seconds=0.5" in second
    assert last == "workers ended" and (tmp_path / FILE).exists()


def test_a_run_whose_workers_cannot_be_ended_ends_all_the_same(tmp_path):
    code = HANGS.format(folder=str(tmp_path), kill="lambda: 1 / 0")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_STALLED, done.stderr
