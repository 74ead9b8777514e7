"""A run folder of many steps, made in seconds: metric rows of a real run's width, and group files that share their data."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from pathlib import Path
from typing import Any

NUM_FILES = 64  # different group files; the others are hard links to them
TOKENS = 40


def make_large_run(
    path: Path, steps: int, *, groups: int = 8, n: int = 8, names: int = 110, linked: bool = True
) -> Path:
    """Write a run of `steps` steps. With `linked` equal group files share their disk space; else each is written."""
    rng = random.Random(0)
    (path / "groups").mkdir(parents=True)
    (path / "evals").mkdir()
    (path / "config.yaml").write_text(f"trainer:\n  total_training_steps: {steps}\n")
    _write_metrics(path / "metrics.jsonl", steps, names)
    kinds = [_group_file(rng, groups, n) for _ in range(NUM_FILES)]
    firsts: dict[int, Path] = {}
    for step in range(1, steps + 1):
        file, kind = path / "groups" / f"step-{step:06d}.jsonl.gz", step % NUM_FILES
        if linked and kind in firsts:
            os.link(firsts[kind], file)
        else:
            file.write_bytes(kinds[kind])
            firsts[kind] = file
    for step in (0, steps):
        (path / "evals" / f"step-{step:06d}.jsonl.gz").write_bytes(kinds[0])
    return path


def metric(step: int) -> float:
    """The reward of a step. One step in 9,973 is far out, which a thinned chart must show."""
    return -5.0 if step % 9_973 == 0 and step else 0.2 + 0.6 * (1 - math.exp(-step / 20_000))


def _write_metrics(file: Path, steps: int, names: int) -> None:
    constant = ", ".join(f'"actor/metric_{i}": {1.0 / (i + 3)!r}' for i in range(names))
    name = "val-core/arithmetic/acc/mean@1"
    with open(file, "w") as out:
        for step in range(steps + 1):
            accuracy = f', "{name}": {0.3 if step == 0 else 0.8}' if step in (0, steps) else ""
            out.write(
                f'{{"step": {step}, "critic/score_all/mean": {metric(step)!r}, "timing_s/step": 1.5, '
                f'"train/generated_tokens": 1000{accuracy}, {constant}}}\n'
            )


def _group_file(rng: random.Random, groups: int, n: int) -> bytes:
    records = []
    for number in range(groups):
        records.append(
            {
                "uid": f"q{rng.randrange(10**6)}",
                "submission": number,
                "version": 0,
                "fate": rng.choice(["kept", "all_right", "all_wrong"]),
                "data_source": "arithmetic",
                "ground_truth": "7",
                "messages": [{"role": "user", "content": f"What is {rng.random()} times {rng.random()}?"}],
                "responses": [_response(rng) for _ in range(n)],
            }
        )
    return gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode(), 5, mtime=0)


def _response(rng: random.Random) -> dict[str, Any]:
    score = float(rng.random() < 0.5)
    numbers = {
        name: [round(-rng.random(), 5) for _ in range(TOKENS)]
        for name in ("log_probs", "old_log_probs", "new_log_probs")
    }
    return {
        "text": "".join(rng.choice("0123456789 =+") for _ in range(3 * TOKENS)),
        "num_tokens": TOKENS,
        "score": score,
        "acc": score,
        "advantage": score - 0.5,
        "ratio": 1 + rng.gauss(0, 1e-3),
        "token_ids": [rng.randrange(500) for _ in range(TOKENS)],
        "tokens": [f"t{rng.randrange(500)}" for _ in range(TOKENS)],
        "loss_mask": [1] * TOKENS,
        **numbers,
    }
