"""Short trainings of the embedded model: do the numbers behave, does it get better, what does the clip range do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gspo.checks.check import Verdict
from gspo.config import load
from gspo.loop.guards.alarms import Alarms
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from gspo.runs.folder import RunFolder
from gspo.runs.group_log import read_groups
from gspo.runs.metric_names import held_out_accuracy

NUM_STEPS = 10
NUM_QUESTIONS = 192
CLIP_STEPS = 2
CLIP_FACTORS = (0.03, 1.0, 30.0)  # of the recipe's clip range
ACTOR = "actor_rollout_ref.actor"
NAMES = (
    "actor/pg_clipfrac_lower",
    "actor/pg_clipfrac_upper",
    "actor/seq_importance_ratio",
    "train/num_gen_batches",
    "train/filtered_prompts_ratio",
)


@dataclass(frozen=True)
class ShortRun:
    """A finished short training: the rows of its training steps, all rows, and its folder."""

    folder: RunFolder
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def column(self, name: str) -> list[float]:
        """The values of a metric, step by step; a step without it is not a number."""
        return [float("nan") if row.get(name) is None else float(row[name]) for row in self.rows]


def train(folder: Path, name: str, steps: int, *overrides: str, log: Callable[[str], None]) -> ShortRun:
    """Train the embedded model by its recipe, a line a step to `log`."""
    resolved = load(
        None,
        [
            "actor_rollout_ref.model.path=embedded",
            f"trainer.default_local_dir={folder}",
            f"trainer.experiment_name={name}",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=-1",
            "trainer.log_val_generations=0",
            f"data.num_val_samples={NUM_QUESTIONS}",
            *overrides,
        ],
    )
    trainer = Trainer(resolved, console=_Quiet(log, name))
    trainer.fit()
    run = RunFolder(folder / name)
    rows = list(run.rows())
    return ShortRun(
        run, [r for r in rows if "actor/grad_norm" in r], [r for r in rows if held_out_accuracy(r) is not None]
    )


class _Quiet(Console):
    """A console that gives one short line a step to a function."""

    def __init__(self, log: Callable[[str], None], name: str) -> None:
        super().__init__(enabled=False)
        self._log, self._name = log, name

    def step(self, step: int, total: int | None, values: Any) -> None:
        reward = values.get("critic/score_all/mean")
        if reward is not None:
            self._log(f"  {self._name}: step {step} of {total}, reward {reward:.3f}")


def dynamics_checks(run: ShortRun) -> dict[str, Callable[[], Verdict]]:
    """What must be seen in any healthy training with several mini-batches a step."""
    return {
        "first mini-batch": lambda: _first_mini_batch(run),
        "later mini-batches": lambda: _later_mini_batches(run),
        "ratios": lambda: _ratios(run),
        "clip fraction": lambda: _clip_fraction(run),
        "trained groups": lambda: _trained_groups(run),
        "metrics vary": lambda: _vary(run),
        "no alarm": lambda: _no_alarm(run),
    }


def improvement_checks(run: ShortRun) -> dict[str, Callable[[], Verdict]]:
    """The model must have become better, in training reward and on held-out questions."""
    return {"held-out accuracy": lambda: _accuracy(run), "training reward": lambda: _reward(run)}


def clip_range_checks(runs: dict[float, ShortRun]) -> dict[str, Callable[[], Verdict]]:
    """Runs of different clip ranges, by factor: a narrower range must clip more, and much more."""
    return {"clip ranges": lambda: _clip_ranges(runs)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _first_mini_batch(run: ShortRun) -> Verdict:
    ratios, clipped = run.column("actor/seq_importance_ratio/mb0"), run.column("actor/pg_clipfrac/mb0")
    good = all(r == 1.0 for r in ratios) and all(c == 0.0 for c in clipped)
    return good, f"ratio exactly 1 in {sum(r == 1.0 for r in ratios)} of {len(ratios)} steps"


def _later_mini_batches(run: ShortRun) -> Verdict:
    moved = [
        low < 1.0 < high
        for low, high in zip(run.column("actor/seq_importance_ratio/min"), run.column("actor/seq_importance_ratio/max"))
    ]
    return all(moved), f"ratios on both sides of 1 in {sum(moved)} of {len(moved)} steps"


def _ratios(run: ShortRun) -> Verdict:
    means = run.column("actor/seq_importance_ratio")
    high = max(run.column("actor/seq_importance_ratio/max"))
    good = min(means) > 0.8 and max(means) < 1.2 and high < 10.0
    return good, f"means from {min(means):.4f} to {max(means):.4f}, the greatest {high:.4f}"


def _clip_fraction(run: ShortRun) -> Verdict:
    mean = _mean(run.column("actor/pg_clipfrac_later"))
    return 0.01 < mean < 0.8, f"{mean:.3f} of the sequences after the first mini-batch"


def _trained_groups(run: ShortRun) -> Verdict:
    groups = [g for file in sorted(run.folder.groups.glob("*.gz")) for g in read_groups(file)]
    kept = [g for g in groups if g["fate"] == "kept"]
    equal = sum(len({r["score"] for r in g["responses"]}) == 1 for g in kept)
    good = equal == 0 and 0 < len(kept) < len(groups)
    return good, f"{len(kept)} of {len(groups)} groups kept, {equal} of them without a difference in reward"


def _vary(run: ShortRun) -> Verdict:
    flat = [name for name in NAMES if len(set(run.column(name))) < 2]
    absent = [name for name in NAMES if any(math.isnan(v) for v in run.column(name))]
    told = ["train/num_gen_batches"]  # a step may need the same number of generation batches every time
    bad = sorted({*absent, *(name for name in flat if name not in told)})
    return (
        not bad,
        f"absent or constant: {', '.join(bad)}" if bad else f"{len(NAMES)} metrics of the documents are there",
    )


def _no_alarm(run: ShortRun) -> Verdict:
    found = Alarms(run.folder, "warn", print).read()
    return not found, "; ".join(f"step {a.step}: {a.name}: {a.text}" for a in found) or "none went off"


def _accuracy(run: ShortRun) -> Verdict:
    before, after = (held_out_accuracy(run.evaluations[i]) or 0.0 for i in (0, -1))
    noise = 1.96 * math.sqrt(0.5 / NUM_QUESTIONS)  # 95 % of the difference of two shares, at their widest
    return (after - before > noise, f"{before:.3f} → {after:.3f} in {len(run.rows)} steps (needed: +{noise:.3f})")


def _reward(run: ShortRun) -> Verdict:
    rewards = run.column("critic/score_all/mean")
    before, after = _mean(rewards[:3]), _mean(rewards[-3:])
    return after - before > 0.01, f"{before:.3f} → {after:.3f} (first and last three steps)"


def _clip_ranges(runs: dict[float, ShortRun]) -> Verdict:
    seen = {factor: _mean(run.column("actor/pg_clipfrac_later")) for factor, run in sorted(runs.items())}
    shares = list(seen.values())
    falls = all(a > b for a, b in pairwise(shares))
    text = ", ".join(f"ε × {factor:g} clips {share:.3f}" for factor, share in seen.items())
    return falls and shares[-1] < shares[0] / 2, text
