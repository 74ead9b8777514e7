"""The work of step.py done by TRL's GRPOTrainer with GSPO settings. Run by vs_trl.py in an environment that has TRL.

    .venv-trl/bin/python benchmarks/trl_step.py tiny --prompts 16 --group 8 --plen 32 --new 64 --steps 3 --minibatches 4

One step is one generation and `--minibatches` optimiser steps on it. Prints the JSON line that step.py prints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from shapes import SHAPES, add_work, given_answer, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


def make_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """One word a token, so that prompts have the length asked for."""
    words = models.WordLevel({f"t{i}": i for i in range(num_tokens)}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", eos_token=f"t{num_tokens - 1}", unk_token="t0"
    )


class TimedTrainer(GRPOTrainer):
    """Counts the seconds spent generating."""

    generating = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return super()._generate(*args, **kwargs)
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.generating += time.perf_counter() - start


class Watch(TrainerCallback):
    """Notes the time and the seconds of generation at the end of every step."""

    def __init__(self, minibatches: int) -> None:
        self.minibatches = minibatches
        self.marks: list[tuple[float, float]] = []
        self.trainer: TimedTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.minibatches == 0:
            self.mark()

    def mark(self) -> None:
        assert self.trainer is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), self.trainer.generating))


class Given:
    """Answers that nobody generated, in the form that TRL's rollout functions return."""

    def __init__(self, rows: list[list[int]], length: int, vocab: int) -> None:
        self.rows = {" ".join(f"t{t}" for t in row): row for row in rows}
        self.length, self.vocab = length, vocab
        self.numbers = itertools.count()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        answers = [given_answer(next(self.numbers), self.length, self.vocab) for _ in prompts]
        return {
            "prompt_ids": [self.rows[p] for p in prompts],
            "completion_ids": answers,
            "logprobs": [[-math.log(self.vocab)] * self.length for _ in prompts],
        }


def make_trainer(args: argparse.Namespace, folder: str) -> tuple[TimedTrainer, Watch]:
    cuda = args.device.startswith("cuda")
    dtype = getattr(torch, args.dtype or ("bfloat16" if cuda else "float32"))
    model = make_model(args.model, max_length=args.plen + args.new, dtype=dtype, device=args.device)
    vocab = model.config.vocab_size
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = vocab - 1, 0
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, vocab - 1, (args.prompts, args.plen), generator=generator).tolist()
    watch = Watch(args.minibatches)
    mini_batch = args.prompts * args.group // args.minibatches
    accumulated = mini_batch // (args.pass_size or mini_batch)
    trainer = TimedTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=GRPOConfig(
            output_dir=folder,
            num_generations=args.group,
            max_completion_length=args.new,
            per_device_train_batch_size=mini_batch // accumulated,
            steps_per_generation=args.minibatches * accumulated,
            gradient_accumulation_steps=accumulated,
            max_steps=(args.steps + 1) * args.minibatches,
            importance_sampling_level="sequence",
            loss_type="grpo",
            beta=0.0,
            epsilon=3e-4,
            epsilon_high=4e-4,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            temperature=1.0,
            generation_kwargs={"min_new_tokens": args.new},
            gradient_checkpointing=args.checkpointing,
            bf16=cuda,
            use_cpu=not cuda,
            shuffle_dataset=False,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [" ".join(f"t{t}" for t in row) for row in rows]}),
        processing_class=make_tokenizer(vocab),
        callbacks=[watch],
        rollout_func=Given(rows, args.new, vocab) if args.given else None,
    )
    watch.trainer = trainer
    return trainer, watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    add_work(parser)
    parser.add_argument("--pass-size", type=int, help="sequences in a forward pass; the whole mini-batch unless given")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        trainer, watch = make_trainer(args, folder)
        trainer.train()
    pairs = list(zip(watch.marks, watch.marks[1:]))[1:]
    median = statistics.median(b[0] - a[0] for a, b in pairs)
    num = args.prompts * args.group
    cuda = args.device.startswith("cuda")
    peak = (
        torch.cuda.max_memory_reserved() / 2**30 if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )
    figures = {
        "model": args.model,
        "seqs": num,
        "new": args.new,
        "s_per_step": round(median, 4),
        "rollout_s": round(statistics.median(b[1] - a[1] for a, b in pairs), 4),
        "trained_tok_per_s": round(num * args.new / median),
        "peak_gib": round(peak, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
