"""`gspo sweep`: many runs from one file, a grid or random draws, and one page that compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gspo.commands import refuse
from gspo.commands.sweep.spec import Sweep, SweepError, read_sweep
from gspo.exit_codes import EXIT_DONE, EXIT_PROBLEM

app = typer.Typer(add_completion=False)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="What is swept; docs/sweeps.md describes it.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file, print the runs, then stop.")] = False,
) -> None:
    """Train with every combination of settings in a file. Type it again to go on with an interrupted sweep."""
    try:
        plan = read_sweep(file)
    except SweepError as error:
        refuse(error)
    _check_configs(plan)
    if dry_run:
        typer.echo(f"{len(plan.trials)} runs in {plan.folder}, backend {plan.backend}")
        for trial in plan.trials:
            typer.echo(trial.name)
        return
    raise typer.Exit(_run(plan))


def _check_configs(plan: Sweep) -> None:
    """Refuse a setting that the config refuses, before the first run starts."""
    from gspo.config import ConfigErrors, load

    for trial in plan.trials:
        try:
            load(plan.base, plan.overrides(trial))
        except ConfigErrors as errors:
            for problem in errors.problems:
                typer.echo(str(problem), err=True)
            refuse(f"{trial.name}: the configuration has errors; nothing was started")


def _run(plan: Sweep) -> int:
    from gspo.commands.sweep.ledger import Ledger
    from gspo.commands.sweep.standings import standings, write_page
    from gspo.commands.sweep.trials import run_on_ray, run_one_by_one

    plan.folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(plan)
    left = [trial for trial in plan.trials if not ledger.is_done(trial)]
    if len(left) < len(plan.trials):
        typer.echo(f"{len(plan.trials) - len(left)} of {len(plan.trials)} runs are finished already")
    run_trials = run_on_ray if plan.backend == "ray" else run_one_by_one
    started = []
    for trial, code in run_trials(plan, left, typer.echo) if left else ():
        ledger.record(trial, code)
        started.append(trial)
        write_page(plan.folder, [t.name for t in plan.trials])
    if written := write_page(plan.folder, [t.name for t in plan.trials]):
        typer.echo(f"\n{standings(written[1])}\npage: {written[0]}")
    for name, code in (failed := ledger.failed(started)):
        typer.echo(f"error: {name} ended with exit code {code}; see {plan.folder / name}.log", err=True)
    if len(started) < len(left):
        return failed[-1][1] if failed else EXIT_PROBLEM  # stopped by a signal: the code of the run that it ended
    return EXIT_PROBLEM if failed else EXIT_DONE
