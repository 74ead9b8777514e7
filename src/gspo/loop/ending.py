"""The end of a run: its result, a summary of what changed, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gspo import report
from gspo.exit_codes import EXIT_PAUSED
from gspo.loop.counters import Counters
from gspo.loop.export import write_cards
from gspo.loop.guards.alarms import Paused
from gspo.runs.console import Console
from gspo.runs.files import write_json
from gspo.runs.folder import RunFolder, step_of
from gspo.runs.metric_names import accuracy_interval, held_out_accuracy, held_out_score, tool_call_share
from gspo.runs.reading import read_groups

if TYPE_CHECKING:
    from gspo.loop.training_run import TrainingRun


def result(run: RunFolder, step: int, counters: Counters) -> dict[str, Any]:
    """The outcome of the run, from its metric rows: the same after any number of interruptions."""
    rows = [row for row in run.rows() if held_out_accuracy(row) is not None]
    first, last = (rows[0], rows[-1]) if rows else ({}, {})
    calls = {"tool_calls_start": tool_call_share(first), "tool_calls_final": tool_call_share(last)}
    return {
        "start_acc": held_out_accuracy(first),
        "final_acc": held_out_accuracy(last),
        "steps": step,
        "seconds": round(counters.seconds, 1),
        "generated_tokens": counters.generated_tokens,
        "run": str(run.path),
        "start_ci": _interval(first),
        "final_ci": _interval(last),
        **{name: share for name, share in calls.items() if share is not None},
    }


def finished(console: Console, run: RunFolder, outcome: dict[str, Any], num_examples: int) -> dict[str, Any]:
    """Write the result of a finished run, print what changed, and write the report."""
    write_json(run.result_file, outcome)
    show_change(console, run, outcome, num_examples)
    write_report(console, run)
    return outcome


def paused(trainer: TrainingRun[Any], cause: Paused) -> dict[str, Any]:
    """Print how to continue a run that an alarm paused. It is saved."""
    run = trainer.run
    trainer.console.say(
        f"{cause}; saved in {run.path}, the alarm is in {trainer.alarms.file.name}. Continue as it is with the same "
        f"command, or from an earlier checkpoint of {run.checkpoints} under another trainer.experiment_name"
    )
    return {**trainer.result(), "stopped": EXIT_PAUSED}


def stopped(trainer: TrainingRun[Any]) -> dict[str, Any]:
    """Print how to continue a run that a signal stopped. It is saved."""
    run, console = trainer.run, trainer.console
    console.say(f"stopped at step {trainer.step} of {trainer.total_steps}; saved in {run.path}. {going_on(trainer)}:")
    console.command(f"  {command_to_go_on(trainer)}")
    return {**trainer.result(), "stopped": trainer.stop.exit_code}


def going_on(trainer: TrainingRun[Any]) -> str:
    """How a run that was stopped is continued, as the beginning of a sentence that ends with a command or a setting."""
    if trainer.inputs.facts():
        return "Continue by running the same Python program again, from anywhere with this setting"
    return "Continue with the same command, or"


def command_to_go_on(trainer: TrainingRun[Any], *overrides: str) -> str:
    """The command that continues a run, or the setting for a Python program whose objects no command has."""
    run = trainer.run
    if trainer.inputs.facts():
        return " ".join([f"trainer.resume_mode={run.path}", *overrides])
    name = f"trainer.experiment_name={run.name}"
    return " ".join([f"gspo {trainer.command} {run.config_file} {name}", *overrides])


def write_report(console: Console, run: RunFolder) -> None:
    """Write the model cards of the checkpoints and the report page, and print where it is.

    What cannot be written is a warning: the run itself ended well.
    """
    try:
        write_cards(run)
    except OSError as error:
        console.warn(f"the model cards of {run.checkpoints} are not complete: {error}")
    page = report.write_report(run.path, console.warn)
    if page is not None:
        console.say(f"report: {page}")


def _interval(row: Mapping[str, Any]) -> list[float] | None:
    """The interval as a JSON list."""
    interval = accuracy_interval(row)
    return None if interval is None else list(interval)


def show_change(console: Console, run: RunFolder, result: Mapping[str, Any], num_examples: int) -> None:
    """Print what training changed, with answers before and after side by side."""
    files = sorted(run.evals.glob("step-*.jsonl.gz"), key=lambda f: step_of(f.name))
    if len(files) < 2:
        return
    if result["start_acc"] is None:
        _show_reward_change(console, run, result)
        return
    before = {r["uid"]: r for r in read_groups(files[0])}
    after = {r["uid"]: r for r in read_groups(files[-1])}
    both = [(before[uid], after[uid]) for uid in before if uid in after]
    fixed = [pair for pair in both if not _right(pair[0]) and _right(pair[1])]
    broken = sum(_right(a) and not _right(b) for a, b in both)
    lengths = [sum(_length(pair[i]) for pair in both) / max(1, len(both)) for i in (0, 1)]
    console.say(
        f"held-out accuracy {result['start_acc']:.3f} → {result['final_acc']:.3f} "
        f"in {result['steps']} step{'s' * (result['steps'] != 1)} and {result['seconds']:.0f} s: of {len(both)} questions, {len(fixed)} became right "
        f"and {broken} wrong; answers went from {lengths[0]:.1f} to {lengths[1]:.1f} tokens"
    )
    if num_examples > 0 and fixed:
        rows = [
            [_question(a), str(a["ground_truth"]), a["responses"][0]["text"], b["responses"][0]["text"]]
            for a, b in fixed[:num_examples]
        ]
        console.side_by_side("the same questions", ["question", "truth", "before", "after"], rows)


def _show_reward_change(console: Console, run: RunFolder, result: Mapping[str, Any]) -> None:
    """Print how the held-out reward changed, where no accuracy is known."""
    known = [value for row in run.rows() if (value := held_out_score(row)) is not None]
    if len(known) >= 2:
        steps = f"{result['steps']} step{'s' * (result['steps'] != 1)}"
        console.say(f"held-out reward {known[0]:.3f} → {known[-1]:.3f} in {steps} and {result['seconds']:.0f} s")


def _right(record: Mapping[str, Any]) -> bool:
    return (record["responses"][0]["acc"] or 0.0) > 0.5


def _length(record: Mapping[str, Any]) -> int:
    return record["responses"][0]["num_tokens"]


def _question(record: Mapping[str, Any]) -> str:
    return str(record["messages"][-1]["content"]) if record["messages"] else record["uid"]
