"""From a name as written to our key: full keys, aliases, short forms, and the nearest name for anything else."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from gspo.config.compat.alias_values import UNSET
from gspo.config.compat.aliases import Alias, aliases
from gspo.config.compat.unneeded import fixed_values, why_unneeded
from gspo.config.compat.verl import VALUES
from gspo.config.loading import foreign, tree
from gspo.config.loading.settings import Setting
from gspo.config.problems import Problem


@cache
def _by_suffix() -> dict[str, tuple[str, ...]]:
    """Every ending of every key (`optim.lr`, `lr`) → the keys with that ending."""
    table: dict[str, list[str]] = {}
    for key in tree.leaves():
        parts = key.split(".")
        for start in range(1, len(parts)):
            table.setdefault(".".join(parts[start:]), []).append(key)
    return {suffix: tuple(keys) for suffix, keys in table.items()}


def canonical(name: str) -> str | None:
    """The full key of a name: the name itself, a key inside a mapping, or the only key with that ending.

    A name of another system that is no alias of ours never is a short form: it means something else there.
    """
    if tree.leaf_of(name):
        return name
    if fixed_values(name) or why_unneeded(name):
        return None
    found = candidates(name)
    if not found:  # perhaps the short form of a key inside a mapping
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            owner = _by_suffix().get(".".join(parts[:end]), ())
            if len(owner) == 1 and tree.leaves()[owner[0]].is_mapping:
                return ".".join((owner[0], *parts[end:]))
    return found[0] if len(found) == 1 else None


def candidates(name: str) -> tuple[str, ...]:
    """The keys that a short name can mean. Keys of the critic and the reference count only if the policy has none."""
    found = _by_suffix().get(name, ())
    first = tuple(key for key in found if not key.startswith(("critic.", "actor_rollout_ref.ref.")))
    return first or found


# What people write for a key whose name is not close to it.
USUAL_WORDS = {
    "steps": "trainer.total_training_steps",
    "num_steps": "trainer.total_training_steps",
    "epochs": "trainer.total_epochs",
    "batch_size": "data.train_batch_size",
    "model": "actor_rollout_ref.model.path",
    "data": "data.train_files",
    "reward": "custom_reward_function.path",
    "name": "trainer.experiment_name",
    "output": "trainer.default_local_dir",
}


def nearest(name: str) -> str | None:
    """The known name closest to `name`, in meaning or preferably in the same section; None when nothing is close."""
    if name.replace("-", "_") in USUAL_WORDS:
        return USUAL_WORDS[name.replace("-", "_")]
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


def suggestion(near: str | None) -> str:
    """The remedy for an unknown key."""
    return f"did you mean {near}?" if near else "`gspo config show` prints every key"


def nearest_choice(value: Any, choices: Iterable[Any]) -> str:
    """`did you mean …?` with the choice closest to `value`, or an empty text when none is close."""
    near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def translate(settings: Iterable[Setting], problems: list[Problem]) -> tuple[list[Setting], list[Setting]]:
    """Settings under our keys, and deferred aliases under their own names.

    A deferred alias depends on the final values of other keys. Names that are not understood go to `problems`.
    """
    main: list[Setting] = []
    extra: list[Setting] = []  # further keys that an alias sets; setting such a key directly takes precedence
    deferred: list[Setting] = []
    first: dict[tuple[int, str], Setting] = {}
    for setting in foreign.prepare(list(settings), problems):
        alias = aliases().get(setting.name)
        if setting.value in ({}, None) and (setting.name in tree.sections() or _is_plain(alias)):
            continue  # nothing is set
        if alias is not None and alias.deferred:
            # Replaces the value of an earlier layer.
            deferred = [d for d in deferred if _deferred_value(d.name) != _deferred_value(alias.name)]
            deferred.append(setting)
            continue
        found = _plain(setting, problems) if alias is None else _aliased(alias, setting, problems)
        for one in found:
            if alias is not None and one.name != alias.target:
                extra.append(one)
                continue
            main.append(one)
            earlier = first.setdefault((setting.origin.layer, one.name), setting)
            if earlier.name != setting.name and earlier.value != setting.value:
                message = f"{earlier.name} = {earlier.value} ({earlier.origin.text}) sets the same key, {one.name}"
                problems.append(setting.problem(message, "keep one of the two"))
    return sorted(extra + main, key=lambda s: s.origin.layer), deferred


def _is_plain(alias: Alias | None) -> bool:
    return alias is not None and alias.convert is None


def _deferred_value(name: str) -> tuple[str, str]:
    """What a deferred alias sets: its target, and which part of it."""
    return aliases()[name].target, name.rpartition(".")[2]


def _aliased(alias: Alias, setting: Setting, problems: list[Problem]) -> list[Setting]:
    """A setting under an alias, as settings under our keys; or a problem."""
    try:
        found = alias.apply(setting.value)
    except ValueError as error:
        problems.append(setting.problem(str(error), f"correct the value, or set {alias.target} instead"))
        return []
    text = setting.text if alias.convert is None else None
    return [Setting(key, value, setting.origin, text) for key, value in found.items()]


def _plain(setting: Setting, problems: list[Problem]) -> list[Setting]:
    """A setting that is not an alias, under its full key; or a problem."""
    key = canonical(setting.name)
    if key is not None:
        return _as_ours(Setting(key, setting.value, setting.origin, setting.text), problems)
    fixed, reason = fixed_values(setting.name), why_unneeded(setting.name)
    several = candidates(setting.name)
    if fixed is not None:
        if setting.value is not None and setting.value not in fixed.values:
            wanted = ", ".join(map(str, fixed.values)) or "null"
            problems.append(setting.problem(f"only {wanted} is supported here", fixed.remedy))
    elif reason is not None:
        problems.append(setting.problem(f"has no effect: {reason}", "remove it", "warning"))
    elif setting.name in tree.sections():
        remedy = f"set its keys one by one, as {setting.name}.KEY; see `gspo config explain {setting.name}`"
        problems.append(setting.problem("is a section, not a key", remedy))
    elif several:
        problems.append(setting.problem("could mean several keys", f"write {' or '.join(several)}"))
    else:
        elsewhere = fixed_values(setting.name.rpartition(".")[2])
        remedy = elsewhere.remedy if elsewhere else suggestion(nearest(setting.name))
        problems.append(setting.problem("unknown key", remedy))
    return []


def _as_ours(setting: Setting, problems: list[Problem]) -> list[Setting]:
    """A setting of our key whose value may be written as verl writes it. A null that the key cannot be means unset."""
    leaf = tree.leaves().get(setting.name)
    if leaf is None:
        return [setting]
    if setting.value is None and type(None) not in get_args(leaf.type):
        return []
    if setting.name not in VALUES:
        return [setting]
    value, note = VALUES[setting.name](setting.value)
    if note is not None:
        problems.append(setting.problem(note, "remove it, or set it to what is used", "warning"))
    changed = value is not setting.value and value != setting.value
    return [] if value is UNSET else [Setting(setting.name, value, setting.origin, None if changed else setting.text)]
