"""Rows K1 to K5: a run that is killed or stopped at any moment resumes and ends with the same bits."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo.runs.group_log import read_groups
from tests.faults import faults
from tests.faults.processes import Child
from tests.faults.row import Check, Row
from tests.support.small_run import config, even_first_byte, final_state, make_model

STEPS = "trainer.total_training_steps=6"


class Bench:
    """A folder with a model, in which runs are started, killed, resumed and compared with an untouched one."""

    def __init__(self, folder: Path) -> None:
        import gspo.loop.run  # noqa: F401 - loaded once here, so that forked children start at once

        self.folder = folder
        self.model = make_model_apart(folder / "model")
        self._references: dict[tuple[str, ...], dict[str, str]] = {}
        self.seconds = 1.0

    def start(
        self,
        name: str,
        *overrides: str,
        prepare: Callable[[Any], None] | None = None,
        reward: Callable[..., Any] = even_first_byte,
    ) -> Child:
        """Train (or go on with) run `name` in a child process; its exit code is that of `gspo train`."""

        def work() -> int:
            import gspo.loop.trainer as module
            from gspo.loop.run import run_program as train

            if prepare is not None:
                prepare(module)
            resolved = config(self.folder, self.model, STEPS, *overrides, f"trainer.experiment_name={name}")
            return train(resolved, reward_fn=reward)

        return Child(work, self.folder / f"{name}.log")

    def reference(self, *overrides: str) -> dict[str, str]:
        """The final state of an uninterrupted run with these settings."""
        if overrides not in self._references:
            name = f"reference-{len(self._references)}"
            start = time.monotonic()
            if self.start(name, *overrides).wait() != 0:
                raise RuntimeError((self.folder / f"{name}.log").read_text())
            self.seconds = time.monotonic() - start
            self._references[overrides] = final_state(self.folder / name)
        return self._references[overrides]

    def finish(self, name: str, *overrides: str) -> bool:
        """Let run `name` go on to its end; whether it ended as the uninterrupted one."""
        code = self.start(name, *overrides).wait()
        return code == 0 and final_state(self.folder / name) == self.reference(*overrides)


def make_model_apart(folder: Path, **shape: int) -> Path:
    """The model made in a child, so that this process stays without threads and can be forked."""

    def work() -> int:
        make_model(folder, **shape)
        return 0

    child = Child(work, folder.with_suffix(".log"))
    if child.wait() != 0:
        raise RuntimeError(child.output())
    return folder


def with_bench(check: Callable[[Bench, random.Random], tuple[bool, str]], id: str, title: str) -> Check:
    """A row whose check gets its own bench, in its own folder, and its own random generator."""

    def run(seed: int) -> Row:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gspo-scorecard-") as folder:
            passed, detail = check(Bench(Path(folder)), random.Random(f"{seed}/{id}"))
        return Row(id, title, passed, detail, time.monotonic() - start)

    return run


def random_kills(bench: Bench, rng: random.Random, runs: int = 10, kills: int = 5) -> tuple[bool, str]:
    """K1: SIGKILL at random moments of a run, several times, then let it end."""
    settings = ["trainer.seed=0", "trainer.seed=1"]
    for setting in settings:
        bench.reference(setting)
    same = landed = 0
    for run in range(runs):
        setting, name = settings[run % 2], f"killed-{run}"
        for _ in range(kills):
            landed += bench.start(name, setting).kill_after(rng.uniform(0.0, bench.seconds * 0.35))
        same += bench.finish(name, setting)
    return same == runs and landed >= 0.9 * runs * kills, f"{same}/{runs} runs identical after {landed} kills"


def named_kills(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """K2: SIGKILL at each named point."""
    bench.reference()
    bad = []
    for point in faults.POINTS:
        name = point.replace(":", "-")
        count = rng.randint(1, 3) if point != "resume" else 1
        if point == "resume":
            bench.start(name, prepare=lambda m: faults.kill_at(m, "update", 7)).wait()
        code = bench.start(name, prepare=lambda m, p=point, c=count: faults.kill_at(m, p, c)).wait()
        if code != -signal.SIGKILL or not bench.finish(name):
            bad.append(point)
    return not bad, f"{len(faults.POINTS) - len(bad)}/{len(faults.POINTS)} points" + (f"; not: {bad}" if bad else "")


def repeated_resumes(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """K3: three resumes in one epoch, at an epoch's end, at the last step, at step 0."""
    small_epoch = "data.num_train_samples=12"  # an epoch is crossed every two steps or so
    bad = []
    for title, settings, updates in (
        ("three in one epoch", (), (3, 3, 3)),
        ("over epochs' ends", (small_epoch,), (4, 2, 2)),
        ("last step", (), (12,)),
        ("step 0", (), (1,)),
    ):
        bench.reference(*settings)
        name = title.replace(" ", "-").replace("'", "")
        for count in updates:
            bench.start(name, *settings, prepare=lambda m, c=count: faults.kill_at(m, "update", c)).wait()
        if not bench.finish(name, *settings):
            bad.append(title)
    rerun = bench.start("last-step")
    if rerun.wait() != 0 or final_state(bench.folder / "last-step") != bench.reference():
        bad.append("a finished run started again")
    return not bad, "all five identical" if not bad else f"not: {bad}"


