"""Time one GSPO training step on random weights, every answer forced to its full length, no KL.

    python benchmarks/step.py tiny --prompts 16 --group 8 --plen 32 --new 64 --steps 5 --minibatches 4

Prints one JSON line: {"model","seqs","new","s_per_step","rollout_s","trained_tok_per_s","peak_gib"}; times are medians
over the steps after one that warms up, the peak is what torch reserves on a GPU (what a CUDA graph holds is hardly
counted as allocated). `--given --checkpointing` shows what training long answers takes, `--offload` with
masters and moments in host memory.
"""

from __future__ import annotations

from gspo.openmp import choose_spin_count

choose_spin_count()  # as the program does, before torch is imported

# isort: split

import argparse
import functools
import itertools
import json
import math
import resource
import statistics
import time
from typing import Any

import torch
from shapes import SHAPES, add_work, given_answer, make_model

from gspo.algo.controllers import ClipController
from gspo.algo.functional import compute_advantage
from gspo.algo.losses import get_policy_loss
from gspo.algo.objective import Objective
from gspo.algo.settings import LossSettings
from gspo.kernels.compiled_layers import worth_compiling
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.native.engine import NativeEngine
from gspo.training.batch.batching import collate
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.optim.offloaded import OffloadedOptimizer
from gspo.training.policy import Policy, PolicySettings
from gspo.training.schedule import Schedule
from gspo.types import Group, Prompt, Reward, Rollout


class Work:
    """The step of a trainer without its files: generate, score, update, publish."""

    def __init__(self, model: Any, args: argparse.Namespace, device: str) -> None:
        self.args = args
        self.engine = None if args.given else make_engine(model, args, device)
        if args.checkpointing:
            model.gradient_checkpointing_enable()
        self.policy = Policy(
            model,
            (OffloadedOptimizer if args.offload else MasterOptimizer)(model.named_parameters(), lr=1e-6),
            Schedule(1e-6),
            PolicySettings(
                mini_batch_groups=-(-args.prompts // args.minibatches),
                micro_batch_tokens=args.micro_tokens,
                layout=args.layout,
                flex_attention=args.flex,
                compiled=not args.eager and worth_compiling(model),
            ),
        )
        settings = get_policy_loss("gspo").resolve(LossSettings())
        self.objective = Objective("gspo", settings, functools.partial(compute_advantage, "grpo"), ClipController(None))
        generator = torch.Generator().manual_seed(1)
        self.vocab = vocab = model.config.vocab_size
        self.prompts = [
            Prompt(f"p{i}", (), tuple(torch.randint(1, vocab, (args.plen,), generator=generator).tolist()))
            for i in range(args.prompts)
        ]

    def rollout(self, step: int) -> list[Group]:
        groups = self.given(step) if self.engine is None else self.generated(self.engine, step)
        return [
            g.with_rollouts(tuple(r.with_reward(Reward(float(i % 2))) for i, r in enumerate(g.rollouts)))
            for g in groups
        ]

    def generated(self, engine: NativeEngine, step: int) -> list[Group]:
        params = SamplingParams(max_tokens=self.args.new, ignore_eos=True)
        for i, prompt in enumerate(self.prompts):
            number = step * len(self.prompts) + i
            engine.submit(GroupRequest(prompt, number, self.args.group, step, params, seed=0))
        groups: list[Group] = []
        while len(groups) < len(self.prompts):
            groups += engine.step()
        return groups

    def given(self, step: int) -> list[Group]:
        n, new = self.args.group, self.args.new
        numbers = itertools.count(step * len(self.prompts) * n)
        return [
            Group(prompt, tuple(self.answer(next(numbers), new, step) for _ in range(n)), i, step)
            for i, prompt in enumerate(self.prompts)
        ]

    def answer(self, number: int, length: int, version: int) -> Rollout:
        tokens = tuple(given_answer(number, length, self.vocab))
        return Rollout(tokens, (-math.log(self.vocab),) * length, (1,) * length, (version,) * length, "length")

    def train(self, groups: list[Group], step: int) -> None:
        batch = self.policy.score(collate(groups))
        batch = self.objective.with_advantages(batch)
        self.policy.update(batch, self.objective.loss(), step=step)
        if self.engine is not None:
            self.engine.load_weights(None, version=step + 1)


def make_engine(model: Any, args: argparse.Namespace, device: str) -> NativeEngine:
    return NativeEngine(
        model,
        lambda ids: "",
        eos_token_ids=[],
        pad_token_id=0,
        num_slots=args.prompts * args.group,
        max_length=args.plen + args.new,
        device=device,
        eager=args.eager,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    add_work(parser)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--layout", default="shared", choices=["plain", "packed", "shared"])
    parser.add_argument("--flex", action="store_true", help="flex_attention for packed layouts (GPU)")
    parser.add_argument("--offload", action="store_true", help="masters and moments in host memory (GPU)")
    parser.add_argument("--eager", action="store_true", help="nothing compiled, nothing captured (GPU)")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32"))
    model = make_model(args.model, max_length=args.plen + args.new, dtype=dtype, device=args.device)
    print(json.dumps(measure(Work(model, args, args.device), args)))


def measure(work: Work, args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device.startswith("cuda")
    wait = torch.cuda.synchronize if cuda else lambda: None
    seconds, rollout = [], []
    for step in range(args.steps + 1):
        wait()
        start = time.perf_counter()
        groups = work.rollout(step)
        wait()
        middle = time.perf_counter()
        work.train(groups, step)
        wait()
        seconds.append(time.perf_counter() - start)
        rollout.append(middle - start)
    peak = (
        torch.cuda.max_memory_reserved() / 2**30 if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )
    num = args.prompts * args.group
    median = statistics.median(seconds[1:])
    return {
        "model": args.model,
        "seqs": num,
        "new": args.new,
        "s_per_step": round(median, 4),
        "rollout_s": round(statistics.median(rollout[1:]), 4),
        "trained_tok_per_s": round(num * args.new / median),
        "peak_gib": round(peak, 2),
    }


if __name__ == "__main__":
    main()
