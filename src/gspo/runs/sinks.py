"""Sinks receive the metric rows of a run, in addition to its folder: tensorboard, wandb, trackio, or a user's sink."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gspo.registry import PluginError, Registry, user_code


class Sink(Protocol):
    """Receives one row of plain numbers per step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run of a sink: its folder, `trainer.project_name`, its name, and the whole config."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]


class MissingExtra(RuntimeError):
    """A sink needs a package that is not installed."""


MakeSink = Callable[[RunInfo], Sink]
Make = TypeVar("Make", bound=MakeSink)
SINKS: Registry[MakeSink] = Registry("trainer.logger")


def sink(name: str) -> Callable[[Make], Make]:
    """Register a function `RunInfo -> Sink`, or a class with that constructor, under a name for `trainer.logger`."""
    return SINKS.register(name)


@sink("tensorboard")
class TensorBoardSink:
    """Scalars under `<run>/tensorboard`."""

    def __init__(self, run: RunInfo) -> None:
        module = _require("torch.utils.tensorboard", "tensorboard")
        self.writer = module.SummaryWriter(str(run.folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


@sink("wandb")
class WandbSink:
    """A run in Weights & Biases."""

    package = "wandb"

    def __init__(self, run: RunInfo) -> None:
        self.module = _require(self.package, self.package)
        self.module.init(project=run.project, name=run.name, config=dict(run.config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


@sink("trackio")
class TrackioSink(WandbSink):
    """A run in trackio, which has the functions of wandb."""

    package = "trackio"


def open_sinks(names: Sequence[str], run: RunInfo, passed: Sequence[Sink] = ()) -> list[Sink]:
    """The sinks of `trainer.logger` (registered names or "module:function"), then those that were passed.

    Every run has `console` and `file`.
    """
    for each in passed:
        check_sink(each, "sinks")
    sinks: list[Sink] = []
    with ExitStack() as opened:  # closes what is open when another cannot be opened
        for name in names:
            if name in ("console", "file"):
                continue
            with user_code(f"trainer.logger: {name}"):
                sinks.append(SINKS.find(name)(run))
            check_sink(sinks[-1], f"trainer.logger: {name}")
            opened.callback(sinks[-1].close)
        opened.pop_all()
    return [*sinks, *passed]


def check_sink(sink: Any, what: str) -> None:
    """Refuse an object that lacks a method of a sink."""
    for method in ("log", "close"):
        if not callable(getattr(sink, method, None)):
            raise PluginError(f"{what}: a sink of type {type(sink).__name__} has no method {method}")


def _require(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"trainer.logger: {name} needs a package that is not installed ({error}); pip install 'gspo[{name}]'"
        ) from None
