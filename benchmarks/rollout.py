"""Tokens per second of the native engine on random weights: `python benchmarks/rollout.py tiny --prompts 16 --group 8`.

Prints one JSON line. Every answer is forced to --new tokens; the first run warms up and is not counted.
"""

from __future__ import annotations

from gspo.openmp import choose_spin_count

choose_spin_count()  # as the program does, before torch is imported

# isort: split

import argparse
import json
import statistics
import time

import torch
from shapes import SHAPES, make_model

from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.native.engine import NativeEngine
from gspo.types import Prompt


def requests(args: argparse.Namespace, vocab: int, run: int) -> list[GroupRequest]:
    """`--prompts` groups with prompts of `--plen` random tokens; each run has its own."""
    generator = torch.Generator().manual_seed(run)
    params = SamplingParams(max_tokens=args.new, ignore_eos=True)
    rows = torch.randint(3, vocab, (args.prompts, args.plen), generator=generator).tolist()
    prompts = [Prompt(uid=str(i), messages=(), token_ids=tuple(row)) for i, row in enumerate(rows)]
    return [
        GroupRequest(p, submission=i, n=args.group, version=0, params=params, seed=run) for i, p in enumerate(prompts)
    ]


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run the rollout `--runs` times after a warm-up; the median is the figure."""
    device = torch.device(args.device)
    max_length = args.plen + args.new
    model = make_model(args.model, max_length=max_length, dtype=getattr(torch, args.dtype), device=args.device)
    engine = NativeEngine(
        model,
        lambda ids: "",
        eos_token_ids=(1,),
        pad_token_id=0,
        num_slots=args.slots or args.prompts * args.group,
        max_length=max_length,
        decode_chunk=args.chunk,
        device=device,
    )
    seconds, num_tokens = [], 0
    for run in range(args.runs + 1):
        for request in requests(args, model.config.vocab_size, run):
            engine.submit(request)
        begin, num_tokens = time.perf_counter(), 0
        while engine.num_in_flight:
            num_tokens += sum(group.num_tokens for group in engine.step())
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[1:])
    return {
        "model": args.model,
        "seqs": args.prompts * args.group,
        "plen": args.plen,
        "new": args.new,
        "rollout_s": round(median, 4),
        "tok_per_s": round(num_tokens / median, 1),
        "runs_s": [round(s, 4) for s in seconds[1:]],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": args.dtype,
        "engine": engine.description,
        "threads": torch.get_num_threads(),
        "peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3) if device.type == "cuda" else None,
    }


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--plen", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slots", type=int, default=0, help="responses at once (default: all)")
    parser.add_argument("--chunk", type=int, default=None, help="decode steps between looks")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if has_gpu else "float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
