"""The rollouts in a report: chosen within a budget, reduced and compressed, one chunk per step."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, TypeGuard

import numpy as np

from gspo.runs import reading
from gspo.runs.group_index import GroupIndex, spread
from gspo.runs.run import Run

LOG_PROBS = ("log_probs", "old_log_probs", "new_log_probs")
LEFT_OUT = (*LOG_PROBS, "token_ids", "loss_mask")
MAX_LISTED = 2000  # steps of training, and of evaluations, whose groups are listed
MAX_TEXTS = 300  # steps of a run with more than MAX_LISTED whose texts are in the page
DEFAULT_BUDGET = 32 << 20  # bytes of group files; their chunks come out smaller


@dataclass
class RolloutStore:
    """`index` lists the groups of the run; `chunks` are the texts of the chosen steps as gzip JSON lines."""

    index: list[dict[str, Any]] = field(default_factory=list)
    chunks: dict[tuple[str, int], bytes] = field(default_factory=dict)
    note: str = ""
    problems: list[str] = field(default_factory=list)  # files whose groups could not be read, with the reason


def collect(run: Run, budget: int = DEFAULT_BUDGET) -> RolloutStore:
    """List groups, with the texts of as many steps as the budget allows: all, or evenly spaced ones.

    Groups are listed from the index of their folder. Lines that it lacks are made and added to it.
    """
    store = RolloutStore()
    evals, groups = run.eval_files(), run.group_files()
    listed = {"eval": spread(evals, MAX_LISTED), "train": spread(groups, MAX_LISTED)}
    chosen_evals = choose({step: evals[step] for step in listed["eval"]}, budget // 4)
    left = budget - sum(_size(evals[s]) for s in chosen_evals)
    texts = listed["train"] if len(groups) <= MAX_LISTED else spread(listed["train"], MAX_TEXTS)
    chosen = {"eval": chosen_evals, "train": choose({step: groups[step] for step in texts}, left)}
    for kind, files in (("train", groups), ("eval", evals)):
        index = GroupIndex(run.path / ("groups" if kind == "train" else "evals"), held_out=kind == "eval")
        index.refresh()
        for step in listed[kind]:
            entry = _entry(index, step, files[step])
            store.index.append({"step": step, "kind": kind, **entry})
            if "problem" in entry:
                store.problems.append(f"{index.folder.name}/{files[step].name}: {entry['problem']}")
            if step in chosen[kind]:
                store.chunks[kind, step] = pack(reading.read_groups(files[step]))
    store.index.sort(key=lambda entry: (entry["step"], entry["kind"] == "train"))
    store.note = _note(run, len(groups), len(listed["train"]), len(chosen["train"]))
    return store


def _entry(index: GroupIndex, step: int, file: Path) -> dict[str, Any]:
    entry, stored = index.entry(step, file)
    if not stored and "problem" not in entry:
        index.add(step, file, entry)
    return entry


def _note(run: Run, num_steps: int, num_listed: int, num_chosen: int) -> str:
    """What the page leaves out; "" when it has everything."""
    if num_chosen == num_steps:
        return ""
    groups = "all groups are listed" if num_listed == num_steps else f"the groups of {num_listed:,} steps are listed"
    return (
        f"This file contains the texts of {num_chosen:,} of {num_steps:,} steps, evenly spaced, to stay small; {groups}. "
        f"`gspo dashboard {run.path.parent}` shows every text."
    )


def choose(files: Mapping[int, Path], budget: int) -> set[int]:
    """The steps to include: every k-th with the smallest k that the budget allows, the last one always."""
    steps = sorted(files, reverse=True)
    sizes = {step: _size(files[step]) for step in steps}
    for stride in range(1, len(steps)):
        if sum(sizes[step] for step in steps[::stride]) <= budget:
            return set(steps[::stride])
    return set(steps[:1])


def pack(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Records as gzip JSON lines with what a page shows: log-probs in milli-nats, log-ratios in micro-nats."""
    whole = [[x for x in r["responses"] if isinstance(x, dict)] for r in records]
    slim = [{**r, "responses": [_slim(x) for x in responses]} for r, responses in zip(records, whole)]
    _add_log_probs([x for responses in whole for x in responses], [x for r in slim for x in r["responses"]])
    text = "".join(reading.to_json(r) + "\n" for r in slim)
    return gzip.compress(text.encode("utf-8", "replace"), 4, mtime=0)


def _slim(response: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in response.items() if k not in LEFT_OUT and v not in (None, {}, [])}


def _add_log_probs(responses: Sequence[Mapping[str, Any]], slim: Sequence[dict[str, Any]]) -> None:
    """Add `mlp` (μ), `mlr` (π_old against μ) and `mln` (π_θ against π_old) where they are known.

    All responses at once: token lists are most of a run, and numpy rounds them faster together.
    """
    chosen = [(r, s) for r, s in zip(responses, slim) if _are_numbers(r.get("log_probs"))]
    columns = []
    for name in LOG_PROBS:
        column: list[float | None] = []
        for response, _ in chosen:
            size, found = len(response["log_probs"]), response.get(name)
            column += found if _are_numbers(found) and len(found) == size else [None] * size
        columns.append(np.array(column, dtype=float))  # None becomes NaN
    behaviour, old, new = columns
    kinds = {"mlp": behaviour * 1e3, "mlr": (old - behaviour) * 1e6, "mln": (new - old) * 1e6}
    for name, values in kinds.items():
        known = np.isfinite(values)
        integers = np.rint(np.where(known, values, 0.0)).astype(int).tolist()
        start = 0
        for response, out in chosen:
            part = slice(start, start := start + len(response["log_probs"]))
            if known[part].all():
                out[name] = integers[part]


def _are_numbers(values: Any) -> TypeGuard[list[float | None]]:
    """A list of numbers, with null for those that are not finite; not empty."""
    return isinstance(values, list) and bool(values) and set(map(type, values)) <= {float, int, NoneType}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
