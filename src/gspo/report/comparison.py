"""Several runs compared: results, paired differences over the same questions, and the config keys that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gspo.report import words
from gspo.report.thinning import Thinning
from gspo.report.verdict import held_out_scores, start_and_end
from gspo.runs import reading, stats
from gspo.runs.run import Run

IGNORED_KEYS = ("trainer.experiment_name", "trainer.default_local_dir")


def compare_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """`runs`, `differences` (each against the first), `config` (differing keys only) and `sentences`; JSON-able."""
    scores = [final_scores(run) for run in runs]
    differences = []
    for run, score in zip(runs[1:], scores[1:]):
        paired, left_out = stats.paired_by_question(scores[0], score)
        differences.append(
            {"a": runs[0].name, "b": run.name, "paired": paired.to_dict() if paired else None, "left_out": left_out}
        )
    return {
        "runs": [_facts(run) for run in runs],
        "differences": differences,
        "config": config_differences(runs),
        "sentences": [_sentence(d) for d in differences],
    }


def final_scores(run: Run) -> dict[str, tuple[float, str]]:
    """uid → (accuracy, question) of the run's last evaluation."""
    files = list(run.eval_files().values())
    return stats.question_scores(reading.read_groups(files[-1], numbers=False)) if files else {}


def config_differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all runs, with each run's value."""
    tables = [{leaf["key"]: leaf["value"] for leaf in run.config} for run in runs]
    out = []
    for key in dict.fromkeys(key for table in tables for key in table if key not in IGNORED_KEYS):
        values = [{"value": table.get(key), "missing": key not in table} for table in tables]
        if any(v != values[0] for v in values):
            out.append({"key": key, "values": values})
    return out


def _facts(run: Run) -> dict[str, Any]:
    last = run.accuracy[-1][1] if run.accuracy else None
    start, end = start_and_end(run) or (None, last)
    generated, wasted = run.generated_tokens, run.total("train/wasted_tokens")
    final, rewards = run.interval("final"), [] if run.accuracy else held_out_scores(run)
    return {
        "name": run.name,
        "status": run.status,
        "problems": list(run.problems),
        "steps": run.last_step,
        "start_acc": start,
        "final_acc": end,
        "final_reward": rewards[-1] if rewards else None,  # where no accuracy is known
        "final_ci": list(final) if final else None,
        "generated_tokens": generated,
        "wasted_share": wasted / generated if generated and wasted is not None else None,
        "seconds": run.seconds,
        "curves": _curves(run),
    }


def _curves(run: Run) -> dict[str, Sequence[float | None]]:
    """Held-out accuracy and reward with each row's step, tokens so far and seconds so far; thinned for a long run."""
    thinning = Thinning(len(run.steps))

    def running_sum(name: str) -> list[float]:
        return thinning.at(list(accumulate(value or 0.0 for value in run.column(name))))

    accuracy = dict(run.accuracy)
    return {
        "step": thinning.at(run.steps),
        "tokens": running_sum("train/generated_tokens"),
        "seconds": running_sum("timing_s/step"),
        "accuracy": thinning.extremes([accuracy.get(step, math.nan) for step in run.steps]),
        "reward": thinning.extremes(run.metrics.numbers("critic/score_all/mean")),
    }


def _sentence(difference: dict[str, Any]) -> str:
    a, b, paired = difference["a"], difference["b"], difference["paired"]
    if paired is None:
        return f"{b} and {a} share no held-out question, so their accuracies cannot be paired."
    where = f"over the same {paired['num_questions']:,} held-out questions"
    if difference["left_out"]:
        where += f" ({difference['left_out']:,} were not in both and are left out)"
    span = f"95 % interval {100 * paired['low']:+.1f} to {100 * paired['high']:+.1f}"
    if not paired["clear"]:
        return f"No clear difference between {b} and {a}: {words.points(paired['difference'])} {where}, {span}."
    word = "better" if paired["difference"] > 0 else "worse"
    return f"{b} is {word} than {a} by {abs(100 * paired['difference']):.1f} points {where}, {span}."
