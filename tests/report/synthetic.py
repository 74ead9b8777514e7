"""Run folders made up for the tests: the trainer's file formats, filled with a plausible learning curve."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ACTOR = "actor_rollout_ref.actor"
SETTINGS = (
    ("algorithm.adv_estimator", "grpo", "default"),
    ("algorithm.filter_groups.enable", True, "recipe embedded"),
    ("algorithm.filter_groups.metric", "acc", "recipe embedded"),
    ("data.train_files", "arithmetic", "recipe embedded"),
    ("data.val_files", None, "default"),
    ("data.train_batch_size", 32, "recipe embedded"),
    ("data.seed", None, "default"),
    ("actor_rollout_ref.model.path", "embedded", "default"),
    (f"{ACTOR}.ppo_mini_batch_size", 8, "recipe embedded"),
    (f"{ACTOR}.clip_ratio", None, "default"),
    (f"{ACTOR}.clip_ratio_low", 0.01, "recipe embedded"),
    (f"{ACTOR}.clip_ratio_high", 0.01, "recipe embedded"),
    (f"{ACTOR}.policy_loss.loss_mode", "gspo", "default"),
    ("actor_rollout_ref.rollout.n", 8, "recipe embedded"),
)


@dataclass
class Plan:
    """What kind of run to make up."""

    steps: int = 12
    groups: int = 10
    n: int = 8
    questions: int = 40
    val_every: int = 4
    seed: int = 0
    lr: float = 1e-4
    finished: bool = True
    gain: float = 0.5
    tokens: int = 12
    source: str = "arithmetic"
    group_filter: bool = False  # drop every third group with different responses, as a group filter may


class Maker:
    """Writes one run folder step by step, so that a test can watch it grow."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan, self.random = path, plan, random.Random(plan.seed)
        for folder in (path, path / "groups", path / "evals"):
            folder.mkdir(parents=True, exist_ok=True)
        self.configure(
            *SETTINGS,
            (f"{ACTOR}.optim.lr", plan.lr, "flag --learning-rate"),
            ("trainer.experiment_name", path.name, "command line"),
            ("trainer.total_training_steps", plan.steps, "recipe embedded"),
            ("trainer.seed", plan.seed, "default"),
        )
        environment = {
            "gspo": "0.1.0",
            "python": "3.11.7",
            "device": "cpu",
            "cpu_count": 2,
            "packages": {"torch": "2.13.0"},
        }
        environment["argv"] = ["gspo", "train", "trainer.seed=0"]
        (path / "environment.json").write_text(json.dumps(environment))
        self.total = 0

    def configure(self, *settings: tuple[str, Any, str]) -> None:
        """Write config.json and config.yaml."""
        records = [{"key": key, "value": value, "origin": origin} for key, value, origin in settings]
        (self.path / "config.json").write_text(json.dumps(records))
        tree = OmegaConf.create({})
        for key, value, _ in settings:
            OmegaConf.update(tree, key, value, force_add=True)
        OmegaConf.save(tree, self.path / "config.yaml")

    def skill(self, step: int) -> float:
        return 0.3 + self.plan.gain * (1 - math.exp(-3 * step / max(1, self.plan.steps)))

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out answers of a step; returns their metrics."""
        records, right, skill = [], 0, self.skill(step)
        for q in range(self.plan.questions):
            a, b = 3 + q, 7 + 2 * q
            hard = ((q * 7919) % 100) / 100
            ok = hard < skill
            right += ok
            answer = a + b if ok else a + b + 1
            response = {
                "text": f"{a} + {b} = {answer}",
                "score": float(ok),
                "acc": float(ok),
                "num_tokens": 7,
                "finish_reason": "stop",
            }
            record = {"uid": f"arithmetic/val/{q}", "data_source": "arithmetic", "ground_truth": str(a + b)}
            records.append(
                {**record, "messages": [{"role": "user", "content": f"{a} + {b} = ?"}], "responses": [response]}
            )
        write_step(self.path / "evals", step, records)
        share = right / self.plan.questions
        half = 1.96 * math.sqrt(max(share * (1 - share), 0.01) / self.plan.questions)
        out = {f"val-core/{self.plan.source}/acc/mean@1": share}
        return out | {
            f"val-aux/{self.plan.source}/acc/ci_low": max(0.0, share - half),
            f"val-aux/{self.plan.source}/acc/ci_high": min(1.0, share + half),
        }

    def group(self, step: int, number: int) -> dict[str, Any]:
        rng, plan = self.random, self.plan
        a, b = rng.randrange(10, 99), rng.randrange(10, 99)
        rate = min(1.0, max(0.0, rng.gauss(self.skill(step), 0.35)))
        responses = [self.response(a, b, rng.random() < rate) for _ in range(plan.n)]
        right = sum(r["acc"] for r in responses)
        fate = "all_right" if right == plan.n else "all_wrong" if right == 0 else "kept"
        if fate == "kept" and plan.group_filter and number % 3 == 0:
            fate = "filtered"
        if fate == "kept":
            mean = right / plan.n
            spread = math.sqrt(plan.n / (plan.n - 1) * mean * (1 - mean))
            for r in responses:
                self.train(r, (r["acc"] - mean) / spread)
        record = {
            "uid": f"arithmetic/{step}-{number}",
            "submission": step * plan.groups + number,
            "version": step - 1,
            "fate": fate,
        }
        record |= {"data_source": "arithmetic", "ground_truth": str(a + b)}
        return {**record, "messages": [{"role": "user", "content": f"What is {a} + {b}?"}], "responses": responses}

    def response(self, a: int, b: int, ok: bool) -> dict[str, Any]:
        answer = a + b if ok else a + b + self.random.choice((-10, -1, 1, 10))
        text = f"{a} plus {b} gives {answer}.\nAnswer: {answer}"
        base = {
            "text": text,
            "finish_reason": "stop",
            "num_tokens": self.plan.tokens,
            "score": float(ok),
            "acc": float(ok),
        }
        return {**base, "extra": {}, "failure": None}

    def train(self, response: dict[str, Any], advantage: float) -> None:
        rng = self.random
        words = (response["text"].replace(" ", " \0").split("\0") * self.plan.tokens)[: self.plan.tokens]
        behaviour = [-abs(rng.gauss(0, 0.8)) for _ in words]
        response |= {
            "advantage": advantage,
            "ratio": 1.0 + rng.gauss(0, 0.006),
            "tokens": words,
            "log_probs": behaviour,
        }
        response["old_log_probs"] = [v + rng.gauss(0, 0.01) for v in behaviour]
        response["new_log_probs"] = [v + rng.gauss(0, 0.02) for v in response["old_log_probs"]]

    def step(self, step: int) -> dict[str, Any]:
        """One training step: its groups and its metric row."""
        rng, plan = self.random, self.plan
        groups = [self.group(step, i) for i in range(plan.groups)]
        write_step(self.path / "groups", step, groups)
        fates = Counter(g["fate"] for g in groups)
        tokens = plan.groups * plan.n * plan.tokens
        wasted = (plan.groups - fates["kept"]) * plan.n * plan.tokens
        every = [r["score"] for g in groups for r in g["responses"]]
        trained = [r["score"] for g in groups if g["fate"] == "kept" for r in g["responses"]] or [0.5]
        clip = max(0.0, 0.12 + rng.gauss(0, 0.02))
        row: dict[str, Any] = {
            "critic/score_all/mean": sum(every) / len(every),
            "critic/score/mean": sum(trained) / len(trained),
            "actor/pg_clipfrac": clip,
            "actor/pg_clipfrac_lower": clip * 0.4,
            "actor/pg_clipfrac_upper": clip * 0.6,
            **{f"actor/pg_clipfrac/mb{i}": clip * i / 1.5 for i in range(4)},
            "actor/seq_importance_ratio": 1.0 + rng.gauss(0, 1e-3),
            "actor/entropy": 0.9 * math.exp(-step / plan.steps) + rng.gauss(0, 0.01),
            "actor/grad_norm": 0.6 + abs(rng.gauss(0, 0.1)),
            "actor/ppo_kl": abs(rng.gauss(0, 1e-3)),
            "actor/lr": 1e-4,
            "actor/clip_ratio_low": 0.01,
            "actor/clip_ratio_high": 0.01,
            "response_length/mean": plan.tokens + rng.gauss(0, 0.3),
            "response_length/min": plan.tokens * 0.5,
            "response_length/max": plan.tokens * 1.8,
            "train/groups_kept": fates["kept"],
            "train/groups_all_right": fates["all_right"],
            "train/groups_all_wrong": fates["all_wrong"],
            **({"train/groups_filtered": fates["filtered"]} if fates["filtered"] else {}),
            "train/groups_carried": rng.randrange(3),
            "train/filtered_prompts_ratio": fates["kept"] / plan.groups,
            "train/num_gen_batches": 1,
            "train/generated_tokens": tokens,
            "train/wasted_tokens": wasted,
            "timing_s/gen": 0.8 + rng.random() * 0.1,
            "timing_s/old_log_prob": 0.1,
            "timing_s/update_actor": 0.5 + rng.random() * 0.1,
            "timing_s/step": 1.6,
            "perf/throughput": tokens / 0.8,
        }
        self.total += tokens
        if step % plan.val_every == 0 or step == plan.steps:
            row |= self.evaluate(step)
        self.append(step, row)
        return row

    def append(self, step: int, row: dict[str, Any]) -> None:
        with open(self.path / "metrics.jsonl", "a") as f:
            f.write(json.dumps({"step": step, **row}) + "\n")

    def finish(self, start: float, final: float) -> None:
        result = {"start_acc": start, "final_acc": final, "steps": self.plan.steps, "seconds": 1.6 * self.plan.steps}
        result |= {"generated_tokens": self.total, "run": self.path.name}
        (self.path / "result.json").write_text(json.dumps(result))


def write_step(folder: Path, step: int, records: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    (folder / f"step-{step:06d}.jsonl.gz").write_bytes(gzip.compress(text.encode(), 1, mtime=0))


def make_run(path: Path, plan: Plan | None = None) -> Path:
    """A whole run folder."""
    plan = plan or Plan()
    maker = Maker(path, plan)
    first = maker.evaluate(0)
    maker.append(0, first)
    row: dict[str, Any] = {}
    for step in range(1, plan.steps + 1):
        row = maker.step(step)
    if plan.finished:
        name = f"val-core/{plan.source}/acc/mean@1"
        maker.finish(first[name], row[name])
    return path
