"""Faults placed inside a training process: a kill at a named point, bad numbers in a named tensor."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from gspo.checkpoint import folder as checkpoint

POINTS = (
    "save:begin",
    "save:model",
    "save:optimizer",
    "save:state",
    "save:manifest",
    "save:renamed",
    "rollout",
    "reward",
    "update",
    "evaluation",
    "metrics",
    "resume",
)


def kill_at(trainer_module: Any, point: str, count: int) -> None:
    """Arrange SIGKILL at the `count`-th time that a trainer made from now on reaches `point`."""
    call_at(trainer_module, point, count, _kill)


def call_at(trainer_module: Any, point: str, count: int, then: Callable[[], None]) -> None:
    """Arrange a call at the `count`-th time that a trainer made from now on reaches `point`."""
    reach = _countdown(count, then)
    if point.startswith("save:"):
        checkpoint.save = functools.partial(checkpoint.save, hook=lambda name: reach() if name == point else None)
        return
    trainer = trainer_module.Trainer
    if point == "resume":
        _after(trainer, "_restore", reach)
        return
    built = trainer.__init__

    @functools.wraps(built)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        parts = self.parts
        where: dict[str, tuple[Any, str]] = {
            "rollout": (parts.engine, "step"),
            "reward": (parts.scorers[0], "submit"),
            "update": (parts.policy.optimizer, "step"),
            "evaluation": (parts.scorers[1], "submit"),
            "metrics": (self.run, "append_metrics"),
        }
        _after(*where[point], reach)

    trainer.__init__ = init


def kill_after(owner: Any, method: str, count: int) -> None:
    """Arrange SIGKILL after the `count`-th call of a method."""
    _after(owner, method, _countdown(count, _kill))


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _countdown(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """A function whose `count`-th call calls `then`."""
    left = [count]

    def reach() -> None:
        left[0] -= 1
        if left[0] == 0:
            then()

    return reach


def _after(owner: Any, name: str, then: Callable[[], None]) -> None:
    """Call `then` after every call of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        then()
        return out

    setattr(owner, name, wrapped)
