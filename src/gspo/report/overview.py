"""The overview of a run: everything a page shows except the rollouts, as one JSON-able object."""

from __future__ import annotations

from typing import Any

from gspo.report import words
from gspo.report.verdict import DROPPED, judge, start_and_end
from gspo.runs.run import Run


def overview(run: Run) -> dict[str, Any]:
    """Verdict, tiles, every metric as a column (values exactly as in metrics.jsonl), config, environment, alarms."""
    return {
        "name": run.name,
        "status": run.status,
        "last_step": run.last_step,
        "total_steps": run.setting("trainer.total_training_steps"),
        "verdict": judge(run).to_dict(),
        "tiles": tiles(run),
        "columns": {"step": [row["step"] for row in run.rows], **{n: run.column(n) for n in run.names()}},
        "alarms": run.alarms,
        "config": run.config,
        "environment": run.environment or {},
        "result": run.result or {},
        "clip": clip_band(run),
    }


def clip_band(run: Run) -> dict[str, float | None]:
    """ε_low and ε_high of the config; the metrics say what was used when they were adapted."""
    actor = "actor_rollout_ref.actor"
    both = run.setting(f"{actor}.clip_ratio")
    low, high = run.setting(f"{actor}.clip_ratio_low"), run.setting(f"{actor}.clip_ratio_high")
    return {"low": both if low is None else low, "high": both if high is None else high}


def tiles(run: Run) -> list[dict[str, str]]:
    """The few figures for the top of the page, each with a label and a line of detail."""
    candidates = (_accuracy_tile, _reward_tile, _time_tile, _token_tile, _kept_tile, _clip_tile)
    return [tile for make in candidates if (tile := make(run)) is not None]


def _tile(label: str, value: str, detail: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _accuracy_tile(run: Run) -> dict[str, str] | None:
    ends = start_and_end(run)
    if ends is None:
        if not run.accuracy:
            return None
        return _tile("Held-out accuracy", words.percent(run.accuracy[-1][1]), f"at step {run.accuracy[-1][0]}")
    final = run.interval("final")
    detail = f"95 % interval {words.interval(*final)}" if final else ""
    return _tile("Held-out accuracy", f"{100 * ends[0]:.1f} → {words.percent(ends[1])}", detail)


def _reward_tile(run: Run) -> dict[str, str] | None:
    every, trained = run.last("critic/score_all/mean"), run.last("critic/score/mean")
    if every is None and trained is None:
        return None
    if every is None:
        return _tile("Reward, last step", f"{trained:.3f}", "trained groups")
    detail = "all groups" if trained is None else f"all groups; trained groups {trained:.3f}"
    return _tile("Reward, last step", f"{every:.3f}", detail)


def _time_tile(run: Run) -> dict[str, str] | None:
    if run.seconds is None:
        return None
    step = run.last("timing_s/step")
    return _tile("Time", words.duration(run.seconds), f"last step {words.duration(step)}" if step is not None else "")


def _token_tile(run: Run) -> dict[str, str] | None:
    generated, wasted = run.generated_tokens, run.total("train/wasted_tokens")
    if not generated:
        return None
    detail = f"{words.percent(wasted / generated, 0)} in groups never trained on" if wasted is not None else ""
    return _tile("Generated tokens", words.count(generated), detail)


def _kept_tile(run: Run) -> dict[str, str] | None:
    kept = run.total("train/groups_kept")
    if not kept:
        return None
    dropped = [run.total(name) or 0.0 for name in DROPPED]
    judged = kept + sum(dropped)
    return _tile("Groups kept", words.percent(kept / judged, 0), f"{kept:,.0f} of {judged:,.0f}")


def _clip_tile(run: Run) -> dict[str, str] | None:
    values = [v for v in run.column("actor/pg_clipfrac") if v is not None]
    if not values:
        return None
    low, high = run.last("actor/clip_ratio_low"), run.last("actor/clip_ratio_high")
    band = clip_band(run)
    low, high = band["low"] if low is None else low, band["high"] if high is None else high
    detail = "mean over steps"
    if low is not None and high is not None:
        detail += f"; band ±{low:.2g}" if low == high else f"; band −{low:.2g} to +{high:.2g}"
    return _tile("Clip fraction", words.percent(sum(values) / len(values)), detail)
