"""The file of a sweep: which runs it makes. Each combination of a grid, and of random draws, is one trial."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo import untrusted
from gspo.paths import user_path
from gspo.seeding import derive_seed

KEYS = ("base", "folder", "set", "grid", "random", "backend", "gpus_per_run", "cpus_per_run")
MAX_NAME = 100  # characters of a run's name; a longer one ends in a digest


class SweepError(ValueError):
    """A sweep file that cannot be used; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a sweep: its name, which follows from its settings, and those settings."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep file says. `common` are settings of every trial; runs are folders below `folder`."""

    base: Path | None
    folder: Path
    common: Mapping[str, Any]
    trials: tuple[Trial, ...]
    backend: str = "local"
    gpus_per_run: float = 0.0
    cpus_per_run: float = 1.0
    digest: str = field(default="", repr=False)  # of the base file

    def overrides(self, trial: Trial) -> list[str]:
        """The words after `gspo train` and the base file."""
        place = {"trainer.default_local_dir": str(self.folder), "trainer.experiment_name": trial.name}
        settings = {**self.common, **trial.settings, **place}
        return [f"{key}={_as_typed(value)}" for key, value in settings.items()]


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file. Relative paths of the base file are relative to it."""
    try:
        content = untrusted.read_yaml(path)
    except (OSError, untrusted.Unreadable) as error:
        raise SweepError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise SweepError(f"{path}: expected a mapping with the keys {', '.join(KEYS)}")
    if unknown := [key for key in content if key not in KEYS]:
        raise SweepError(f"{path}: unknown key {unknown[0]!r}; the keys are {', '.join(KEYS)}")
    for key in ("base", "folder"):
        if not isinstance(content.get(key) or "", str):
            raise SweepError(f"{path}: {key} is {content[key]!r}; expected a path")
    base = path.parent / user_path(content["base"]) if content.get("base") else None
    if base is not None and not base.is_file():
        raise SweepError(f"{path}: base: no such file: {base}")
    backend = content.get("backend", "local")
    if backend not in ("local", "ray"):
        raise SweepError(f"{path}: backend is {backend!r}; expected local or ray")
    trials = _trials(path, _mapping(path, content, "grid"), _mapping(path, content, "random"))
    return Sweep(
        base=base,
        folder=user_path(content.get("folder") or Path("runs") / path.stem),
        common=_mapping(path, content, "set"),
        trials=trials,
        backend=backend,
        gpus_per_run=_number(path, content, "gpus_per_run", 0.0),
        cpus_per_run=_number(path, content, "cpus_per_run", 1.0),
        digest="" if base is None else hashlib.blake2b(base.read_bytes(), digest_size=8).hexdigest(),
    )


def _trials(path: Path, grid: Mapping[str, Any], drawn: Mapping[str, Any]) -> tuple[Trial, ...]:
    """Every combination of the grid with every draw; equal ones once."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise SweepError(f"{path}: grid.{key} is {values!r}; expected a list of values")
    draws = list(_draws(path, drawn)) if drawn else [{}]
    points = itertools.product(*([(key, value) for value in values] for key, values in grid.items()))
    every = [{**dict(point), **draw} for point in points for draw in draws]
    if not every[0]:
        raise SweepError(f"{path}: nothing to sweep; expected grid or random")
    short = _short_names(list(every[0]))
    trials = {_name(settings, short): Trial(_name(settings, short), settings) for settings in every}
    return tuple(trials.values())


def _draws(path: Path, drawn: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`samples` draws of `keys`. Draw i depends on the seed and i only, so more samples add trials and change none."""
    keys, samples, seed = drawn.get("keys"), drawn.get("samples"), drawn.get("seed", 0)
    if set(drawn) - {"keys", "samples", "seed"} or not isinstance(keys, dict) or not keys:
        raise SweepError(f"{path}: random: expected samples, keys and, optionally, seed")
    if not isinstance(samples, int) or samples < 1 or not isinstance(seed, int):
        raise SweepError(f"{path}: random.samples is {samples!r}; expected a whole number of at least 1")
    for number in range(samples):
        yield {
            key: _draw(path, key, space, random.Random(derive_seed(seed, f"sweep/{key}", number)))
            for key, space in keys.items()
        }


def _draw(path: Path, key: str, space: Any, source: random.Random) -> Any:
    """A value of a list, or a number between min and max; with three significant digits, so that names are exact."""
    if isinstance(space, list) and space:
        return source.choice(space)
    expected = f"{path}: random.keys.{key} is {space!r}; expected a list, or {{min: …, max: …, log: true}}"
    if not isinstance(space, dict) or set(space) - {"min", "max", "log"} or not {"min", "max"} <= set(space):
        raise SweepError(expected)
    try:
        low, high = float(space["min"]), float(space["max"])
    except (TypeError, ValueError):
        raise SweepError(expected) from None
    if not low < high or (space.get("log") and low <= 0):
        raise SweepError(f"{path}: random.keys.{key}: expected min < max, and min > 0 with log")
    if isinstance(space["min"], int) and isinstance(space["max"], int) and not space.get("log"):
        return source.randint(space["min"], space["max"])
    if space.get("log"):
        return float(f"{math.exp(source.uniform(math.log(low), math.log(high))):.3g}")
    return float(f"{source.uniform(low, high):.3g}")


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each key's shortest end that no other key has."""
    out = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        out[key] = next((e for e in ends if sum(k == e or k.endswith(f".{e}") for k in keys) == 1), key)
    return out


def _name(settings: Mapping[str, Any], short: Mapping[str, str]) -> str:
    """A folder name such as `lr=1e-06,seed=0`."""
    text = ",".join(f"{short[key]}={_as_typed(value)}" for key, value in settings.items())
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", text)
    if safe == text and len(safe) <= MAX_NAME:
        return safe
    return f"{safe[:MAX_NAME]}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _as_typed(value: Any) -> str:
    """A value as it is typed after `key=`. Text stays as it is: YAML reads 1e-6 in a file as text."""
    return value if isinstance(value, str) else json.dumps(value)


def _mapping(path: Path, content: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise SweepError(f"{path}: {key} is {value!r}; expected a mapping of keys")
    return value


def _number(path: Path, content: Mapping[str, Any], key: str, default: float) -> float:
    value = content.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise SweepError(f"{path}: {key} is {value!r}; expected a number of at least 0")
    return float(value)
