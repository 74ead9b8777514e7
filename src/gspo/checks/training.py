"""Short trainings of the embedded model: are the metrics plausible, does it improve, does the clip range act."""

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
NAMES = (
    "actor/pg_clipfrac_lower",
    "actor/pg_clipfrac_upper",
    "actor/seq_importance_ratio",
    "train/num_gen_batches",
    "train/filtered_prompts_ratio",
)
MAY_BE_CONSTANT = "train/num_gen_batches"  # every step may need the same number of generation batches


@dataclass(frozen=True)
class ShortRun:
    """A finished short training: its folder, the rows of its training steps, and those with an evaluation."""

    folder: RunFolder
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def column(self, name: str) -> list[float]:
        """The values of a metric, step by step; NaN for a step without it."""
        return [float("nan") if row.get(name) is None else float(row[name]) for row in self.rows]


def train(folder: Path, name: str, steps: int, *overrides: str, log: Callable[[str], None]) -> ShortRun:
    """Train the embedded model by its recipe; `log` receives one line per step."""
    settings = [
        "actor_rollout_ref.model.path=embedded",
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.log_val_generations=0",
        f"data.num_val_samples={NUM_QUESTIONS}",
    ]
    Trainer(load(None, [*settings, *overrides]), console=_StepLines(log, name)).fit()
    run = RunFolder(folder / name)
    trained = [row for row in run.rows() if "actor/grad_norm" in row]
    return ShortRun(run, trained, [row for row in run.rows() if held_out_accuracy(row) is not None])


def train_clipped(folder: Path, factor: float, *, log: Callable[[str], None]) -> ShortRun:
    """A training of a few steps with the recipe's clip range multiplied by `factor`, without evaluation."""
    actor = "actor_rollout_ref.actor"
    overrides = [f"{actor}.clip_ratio_{side}={0.01 * factor}" for side in ("low", "high")]
    overrides += [f"{actor}.clip_target=null", "trainer.val_before_train=false", "trainer.val_after_train=false"]
    return train(folder, f"clip-{factor:g}", CLIP_STEPS, *overrides, log=log)


class _StepLines(Console):
    """A console that passes one short line per step to a function."""

    def __init__(self, log: Callable[[str], None], name: str) -> None:
        super().__init__(enabled=False)
        self._log, self._name = log, name

    def step(self, step: int, total: int | None, values: Any) -> None:
        reward = values.get("critic/score_all/mean")
        if reward is not None:
            self._log(f"  {self._name}: step {step} of {total}, reward {reward:.3f}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _first_mini_batch(run: ShortRun) -> Verdict:
    ratios, clipped = run.column("actor/seq_importance_ratio/mb0"), run.column("actor/pg_clipfrac/mb0")
    good = all(r == 1.0 for r in ratios) and all(c == 0.0 for c in clipped)
    return good, f"ratio exactly 1 in {sum(r == 1.0 for r in ratios)} of {len(ratios)} steps"


def _later_mini_batches(run: ShortRun) -> Verdict:
    ends = (run.column(f"actor/seq_importance_ratio/{end}") for end in ("min", "max"))
    moved = [low < 1.0 < high for low, high in zip(*ends)]
    return all(moved), f"ratios on both sides of 1 in {sum(moved)} of {len(moved)} steps"


def _ratios(run: ShortRun) -> Verdict:
    means = run.column("actor/seq_importance_ratio")
    high = max(run.column("actor/seq_importance_ratio/max"))
    good = min(means) > 0.8 and max(means) < 1.2 and high < 10.0
    return good, f"means from {min(means):.4f} to {max(means):.4f}, the largest {high:.4f}"


def _clip_fraction(run: ShortRun) -> Verdict:
    mean = _mean(run.column("actor/pg_clipfrac_later"))
    return 0.01 < mean < 0.8, f"{mean:.3f} of the sequences after the first mini-batch"


def _trained_groups(run: ShortRun) -> Verdict:
    groups = [g for file in sorted(run.folder.groups.glob("*.gz")) for g in read_groups(file)]
    kept = [g for g in groups if g["fate"] == "kept"]
    equal = sum(len({r["score"] for r in g["responses"]}) == 1 for g in kept)
    good = equal == 0 and 0 < len(kept) < len(groups)
    return good, f"{len(kept)} of {len(groups)} groups kept, {equal} of them with equal rewards"


def _vary(run: ShortRun) -> Verdict:
    absent = [name for name in NAMES if any(math.isnan(v) for v in run.column(name))]
    constant = [name for name in NAMES if len(set(run.column(name))) < 2 and name != MAY_BE_CONSTANT]
    bad = ", ".join(sorted({*absent, *constant}))
    return not bad, f"absent or constant: {bad}" if bad else f"{len(NAMES)} documented metrics are present"


def _no_alarm(run: ShortRun) -> Verdict:
    found = Alarms(run.folder, "warn", print).read()
    return not found, "; ".join(f"step {a.step}: {a.name}: {a.text}" for a in found) or "none was raised"


def _accuracy(run: ShortRun) -> Verdict:
    before, after = (held_out_accuracy(run.evaluations[i]) or 0.0 for i in (0, -1))
    noise = 1.96 * math.sqrt(0.5 / NUM_QUESTIONS)  # 95 % interval of the difference of two shares, at its widest
    return after - before > noise, f"{before:.3f} → {after:.3f} in {len(run.rows)} steps (needed: +{noise:.3f})"


def _reward(run: ShortRun) -> Verdict:
    rewards = run.column("critic/score_all/mean")
    before, after = _mean(rewards[:3]), _mean(rewards[-3:])
    return after - before > 0.01, f"{before:.3f} → {after:.3f} (first and last three steps)"


def _clip_ranges(runs: dict[float, ShortRun]) -> Verdict:
    """Runs by the factor of their clip range: a narrower range must clip more, and much more."""
    seen = {factor: _mean(run.column("actor/pg_clipfrac_later")) for factor, run in sorted(runs.items())}
    shares = list(seen.values())
    falls = all(a > b for a, b in pairwise(shares))
    text = ", ".join(f"ε × {factor:g} clips {share:.3f}" for factor, share in seen.items())
    return falls and shares[-1] < shares[0] / 2, text


# What any healthy training with several mini-batches per step shows.
DYNAMICS = {
    "first mini-batch": _first_mini_batch,
    "later mini-batches": _later_mini_batches,
    "ratios": _ratios,
    "clip fraction": _clip_fraction,
    "trained groups": _trained_groups,
    "metrics vary": _vary,
    "no alarm": _no_alarm,
}
IMPROVEMENT = {"held-out accuracy": _accuracy, "training reward": _reward}
CLIP_RANGES = {"clip ranges": _clip_ranges}
