"""One episode in the terminal, played by hand or by a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from gspo.data.datasets import DATASETS, load_rows
from gspo.data.rows import Row, user_message, visible
from gspo.environments.formats import find_format
from gspo.environments.loading import SCHEMES, EnvironmentSpec, find_named, load_environment
from gspo.environments.protocol import Action, Environment, EnvironmentProblem
from gspo.types import Prompt


def find(name: str, plugins: Sequence[str], kwargs: str) -> EnvironmentSpec:
    """The spec of an environment: a name, SCHEME:REST, or file.py:Class."""
    try:
        options = json.loads(kwargs)
    except ValueError as error:
        raise EnvironmentProblem(f"--kwargs {kwargs}: expected JSON: {error}") from error
    if not isinstance(options, dict):
        raise EnvironmentProblem(f'--kwargs {kwargs}: expected an object, such as {{"size": 4}}')
    if name.partition(":")[0] in SCHEMES:
        return EnvironmentSpec(name, kwargs=options)
    path, colon, inside = name.rpartition(":")
    if colon and path.endswith(".py"):
        return EnvironmentSpec(inside, path, options)
    if name.endswith(".py"):
        return EnvironmentSpec(None, name, options)
    return EnvironmentSpec(name, kwargs=options, plugins=tuple(plugins))


def open_environment(spec: EnvironmentSpec) -> tuple[Any, Environment]:
    """What the spec names, and an environment made of it."""
    found, make = find_named(spec), load_environment(spec)
    try:
        return found, make()
    except TypeError as error:  # arguments that it does not have, or lacks
        raise EnvironmentProblem(f"{spec.title} with --kwargs {json.dumps(dict(spec.kwargs))}: {error}") from error


def load_row(task: str, number: int, *, is_given: bool) -> Prompt:
    """A row of a dataset as the environment sees it; an empty question where the environment has no task of its own."""
    if is_given or task in DATASETS:
        rows = load_rows(task, "val" if task in DATASETS else "train", limit=number + 1)
        if number >= len(rows):
            raise EnvironmentProblem(f"--row {number}: {task} has {len(rows)} rows")
        row = rows[number]
    else:
        row = Row("empty", user_message(""))
    return Prompt(row.uid, row.messages, (), row.data_source, row.ground_truth, row.extra)


def play_by_hand(spec: EnvironmentSpec, prompt: Prompt, seed: int) -> None:
    """Read one turn per line from standard input until the episode ends or the input does."""
    _, environment = open_environment(spec)
    calls = find_format(getattr(environment, "tool_format", None) or "hermes", None) if environment.tools else None
    _show("prompt", prompt.messages)
    _show("environment", environment.reset(prompt, seed))
    total = 0.0
    for turn, line in enumerate(sys.stdin):
        text = line.rstrip("\n")
        step = environment.step(Action(text, calls.parse(text) if calls is not None else (), turn=turn))
        _show("environment", step.messages)
        if step.reward is not None:
            total += step.reward
            typer.echo(f"reward: {step.reward:g}")
        if step.done or step.truncated:
            break
    environment.close()
    typer.echo(f"total reward: {total:g}")


def play_with_model(spec: EnvironmentSpec, prompt: Prompt, seed: int, model: str, max_tokens: int) -> None:
    """Let a model play, greedily, through the engine that training uses."""
    import dataclasses
    import functools

    from gspo.build.engines import stop_tokens
    from gspo.models.load import load_model, load_tokenizer
    from gspo.rollout.engine import GroupRequest, SamplingParams
    from gspo.rollout.episodes.dialogue import DialogueSettings
    from gspo.rollout.episodes.settings import EpisodeSettings, wrap_engine
    from gspo.rollout.native.engine import NativeEngine

    tokenizer, weights = load_tokenizer(model), load_model(model, dtype="float32").eval()
    settings = EpisodeSettings(spec, DialogueSettings(), num_workers=1)
    pool = settings.open_pool()
    try:
        settings = settings.with_tools(pool)
        settings.check_template(tokenizer)
        settings = settings.with_opening(pool, prompt)
        stops = stop_tokens(weights.generation_config, tokenizer)
        options = settings.prompt_options(tokenizer)
        prompt = dataclasses.replace(prompt, token_ids=_encode(prompt, tokenizer, options))
        length = 4 * len(prompt.token_ids) + max_tokens + 1024
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        native = NativeEngine(weights, decode, eos_token_ids=stops, pad_token_id=pad, num_slots=1, max_length=length)
        engine = wrap_engine(native, settings, tokenizer, eos_token_ids=stops, max_length=length, pool=pool)
        request = GroupRequest(prompt, 0, 1, 0, SamplingParams(max_tokens, temperature=0.0), seed)
        (group,) = engine.generate([request])
    finally:
        pool.close()
    _show("prompt", group.prompt.messages)
    (rollout,) = group.rollouts
    for turn in rollout.turns:
        typer.echo(f"model: {visible(turn.text)}")
        if turn.observation:
            typer.echo(f"environment: {visible(turn.observation)}")
        if turn.reward is not None:
            typer.echo(f"reward: {turn.reward:g}")
    typer.echo(f"ended: {rollout.finish_reason}" + (f": {rollout.failure}" if rollout.failure else ""))


def _encode(prompt: Prompt, tokenizer: Any, options: Mapping[str, Any]) -> tuple[int, ...]:
    from gspo.data.chat_template import encode_prompt

    return encode_prompt(Row(prompt.uid, prompt.messages), tokenizer, **options).token_ids


def _show(who: str, messages: Sequence[Mapping[str, Any] | str]) -> None:
    for message in messages:
        content = message if isinstance(message, str) else message["content"]
        if content:
            typer.echo(f"{who}: {visible(str(content))}")
