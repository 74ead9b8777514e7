"""`gspo eval`: how well a model answers a dataset's held-out questions."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gspo.commands.arguments import PASS_THROUGH, load_arguments

if TYPE_CHECKING:
    from gspo.checks.assess import Assessment

app = typer.Typer(add_completion=False)


@app.command("eval", context_settings=PASS_THROUGH)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, checkpoint, hub name, or embedded.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE …]", help="Overrides, as for gspo train.")
    ] = None,
    data: Annotated[
        str, typer.Option("--data", help="Built-in task, jsonl or parquet file, or hub name.")
    ] = "arithmetic",
    n: Annotated[
        int,
        typer.Option("--n", min=1, help="Answers per question; above 1, sampled answers are added to the greedy one."),
    ] = 1,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="Of sampled answers.")] = 1.0,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N questions.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Evaluate a model: greedy and sampled accuracy with 95 % intervals, best@k and maj@k, by data source."""
    val = "actor_rollout_ref.rollout.val_kwargs"
    wanted = [f"actor_rollout_ref.model.path={model}", f"data.val_files={data}"]
    wanted += [f"data.num_val_samples={limit}"] if limit else []
    if n > 1:
        wanted += [f"{val}.n={n}", f"{val}.do_sample=true", f"{val}.temperature={temperature}"]
    resolved = load_arguments([*wanted, *(arguments or [])])
    from gspo.checks.assess import assess
    from gspo.loop.run import exit_code

    try:
        assessment = assess(resolved.config, num_samples=resolved.get(f"{val}.n"))
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(code) from None
    if as_json:
        typer.echo(json.dumps({"model": model, "data": data, **assessment.to_dict()}))
    else:
        _print(model, data, assessment)


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
