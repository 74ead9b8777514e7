"""Running the trials of a sweep: one after another in this process's children, or as tasks on Ray."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from gspo.commands.sweep.ledger import log_file
from gspo.commands.sweep.spec import Sweep, Trial
from gspo.processes import die_with_parent, python_environment

SHOWN = ("step ", "error", "warning")  # beginnings of the lines that are shown; all are in the log
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


def program(sweep: Sweep, trial: Trial) -> list[str]:
    """The command of a trial."""
    base = [] if sweep.base is None else [str(sweep.base)]
    return [sys.executable, "-m", "gspo", "train", *base, *sweep.overrides(trial)]


def run_one_by_one(sweep: Sweep, trials: Sequence[Trial], say: Say) -> Iterator[tuple[Trial, int]]:
    """Each trial with its exit code. After a signal the current trial saves and ends, and no other starts."""
    for number, trial in enumerate(trials, start=1):
        log = log_file(sweep.folder, trial.name)
        say(f"run {number}/{len(trials)}  {trial.name}  (log {log})")
        stopped_by, code = _run(program(sweep, trial), log, lambda line: say(f"  {line}"))
        yield trial, code
        if stopped_by:
            return


def _run(words: Sequence[str], log: Path, say: Say) -> tuple[int, int]:
    """Run a command with its output in `log`. Returns the signal that was passed on to it, or 0, and its exit code."""
    stopped_by = 0
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=python_environment(),
        start_new_session=True,  # signals of the terminal reach it through `forward` only, once each
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = number
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        assert child.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in child.stdout:
                file.write(line)
                file.flush()
                if line.startswith(SHOWN):
                    say(line.rstrip())
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return stopped_by, code if code >= 0 else 128 - code


def run_on_ray(sweep: Sweep, trials: Sequence[Trial], say: Say) -> Iterator[tuple[Trial, int]]:
    """Each trial with its exit code, in the order in which they end; as many at a time as the cluster has room for."""
    from gspo.distributed.ray.commands import run_commands

    by_name = {trial.name: trial for trial in trials}
    commands = {name: (program(sweep, t), str(log_file(sweep.folder, name).resolve())) for name, t in by_name.items()}
    say(f"{len(trials)} runs on Ray, each with {sweep.cpus_per_run:g} CPUs and {sweep.gpus_per_run:g} GPUs")
    for name, code in run_commands(commands, num_cpus=sweep.cpus_per_run, num_gpus=sweep.gpus_per_run):
        say(f"{name} ended with exit code {code}  (log {log_file(sweep.folder, name)})")
        yield by_name[name], code
