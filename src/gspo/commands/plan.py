"""`gspo plan`: step time, memory a device and the best split of a cluster, predicted before anything is started."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gspo.commands.arguments import EXIT_BAD_CONFIG, PASS_THROUGH, load_arguments

if TYPE_CHECKING:
    from gspo.config import TrainerConfig
    from gspo.plan.constants import Device
    from gspo.plan.search import Plan
    from gspo.plan.workload import Workload

app = typer.Typer(add_completion=False)
DEFAULT_ETA = 2


@app.command(context_settings=PASS_THROUGH)
def plan(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE …]", help="As for gspo train.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Folder, config.json, hub name, a size such as 7b, or hidden=…,layers=…"
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Devices; from the config unless given.")] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Device: h200, h100, a100, …; h200 unless given.")
    ] = None,
    prompt_length: Annotated[int | None, typer.Option(help="Longest prompt, tokens.")] = None,
    response_length: Annotated[int | None, typer.Option(help="Longest answer, tokens.")] = None,
    mean_prompt_length: Annotated[
        float | None, typer.Option(help="Mean prompt; the longest unless given.")
    ] = None,
    mean_response_length: Annotated[
        float | None, typer.Option(help="Mean answer; 0.35 of the longest unless given.")
    ] = None,
    length_spread: Annotated[
        float | None, typer.Option(help="Standard deviation over mean of the length.")
    ] = None,
    keep_rate: Annotated[float | None, typer.Option(help="Share of groups dynamic sampling keeps.")] = None,
    eta: Annotated[
        int | None, typer.Option(help="Versions rollouts may run ahead in async; 2 unless given.")
    ] = None,
    simulate: Annotated[
        int | None, typer.Option(help="Simulate so many steps with stragglers and failures.")
    ] = None,
    mtbf_hours: Annotated[float | None, typer.Option(help="Hours between failures of one device.")] = None,
    save_minutes: Annotated[
        float | None, typer.Option(help="Minutes between checkpoints; best unless given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    check: Annotated[
        Path | None, typer.Option("--check", help="Compare with a run folder's measured times.")
    ] = None,
    constants: Annotated[
        bool, typer.Option("--constants", help="Print every constant with its source.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict step time, memory a device and the best split between rollout and training. Exits 1 when nothing fits."""
    from gspo.models.shape import ShapeError
    from gspo.plan.check import CheckError

    _positive(gpus=gpus, prompt_length=prompt_length, response_length=response_length, simulate=simulate)
    _positive(
        mean_prompt_length=mean_prompt_length,
        mean_response_length=mean_response_length,
        mtbf_hours=mtbf_hours,
    )
    _positive(keep_rate=keep_rate, save_minutes=save_minutes)
    if keep_rate is not None and keep_rate > 1:
        _refuse("--keep-rate", keep_rate, "a share above 0 and at most 1")
    for name, value in (("--eta", eta), ("--length-spread", length_spread)):
        if value is not None and value < 0:
            _refuse(name, value, "0 or more")
    try:
        if constants:
            from gspo.plan.show import constants_text

            typer.echo(constants_text(), nl=False)
            return
        if check is not None:
            _check(check, gpu, model, as_json)
            return
        resolved = _load(arguments or [], config, model, prompt_length, response_length).config
        _note(resolved)
        device = _device(gpu, resolved)
        work = _workload(resolved, mean_prompt_length, mean_response_length, length_spread, keep_rate, eta)
        made = _search(resolved, model, device, gpus, work)
    except (ShapeError, CheckError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_BAD_CONFIG) from error
    changes = {
        "mtbf_s": mtbf_hours and mtbf_hours * 3600,
        "save_interval_s": save_minutes and save_minutes * 60,
    }
    _report(made, simulate, {"seed": seed, **{k: v for k, v in changes.items() if v}}, as_json)


def _load(
    arguments: list[str], config: Path | None, model: str | None, prompt: int | None, response: int | None
) -> Any:
    words = list(arguments)
    if model is not None:
        words.append(f"actor_rollout_ref.model.path={'shape' if '=' in model else model}")
    if prompt is not None:
        words.append(f"data.max_prompt_length={prompt}")
    if response is not None:
        words.append(f"data.max_response_length={response}")
    return load_arguments(words, config, show_warnings=False)


