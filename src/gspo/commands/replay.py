"""`gspo replay`: other losses on the groups that a run was trained on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gspo.commands import refuse

if TYPE_CHECKING:
    from gspo.checks.replay import Replay, Shadow

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder with recorded groups.")],
    losses: Annotated[
        str, typer.Option(help="Names of losses, separated by commas.")
    ] = "gspo,gspo_token,vanilla,dapo,cispo,geo_mean,sapo",
    steps: Annotated[str | None, typer.Option(help="One step or a range, such as 3 or 3-8. Default: all.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Model folder. Gradients are then those of its parameters.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every step as JSON.")] = False,
) -> None:
    """Compute other losses on the recorded groups of a run.

    Prints for each loss the clip fraction, the gradient norm, and the cosine with the gradient of the loss that was
    trained. Gradients are with respect to the log-probs of the tokens, unless --checkpoint is set.
    """
    from gspo.checks.replay import Replay, ReplayError, mean_over_steps

    names = [name.strip() for name in losses.split(",") if name.strip()]
    try:
        source = Replay(run, checkpoint)
        chosen = _choose(source.steps(), steps)
        shadows = [s for step in chosen for s in source.shadows(step, names)]
    except (ReplayError, ValueError) as error:
        refuse(error)
    if as_json:
        facts = {"run": str(run), "trained": source.trained, "gradients_of": source.space}
        means = mean_over_steps(shadows)
        typer.echo(json.dumps({**facts, "mean": means, "steps": [asdict(s) for s in shadows]}))
        return
    _print(source, shadows)


def _choose(known: list[int], wanted: str | None) -> list[int]:
    if not known:
        raise ValueError("no groups are recorded in this run; it needs trainer.save_groups=true")
    if wanted is None:
        return known
    first, _, last = wanted.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        raise ValueError(f"--steps {wanted}: expected A or A-B, e.g. 3-8") from None
    chosen = [step for step in known if low <= step <= high]
    if not chosen:
        raise ValueError(f"--steps {wanted}: no such step; recorded are {known[0]} to {known[-1]}")
    return chosen


def _print(source: Replay, shadows: list[Shadow]) -> None:
    from gspo.checks.replay import mean_over_steps

    num_steps = len({s.step for s in shadows})
    typer.echo(
        f"{source.run.path}: trained with {source.trained}; means over {num_steps} steps; "
        f"gradients with respect to {source.space}"
    )
    typer.echo(f"  {'loss':12s} {'clipped':>8s} {'gradient':>11s} {'cosine':>8s}")
    for name, values in mean_over_steps(shadows).items():
        cosine = "–" if values["cosine"] is None else f"{values['cosine']:.4f}"
        typer.echo(f"  {name:12s} {values['clip_fraction']:8.4f} {values['grad_norm']:11.4e} {cosine:>8s}")
