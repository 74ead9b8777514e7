"""`gspo plan`: step time, memory per device and the best split of a cluster, predicted before anything is started."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gspo.commands import refuse
from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words, load_arguments
from gspo.exit_codes import EXIT_PROBLEM

if TYPE_CHECKING:
    from gspo.config import TrainerConfig
    from gspo.plan.constants import Device
    from gspo.plan.predict import Plan
    from gspo.plan.workload import Workload

app = typer.Typer(add_completion=False)
DEFAULT_ETA = 2


@app.command(context_settings=PASS_THROUGH)
def plan(
    arguments: Words = None,
    config: ConfigFile = None,
    model: Annotated[
        str | None, typer.Option(help="Folder, config.json, hub name, a size such as 7b, or hidden=…,layers=…")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of devices. Default: as many as the config has.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Type of device: h200, h100, a100, … Default: h200.")] = None,
    prompt_length: Annotated[int | None, typer.Option(help="Longest prompt in tokens.")] = None,
    response_length: Annotated[int | None, typer.Option(help="Longest response in tokens.")] = None,
    mean_prompt_length: Annotated[
        float | None, typer.Option(help="Mean prompt in tokens. Default: the longest.")
    ] = None,
    mean_response_length: Annotated[
        float | None, typer.Option(help="Mean response in tokens. Default: 0.35 of the longest.")
    ] = None,
    length_spread: Annotated[
        float | None, typer.Option(help="Standard deviation of response lengths, relative to their mean. Default: 0.8.")
    ] = None,
    keep_rate: Annotated[
        float | None, typer.Option(help="Share of groups that dynamic sampling keeps. Default: 0.5.")
    ] = None,
    eta: Annotated[
        int | None, typer.Option(help="Weight versions that rollouts may run ahead when asynchronous. Default: 2.")
    ] = None,
    simulate: Annotated[
        int | None, typer.Option(help="Also simulate this many steps with stragglers and failures.")
    ] = None,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Simulation: mean hours between failures of one device.")
    ] = None,
    save_minutes: Annotated[
        float | None, typer.Option(help="Simulation: minutes between checkpoints. Default: the best interval.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Simulation: random seed.")] = 0,
    check: Annotated[
        Path | None, typer.Option(help="Compare predicted stage times with those of this run folder.")
    ] = None,
    constants: Annotated[bool, typer.Option("--constants", help="Print every constant with its source.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict step time, memory per device and the best split of a cluster.

    The split is between rollout and training. Runs nothing and needs no GPU. Exits with code 1 when nothing fits.
    """
    from gspo.models.shape import ShapeError
    from gspo.plan.check import CheckError
    from gspo.plan.show import constants_text

    _check_above_0(gpus=gpus, prompt_length=prompt_length, response_length=response_length, simulate=simulate)
    _check_above_0(mean_prompt_length=mean_prompt_length, mean_response_length=mean_response_length)
    _check_above_0(keep_rate=keep_rate, mtbf_hours=mtbf_hours, save_minutes=save_minutes)
    if keep_rate is not None and keep_rate > 1:
        _refuse_option("--keep-rate", keep_rate, "a share above 0 and at most 1")
    for name, value in (("--eta", eta), ("--length-spread", length_spread)):
        if value is not None and not 0 <= value < math.inf:
            _refuse_option(name, value, "0 or more")
    try:
        if constants:
            typer.echo(constants_text(), nl=False)
            return
        if check is not None:
            _check(check, gpu, model, as_json)
            return
        resolved = _load(arguments or [], config, model, prompt_length, response_length).config
        _note_limits(resolved)
        device = _device(gpu, resolved)
        work = _workload(resolved, mean_prompt_length, mean_response_length, length_spread, keep_rate, eta)
        found = _search(resolved, model, device, gpus, work)
    except (ShapeError, CheckError) as error:
        refuse(error)
    changes: dict[str, Any] = {"seed": seed}
    if mtbf_hours is not None:
        changes["mtbf_s"] = mtbf_hours * 3600
    if save_minutes is not None:
        changes["save_interval_s"] = save_minutes * 60
    _report(found, simulate, changes, as_json)


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


