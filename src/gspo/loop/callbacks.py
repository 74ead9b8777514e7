"""Callbacks: the user's functions that run at fixed points of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gspo.registry import Registry

if TYPE_CHECKING:
    from gspo.evaluation.evaluator import Evaluation
    from gspo.loop.trainer import Trainer


class Callback:
    """Derive from this and override what you need. All methods run in the main thread of the controller.

    A callback may read everything of the trainer and call `trainer.finish_early(reason)`. What `state_dict` returns
    (plain JSON) is part of every checkpoint and is given back on resume.
    """

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step of this process, also after a resume."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """After a step is recorded and before its checkpoint begins. `metrics` is its row of metrics.jsonl."""

    def on_evaluate(self, trainer: Trainer, step: int, evaluation: Evaluation) -> None:
        """After an evaluation on held-out prompts."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """When the checkpoint of a step is started; it is written in the background."""

    def on_train_end(self, trainer: Trainer, result: Mapping[str, Any]) -> None:
        """After the run is finished or was stopped; `result` is what `fit` returns."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Callbacks(Callback):
    """Several callbacks as one: each method calls them in order."""

    def __init__(self, members: Sequence[Callback]) -> None:
        self.members = list(members)

    def on_train_begin(self, trainer: Trainer) -> None:
        for member in self.members:
            member.on_train_begin(trainer)

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        for member in self.members:
            member.on_step_end(trainer, step, metrics)

    def on_evaluate(self, trainer: Trainer, step: int, evaluation: Evaluation) -> None:
        for member in self.members:
            member.on_evaluate(trainer, step, evaluation)

    def on_save(self, trainer: Trainer, step: int) -> None:
        for member in self.members:
            member.on_save(trainer, step)

    def on_train_end(self, trainer: Trainer, result: Mapping[str, Any]) -> None:
        for member in self.members:
            member.on_train_end(trainer, result)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): state for i, member in enumerate(self.members) if (state := member.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for i, member in enumerate(self.members):
            if str(i) in state:
                member.load_state_dict(state[str(i)])


CALLBACKS: Registry[Callable[[], Callback]] = Registry("trainer.callbacks")


def callback(name: str) -> Callable[[Callable[[], Callback]], Callable[[], Callback]]:
    """Register a Callback class, or a function that makes one, under a name for `trainer.callbacks`."""
    return CALLBACKS.register(name)


def open_callbacks(names: Sequence[str], given: Sequence[Callback] = ()) -> Callbacks:
    """The callbacks of `trainer.callbacks` (registered names or "module:function"), then those that were passed."""
    return Callbacks([*(CALLBACKS.find(name)() for name in names), *given])
