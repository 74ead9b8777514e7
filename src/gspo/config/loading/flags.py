"""Flags on the command line: `--name value`, `--name=value`, `--switch`, `--no-switch`, for any key or alias."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.config.compat.aliases import aliases
from gspo.config.loading import names, tree
from gspo.config.loading.sources import OVERRIDE, Entry, Layer, Origin, parse_value
from gspo.config.problems import Problem

SWITCH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sort command-line words into (plain words, `key=value` overrides, flags with their values)."""
    words: list[str] = []
    overrides: list[str] = []
    flags: list[str] = []
    queue = list(arguments)
    while queue:
        token = queue.pop(0)
        if token.startswith("--"):
            flags.append(token)
            if takes_value(token) and queue and _is_value(token, queue[0]):
                flags.append(queue.pop(0))
        elif OVERRIDE.fullmatch(token) or token.startswith(("~", "+")):
            overrides.append(token)
        else:
            words.append(token)
    return words, overrides, flags


def takes_value(token: str) -> bool:
    """Whether a flag may be followed by its value as the next word."""
    return "=" not in token and not _negated(token)


def _is_value(token: str, word: str) -> bool:
    """Whether the word after a flag is its value; a switch takes only a truth value."""
    return not word.startswith("--") and (not is_switch(token) or word.lower() in SWITCH_VALUES)


def is_switch(token: str) -> bool:
    """Whether a flag may stand alone."""
    name = _name(token)
    alias = aliases().get(name)
    if alias is not None and alias.is_switch:
        return True
    leaf = tree.leaf_of(alias.target if alias and alias.convert is None else names.canonical(name) or name)
    return leaf is not None and bool in (leaf.type, *getattr(leaf.type, "__args__", ()))


def _name(token: str) -> str:
    return token.removeprefix("--").partition("=")[0].replace("-", "_")


def _negated(token: str) -> str | None:
    """The switch that `--no-switch` turns off."""
    name = _name(token)
    positive = name.removeprefix("no_")
    return positive if positive != name and is_switch(f"--{positive}") else None


def read_flags(tokens: Sequence[str]) -> tuple[list[Entry], list[Problem]]:
    """Settings from flags, as sorted by `split_arguments`."""
    entries: list[Entry] = []
    problems: list[Problem] = []
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
                entries.append(Entry(_name(token), parse_value(text), origin, text))
            except ValueError as error:
                problems.append(Problem("error", flag, text, origin.text, str(error), "quote it"))
        elif negated:
            entries.append(Entry(negated, False, origin))
        elif is_switch(token) or not _known(_name(token)):
            entries.append(Entry(_name(token), True, origin))
        else:
            problems.append(
                Problem("error", flag, None, "command line", "needs a value", f"write {flag} VALUE")
            )
    return entries, problems


def _known(name: str) -> bool:
    return name in aliases() or names.canonical(name) is not None
