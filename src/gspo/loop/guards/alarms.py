"""Alarms: rules over the metric rows of a run, their messages, and the action of `trainer.on_alarm`.

An alarm goes off in the step in which its condition begins, and not again before the condition has ended. Whether it
does is a function of the rows alone, so a resumed run raises the alarms it would have raised without the interruption.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

from gspo.checkpoint import folder as checkpoint
from gspo.loop.guards.row_history import REWARD, RISING_STEPS, START_ROWS, Row, RowHistory, finite_value
from gspo.runs.files import write_atomic
from gspo.runs.folder import RunFolder, step_of
from gspo.runs.metric_names import held_out_accuracy

LR_FACTOR = 0.5  # of the learning rate after a rollback
MAX_ROLLBACKS = 1
RATIO_LIMIT = 10.0
MEAN_RANGE = (0.5, 2.0)
CLIP_LIMIT = 0.8
ENTROPY_SHARE = 0.05
ENTROPY_FACTOR = 3.0
KEEP_LIMIT = 0.05
LENGTH_SHARE = 0.25
CUT_LIMIT = 0.5
HACKING_MARGIN = 0.05
DISAGREEMENT_MARGIN = 0.15

Rule = Callable[[Sequence[Row]], str | None]
Action = Literal["warn", "pause", "rollback"]


class Paused(RuntimeError):
    """An alarm stopped the run after saving it."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm of a step: its cause and remedy in words, and the action that was taken."""

    step: int
    name: str
    text: str
    action: Action = "warn"


class AlarmWatch:
    """Judges metric rows one after another."""

    def __init__(self, rules: Mapping[str, Rule] | None = None) -> None:
        self._rules = RULES if rules is None else rules
        self._history = RowHistory()
        self._active: set[str] = set()

    def observe(self, row: Row) -> list[Alarm]:
        """The alarms that begin with this row."""
        rows = [*self._history.rows(), row]
        found = {name: text for name, rule in self._rules.items() if (text := rule(rows)) is not None}
        self._history.add(row)
        new = [name for name in found if name not in self._active]
        self._active = set(found)
        return [Alarm(int(row["step"]), name, found[name]) for name in new]


