"""Where metric rows go beside the run folder: tensorboard, wandb, trackio, or a sink of the user's own."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gspo.registry import Registry


class Sink(Protocol):
    """Receives one row of plain numbers per step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink may know about its run: folder, `trainer.project_name`, the run's name, and the whole config."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]


class MissingExtra(RuntimeError):
    """A sink needs a package that is not installed."""


MakeSink = Callable[[RunInfo], Sink]
SINKS: Registry[MakeSink] = Registry("trainer.logger")


def sink(name: str) -> Callable[[MakeSink], MakeSink]:
    """Register a function `RunInfo -> Sink`, or a class with that constructor, under a name for `trainer.logger`."""

    def register(make: MakeSink) -> MakeSink:
        SINKS.add(name, make)
        return make

    return register


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


class WandbLikeSink:
    """wandb, or trackio, which has the same functions."""

    def __init__(self, package: str, run: RunInfo) -> None:
        self.module = _require(package, package)
        self.module.init(project=run.project, name=run.name, config=dict(run.config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


@sink("wandb")
def wandb_sink(run: RunInfo) -> WandbLikeSink:
    return WandbLikeSink("wandb", run)


@sink("trackio")
def trackio_sink(run: RunInfo) -> WandbLikeSink:
    return WandbLikeSink("trackio", run)


def open_sinks(names: Sequence[str], run: RunInfo) -> list[Sink]:
    """The sinks of `trainer.logger`: registered names or "module:function". `console` and `file` are always there."""
    return [SINKS.find(name)(run) for name in names if name not in ("console", "file")]


def _require(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"trainer.logger: {name} needs a package that is not installed ({error}); pip install 'gspo[{name}]'"
        ) from None