def _note(config: TrainerConfig) -> None:
    """Say which settings the plan knows nothing of."""
    model, fsdp = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.fsdp_config
    if model.lora_rank:
        text = f"actor_rollout_ref.model.lora_rank = {model.lora_rank}: planned as training all weights"
        typer.echo(f"note: {text}; time and memory are upper bounds", err=True)
    if fsdp.param_offload or fsdp.offload_policy:
        typer.echo("note: actor_rollout_ref.actor.fsdp_config: offloading is not planned for", err=True)
    elif fsdp.optimizer_offload:
        text = "planned for one trainer rank"
        typer.echo(f"note: actor_rollout_ref.actor.fsdp_config.optimizer_offload: {text}", err=True)


def _device(gpu: str | None, config: TrainerConfig) -> Device:
    from gspo.plan.constants import DEVICES, in_float32

    name = (gpu or "h200").lower()
    if name not in DEVICES:
        _refuse("--gpu", gpu, f"one of {', '.join(DEVICES)}")
    wide = config.actor_rollout_ref.model.dtype == "float32"
    return in_float32(DEVICES[name]) if wide else DEVICES[name]


def _workload(
    config: TrainerConfig,
    mean_prompt: float | None,
    mean_response: float | None,
    spread: float | None,
    keep_rate: float | None,
    eta: int | None,
) -> Workload:
    from gspo.config import BatchPlan
    from gspo.plan.workload import workload_of

    plan = BatchPlan.of(config)
    for name, mean, longest in (
        ("--mean-prompt-length", mean_prompt, plan.max_prompt_tokens),
        ("--mean-response-length", mean_response, plan.max_response_tokens),
    ):
        if mean is not None and mean > longest:
            _refuse(name, mean, f"at most the longest, {longest}")
    if keep_rate is not None and not config.algorithm.filter_groups.enable:
        _refuse("--keep-rate", keep_rate, "dynamic sampling: add algorithm.filter_groups.enable=true")
    work = workload_of(
        config, mean_response=mean_response, spread=spread, mean_prompt=mean_prompt, keep_rate=keep_rate
    )
    return dataclasses.replace(work, eta=eta if eta is not None else work.eta or DEFAULT_ETA)


def _search(
    config: TrainerConfig, model: str | None, device: Device, gpus: int | None, work: Workload
) -> Plan:
    from gspo.models.shape import shape_of
    from gspo.plan.search import search

    shape = shape_of(model or config.actor_rollout_ref.model.path)
    count = gpus or config.trainer.nnodes * (config.trainer.n_gpus_per_node or 1)
    return search(shape, device, count, work)


def _report(made: Plan, steps: int | None, changes: dict[str, Any], as_json: bool) -> None:
    from gspo.plan.scenario import scenario_of
    from gspo.plan.search import smallest_cluster
    from gspo.plan.show import outcome_text, plan_text
    from gspo.plan.simulate import simulate

    best = made.best
    if best is None:
        enough = smallest_cluster(made.shape, made.device, made.work)
        remedy = (
            f"--gpus {enough} would do"
            if enough
            else "no cluster of up to 1,024 would do; shorten the answers"
        )
        typer.echo(
            f"error: {made.shape.name} does not fit on {made.gpus:,} {made.device.name} in any split, with gradient "
            f"checkpointing or without; {remedy}",
            err=True,
        )
        raise typer.Exit(1)
    facts: dict[str, Any] = {
        "model": made.shape.name,
        "parameters": made.shape.parameters,
        "gpus": made.gpus,
        "gpu": made.device.name,
        "predictions": [p.to_dict() for p in made.found],
    }
    if not as_json:
        typer.echo(plan_text(made), nl=False)
    if steps:
        scenario = scenario_of(best, made.work, steps=steps, **changes)
        calm = dataclasses.replace(scenario, mtbf_s=math.inf, sigma=0.0, slow_share=0.0)
        real, ideal = simulate(scenario), simulate(calm)
        facts["simulation"] = {
            **real.to_dict(),
            "ideal_step_s": ideal.step_s,
            "goodput": ideal.step_s / real.step_s,
        }
        if not as_json:
            typer.echo("\n" + outcome_text(scenario, real, ideal), nl=False)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))


def _check(folder: Path, gpu: str | None, model: str | None, as_json: bool) -> None:
    from gspo.plan.check import check_run
    from gspo.plan.constants import DEVICES
    from gspo.plan.show import comparison_text

    if gpu is not None and gpu.lower() not in DEVICES:
        _refuse("--gpu", gpu, f"one of {', '.join(DEVICES)}")
    found = check_run(folder, gpu and gpu.lower(), model)
    typer.echo(json.dumps(found.to_dict()) if as_json else comparison_text(found), nl=as_json)


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            _refuse(f"--{name.replace('_', '-')}", value, "a number above 0")


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    typer.echo(f"error: {name} {value}: expected {expected}", err=True)
    raise typer.Exit(EXIT_BAD_CONFIG)
