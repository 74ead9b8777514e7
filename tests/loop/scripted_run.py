"""A run of milliseconds around the real loop: a model of one number, and metrics and accuracies that a test chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gspo.build.data.given import Inputs
from gspo.config import ResolvedConfig, load
from gspo.loop.callbacks import Callback
from gspo.loop.training_run import TrainingRun
from gspo.metrics import Metric, Metrics
from gspo.runs.console import Console
from gspo.runs.files import write_json
from gspo.runs.folder import RunFolder

ACCURACY = "val-core/a/acc/mean@1"
RATE = 0.125  # by which the number of the model grows in a step, times the number of the step


@functools.cache
def settings(*overrides: str) -> ResolvedConfig:
    """The config of a run `run` in the current folder."""
    base = ("trainer.default_local_dir=.", "trainer.experiment_name=run", "trainer.total_training_steps=4")
    return load(None, [*base, "trainer.save_freq=1", "trainer.watchdog_seconds=0", *overrides])


class Heard(Console):
    """A console that keeps what is said."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    warn = say


class Roles:
    """A model and a moment of one number each."""

    saves_in_background = True
    write_shards = None

    def __init__(self, log: list[Any], weight: float) -> None:
        self.log, self.weight, self.moment, self.rate = log, weight, 0.0, RATE

    def train(self, step: int) -> None:
        self.weight += self.rate * step
        self.moment = 0.5 * self.moment + step

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor(self.weight, dtype=torch.float64)}

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"optimizer": {"exp_avg/w": torch.tensor(self.moment, dtype=torch.float64)}}

    def save_model(self, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        (folder / "config.json").write_text("{}")
        save_file(dict(weights or self.weights()), folder / "model.safetensors")

    def scale_lr(self, factor: float) -> None:
        self.rate *= factor
        self.log.append(("rate", factor))

    def without_state(self) -> dict[str, list[str]]:
        return {}

    def load(self, loaded: Any, *, reset: bool = False) -> list[str]:
        self.moment = float(loaded.tensors["optimizer"]["exp_avg/w"])
        self.log.append(("reset", reset))
        return ["a note of the models"]


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


class Parts:
    """The parts of a scripted run. `log` has what was done with them."""

    def __init__(self, log: list[Any], total_steps: int, weight: float) -> None:
        self.log, self.total_steps = log, total_steps
        self.roles, self.tokenizer = Roles(log, weight), Tokenizer()
        self.fingerprint = {"model": "one number"}
        self.drawn = 0

    def publish(self, version: int) -> None:
        self.log.append(("published", version))

    def state_dict(self) -> dict[str, Any]:
        return {"examples": {"drawn": self.drawn}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["examples"]["drawn"]

    def check_fingerprint(self, saved: Mapping[str, Any]) -> list[str]:
        assert saved == self.fingerprint
        return ["a note of the fingerprint"]

    def summary(self, path: Path, total_steps: int) -> str:
        return f"{total_steps} steps"

    def stacks(self) -> str:
        return ""

    def kill(self) -> None: ...

    def close(self) -> None:
        self.log.append("closed")


class Events(Callback):
    """Notes what happens to a run, in order, and counts steps in its state."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.seen = 0

    def on_train_begin(self, trainer: Any) -> None:
        self.log.append(("begin", trainer.step))

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.seen += 1
        self.log.append(("step", step))

    def on_save(self, trainer: Any, step: int) -> None:
        self.log.append(("save", step))

    def on_train_end(self, trainer: Any, result: Any) -> None:
        self.log.append(("end", result["steps"]))

    def of(self, kind: str) -> list[int]:
        return [step for name, step in self.log if name == kind]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


class ScriptedRun(TrainingRun[Any]):
    """`script(step)` returns further metrics of a step, or raises; `accuracy(step)` is the figure of an evaluation."""

    def __init__(
        self,
        *overrides: str,
        script: Callable[[int], Mapping[str, float]] = lambda step: {},
        accuracy: Callable[[int], float] = lambda step: 0.5,
        stop_after: int | None = None,
        **options: Any,
    ) -> None:
        self.script, self.accuracy, self.stop_after = script, accuracy, stop_after
        self.log: list[Any] = []
        self.evaluated: list[int] = []
        self.heard, self.events = Heard(), Events()
        self.alarm_rules = options.pop("rules", {})
        given = [self.events, *options.pop("callbacks", ())]
        super().__init__(settings(*overrides), Inputs(), console=self.heard, callbacks=given, **options)

    def _with_sizes(self, resolved: ResolvedConfig) -> ResolvedConfig:
        return resolved

    def _build(self, weights_from: Path | None) -> Parts:
        weight = 1.0 if weights_from is None else float(load_file(weights_from / "model.safetensors")["w"])
        self.log.append(("built", weights_from and weights_from.name))
        return Parts(self.log, self.config.trainer.total_training_steps or 0, weight)

    def _train_and_measure(self) -> Metrics:
        values = self.script(self.step + 1)
        self.writer.wait()
        self.parts.roles.train(self.step + 1)
        self.parts.drawn += 3
        self.step += 1
        if self.step == self.stop_after:
            self.stop.signal = 15
        more = {name: Metric("last", value) for name, value in values.items()}
        return {"train/weight": Metric("last", self.parts.roles.weight), **more}

    def _evaluate(self) -> Metrics:
        self.evaluated.append(self.step)
        return {ACCURACY: Metric("last", self.accuracy(self.step))}

    def _is_evaluated(self) -> bool:
        return any(row["step"] == self.step and ACCURACY in row for row in self.run.rows())

    def result(self) -> dict[str, Any]:
        return {"steps": self.step, "weight": self.parts.roles.weight}

    def _finish(self) -> dict[str, Any]:
        write_json(self.run.result_file, self.result())
        return self.result()


def kept_rows(run: RunFolder | None = None) -> list[dict[str, Any]]:
    """The metric rows of the run in the current folder, without times."""
    rows = (run or RunFolder("run")).rows()
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows]
