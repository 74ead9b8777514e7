"""Evaluates a model without training it: greedy and sampled answers to a dataset's held-out questions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from gspo.build.data.training_data import load_prompts
from gspo.build.device import choose_device, default_threads
from gspo.build.engines import build_engine
from gspo.build.models import load_weights
from gspo.build.rewards import build_scorer
from gspo.config import TrainerConfig
from gspo.data.columns import Say
from gspo.data.rows import DataError
from gspo.evaluation.evaluator import Evaluation, Evaluator
from gspo.models.load import load_tokenizer
from gspo.rollout.engine import SamplingParams
from gspo.runs.metric_names import held_out
from gspo.seeding import derive_seed


@dataclass(frozen=True, slots=True)
class Assessment:
    """Greedy answers, and sampled ones when more than one answer per question is wanted."""

    num_questions: int
    greedy: Evaluation
    sampled: Evaluation | None
    seconds: float

    def failure(self) -> str | None:
        """How many rewards failed, and why the first one did; None when none did."""
        evaluations = [self.greedy, *([] if self.sampled is None else [self.sampled])]
        answers = [r for e in evaluations for g in e.groups for r in g.rollouts]
        failed = [r.failure or "no reason is known" for r in answers if r.reward is None]
        return f"{len(failed)} of {len(answers)} rewards failed; the first: {failed[0]}" if failed else None

    def to_dict(self) -> dict[str, Any]:
        """JSON values: by method (greedy or sampled), then by data source."""
        sampled = {} if self.sampled is None else {"sampled": _plain(self.sampled)}
        facts = {"num_questions": self.num_questions, "seconds": round(self.seconds, 2)}
        return {**facts, "greedy": _plain(self.greedy), **sampled}


def assess(config: TrainerConfig, *, num_samples: int = 1, reward_fn: Any = None, say: Say | None = None) -> Assessment:
    """Evaluate `model.path` on `data.val_files`: greedily, and with `num_samples` > 1 also by sampling.

    Sampling follows `rollout.val_kwargs`. The same config gives the same answers. `say` gets sentences about the data.
    """
    torch.set_num_threads(config.trainer.num_threads or default_threads())
    device = choose_device(config.trainer.device)
    c, val = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.val_kwargs
    tokenizer = load_tokenizer(c.tokenizer_path or c.path, trust_remote_code=c.trust_remote_code)
    prompts = load_prompts(config, tokenizer, "val", say=say)
    if not prompts:
        files = config.data.val_files or config.data.train_files
        raise DataError(f"data.val_files={files}", "has no held-out rows; name rows to answer with --data FILE")
    scorer = build_scorer(config, reward_fn, held_out=True)
    start = time.monotonic()
    try:
        engine = build_engine(config, load_weights(config, device, c.path).eval(), tokenizer, device)
        length = config.actor_rollout_ref.rollout.response_length or config.data.max_response_length
        seed, size = derive_seed(config.trainer.seed, "eval"), config.data.val_batch_size

        def run(params: SamplingParams, n: int) -> Evaluation:
            return Evaluator(engine, scorer, prompts, params, n=n, seed=seed, batch_size=size).run(0)

        greedy = run(SamplingParams(length, temperature=0.0), 1)
        sampled = None
        if num_samples > 1:
            params = SamplingParams(length, temperature=val.temperature, top_k=val.top_k, top_p=val.top_p)
            sampled = run(params, num_samples)
    finally:
        scorer.close()
    return Assessment(len(prompts), greedy, sampled, time.monotonic() - start)


def _plain(evaluation: Evaluation) -> dict[str, Any]:
    """`{"accuracy", "interval", "sources": {source: {measure: value}}}` of an evaluation."""
    sources: dict[str, dict[str, float]] = {}
    for name, metric in evaluation.metrics.items():
        found = held_out(name)
        if found is not None:
            sources.setdefault(found.source, {})[found.measure] = metric.result()
    interval = None if evaluation.interval is None else list(evaluation.interval)
    return {"accuracy": evaluation.accuracy, "interval": interval, "sources": sources}
