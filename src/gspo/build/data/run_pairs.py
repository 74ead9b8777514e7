"""Preference pairs from the recorded groups of runs: a better and a worse answer of the policy to the same question."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gspo.build.data.rows import held_out_share
from gspo.config import TrainerConfig
from gspo.data.held_out import split_rows
from gspo.data.rows import DataError, Row
from gspo.paths import user_path
from gspo.runs.folder import step_of
from gspo.runs.group_log import read_groups
from gspo.runs.run import is_run

HELD_OUT = 0.05  # of the questions, where the config does not say


def pairs_of_runs(config: TrainerConfig) -> tuple[list[Row] | None, list[Row] | None]:
    """Training and held-out pairs of the run folders that the config names; None for what it names otherwise.

    Without named held-out data, a share of the questions is held out.
    """
    c = config.data
    train, held_out = _rows_of("data.train_files", c.train_files), _rows_of("data.val_files", c.val_files)
    if train is not None and c.val_files is None:
        train, held_out = split_rows(train, held_out_share(config) or HELD_OUT)
    return (
        None if train is None else train[: c.num_train_samples],
        None if held_out is None else held_out[: c.num_val_samples],
    )


def _rows_of(key: str, files: str | list[str] | None) -> list[Row] | None:
    """The pairs of the run folders in `files`, one run after another; None when there is none among them."""
    names = [files] if isinstance(files, str) else files or []
    runs = [path for name in names if is_run(path := user_path(name))]
    if not runs:
        return None
    if len(runs) < len(names):
        raise DataError(key, f"is {', '.join(names)}; expected run folders only, or none")
    return [row for run in runs for row in run_pairs(run)]


def run_pairs(run: Path) -> list[Row]:
    """A run's pairs, in the order of its steps. Each has the columns `chosen` and `rejected`."""
    files = sorted((run / "groups").glob("step-*.jsonl.gz"), key=lambda file: step_of(file.name))
    if not files:
        raise DataError(str(run), "has no groups; train it with trainer.save_groups=true")
    rows = [row for file in files for group in read_groups(file) for row in _group_pairs(run, group)]
    if not rows:
        raise DataError(str(run), "has no group in which one answer is better than another")
    return rows


def _group_pairs(run: Path, group: Mapping[str, Any]) -> Iterator[Row]:
    """Each different answer above the group's mean against one below it, so that all of them occur."""
    answers = _graded(group["responses"])
    if any(response.get("turns") for response in group["responses"]):
        raise DataError(str(run), "has responses of several turns; expected answers to one prompt")
    mean = fmean(answers.values()) if answers else 0.0
    better = [text for text, value in answers.items() if value > mean]
    worse = [text for text, value in answers.items() if value < mean]
    count = max(len(better), len(worse)) if better and worse else 0
    pairs = zip(range(count), itertools.cycle(better), itertools.cycle(worse))
    for number, chosen, rejected in pairs:
        yield Row(
            f"{run.name}/{group['submission']}/{number}",
            tuple(group["messages"]),
            group["data_source"],
            extra={"chosen": chosen, "rejected": rejected},
        )


def _graded(responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The different answers of a group with their accuracy, or with their score where some have no accuracy."""
    known = [response for response in responses if response["score"] is not None]
    name = "acc" if all(response["acc"] is not None for response in known) else "score"
    return {response["text"]: float(response[name]) for response in known}
