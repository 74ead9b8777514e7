"""Checks the groups that a run recorded: none lost, none trained on twice, none too old."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from gspo.runs.folder import step_of
from gspo.runs.group_log import read_groups

PUT_BACK = ("stale_dropped", "surplus")  # not final: the prompt was generated again


def recorded(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """Every recorded group with the step of its file, in order."""
    files = sorted((run / "groups").glob("*.gz"), key=lambda file: step_of(file.name))
    return [(step_of(file.name), group) for file in files for group in read_groups(file)]


def problems(run: Path) -> list[str]:
    """The problems of a run: submissions recorded twice or not at all, prompts trained on twice.

    Every submission must be recorded once in the files of the steps, or be pending in the newest checkpoint.
    """
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = json.loads((checkpoint / "training" / "state.json").read_text())["sampler"]
    found = Counter(group["submission"] for _, group in recorded(run))
    pending = Counter(g["submission"] for part in ("kept", "scored", "unfinished") for g in state[part])
    pending.update(group["submission"] for group, _, _ in state.get("untold", []))
    total = found + pending
    twice = sorted(s for s, count in total.items() if count > 1)
    lost = sorted(set(range(state["next_submission"])) - set(total))
    unknown = sorted(s for s in total if s >= state["next_submission"])
    out = []
    for what, submissions in (("twice", twice), ("lost", lost), ("unknown", unknown)):
        if submissions:
            out.append(f"submissions {what}: {submissions[:8]}")
    return out + _trained_too_often(run)


def _trained_too_often(run: Path) -> list[str]:
    """Prompts with more final fates than passes over the data that can have begun."""
    ends = Counter(group["uid"] for _, group in recorded(run) if group["fate"] not in PUT_BACK)
    if not ends:
        return ["nothing was recorded"]
    fewest = min(ends.values()) if len(ends) > 1 else 0
    often = [uid for uid, count in ends.items() if count > max(2, fewest + 2)]
    return [f"prompts used too often: {often[:8]}"] if often else []


def staleness(run: Path) -> list[int]:
    """How many versions each trained group lagged: the version it was trained at less the one of its submission."""
    return [step - 1 - group["version"] for step, group in recorded(run) if group["fate"] == "kept"]