def _note_limits(config: TrainerConfig) -> None:
    """Print which settings the prediction does not cover."""
    model, fsdp = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.fsdp_config
    if model.lora_rank:
        text = f"actor_rollout_ref.model.lora_rank = {model.lora_rank}: predicted as if all weights were trained"
        typer.echo(f"note: {text}; time and memory are upper bounds", err=True)
    if model.override_config:
        typer.echo("note: actor_rollout_ref.model.override_config: ignored", err=True)
    if fsdp.param_offload or fsdp.offload_policy:
        typer.echo("note: actor_rollout_ref.actor.fsdp_config: offloading is ignored", err=True)
    elif fsdp.optimizer_offload:
        text = "counted for a single trainer rank, ignored for several"
        typer.echo(f"note: actor_rollout_ref.actor.fsdp_config.optimizer_offload: {text}", err=True)


def _device(gpu: str | None, config: TrainerConfig) -> Device:
    from gspo.plan.constants import DEVICES, in_float32

    name = (gpu or "h200").lower()
    if name not in DEVICES:
        _refuse_option("--gpu", gpu, f"one of {', '.join(DEVICES)}")
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
            _refuse_option(name, mean, f"at most the longest length, {longest}")
    if keep_rate is not None and not config.algorithm.filter_groups.enable:
        _refuse_option("--keep-rate", keep_rate, "dynamic sampling to be on: add algorithm.filter_groups.enable=true")
    work = workload_of(config, mean_response=mean_response, spread=spread, mean_prompt=mean_prompt, keep_rate=keep_rate)
    return dataclasses.replace(work, eta=eta if eta is not None else work.eta or DEFAULT_ETA)


def _search(config: TrainerConfig, model: str | None, device: Device, gpus: int | None, work: Workload) -> Plan:
    from gspo.models.shape import shape_of
    from gspo.plan.predict import search

    shape = shape_of(model or config.actor_rollout_ref.model.path)
    count = gpus or config.trainer.nnodes * (config.trainer.n_gpus_per_node or 1)
    return search(shape, device, count, work)


def _report(found: Plan, steps: int | None, changes: dict[str, Any], as_json: bool) -> None:
    from gspo.plan.predict import smallest_cluster
    from gspo.plan.scenario import scenario_of
    from gspo.plan.show import outcome_text, plan_text
    from gspo.plan.simulate import SimulationError, simulate

    best = found.best
    if best is None:
        enough = smallest_cluster(found.shape, found.device, found.work)
        remedy = (
            f"--gpus {enough} is enough" if enough else "1,024 devices are not enough either; shorten the responses"
        )
        refuse(
            f"{found.shape.name} does not fit on {found.gpus:,} {found.device.name} in any split, with or without "
            f"gradient checkpointing; {remedy}",
            EXIT_PROBLEM,
        )
    facts: dict[str, Any] = {
        "model": found.shape.name,
        "parameters": found.shape.parameters,
        "gpus": found.gpus,
        "gpu": found.device.name,
        "predictions": [p.to_dict() for p in found.found],
    }
    if not as_json:
        typer.echo(plan_text(found), nl=False)
    if steps:
        scenario = scenario_of(best, found.work, steps=steps, **changes)
        calm = dataclasses.replace(scenario, mtbf_s=math.inf, sigma=0.0, slow_share=0.0)
        try:
            real, ideal = simulate(scenario), simulate(calm)
        except SimulationError as error:
            refuse(error, EXIT_PROBLEM)
        facts["simulation"] = {**real.to_dict(), "ideal_step_s": ideal.step_s, "goodput": ideal.step_s / real.step_s}
        if not as_json:
            typer.echo("\n" + outcome_text(scenario, real, ideal), nl=False)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))


def _check(folder: Path, gpu: str | None, model: str | None, as_json: bool) -> None:
    from gspo.plan.check import check_run
    from gspo.plan.constants import DEVICES
    from gspo.plan.show import comparison_text

    if gpu is not None and gpu.lower() not in DEVICES:
        _refuse_option("--gpu", gpu, f"one of {', '.join(DEVICES)}")
    found = check_run(folder, gpu and gpu.lower(), model)
    typer.echo(json.dumps(found.to_dict()) if as_json else comparison_text(found), nl=as_json)


def _check_above_0(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            _refuse_option(f"--{name.replace('_', '-')}", value, "a number above 0")


def _refuse_option(name: str, value: Any, expected: str) -> NoReturn:
    refuse(f"{name} {value}: expected {expected}")
