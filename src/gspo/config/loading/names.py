"""From the name someone wrote to our key: canonical keys, aliases, short forms, and the nearest name for the rest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from gspo.config.compat.aliases import Alias, aliases
from gspo.config.compat.unneeded import why_unneeded
from gspo.config.loading import tree
from gspo.config.loading.sources import Entry
from gspo.config.problems import Problem


@dataclass(frozen=True, slots=True)
class Deferred:
    """An alias whose meaning depends on the final value of other keys."""

    alias: Alias
    entry: Entry


@cache
def _by_suffix() -> dict[str, tuple[str, ...]]:
    """Every ending of every key (`optim.lr`, `lr`) → the keys that end so."""
    table: dict[str, list[str]] = {}
    for key in tree.leaves():
        parts = key.split(".")
        for start in range(1, len(parts)):
            table.setdefault(".".join(parts[start:]), []).append(key)
    return {suffix: tuple(keys) for suffix, keys in table.items()}


def canonical(name: str) -> str | None:
    """Our key for a name: itself, a key inside a mapping, or an ending that only one key has (`clip_ratio_low`)."""
    if tree.leaf_of(name):
        return name
    found = candidates(name)
    if not found:  # a key inside a mapping, by its short form
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            owner = _by_suffix().get(".".join(parts[:end]), ())
            if len(owner) == 1 and tree.leaves()[owner[0]].is_mapping:
                return ".".join((owner[0], *parts[end:]))
    return found[0] if len(found) == 1 else None


def candidates(name: str) -> tuple[str, ...]:
    """The keys that a short name could mean; the policy's before the same key of the critic or the reference."""
    found = _by_suffix().get(name, ())
    first = tuple(key for key in found if not key.startswith(("critic.", "actor_rollout_ref.ref.")))
    return first or found


def nearest(name: str) -> str | None:
    """The known name closest to `name`, or None when nothing is close. A sibling in the same section comes first."""
    known = [*tree.leaves(), *aliases(), *tree.sections()]
    parent, _, last = name.rpartition(".")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if close:
        return close[0]
    same_end = _by_suffix().get(last, ())
    if parent and same_end:
        return same_end[0]
    ends: dict[str, str] = {}
    for key in known:
        ends.setdefault(key.rpartition(".")[2], key)
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent} if parent else ends
    tables = ((siblings, 0.5 if parent else 0.72), (ends, 0.6 if parent else 0.72))
    for table, cutoff in tables:
        close = difflib.get_close_matches(last, list(table), n=1, cutoff=cutoff)
        if close:
            return table[close[0]]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5 if parent else 0.72)
    return close[0] if close else None


def nearest_choice(value: Any, choices: Iterable[Any]) -> str:
    """`did you mean …?` for a value that is not among the choices, or nothing."""
    near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def translate(entries: Iterable[Entry], problems: list[Problem]) -> tuple[list[Entry], list[Deferred]]:
    """Entries under our keys, and the aliases that wait; what cannot be understood goes to `problems`."""
    main: list[Entry] = []
    beside: list[Entry] = []  # further keys that an alias sets; they give way to the same key set by itself
    deferred: list[Deferred] = []
    claimed: dict[tuple[int, str], Entry] = {}
    for entry in entries:
        alias = aliases().get(entry.name)
        if entry.value in ({}, None) and entry.name in tree.sections():
            continue
        if alias is not None and alias.deferred:
            last = alias.name.rpartition(".")[2]  # a later layer's value replaces this one's
            deferred = [d for d in deferred if d.alias.name.rpartition(".")[2] != last]
            deferred.append(Deferred(alias, entry))
            continue
        found = _plain(entry, problems) if alias is None else _aliased(alias, entry, problems)
        for one in found:
            if alias is not None and one.name != alias.target:
                beside.append(one)
                continue
            main.append(one)
            earlier = claimed.setdefault((entry.origin.layer, one.name), entry)
            if earlier.name != entry.name and earlier.value != entry.value:
                message = (
                    f"{earlier.name} = {earlier.value} ({earlier.origin.text}) sets the same key, {one.name}"
                )
                problems.append(_error(entry, message, "keep one of the two"))
    return sorted(beside + main, key=lambda e: e.origin.layer), deferred


def _aliased(alias: Alias, entry: Entry, problems: list[Problem]) -> list[Entry]:
    """An entry under an alias, as entries under our keys; or a problem."""
    try:
        found = alias.apply(entry.value)
    except ValueError as error:
        problems.append(_error(entry, str(error), f"or set {alias.target} itself"))
        return []
    text = entry.text if alias.convert is None else None
    return [Entry(key, value, entry.origin, text) for key, value in found.items()]


def _error(entry: Entry, message: str, remedy: str) -> Problem:
    return Problem("error", entry.name, entry.value, entry.origin.text, message, remedy)


def _plain(entry: Entry, problems: list[Problem]) -> list[Entry]:
    """An entry that is no alias, under its full key; or a problem."""
    key = canonical(entry.name)
    if key is not None:
        return [Entry(key, entry.value, entry.origin, entry.text)]
    reason = why_unneeded(entry.name)
    several = candidates(entry.name)
    if reason is not None:
        message = f"has no effect: {reason}"
        problems.append(Problem("warning", entry.name, entry.value, entry.origin.text, message, "remove it"))
    elif entry.name in tree.sections():
        problems.append(_error(entry, "is a section, not a value", f"set {entry.name}.…"))
    elif several:
        problems.append(_error(entry, "could mean several keys", " or ".join(several)))
    else:
        near = nearest(entry.name)
        problems.append(
            _error(
                entry,
                "unknown key",
                f"did you mean {near}?" if near else "see `gspo config show` for every key",
            )
        )
    return []
