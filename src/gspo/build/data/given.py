"""What a caller passes in Python instead of naming it in the config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gspo.sampling.filters import GroupFilter


@dataclass(frozen=True)
class Inputs:
    """Python objects of the caller that replace what the config names."""

    reward_fn: Any = None
    val_reward_fn: Any = None  # None: `reward_fn`
    train_dataset: Iterable[Any] | None = None
    val_dataset: Iterable[Any] | None = None
    tokenizer: Any = None
    environment: Any = None  # a class, a factory, or a list of functions as tools
    group_filter: GroupFilter | None = None  # used only where `algorithm.filter_groups.function` is null

    def facts(self, share: float | None = None) -> dict[str, str]:
        """What replaces the config's data and reward, in words, by the name of the argument.

        `share` of the training rows is held out where none are passed for that.
        """
        rows = {"train_dataset": self.train_dataset, "val_dataset": self.val_dataset}
        found = {name: f"{len(list(given))} rows passed in Python" for name, given in rows.items() if given is not None}
        if self.train_dataset is not None and self.val_dataset is None:
            found["val_dataset"] = "none" if share is None else f"{share:.3g} of the training rows"
        if self.reward_fn is not None:
            found["reward_fn"] = f"{_name_of(self.reward_fn)}, passed in Python"
        return found


NOTHING = Inputs()


def _name_of(function: Any) -> str:
    if isinstance(function, list | tuple):
        return ", ".join(map(_name_of, function))
    return str(getattr(function, "__name__", type(function).__name__))
