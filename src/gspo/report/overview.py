"""The overview of a run: everything a page shows except the rollouts, as one JSON-able object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gspo.report import words
from gspo.report.thinning import Thinning
from gspo.report.verdict import DROPPED, judge, reward_ends, start_and_end
from gspo.runs import reading
from gspo.runs.group_index import question_of
from gspo.runs.run import Run

NUM_SAMPLES, MAX_SAMPLE = 3, 1200  # questions, and characters of a text


def overview(run: Run) -> dict[str, Any]:
    """Verdict, tiles, every metric as a column (values exactly as in metrics.jsonl), config, environment, alarms.

    Of a run with many rows the columns are thinned for charts; `thinned` has the number of rows per bucket, else 1.
    """
    thinning = Thinning(len(run.steps))
    return {
        "name": run.name,
        "status": run.status,
        "last_step": run.last_step,
        "total_steps": total if isinstance(total := run.setting("trainer.total_training_steps"), int) else None,
        "verdict": asdict(judge(run)),
        "tiles": tiles(run),
        "columns": {
            "step": thinning.at(run.steps),
            **{name: thinning.extremes(run.metrics.numbers(name)) for name in run.names()},
        },
        "num_rows": len(run.steps),
        "thinned": thinning.size,
        "problems": list(run.problems),
        "alarms": run.alarms,
        "config": run.config,
        "environment": run.environment or {},
        "result": run.result or {},
        "clip": clip_band(run),
        "seen": run.seen_questions(),
        "samples": samples(run),
    }


def samples(run: Run) -> list[dict[str, Any]]:
    """A few held-out questions with the answers of the first and the latest evaluation, those that improved first."""
    files = list(run.eval_files().values())
    if len(files) < 2:
        return []
    before, after = (
        {str(r.get("uid")): r for r in reading.read_groups(f, numbers=False)} for f in (files[0], files[-1])
    )
    pairs = [(before[uid], after[uid]) for uid in before if uid in after]
    pairs = [pair for pair in pairs if pair[0]["responses"] and pair[1]["responses"]]
    pairs.sort(key=lambda pair: _earned(pair[0]) - _earned(pair[1]))
    return [
        {
            "question": question_of(old.get("messages"))[:MAX_SAMPLE],
            "truth": "" if old.get("ground_truth") is None else str(old["ground_truth"])[:MAX_SAMPLE],
            "before": str(old["responses"][0].get("text", ""))[:MAX_SAMPLE],
            "after": str(new["responses"][0].get("text", ""))[:MAX_SAMPLE],
            "scores": [_earned(old), _earned(new)],
        }
        for old, new in pairs[:NUM_SAMPLES]
    ]


def _earned(record: Mapping[str, Any]) -> float:
    """The accuracy, else the score, of the first response; 0 where neither is known."""
    response = record["responses"][0]
    values = [response.get(name) for name in ("acc", "score")]
    return next((float(v) for v in values if isinstance(v, int | float)), 0.0)


def clip_band(run: Run) -> dict[str, float | None]:
    """ε_low and ε_high of the config; when they are adapted, the metrics contain the values in use."""
    both, low, high = (run.setting(f"actor_rollout_ref.actor.clip_ratio{end}") for end in ("", "_low", "_high"))
    band = {"low": both if low is None else low, "high": both if high is None else high}
    return {side: value if isinstance(value, int | float) else None for side, value in band.items()}


def tiles(run: Run) -> list[dict[str, str]]:
    """The main figures for the top of the page, each with a label and a line of detail."""
    makers = {
        "Held-out accuracy": _accuracy,
        "Held-out reward": _held_out_reward,
        "Held-out loss": _held_out_loss,
        "Training loss, last step": _loss,
        "Reward, last step": _reward,
        "Time": _time,
        "Generated tokens": _tokens,
        "Groups kept": _kept,
        "Clip fraction": _clip_fraction,
    }
    found = {label: make(run) for label, make in makers.items()}
    return [{"label": label, "value": tile[0], "detail": tile[1]} for label, tile in found.items() if tile]


Tile = tuple[str, str] | None  # value and detail; None for what the run has not measured


def _accuracy(run: Run) -> Tile:
    ends, final = start_and_end(run), run.interval("final")
    if ends is not None:
        detail = f"95 % interval {words.interval(*final)}" if final else ""
        return f"{100 * ends[0]:.1f} → {words.percent(ends[1])}", detail
    return (words.percent(run.accuracy[-1][1]), f"at step {run.accuracy[-1][0]}") if run.accuracy else None


def _held_out_reward(run: Run) -> Tile:
    """Where no accuracy is known."""
    ends = None if run.accuracy else reward_ends(run)
    return None if ends is None else (f"{ends[0]:.3f} → {ends[1]:.3f}", "mean over the held-out questions")


def _held_out_loss(run: Run) -> Tile:
    losses, perplexity = run.values("val/loss"), run.last("val/perplexity")
    if not losses:
        return None
    span = f"{losses[0]:.3f} → {losses[-1]:.3f}" if len(losses) > 1 else f"{losses[0]:.3f}"
    return span, "" if perplexity is None else f"perplexity {perplexity:.3g}"


def _loss(run: Run) -> Tile:
    loss = run.last("train/loss")
    return None if loss is None else (f"{loss:.3f}", "per pair" if run.is_reward_model else "per answer token")


def _reward(run: Run) -> Tile:
    every, trained = run.last("critic/score_all/mean"), run.last("critic/score/mean")
    if every is None:
        return None if trained is None else (f"{trained:.3f}", "trained groups")
    return f"{every:.3f}", "all groups" if trained is None else f"all groups; trained groups {trained:.3f}"


def _time(run: Run) -> Tile:
    if run.seconds is None:
        return None
    step = run.last("timing_s/step")
    return words.duration(run.seconds), f"last step {words.duration(step)}" if step is not None else ""


def _tokens(run: Run) -> Tile:
    generated, wasted = run.generated_tokens, run.total("train/wasted_tokens")
    if not generated:
        return None
    detail = f"{words.percent(wasted / generated, 0)} in groups never trained on" if wasted is not None else ""
    return words.count(generated), detail


def _kept(run: Run) -> Tile:
    kept = run.total("train/groups_kept")
    if not kept:
        return None
    judged = kept + sum(run.total(name) or 0.0 for name in DROPPED)
    return words.percent(kept / judged, 0), f"{kept:,.0f} of {judged:,.0f}"


def _clip_fraction(run: Run) -> Tile:
    values, band = run.values("actor/pg_clipfrac"), clip_band(run)
    if not values:
        return None
    used = {side: run.last(f"actor/clip_ratio_{side}") for side in band}
    low, high = (band[side] if used[side] is None else used[side] for side in ("low", "high"))
    detail = "mean over steps"
    if low is not None and high is not None:
        detail += f"; band ±{low:.2g}" if low == high else f"; band −{low:.2g} to +{high:.2g}"
    return words.percent(sum(values) / len(values)), detail
