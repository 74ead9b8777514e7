"""TRL's GRPOConfig: the fields that were set, under TRL's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gspo.config import ConfigErrors, Problem
from gspo.config.compat.aliases import aliases
from gspo.config.compat.unneeded import fixed_values, why_unneeded
from gspo.config.loading import names

# Fields that the trainer itself reads.
OF_TRAINER = ("reward_weights",)


class GRPOConfig:
    """The arguments of a GRPOTrainer under TRL's names: `GRPOConfig(output_dir="out", num_generations=8)`.

    Only what is set counts; other fields have TRL's defaults. An unknown name is refused with the nearest known one.
    Names that mean something else here, or nothing, are listed when the trainer is made.
    """

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        given = {**({} if output_dir is None else {"output_dir": output_dir}), **fields}
        problems = [
            Problem("error", name, given[name], "GRPOConfig", "unknown field", names.suggestion(names.nearest(name)))
            for name in given
            if not _is_known(name)
        ]
        if problems:
            raise ConfigErrors(problems)
        self.__dict__.update(given)

    def to_dict(self) -> dict[str, Any]:
        """The fields that were set."""
        return dict(self.__dict__)


def _is_known(name: str) -> bool:
    known = name in OF_TRAINER or name in aliases() or names.canonical(name) is not None
    return known or fixed_values(name) is not None or why_unneeded(name) is not None


def fields_of(args: Any) -> dict[str, Any]:
    """The fields that were set in a GRPOConfig of ours or of TRL, or the items of a mapping.

    Of TRL's own class those count that differ from its defaults.
    """
    if args is None:
        return {}
    if isinstance(args, GRPOConfig):
        return args.to_dict()
    if isinstance(args, Mapping):
        return dict(args)
    if not dataclasses.is_dataclass(args):
        raise TypeError(f"args={args!r}: expected a GRPOConfig")
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and _differs(args, f)}


def _differs(args: Any, field: dataclasses.Field) -> bool:
    if field.default is not dataclasses.MISSING:
        return getattr(args, field.name) != field.default
    factory = field.default_factory
    return factory is dataclasses.MISSING or getattr(args, field.name) != factory()
