"""Callbacks: the user's functions that run at fixed points of a training run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gspo.registry import PluginError, Registry, user_code

if TYPE_CHECKING:
    from gspo.evaluation.evaluator import Evaluation
    from gspo.loop.training_run import TrainingRun


class Callback:
    """Derive from this and override what you need. All methods run in the main thread of the controller.

    A callback may read everything of the trainer and call `trainer.finish_early(reason)`. What `state_dict` returns
    (plain JSON) is part of every checkpoint and is given back on resume.
    """

    def on_train_begin(self, trainer: TrainingRun[Any]) -> None:
        """Before the first step of this process, also after a resume."""

    def on_step_end(self, trainer: TrainingRun[Any], step: int, metrics: Mapping[str, float]) -> None:
        """After a step is recorded and before its checkpoint begins. `metrics` is its row of metrics.jsonl."""

    def on_evaluate(self, trainer: TrainingRun[Any], step: int, evaluation: Evaluation) -> None:
        """After an evaluation on held-out prompts."""

    def on_save(self, trainer: TrainingRun[Any], step: int) -> None:
        """When the checkpoint of a step is started; it is written in the background."""

    def on_train_end(self, trainer: TrainingRun[Any], result: Mapping[str, Any]) -> None:
        """After the run is finished or was stopped; `result` is what `fit` returns."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Callbacks(Callback):
    """Several callbacks as one: each method calls them in order. What one raises becomes a PluginError that names it."""

    def __init__(self, members: Sequence[Callback]) -> None:
        self.members = list(members)

    def on_train_begin(self, trainer: TrainingRun[Any]) -> None:
        self._call("on_train_begin", trainer)

    def on_step_end(self, trainer: TrainingRun[Any], step: int, metrics: Mapping[str, float]) -> None:
        self._call("on_step_end", trainer, step, metrics)

    def on_evaluate(self, trainer: TrainingRun[Any], step: int, evaluation: Evaluation) -> None:
        self._call("on_evaluate", trainer, step, evaluation)

    def on_save(self, trainer: TrainingRun[Any], step: int) -> None:
        self._call("on_save", trainer, step)

    def on_train_end(self, trainer: TrainingRun[Any], result: Mapping[str, Any]) -> None:
        self._call("on_train_end", trainer, result)

    def state_dict(self) -> dict[str, Any]:
        """The states that are not empty, by the class of their callback."""
        states = {}
        for name, member in self._named():
            with user_code(f"callback {name}: state_dict, which must return plain JSON,"):
                if state := member.state_dict():
                    json.dumps(dict(state))
                    states[name] = state
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore states by class; those of older checkpoints are numbered in the order of the callbacks."""
        for i, (name, member) in enumerate(self._named()):
            if (key := name if name in state else str(i)) in state:
                with user_code(f"callback {name}: load_state_dict"):
                    member.load_state_dict(state[key])

    def _call(self, method: str, *arguments: Any) -> None:
        for name, member in self._named():
            with user_code(f"callback {name}: {method}"):
                getattr(member, method)(*arguments)

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Each callback under the name of its class, with a number from the second of a class on."""
        seen: Counter[str] = Counter()
        for member in self.members:
            name = type(member).__qualname__
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name}-{seen[name]}", member


CALLBACKS: Registry[Callable[[], Callback]] = Registry("trainer.callbacks")


def callback(name: str) -> Callable[[Callable[[], Callback]], Callable[[], Callback]]:
    """Register a Callback class, or a function that makes one, under a name for `trainer.callbacks`."""
    return CALLBACKS.register(name)


def open_callbacks(names: Sequence[str], given: Sequence[Callback] = ()) -> Callbacks:
    """The callbacks of `trainer.callbacks` (registered names or "module:function"), then those that were passed."""
    members: list[Callback] = []
    for name in names:
        with user_code(f"trainer.callbacks: {name}"):
            members.append(CALLBACKS.find(name)())
    members += given
    for member in members:
        if not isinstance(member, Callback):
            raise PluginError(f"trainer.callbacks: {member!r} is not an instance of a class derived from gspo.Callback")
    return Callbacks(members)
