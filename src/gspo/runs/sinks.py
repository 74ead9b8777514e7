"""Where metric rows go beside the run folder: tensorboard, wandb, trackio. Each is an extra, asked for by name."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Receives one row of plain numbers a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MissingExtra(RuntimeError):
    """A sink was asked for whose package is not installed."""


def _require(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"trainer.logger: {name} needs a package that is not installed ({error}); pip install 'gspo[{name}]'"
        ) from None


class TensorBoardSink:
    """Scalars under `<run>/tensorboard`."""

    def __init__(self, folder: Path) -> None:
        module = _require("torch.utils.tensorboard", "tensorboard")
        self.writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbLikeSink:
    """wandb, or trackio, which has wandb's calls."""

    def __init__(self, name: str, *, project: str, run: str, config: Mapping[str, Any]) -> None:
        self.module = _require(name, name)
        self.module.init(project=project, name=run, config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


def open_sinks(
    names: list[str], *, folder: Path, project: str, run: str, config: Mapping[str, Any]
) -> list[Sink]:
    """The sinks named in `trainer.logger`; `console` and `file` are always there and need no sink."""
    sinks: list[Sink] = []
    for name in names:
        if name == "tensorboard":
            sinks.append(TensorBoardSink(folder))
        elif name in ("wandb", "trackio"):
            sinks.append(WandbLikeSink(name, project=project, run=run, config=config))
    return sinks
