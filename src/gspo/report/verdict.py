"""The verdict in sentences: what was trained, with what result, how long it took and what it cost."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.report import words
from gspo.runs.metric_names import held_out_score
from gspo.runs.run import Run

LOSS_NAMES = {
    "gspo": "GSPO",
    "gspo_token": "GSPO-token",
    "vanilla": "GRPO (token-level clipping)",
    "dapo": "DAPO",
    "cispo": "CISPO",
    "geo_mean": "GMPO",
    "sapo": "SAPO",
    "clip_cov": "Clip-Cov",
    "kl_cov": "KL-Cov",
    "gpg": "GPG",
}
DROPPED = {
    "train/groups_all_right": "all right",
    "train/groups_all_wrong": "all wrong",
    "train/groups_same_score": "same score",
    "train/groups_filtered": "filtered",
    "train/groups_stale_dropped": "stale",
    "train/groups_surplus": "surplus",
    "train/groups_reward_failed": "reward failed",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tone` is good, bad, flat or none; `sentences` follow the headline."""

    headline: str
    tone: str
    sentences: list[str]


def judge(run: Run) -> Verdict:
    """The verdict of a run, finished or not."""
    headline, tone = _headline(run)
    sentences = [_what(run), _ancestry(run), _seen(run), _change(run), _cost(run), _alarms(run)]
    return Verdict(headline, tone, [s for s in sentences if s])


def start_and_end(run: Run) -> tuple[float, float] | None:
    """Held-out accuracy of the first and of the latest evaluation; None with fewer than two."""
    result = run.result or {}
    start, final = result.get("start_acc"), result.get("final_acc")
    if isinstance(start, int | float) and isinstance(final, int | float):
        return float(start), float(final)
    if len(run.accuracy) >= 2:
        return run.accuracy[0][1], run.accuracy[-1][1]
    return None


def _headline(run: Run) -> tuple[str, str]:
    ends = start_and_end(run)
    if ends is None:
        return _loss_headline(run) if run.is_supervised else _reward_headline(run)
    start, final = ends
    span = f"from {words.percent(start)} to {words.percent(final)}"
    clear = run.change.clear if run.change else _apart(run)
    if not clear:
        return f"No clear change in held-out accuracy: {span}", "flat"
    if final > start:
        return f"Held-out accuracy rose {span}", "good"
    return f"Held-out accuracy fell {span}", "bad"


def _apart(run: Run) -> bool:
    """Whether the intervals of start and end do not overlap; for runs without recorded questions."""
    a, b = run.interval("start"), run.interval("final")
    return bool(a and b and (a[1] < b[0] or b[1] < a[0]))


def _loss_headline(run: Run) -> tuple[str, str]:
    for name, title in (("val/loss", "Held-out loss"), ("train/loss", "Training loss")):
        values = run.values(name)
        if len(values) >= 2:
            fell = values[-1] < values[0]
            verb = "fell" if fell else "rose" if values[-1] > values[0] else "stayed"
            tone = "none" if name == "train/loss" else "good" if fell else "bad"
            return f"{title} {verb} from {values[0]:.3f} to {values[-1]:.3f}", tone
    return f"Step {run.last_step}: nothing to judge yet", "none"


def held_out_scores(run: Run) -> list[float]:
    """Held-out accuracy, or else reward, of each evaluation."""
    return [value for row in run.rows if (value := held_out_score(row)) is not None]


def reward_ends(run: Run) -> tuple[float, float] | None:
    """Held-out reward of the first and of the latest evaluation; None with fewer than two."""
    known = held_out_scores(run)
    return (known[0], known[-1]) if len(known) >= 2 else None


