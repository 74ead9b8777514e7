"""Flags on the command line: `--name value`, `--name=value`, `--switch`, `--no-switch`, for any key or alias."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from gspo.config.compat.aliases import aliases
from gspo.config.loading import names, tree
from gspo.config.loading.coerce import FALSE, TRUE
from gspo.config.loading.settings import Layer, Origin, Setting
from gspo.config.loading.sources import OVERRIDE, parse_value
from gspo.config.problems import Problem

SWITCH_VALUES = (*TRUE, *FALSE, "1", "0")
VERL_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "ppo_veomni_trainer", "ppo_torchtitan_trainer", "dapo_trainer")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sort command-line words into (other words, `key=value` overrides, flags with their values)."""
    words: list[str] = []
    overrides: list[str] = []
    flags: list[str] = []
    queue = list(arguments)
    while queue:
        token = queue.pop(0)
        if token.startswith("--"):
            flags.append(token)
            may_have_value = "=" not in token and not _negated(token)
            if may_have_value and queue and _is_value(token, queue[0]):
                flags.append(queue.pop(0))
        elif OVERRIDE.fullmatch(token) or token.startswith(("~", "+")):
            overrides.append(token)
        else:
            words.append(token)
    return words, overrides, flags


def take_hydra_config(flags: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that Hydra's `--config-path` and `--config-name` (`-cp`, `-cn`) name, and the other flags.

    A name of verl's own (ppo_trainer, …) that is no file here stands for defaults, which need no file.
    """
    found: dict[str, str] = {}
    rest: list[str] = []
    queue = list(flags)
    while queue:
        token = queue.pop(0)
        name, has_value, text = token.partition("=")
        if name in ("--config-path", "--config-name", "--config-dir"):
            found[name] = text if has_value else queue.pop(0) if queue else ""
        else:
            rest.append(token)
    name = found.get("--config-name", "").removesuffix(".yaml")
    if not name:
        return None, rest
    folder = Path(found.get("--config-path") or found.get("--config-dir") or ".")
    file = folder / f"{name}.yaml"
    return (None if name in VERL_CONFIGS and not file.is_file() else file), rest


def _is_value(flag: str, word: str) -> bool:
    """Whether the word after a flag is its value. Only a truth value can be the value of a switch."""
    return not word.startswith("--") and (not is_switch(flag) or word.lower() in SWITCH_VALUES)


def is_switch(flag: str) -> bool:
    """Whether a flag needs no value."""
    name = _name(flag)
    alias = aliases().get(name)
    if alias is not None and alias.is_switch:
        return True
    leaf = tree.leaf_of(alias.target if alias and alias.convert is None else names.canonical(name) or name)
    return leaf is not None and bool in (leaf.type, *get_args(leaf.type))


def _name(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0].replace("-", "_")


def _negated(flag: str) -> str | None:
    """The switch that `--no-switch` turns off; None for any other flag."""
    name = _name(flag)
    positive = name.removeprefix("no_")
    return positive if positive != name and is_switch(f"--{positive}") else None


def read_flags(tokens: Sequence[str], problems: list[Problem]) -> list[Setting]:
    """Settings from flags, as sorted by `split_arguments`."""
    settings: list[Setting] = []
    queue = list(tokens)
    while queue:
        token = queue.pop(0)
        flag, has_value, text = token.partition("=")
        origin = Origin(Layer.FLAG, f"flag {flag}")
        negated = _negated(token)
        if not has_value and negated is None and queue and not queue[0].startswith("--"):
            has_value, text = "=", queue.pop(0)
        if has_value:
            try:
                settings.append(Setting(_name(token), parse_value(text), origin, text))
            except ValueError as error:
                problems.append(Problem("error", flag, text, origin.text, str(error), "put the value in quotes"))
        elif negated:
            settings.append(Setting(negated, False, origin))
        elif is_switch(token) or not _is_known(_name(token)):
            settings.append(Setting(_name(token), True, origin))
        else:
            problems.append(Problem("error", flag, None, "command line", "needs a value", f"write {flag} VALUE"))
    return settings


def _is_known(name: str) -> bool:
    return name in aliases() or names.canonical(name) is not None
