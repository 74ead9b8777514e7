"""Training beside a rollout process against training in one process, on the embedded task, in one invocation.

    python benchmarks/async_.py --steps 12 --rounds 2

Runs the embedded recipe's steps in turn as one process (sync) and as a trainer with one rollout process (async, η = 2),
so that both meet the same machine. A run's rate counts the steps after the first third, when every process has started.
Prints one JSON line: steps per minute and trained tokens per second of each, their ratio, the seconds per step that the
trainer waited for rollouts, and the processor seconds per step of each process. A machine with other work gives more
time to two processes than to one. `cpu_ratio` is what two idle cores would give: the processor seconds of the single
process over those of the busier of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gspo.config import load
from gspo.loop import ending as closing
from gspo.loop.trainer import Trainer
from gspo.rollout.workers.fleet import Fleet
from gspo.runs.console import Console

ROLLOUT = "actor_rollout_ref.rollout."
ARMS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "async": (
        f"{ROLLOUT}mode=async",
        f"{ROLLOUT}max_head_offpolicyness=2",
        "actor_rollout_ref.actor.use_decoupled_loss=true",
    ),
}


def run(arm: str, steps: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """One run's seconds and trained tokens by step, less those in which it started."""
    settings = [
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
        *ARMS[arm],
        *extra,
    ]
    trainer = Trainer(load(None, settings), console=Console(enabled=False))
    ends: list[float] = []
    spent: list[tuple[float, float]] = []
    train_step = trainer.train_step

    def timed() -> None:
        train_step()
        ends.append(time.perf_counter())
        spent.append((time.process_time(), _worker_seconds(trainer.parts.engine)))

    trainer.train_step = timed
    trainer.fit()
    rows = [json.loads(line) for line in trainer.run.metrics_file.read_text().splitlines()]
    first = steps // 3
    counted = [row for row in rows if row["step"] > first]
    tokens = sum(row["response_length/mean"] * row["train/groups_trained"] for row in counted)
    responses = trainer.config.actor_rollout_ref.rollout.n
    return {
        "seconds": ends[-1] - ends[first - 1],
        "steps": len(counted),
        "tokens": tokens * responses,
        "trainer_cpu": (spent[-1][0] - spent[first - 1][0]) / len(counted),
        "worker_cpu": (spent[-1][1] - spent[first - 1][1]) / len(counted),
        "waited": statistics.mean(row["timing_s/gen"] for row in counted),
    }


def _worker_seconds(engine: Any) -> float:
    """Processor seconds of an engine's worker processes so far."""
    total = 0.0
    slots: Any = engine.slots if isinstance(engine, Fleet) else []
    for slot in slots:
        fields = Path(f"/proc/{slot.connection.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("settings", nargs="*", help="key=value of both arms")
    args = parser.parse_args()
    closing.write_report = lambda console, run: None
    seen: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number in range(args.rounds):
        for arm in ARMS:
            with tempfile.TemporaryDirectory(prefix="gspo-async-") as folder:
                seen[arm].append(run(arm, args.steps, Path(folder) / str(number), args.settings))
    out: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
    for arm, runs in seen.items():
        seconds = sum(r["seconds"] for r in runs)
        out[arm] = {
            "steps_per_min": round(60 * sum(r["steps"] for r in runs) / seconds, 2),
            "trained_tok_per_s": round(sum(r["tokens"] for r in runs) / seconds),
            "trainer_cpu_s": round(statistics.mean(r["trainer_cpu"] for r in runs), 2),
            "worker_cpu_s": round(statistics.mean(r["worker_cpu"] for r in runs), 2),
            "waited_s": round(statistics.mean(r["waited"] for r in runs), 2),
        }
    out["ratio"] = round(out["async"]["trained_tok_per_s"] / out["sync"]["trained_tok_per_s"], 2)
    busier = max(out["async"]["trainer_cpu_s"], out["async"]["worker_cpu_s"])
    out["cpu_ratio"] = round(out["sync"]["trainer_cpu_s"] / busier, 2)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
