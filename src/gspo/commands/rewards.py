"""`gspo rewards try`, `gspo rewards bench` and `gspo rewards sandbox`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gspo.commands import refuse
from gspo.commands.arguments import PASS_THROUGH, load_arguments
from gspo.config import TrainerConfig
from gspo.exit_codes import EXIT_PROBLEM

if TYPE_CHECKING:
    from gspo.types import Prompt

app = typer.Typer(no_args_is_help=True, help="Try, time and inspect rewards.", add_completion=False)


@app.command("try", context_settings=PASS_THROUGH)
def try_reward(
    task: Annotated[str, typer.Option(help="Dataset that the row is in: a name or a file.")],
    answer: Annotated[str, typer.Option(help="File with the response, or - for standard input.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE …]", help="Keys of data and reward, as for gspo train: data.prompt_key=question."
        ),
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Which row, counted from 0.")] = 0,
    reward: Annotated[
        str | None,
        typer.Option(
            help="Built-in reward, or file.py:function. Default: the reward of the keys, or of the data source."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest time for the reward, in seconds.")] = 10.0,
) -> None:
    """Grade one answer to a row of a dataset, as in training, and print the reward and what a judge said."""
    from gspo.build.rewards import build_scorer, rewards_of
    from gspo.data.rows import DataError, visible
    from gspo.rewards import RewardError
    from gspo.types import Group, Prompt, Rollout

    keys = [f"data.train_files={task}", "reward.num_workers=1", f"reward.timeout={timeout}"]
    config = load_arguments([*keys, *(arguments or [])]).config
    try:
        text = sys.stdin.read() if answer == "-" else Path(answer).read_text(encoding="utf-8")
    except OSError as error:
        refuse(f"--answer {answer}: {error.strerror}")
    except UnicodeDecodeError as error:
        refuse(f"--answer {answer}: is not UTF-8 ({error})")
    try:
        source = _load_row(config, row)
        scorer = build_scorer(config, reward)
    except (DataError, RewardError) as error:
        refuse(error)
    if rewards_of(config).model is not None:
        typer.echo("note: the reward model is not loaded here: its score is missing in this reward", err=True)
    prompt = Prompt(source.uid, source.messages, (), source.data_source, source.ground_truth, source.extra)
    rollout = Rollout((), (), (), (), "stop", text=text)
    start = time.perf_counter()
    try:
        scorer.submit(Group(prompt, (rollout,), 0, 0))
        scored = scorer.collect()[0].rollouts[0]
    except (RewardError, OSError) as error:
        refuse(error)
    finally:
        scorer.close()
    _print_row(prompt, text)
    if scored.reward is None:
        typer.echo(f"reward     none: {scored.failure}")
        raise typer.Exit(EXIT_PROBLEM)
    typer.echo(f"score      {scored.reward.score:g}")
    typer.echo(f"acc        {'not given' if scored.reward.acc is None else format(scored.reward.acc, 'g')}")
    for name, value in scored.reward.extra.items():
        typer.echo(f"{name:10s} {value:g}")
    for name, note in scored.reward.notes.items():
        for key, value in note.items():
            typer.echo(visible(f"{name:10s} {key}: {value if isinstance(value, str) else json.dumps(value)}"))
    typer.echo(f"time       {time.perf_counter() - start:.3f} s, including the start of a worker if one is needed")


@app.command()
def bench(
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of measurement per line.")] = 2.0,
    num_workers: Annotated[int, typer.Option("--workers", min=0, help="Reward processes; 0 = one per core.")] = 0,
) -> None:
    """Print how many responses per second each kind of reward grades on this machine."""
    from gspo.rewards.benchmark import WORKLOADS, responses_per_second
    from gspo.sandbox import Sandbox, SandboxError, measure_speed

    for workload in WORKLOADS:
        rate, failed = responses_per_second(workload.groups(), seconds, num_workers)
        typer.echo(f"{workload.name:28s} {rate:9.0f} per second" + (f"   {failed} failed" if failed else ""))
    try:
        with Sandbox() as sandbox:
            speed = measure_speed(sandbox, seconds)
            typer.echo(
                f"{'code, trivial program':28s} {speed.trivial_per_core:9.0f} per second per core   level {sandbox.level}"
            )
            typer.echo(f"{'code, typical program':28s} {speed.typical_per_core:9.0f} per second per core")
    except SandboxError as error:
        typer.echo(f"code: {error}")


@app.command()
def sandbox(
    level: Annotated[int | None, typer.Option(help="Test this level only.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of measurement per speed.")] = 1.0,
) -> None:
    """Print the isolation levels for model-written code that work on this machine.

    For each level: what it guarantees, how many canaries (programs that try to break out) it refused, and its speed.
    """
    from gspo.sandbox import GUARANTEES, HOW_TO, Sandbox, SandboxError, examine_level, measure_speed

    if level is not None and level not in (1, 2, 3):
        refuse(f"--level {level}: expected 1, 2 or 3")
    granted = False
    for number in [level] if level else [3, 2, 1]:
        report = examine_level(number)
        granted |= report.granted
        refused = sum(canary.refused for canary in report.canaries)
        verdict = "granted" if report.granted else f"not granted: {report.reason}"
        typer.echo(
            f"level {number}  {verdict}\n  {GUARANTEES[number]}\n  canaries refused {refused}/{len(report.canaries)}"
        )
        for canary in report.canaries:
            if not canary.refused:
                typer.echo(f"  NOT refused: {canary.name}: {canary.detail}")
        if report.granted:
            with Sandbox(number) as box:
                speed = measure_speed(box, seconds)
            typer.echo(
                f"  {speed.trivial_per_core:.0f} trivial and {speed.typical_per_core:.0f} typical programs per second of "
                f"one core's time ({speed.trivial:.0f} and {speed.typical:.0f} per second of wall-clock time)"
            )
    try:
        typer.echo(f"used by default: level {Sandbox().level}")
    except SandboxError as error:
        typer.echo(f"used by default: none. {error}")
    if not granted:
        refuse(HOW_TO)


def _load_row(config: TrainerConfig, index: int) -> Any:
    from gspo.build.data.rows import training_rows
    from gspo.data.rows import DataError

    rows = training_rows(config, index + 1)
    if len(rows) <= index:
        task = str(config.data.train_files)
        raise DataError(task, f"has {len(rows)} rows; expected --row below that number, got {index}")
    return rows[index]


def _print_row(prompt: Prompt, text: str) -> None:
    from gspo.data.rows import visible

    for message in prompt.messages:
        typer.echo(visible(f"{message.get('role', '')!s:10s} {message.get('content', '')}"))
    truth = str(prompt.ground_truth)
    source = "no data_source" if prompt.data_source == "unknown" else f"data_source {prompt.data_source}"
    typer.echo(visible(f"row        {prompt.uid} ({source})"))
    typer.echo(visible(f"truth      {truth if len(truth) <= 300 else truth[:300] + '…'}"))
    typer.echo(visible(f"answer     {text if len(text) <= 300 else text[:300] + '…'}".rstrip()))
