"""Supervised training against the update of reinforcement learning: tokens per second of both, on the same examples.

    python benchmarks/sft.py MODEL --data gsm8k:PATH --batch-size 64 --steps 40 --skip 15 [KEY=VALUE …]

First starts `gspo sft` as a user does, without evaluations and with a single checkpoint at its end, and reads its
metrics. Then trains the same model with the GSPO loss, one update of four mini-batches at a time, each of
`--batch-size` of the same examples: what `gspo train` does in its stage update_actor. The first `--skip` steps
(compilation, captures) of either are left out. Prints one JSON line:

- `sft_tok_per_s`: tokens of prompts and answers over whole steps of `gspo sft`, with all that happens between updates
- `update_tok_per_s`: the same tokens over the seconds of the updates alone, and `ratio`, the first over the second
- `sft_update_share`: the share of the stage update_actor in the steps of `gspo sft`
- `first_step_s`: seconds from the start of the command to the end of the first training step
"""

from __future__ import annotations

from gspo.openmp import choose_spin_count

choose_spin_count()  # as the program does, before torch is imported

# isort: split

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gspo.build.settings import build_objective
from gspo.build.supervised.examples import build_supervised
from gspo.config import TrainerConfig, load_supervised
from gspo.training.sft import example_batch
from gspo.types import AdvantageBatch, ScoredBatch

MINI_BATCHES = 4  # of an update with the GSPO loss


def settings(args: argparse.Namespace, folder: Path) -> list[str]:
    """The keys of both programs."""
    return [
        f"actor_rollout_ref.model.path={args.model}",
        f"data.train_files={args.data}",
        f"data.train_batch_size={args.batch_size}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.default_local_dir={folder}",
        "trainer.experiment_name=sft",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
        "trainer.save_freq=-1",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        *args.settings,
    ]


def run_sft(words: list[str], folder: Path) -> tuple[list[dict[str, Any]], float]:
    """The metric rows of `gspo sft`, and seconds until the first of them."""
    metrics, begin, first = folder / "sft" / "metrics.jsonl", time.time(), None
    with open(folder / "console.log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "gspo", "sft", *words], stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                if first is None and metrics.exists() and metrics.stat().st_size:
                    first = time.time() - begin
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise SystemExit((folder / "console.log").read_text()[-3000:])
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return rows, time.time() - begin if first is None else first


def rewarded(batch: ScoredBatch, seed: int) -> AdvantageBatch:
    """The examples as if they had been rewarded: an advantage for each."""
    drawn = torch.randn(batch.num_sequences, 1, generator=torch.Generator().manual_seed(seed))
    advantages = drawn.expand_as(batch.mask) * batch.mask
    return batch.with_advantages(advantages, advantages)


def run_updates(config: TrainerConfig, steps: int, skip: int) -> float:
    """Tokens per second of updates with the GSPO loss on the examples of `steps` steps, after the first `skip`."""
    parts, loss, rate = build_supervised(config), build_objective(TrainerConfig()).loss(), []
    for index in range(-(-steps // MINI_BATCHES)):
        examples = [e for i in range(MINI_BATCHES) for e in parts.order.batch(index * MINI_BATCHES + i)]
        batch = rewarded(parts.roles.policy.score(example_batch(examples)), index)
        begin = time.perf_counter()
        parts.roles.update_policy(batch, loss, step=0)  # reads its metrics, so the device is done
        rate.append((sum(e.num_tokens for e in examples), time.perf_counter() - begin))
    parts.close()
    measured = rate[-(-skip // MINI_BATCHES) :]
    return sum(tokens for tokens, _ in measured) / sum(seconds for _, seconds in measured)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    words = settings(args, folder)
    rows, first = run_sft(words, folder)
    measured = [row for row in rows if row["step"] > args.skip]

    def total(name: str) -> float:
        return sum(row.get(name, 0.0) for row in measured)

    sft = total("train/tokens") / total("timing_s/step")
    config = load_supervised(None, words).config
    update = run_updates(config, args.steps, args.skip)
    on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    return {
        "model": args.model,
        "sft_tok_per_s": round(sft, 1),
        "update_tok_per_s": round(update, 1),
        "ratio": round(sft / update, 4),
        "sft_update_share": round(total("timing_s/update_actor") / total("timing_s/step"), 4),
        "tokens_per_step": round(total("train/tokens") / len(measured), 1),
        "steps": len(measured),
        "first_step_s": round(first, 2),
        "device": torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name, or `embedded`")
    parser.add_argument("--data", default="arithmetic", help="as data.train_files, such as gsm8k:PATH")
    parser.add_argument("--batch-size", type=int, default=64, help="examples per optimiser step")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skip", type=int, default=8, help="first steps that are not measured")
    parser.add_argument("--keep", type=Path, help="folder for the run; a temporary one otherwise")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for gspo sft")
    args = parser.parse_intermixed_args()
    if not 0 <= args.skip <= args.steps - MINI_BATCHES:
        parser.error(f"--skip {args.skip}: expected at least 0 and at most --steps {args.steps} less {MINI_BATCHES}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(args, folder)))


if __name__ == "__main__":
    main()
