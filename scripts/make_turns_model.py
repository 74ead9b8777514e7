"""Make the embedded model of turns: a small Llama, warmed up on games of `guess` and on answers of `calculator`.

    python scripts/make_turns_model.py OUT [--device cpu|cuda] [--threads 2]

Tokenizer, optimiser and files are those of make_embedded_model.py. docs/embedded-model.md has the times and the
results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from make_embedded_model import KEYS, save_random_model

from gspo.config import load_supervised
from gspo.data.datasets import load_rows
from gspo.data.rows import Row
from gspo.data.tasks.guess import play
from gspo.loop.supervised import SupervisedTrainer
from gspo.models.load import load_model
from gspo.seeding import derive_seed

SEED = 0
NUM_SUMS, NUM_GAMES = 16_000, 48_000
SHAPE = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 256, "num_attention_heads": 4}
SFT: dict[str, Any] = {
    "steps": 1700,
    "lr": 3e-3,
    "batch_size": 64,
    "max_tokens_per_micro_batch": 4096,
    "min_lr_ratio": 0.05,
    "weight_decay": 0.01,
    "grad_clip": 1.0,
    "max_length": 256,
    "seed": SEED,
}


def make_examples() -> list[Row]:
    """Sums with their answers, and whole games, whose turns and hints are one answer in the tokenizer's own marks."""
    sums = load_rows("calculator", "train", limit=NUM_SUMS, seed=SEED)
    games = load_rows("guess", "train", limit=NUM_GAMES, seed=SEED)
    return sums + [_with_game(row, number) for number, row in enumerate(games)]


def _with_game(row: Row, number: int) -> Row:
    messages = play(int(row.ground_truth), random.Random(derive_seed(SEED, "guess/game", number)))
    turns = [str(m["content"]) for m in messages]
    text = "".join(f"<eos><user>{turn}<assistant>" if i % 2 else turn for i, turn in enumerate(turns))
    return Row(row.uid, row.messages, row.data_source, row.ground_truth, answer=text)


def warm_up(model: str, runs: str, out: Path, args: argparse.Namespace) -> None:
    """Train the model on the examples."""
    words = [f"{KEYS[name]}={value}" for name, value in SFT.items()]
    words += [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={runs}"]
    words += [f"trainer.device={args.device}", f"trainer.num_threads={args.threads}", "trainer.save_freq=-1"]
    words += ["actor_rollout_ref.model.dtype=float32"]
    SupervisedTrainer(load_supervised(None, words), make_examples(), [], out=out).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    out: Path = args.out
    torch.set_num_threads(args.threads)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(f"{folder}/untrained", SHAPE)
        warm_up(f"{folder}/untrained", f"{folder}/runs", out, args)
    recipe = {
        "seed": SEED,
        "shape": SHAPE,
        "data": {"calculator": NUM_SUMS, "guess": NUM_GAMES},
        "sft": SFT,
        "num_parameters": sum(p.numel() for p in load_model(str(out)).parameters()),
        "sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
        "threads": args.threads,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - start),
    }
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    print("result:", json.dumps(recipe))


if __name__ == "__main__":
    main()