class Alarms:
    """The alarms of one run, with their file `alarms.jsonl` in the run folder."""

    def __init__(
        self, run: RunFolder, on_alarm: str, warn: Callable[[str], None], rules: Mapping[str, Rule] | None = None
    ) -> None:
        self.file = run.path / "alarms.jsonl"
        self._checkpoints = run.checkpoints
        self._on_alarm, self._warn = on_alarm, warn
        self._rules = rules
        self._watch = AlarmWatch(rules)

    def restore(self, step: int, rows: Iterable[Row]) -> None:
        """Continue after `step`: forget later alarms, except those that led to a rollback, and look at the rows again."""
        kept = [a for a in self.read() if a.step <= step or a.action == "rollback"]
        if self.file.exists():
            write_atomic(self.file, "".join(json.dumps(asdict(a)) + "\n" for a in kept).encode())
        self._watch = AlarmWatch(self._rules)
        for row in rows:
            if int(row["step"]) <= step:
                self._watch.observe(row)

    def check(self, step: int, values: Mapping[str, float], num_rollbacks: int) -> Action:
        """Check the row of a step and record its alarms; returns the action to take."""
        alarms = self._watch.observe({**values, "step": step})
        if not alarms:
            return "warn"
        action = self._decide(step, num_rollbacks)
        for alarm in alarms:
            self._append(replace(alarm, action=action))
            self._warn(f"alarm at step {step}: {alarm.name}: {alarm.text}")
        return action

    def read(self) -> list[Alarm]:
        """The recorded alarms. A last line that is half written is left out."""
        if not self.file.exists():
            return []
        out = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            try:
                out.append(Alarm(**json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                break
        return out

    def num_rollbacks(self) -> int:
        """Rollbacks so far; several alarms of one step are one rollback."""
        return len({a.step for a in self.read() if a.action == "rollback"})

    def _decide(self, step: int, num_rollbacks: int) -> Action:
        if self._on_alarm != "rollback":
            return "pause" if self._on_alarm == "pause" else "warn"
        can = num_rollbacks < MAX_ROLLBACKS and checkpoint_before(self._checkpoints, step) is not None
        return "rollback" if can else "pause"

    def _append(self, alarm: Alarm) -> None:
        with open(self.file, "a", encoding="utf-8") as f:
            f.write(json.dumps(asdict(alarm)) + "\n")
            f.flush()
            os.fsync(f.fileno())


def checkpoint_before(folder: Path, step: int) -> Path | None:
    """The newest whole checkpoint of an earlier step."""
    for path in reversed(checkpoint.all_steps(folder)):
        if step_of(path.name) < step and checkpoint.verify(path) is None:
            return path
    return None


def _start(rows: Sequence[Row], name: str) -> float | None:
    """The mean over the run's first rows that have the metric; None before there are enough and one more."""
    known = (v for row in rows if (v := finite_value(row, name)) is not None)
    values = list(islice(known, START_ROWS + 1))
    return sum(values[:START_ROWS]) / START_ROWS if len(values) > START_ROWS else None


def _latest(rows: Sequence[Row], name: str) -> float | None:
    """The latest known value of a metric. A step may not measure it, such as the reward when no group was judged."""
    return next((v for row in reversed(rows) if (v := finite_value(row, name)) is not None), None)


def not_finite(rows: Sequence[Row]) -> str | None:
    """NaN or infinity in a loss, a gradient or another number that training depends on."""
    row = rows[-1]
    if (row.get("actor/skipped_updates") or 0) > 0 or (row.get("critic/skipped_updates") or 0) > 0:
        return "a loss or gradient was not finite and its update was skipped; lower actor.optim.lr, or use float32"
    watched = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "critic/vf_loss")
    bad = [name for name in watched if name in row and finite_value(row, name) is None]
    return f"{', '.join(bad)} is not finite; lower actor.optim.lr, or use float32" if bad else None


def ratio_explosion(rows: Sequence[Row]) -> str | None:
    """A sequence ratio far above 1, or most of them far from it: the policy has left the one that generated.

    A single small ratio says nothing: a short answer that was unlikely and wrong may rightly become impossible.
    """
    high = finite_value(rows[-1], "actor/seq_importance_ratio/max")
    mean = finite_value(rows[-1], "actor/seq_importance_ratio")
    if high is None or mean is None or (high <= RATIO_LIMIT and MEAN_RANGE[0] < mean < MEAN_RANGE[1]):
        return None
    return (
        f"sequence ratios reach {high:.3g} with a mean of {mean:.3g} (1 ± 0.01 is usual): the policy moved too far "
        "within a step; lower actor.optim.lr or make fewer mini-batches a step"
    )


def clip_fraction(rows: Sequence[Row]) -> str | None:
    """Nearly everything clipped: most of the batch has no gradient."""
    value = finite_value(rows[-1], "actor/pg_clipfrac_later")
    value = finite_value(rows[-1], "actor/pg_clipfrac") if value is None else value
    if value is None or value <= CLIP_LIMIT:
        return None
    return (
        f"{value:.0%} of the mini-batches after the first is clipped and has no gradient: the clip range is too narrow "
        "for the answers' length or the step size; set actor.clip_target, widen clip_ratio_low/high, or lower the rate"
    )


def entropy_collapse(rows: Sequence[Row]) -> str | None:
    """Entropy gone without the reward having risen. (Answers that become right become certain too.)"""
    start, now = _start(rows, "actor/entropy"), finite_value(rows[-1], "actor/entropy")
    before, reward = _start(rows, REWARD), _latest(rows, REWARD)
    if start is None or now is None or now >= ENTROPY_SHARE * start:
        return None
    if before is not None and reward is not None and reward > before + HACKING_MARGIN:
        return None
    return (
        f"entropy fell from {start:.3g} to {now:.3g} and the reward did not rise: the policy repeats itself; lower "
        "actor.optim.lr, add actor.entropy_coeff, or raise rollout.temperature"
    )


def gibberish(rows: Sequence[Row]) -> str | None:
    """Entropy far above its start and the reward fallen: the answers become random tokens."""
    start, now = _start(rows, "actor/entropy"), finite_value(rows[-1], "actor/entropy")
    before, reward = _start(rows, REWARD), _latest(rows, REWARD)
    if start is None or now is None or before is None or reward is None:
        return None
    if now <= ENTROPY_FACTOR * start or reward >= before - HACKING_MARGIN:
        return None
    return (
        f"entropy rose from {start:.3g} to {now:.3g} and the reward fell from {before:.3f} to {reward:.3f}: the answers "
        "become random; stop, return to an earlier checkpoint, and lower actor.optim.lr or actor.entropy_coeff"
    )


def rising_loss(rows: Sequence[Row]) -> str | None:
    """The policy loss rose in every one of the last steps. It hovers around 0 in a healthy run."""
    known = [v for row in rows[-RISING_STEPS:] if (v := finite_value(row, "actor/pg_loss")) is not None]
    if len(known) < RISING_STEPS or any(b <= a for a, b in pairwise(known)):
        return None
    return (
        f"the policy loss rose in each of the last {RISING_STEPS} steps, from {known[0]:.3g} to {known[-1]:.3g}: updates "
        "make it worse; lower actor.optim.lr, or make fewer mini-batches per step"
    )


def keep_rate(rows: Sequence[Row]) -> str | None:
    """Nearly every group is filtered out."""
    kept = finite_value(rows[-1], "train/filtered_prompts_ratio")
    judged = finite_value(rows[-1], "train/groups_generated") or 0
    if kept is None or judged < 1 / KEEP_LIMIT or kept >= KEEP_LIMIT:
        return None
    right = (finite_value(rows[-1], "train/groups_all_right") or 0) / judged
    remedy = "use harder data, or stop: this is learnt" if right > 0.5 else "use easier data or a warm start"
    return (
        f"only {kept:.1%} of the groups have answers of different reward ({right:.0%} all right), so almost all "
        f"generation is wasted; {remedy}, or raise rollout.n"
    )


def no_gradient(rows: Sequence[Row]) -> str | None:
    """Every group's responses earned the same, and none was filtered: nothing can be learnt from the step."""
    ends = [finite_value(rows[-1], f"critic/advantages/{end}") for end in ("min", "max")]
    if ends != [0.0, 0.0]:
        return None
    score = finite_value(rows[-1], "critic/score/mean")
    earned = "" if score is None else f" (mean {score:.3g})"
    return (
        f"in every group all responses earned the same reward{earned}, so all advantages are 0 and the policy's gradient is "
        "0; use data of another difficulty, a reward with more levels, a larger rollout.n, or "
        "algorithm.filter_groups.enable=true, which replaces such groups"
    )


def length_collapse(rows: Sequence[Row]) -> str | None:
    """Answers shrink to a fraction of what they were."""
    start, now = _start(rows, "response_length/mean"), finite_value(rows[-1], "response_length/mean")
    if start is None or now is None or now >= LENGTH_SHARE * start:
        return None
    return (
        f"answers shrank from {start:.1f} to {now:.1f} tokens: the reward may pay for ending early; look at the answers "
        "(gspo report) and at what an empty one earns (gspo rewards try)"
    )


def answers_cut(rows: Sequence[Row]) -> str | None:
    """Most answers run into the length limit, which they did not at first."""
    start, now = _start(rows, "response_length/clip_ratio"), finite_value(rows[-1], "response_length/clip_ratio")
    if start is None or now is None or now <= CUT_LIMIT or start > CUT_LIMIT / 2:
        return None
    return (
        f"{now:.0%} of the answers are cut at data.max_response_length, {start:.0%} at first: raise it, or set "
        "reward_model.reward_kwargs.overlong_buffer_cfg"
    )


def reward_hacking(rows: Sequence[Row]) -> str | None:
    """The training reward rises while held-out accuracy falls."""
    now = held_out_accuracy(rows[-1])
    if now is None:
        return None
    earlier = [(i, a) for i, row in enumerate(rows[:-1]) if (a := held_out_accuracy(row)) is not None]
    if not earlier:
        return None
    at, best = max(earlier, key=lambda pair: pair[1])
    known = [r for row in rows[at:] if (r := finite_value(row, REWARD)) is not None]
    if len(known) < 2 or best - now <= HACKING_MARGIN or known[-1] - known[0] <= HACKING_MARGIN:
        return None
    return (
        f"the training reward rose from {known[0]:.3f} to {known[-1]:.3f} while held-out accuracy fell from {best:.3f} "
        f"to {now:.3f}: the policy may exploit the reward or overfit; read kept answers (gspo report), tighten the reward"
    )


def judge_disagreement(rows: Sequence[Row]) -> str | None:
    """A judge or reward model contradicts the rule more often than at first: the policy learns to please it."""
    for name, what in (("judge/disagreement", "the judge"), ("reward_model/disagreement", "the reward model")):
        start, now = _start(rows, name), finite_value(rows[-1], name)
        if start is not None and now is not None and now > start + DISAGREEMENT_MARGIN:
            return (
                f"{what} disagrees with the rule on {now:.0%}, {start:.0%} at first: the policy may learn what pleases "
                "it instead of what is right; read answers that only one of them likes (gspo report), give the rule a "
                "weight in reward.functions, or add a KL term"
            )
    return None


RULES: dict[str, Rule] = {
    "not_finite": not_finite,
    "ratio_explosion": ratio_explosion,
    "clip_fraction": clip_fraction,
    "entropy_collapse": entropy_collapse,
    "gibberish": gibberish,
    "rising_loss": rising_loss,
    "keep_rate": keep_rate,
    "no_gradient": no_gradient,
    "length_collapse": length_collapse,
    "answers_cut": answers_cut,
    "reward_hacking": reward_hacking,
    "judge_disagreement": judge_disagreement,
}
SUPERVISED_RULES: dict[str, Rule] = {"not_finite": not_finite}  # the others read what only rollouts have