def _reward_headline(run: Run) -> tuple[str, str]:
    if (ends := reward_ends(run)) is not None:
        verb = "rose" if ends[1] > ends[0] else "fell" if ends[1] < ends[0] else "stayed"
        return f"Held-out reward {verb} from {ends[0]:.3f} to {ends[1]:.3f}", "none"
    for name in ("critic/score_all/mean", "critic/score/mean"):
        values = run.values(name)
        if len(values) >= 2:
            verb = "rose" if values[-1] > values[0] else "fell" if values[-1] < values[0] else "stayed"
            span = f"from {values[0]:.3f} to {values[-1]:.3f}"
            return f"Training reward {verb} {span}; no held-out evaluation yet", "none"
    return (f"Step {run.last_step}: nothing to judge yet" if run.steps else "No metrics yet"), "none"


def _what(run: Run) -> str:
    model = run.setting("actor_rollout_ref.model.path")
    data = run.given("train_dataset") or run.setting("data.train_files")
    loss = run.setting("actor_rollout_ref.actor.policy_loss.loss_mode")
    if model is None and data is None:
        return ""
    states = {"running": "is being trained", "stopped": "was trained (stopped before its end)"}
    kind = "the pairs of " if run.is_reward_model else "the answers of " if run.is_supervised else ""
    what = kind + words.name_of(data)
    named = "embedded model" if model == "embedded" else f"model {words.name_of(model)}"
    text = f"The {named} {states.get(run.status, 'was trained')} on {what}"
    if loss and not run.is_supervised:
        text += f" with {LOSS_NAMES.get(str(loss), str(loss))}"
    total = run.setting("trainer.total_training_steps")
    steps = f"{run.last_step} step" + ("" if run.last_step == 1 else "s")
    if run.status != "finished" and isinstance(total, int) and total > run.last_step:
        steps = f"{run.last_step} of {total} steps"
    return f"{text}: {steps}{'' if run.seconds is None else f' in {words.duration(run.seconds)}'}."


def _ancestry(run: Run) -> str:
    """Of which run it is a branch, and what differs."""
    facts = run.ancestry
    if not facts or "run" not in facts:
        return ""
    changed = facts.get("changed")
    keys = [c for c in changed if isinstance(c, dict)] if isinstance(changed, list) else []
    text = f"It is a branch of {words.name_of(facts['run'])} at step {facts.get('step')}"
    changes = [f"{c.get('key')} {words.name_of(c.get('from'))} → {words.name_of(c.get('to'))}" for c in keys]
    return text + (f", with {', '.join(changes)}." if changes else ".")


def _seen(run: Run) -> str:
    """A warning where the evaluation contains training rows."""
    counts = run.seen_questions()
    if counts is None or not counts[0]:
        return ""
    return (
        f"{counts[0]:,} of the {counts[1]:,} evaluation questions are also training rows: the accuracy called held-out says "
        "nothing about new questions."
    )


def _change(run: Run) -> str:
    final, change = run.interval("final"), run.change
    parts = []
    if change is not None:
        parts.append(
            f"Over the same {change.num_questions:,} questions the change is {words.points(change.difference)} "
            f"(95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f}): "
            f"{change.num_better:,} answered better, {change.num_worse:,} worse."
        )
    if final is not None:
        parts.append(f"The 95 % interval of the accuracy at the end is {words.interval(*final)}.")
    return " ".join(parts)


def _cost(run: Run) -> str:
    generated, wasted = run.generated_tokens, run.total("train/wasted_tokens")
    if not generated:
        return ""
    text = f"It generated {words.count(generated)} tokens in training"
    if wasted is None:
        return text + "."
    text += f", of which {words.count(wasted)} ({words.percent(wasted / generated, 0)}) were in groups never trained on"
    reasons = [(label, n) for name, label in DROPPED.items() if (n := run.total(name))]
    if reasons:
        text += " (groups: " + ", ".join(f"{n:,.0f} {label}" for label, n in reasons) + ")"
    return text + "."


def _alarms(run: Run) -> str:
    if not run.alarms:
        return ""
    number = "One alarm was" if len(run.alarms) == 1 else f"{len(run.alarms)} alarms were"
    last = run.alarms[-1]
    return f"{number} raised; the last, at step {last.get('step', '?')}: {last['text']}"