def kills_while_refilling(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """K4: kills in the middle of refilling, with surplus groups carried over."""
    settings = (
        "data.gen_batch_size=12",
        "algorithm.filter_groups.max_staleness=2",
        "data.num_train_samples=40",
        "data.max_response_length=12",
    )
    bench.reference(*settings)
    same = 0
    for run in range(4):
        name = f"refill-{run}"
        for _ in range(2):
            count = rng.randint(2, 12)
            bench.start(name, *settings, prepare=lambda m, c=count: faults.kill_at(m, "rollout", c)).wait()
        same += bench.finish(name, *settings)
    twice = prompts_used_twice(bench.folder / "refill-0", 40)
    return same == 4 and not twice, f"{same}/4 identical; prompts used twice in an epoch: {len(twice)}"


def prompts_used_twice(run: Path, epoch_size: int) -> list[str]:
    """Prompts with more final fates than passes over the data that have begun."""
    ends: Counter[str] = Counter()
    for file in sorted((run / "groups").glob("*.gz")):
        ends.update(g["uid"] for g in read_groups(file) if g["fate"] not in ("stale_dropped", "surplus"))
    begun = -(-sum(ends.values()) // epoch_size) + 1
    return [uid for uid, count in ends.items() if count > begun]


def stop_signals(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """K5: SIGTERM, SIGINT and SIGHUP to the real program: saved within a step, documented exit code, same bits after."""
    bench.reference(*_CLI)
    seen = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        name = f"signal-{int(number)}"
        command = _command(bench, name)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith("step 2/"):
                process.send_signal(number)
        code = process.wait(timeout=120)
        saved = "saved in" in output and (bench.folder / name / "checkpoints").exists()
        again = subprocess.run(command, capture_output=True, text=True, timeout=300)
        same = again.returncode == 0 and final_state(bench.folder / name) == bench.reference(*_CLI)
        seen.append((signal.Signals(number).name, code == 128 + number, saved, same))
    return all(all(s[1:]) for s in seen), "; ".join(f"{s[0]}: exit, save, bits {s[1:]}" for s in seen)


_CLI = ("custom_reward_function.path=tests.support.small_run", "custom_reward_function.name=even_first_byte")


def _command(bench: Bench, name: str) -> list[str]:
    """The command line of the same run."""
    resolved = config(bench.folder, bench.model, STEPS, *_CLI, f"trainer.experiment_name={name}")
    file = bench.folder / f"{name}.yaml"
    file.write_text(resolved.to_yaml(with_origins=False))
    return [sys.executable, "-m", "gspo", "train", str(file)]


ROWS: dict[str, Check] = {
    "K1": with_bench(random_kills, "K1", "SIGKILL at random, 5 per run, 10 runs"),
    "K2": with_bench(named_kills, "K2", "SIGKILL at 12 named points"),
    "K3": with_bench(repeated_resumes, "K3", "resumes in one epoch, at its end, at the last step, at step 0"),
    "K4": with_bench(kills_while_refilling, "K4", "kill while refilling and with surplus groups"),
    "K5": with_bench(stop_signals, "K5", "SIGTERM, SIGINT, SIGHUP"),
}
