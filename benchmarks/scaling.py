"""The time of a step as one size grows: prompts, group size, prompt length, response length, vocabulary.

    python benchmarks/scaling.py [--steps S] [--plot docs/scaling.svg]

The model is a small Llama; all other sizes stay at their base. Seconds are CPU seconds of one thread on a CPU, which
depend little on other programs, and wall seconds on a GPU. The floor is the time of the multiplications of all forward
and backward passes at the rate of a matrix product on this machine. Prints one JSON line per size, then the slopes of
log time over log size.
"""

from __future__ import annotations

from gspo.openmp import choose_spin_count

choose_spin_count()  # as the program does, before torch is imported

# isort: split

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from step import Work
from transformers import AutoModelForCausalLM, LlamaConfig

BASE = {"prompts": 8, "group": 4, "plen": 32, "new": 32, "vocab": 512}
SWEEPS = {
    "prompts": (4, 8, 16, 32),
    "group": (2, 4, 8, 16),
    "plen": (16, 64, 256, 1024),
    "new": (16, 32, 64, 128),
    "vocab": (512, 4096, 32768),
}


def make_model(vocab: int, max_length: int, device: str) -> Any:
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=max_length,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).eval()


def rate(device: str) -> float:
    """Multiply-adds per second of a matrix product of the sizes in the model."""
    a, b = torch.randn(1024, 128, device=device), torch.randn(128, 344, device=device)
    clock, count = _clock(device), 200
    for _ in range(20):
        torch.mm(a, b)
    start = clock()
    for _ in range(count):
        torch.mm(a, b)
    return count * 1024 * 128 * 344 / (clock() - start)


def floor_operations(sizes: dict[str, int], model: Any) -> float:
    """Multiply-adds that a step needs: each token is decoded once and trained on once (one forward, two for backward).

    Nothing is scored separately, because there is one mini-batch. A prompt counts once for its group.
    """
    p, g, prompt, new = (sizes[k] for k in ("prompts", "group", "plen", "new"))
    head = model.get_output_embeddings().weight.numel()
    body = sum(x.numel() for x in model.parameters()) - head
    tokens = p * (prompt + g * (new - 1))
    config = model.config
    keys = p * (prompt**2 / 2 + g * new * (prompt + new / 2))  # pairs that attend
    attention = 2 * config.num_hidden_layers * config.hidden_size * keys
    forward = tokens * body + p * g * new * head + attention
    return 4 * forward


def _clock(device: str) -> Any:
    if device.startswith("cuda"):

        def wait() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return wait
    return time.process_time


def measure(sizes: dict[str, int], device: str, steps: int) -> tuple[float, float, float]:
    """(seconds of rollout, seconds of training, operations of the floor); the fastest of `steps` steps."""
    model = make_model(sizes["vocab"], sizes["plen"] + sizes["new"], device)
    args = argparse.Namespace(
        **sizes,
        minibatches=1,
        micro_tokens=16384,
        layout="shared",
        flex=False,
        device=device,
        given=False,
        checkpointing=False,
        offload=False,
        eager=False,
    )
    work, clock, best = Work(model, args, device), _clock(device), (math.inf, math.inf)
    for step in range(steps + 1):
        start = clock()
        groups = work.rollout(step)
        middle = clock()
        work.train(groups, step)
        took = (middle - start, clock() - middle)
        if step:
            best = (min(best[0], took[0]), min(best[1], took[1]))
    return *best, floor_operations(sizes, model)


def slope(rows: list[dict[str, float]]) -> float:
    """Doublings of the time per doubling of the size, between the largest two."""
    a, b = rows[-2:]
    return math.log(b["s_per_step"] / a["s_per_step"]) / math.log(b["size"] / a["size"])


def plot(rows: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Time over size, one panel per sweep, as an SVG made without a library; the floor is the thin line."""
    width, height, gap = 190, 150, 36
    parts = []
    for i, (name, points) in enumerate(rows.items()):
        left = i * (width + gap) + gap
        xs = [math.log(p["size"]) for p in points]
        ys = [math.log(p[k]) for p in points for k in ("s_per_step", "floor_s")]
        span_x, span_y = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
        for key, stroke in (("s_per_step", 2.5), ("floor_s", 1)):
            line = " ".join(
                f"{left + (math.log(p['size']) - min(xs)) / span_x * width:.1f},"
                f"{20 + height - (math.log(p[key]) - min(ys)) / span_y * height:.1f}"
                for p in points
            )
            parts.append(f'<polyline points="{line}" fill="none" stroke="#246" stroke-width="{stroke}"/>')
        first, last = points[0], points[-1]
        label = f"{name} {first['size']:g}-{last['size']:g}: {first['s_per_step']:.2g}-{last['s_per_step']:.2g} s"
        parts.append(f'<text x="{left}" y="{height + 40}" font-size="11" font-family="sans-serif">{label}</text>')
    size = f'width="{len(rows) * (width + gap) + gap}" height="{height + 55}"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", choices=sorted(SWEEPS), default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, default=None, help="write an SVG here")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)  # CPU seconds of several threads would count their waiting
    speed = rate(args.device)
    print(json.dumps({"multiply_adds_per_s": round(speed), "base": BASE, "device": args.device}))
    rows: dict[str, list[dict[str, float]]] = {}
    for name in [args.only] if args.only else list(SWEEPS):
        for size in SWEEPS[name]:
            rollout, train, operations = measure({**BASE, name: size}, args.device, args.steps)
            row = {"size": size, "s_per_step": rollout + train, "rollout_s": rollout, "train_s": train}
            row["floor_s"] = operations / speed
            rows.setdefault(name, []).append(row)
            print(json.dumps({"sweep": name, **{k: round(v, 4) for k, v in row.items()}}), flush=True)
    print(json.dumps({"slopes": {name: round(slope(of), 2) for name, of in rows.items()}}))
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
