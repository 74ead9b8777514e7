"""Real work: a `gspo train` of some steps with a real model and real answers, measured by its own metrics.

    python benchmarks/real.py MODEL --data gsm8k:PATH --steps 8 --skip 3 data.train_batch_size=64 …

Starts the program as a user does, with the recipe's defaults for everything that is not given as key=value. The first
`--skip` steps (compilation, captures, first checkpoints) are left out. Prints one JSON line:

- `rollout_tok_per_s`: generated tokens over the seconds of the stage `gen`; `step_tok_per_s`: over whole steps
- `step_s`: median seconds per step; `share`: the share of each stage in them
- `first_step_s`: seconds from the start of the command to the end of the first training step
- `busy`: mean utilisation of the device during the measured steps (nvidia-smi on a GPU, processor time of the command and
  its children over all cores on a CPU); the rest is idle
- `answer_tokens`: mean length of the trained answers, and `kept`: the share of judged groups that were trained on
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STAGES = "timing_s/"


class Device:
    """Samples how busy the device is, in a thread, until it is closed."""

    def __init__(self, seconds: float = 0.25) -> None:
        self.samples: list[tuple[float, float]] = []  # time, share of the device that is busy
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(seconds,), daemon=True)
        self._thread.start()

    def busy(self, begin: float, end: float) -> float | None:
        """The mean of the samples between two times; None without any."""
        found = [share for at, share in self.samples if begin <= at <= end]
        return statistics.fmean(found) if found else None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _sample(self, seconds: float) -> None:
        before = _cpu_times()
        while not self._closed.wait(seconds):
            share = _gpu_busy()
            if share is None:
                now = _cpu_times()
                used, total = now[0] - before[0], now[1] - before[1]
                share, before = used / total if total else 0.0, now
            self.samples.append((time.time(), share))


def _gpu_busy() -> float | None:
    """The utilisation of the first GPU, as nvidia-smi reports it; None on a machine without one."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 100
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def _cpu_times() -> tuple[float, float]:
    """Busy and total processor time of this machine so far."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    return float(sum(numbers) - idle), float(sum(numbers))


def command(args: argparse.Namespace, folder: Path) -> list[str]:
    """The command that a user would type."""
    return [
        *(sys.executable, "-m", "gspo", "train"),
        f"actor_rollout_ref.model.path={args.model}",
        f"data.train_files={args.data}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.default_local_dir={folder}",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
        *args.settings,
    ]


def summarise(rows: list[dict[str, Any]], skip: int) -> dict[str, Any]:
    """The figures of the rows of metrics.jsonl after the first `skip` steps."""
    measured = [row for row in rows if row["step"] > skip]
    if not measured:
        raise SystemExit(f"only {len(rows)} steps were trained; raise --steps or lower --skip")

    def total(name: str) -> float:
        return sum(row.get(name, 0.0) for row in measured)

    whole, tokens = total(f"{STAGES}step"), total("train/generated_tokens")
    stages = sorted({name for row in measured for name in row if name.startswith(STAGES)} - {f"{STAGES}step"})
    share = {name.removeprefix(STAGES): round(total(name) / whole, 4) for name in stages}
    return {
        "steps": len(measured),
        "rollout_tok_per_s": round(tokens / total(f"{STAGES}gen"), 1),
        "step_tok_per_s": round(tokens / whole, 1),
        "step_s": round(statistics.median(row[f"{STAGES}step"] for row in measured), 4),
        "share": dict(sorted(share.items(), key=lambda item: -item[1])),
        "answer_tokens": round(statistics.fmean(row["response_length/mean"] for row in measured), 1),
        "kept": round(total("train/groups_kept") / total("train/groups_generated"), 4),
    }


def follow(metrics: Path, process: subprocess.Popen[bytes]) -> dict[int, float]:
    """When each step's row was written, until the program ends."""
    seen: dict[int, float] = {}
    while True:
        ended = process.poll() is not None
        for line in metrics.read_text().splitlines() if metrics.exists() else ():
            if line.endswith("}"):
                seen.setdefault(json.loads(line)["step"], time.time())
        if ended:
            return seen
        time.sleep(0.05)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the program and read what it wrote."""
    device, begin = Device(), time.time()
    words = [*command(args, folder), "trainer.experiment_name=real"]
    with open(folder / "console.log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            times = follow(folder / "real" / "metrics.jsonl", process)
        finally:
            process.kill()
            process.wait()
            device.close()
    if process.returncode != 0:
        raise SystemExit((folder / "console.log").read_text()[-3000:])
    rows = [json.loads(line) for line in (folder / "real" / "metrics.jsonl").read_text().splitlines()]
    busy = device.busy(times[args.skip], times[max(times)]) if args.skip else device.busy(begin, times[max(times)])
    environment = json.loads((folder / "real" / "environment.json").read_text())
    return {
        "model": args.model,
        **summarise(rows, args.skip),
        "first_step_s": round(times[1] - begin, 2),
        "busy": None if busy is None else round(busy, 4),
        "device": environment["device"] if environment["num_gpus"] else f"{os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name, or `embedded`")
    parser.add_argument("--data", default="arithmetic", help="as data.train_files, such as gsm8k:PATH")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip", type=int, default=3, help="first steps that are not measured")
    parser.add_argument("--keep", type=Path, help="folder for the run; a temporary one otherwise")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for gspo train")
    args = parser.parse_intermixed_args()
    if not 0 <= args.skip < args.steps:
        parser.error(f"--skip {args.skip}: expected fewer than the {args.steps} steps, and at least 0")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(args, folder)))


if __name__ == "__main__":
    main()
