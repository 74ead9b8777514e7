"""`gspo eval`: how well a model answers the held-out questions of a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gspo.commands import refuse
from gspo.commands.arguments import PASS_THROUGH, load_arguments
from gspo.config import TrainerConfig
from gspo.exit_codes import EXIT_PROBLEM
from gspo.paths import user_path
from gspo.runs.console import waiting

if TYPE_CHECKING:
    from gspo.checks.assess import Assessment

app = typer.Typer(add_completion=False)


@app.command("eval", context_settings=PASS_THROUGH)
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder, checkpoint, run (its best or newest checkpoint), hub name, or embedded."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE …]", help="Overrides, as for gspo train.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Built-in task, jsonl or parquet file, or hub name. Default: the run's data, or arithmetic."),
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="Sampled answers per question; 1 = only the greedy one.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of the sampled answers.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N questions. Default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Evaluate a model on the held-out questions of a dataset.

    Prints accuracy with 95 % intervals, greedy and sampled, and best@k and maj@k, for each data source.
    """
    val = "actor_rollout_ref.rollout.val_kwargs"
    run = _find_run(model)
    wanted = [f"actor_rollout_ref.model.path={model if run is None else _checkpoint(run)}"]
    data = data or ("arithmetic" if run is None else None)
    wanted += [f"data.val_files={data}"] if data else []
    wanted += [f"data.num_val_samples={limit}"] if limit else []
    if n > 1:
        wanted += [f"{val}.n={n}", f"{val}.do_sample=true", f"{val}.temperature={temperature}"]
    resolved = load_arguments([*wanted, *(arguments or [])], None if run is None else run / "config.yaml")
    with waiting("loading torch"):
        from gspo.checks.assess import assess
        from gspo.loop.run import exit_code
    try:
        with waiting("evaluating"):
            assessment = assess(resolved.config, num_samples=resolved.get(f"{val}.n"), say=_say)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        refuse(error, code)
    if as_json:
        typer.echo(json.dumps({"model": model, "data": data, **assessment.to_dict()}))
    else:
        _print(resolved.config.actor_rollout_ref.model.path, data or _own_data(resolved.config), assessment)
    if failure := assessment.failure():
        refuse(failure, EXIT_PROBLEM)


def _say(note: str) -> None:
    typer.echo(note, err=True)


def _find_run(name: str) -> Path | None:
    """The run folder of that name; None for a model."""
    from gspo.runs.run import is_run

    path = user_path(name)
    return path if is_run(path) else None


def _checkpoint(run: Path) -> Path:
    """The best checkpoint of a run that keeps its best, else the newest."""
    from gspo.checkpoint.folder import all_steps
    from gspo.loop.best import best_steps
    from gspo.runs.folder import step_of
    from gspo.runs.run import read_run

    steps = {step_of(path.name): path for path in all_steps(run / "checkpoints")}
    if not steps:
        refuse(f"{run}: the run has no checkpoint yet")
    found = read_run(run)
    best = best_steps(found.rows, 1, steps) if found.setting("trainer.keep_best") else []
    return steps[best[0] if best else max(steps)]


def _own_data(config: TrainerConfig) -> str:
    files = config.data.val_files or config.data.train_files
    return files if isinstance(files, str) else ", ".join(files)


def _print(model: str, data: str, assessment: Assessment) -> None:
    facts = assessment.to_dict()
    typer.echo(f"{model} on {data}: {facts['num_questions']} questions, {facts['seconds']:.1f} s")
    for way in ("greedy", "sampled"):
        for source, values in facts.get(way, {"sources": {}})["sources"].items():
            typer.echo(f"  {way:8s} {source}: {_line(values)}")


def _line(values: dict[str, Any]) -> str:
    kind = "acc" if any(name.startswith("acc/") for name in values) else "reward"
    parts = [
        f"{name.removeprefix(f'{kind}/')} {value:.3f}"
        for name, value in values.items()
        if name.startswith(f"{kind}/") and "/ci_" not in name
    ]
    if "acc/ci_low" in values:
        parts.insert(1, f"(95 % {values['acc/ci_low']:.3f} to {values['acc/ci_high']:.3f})")
    if values.get("reward_failures"):
        parts.append(f"{values['reward_failures']:.0f} rewards failed")
    return f"{kind} {' '.join(parts)}, {values['response_length/mean']:.1f} tokens per answer"
