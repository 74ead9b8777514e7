"""Every group of a step, kept or dropped, as one compressed file `groups/step-NNNNNN.jsonl.gz`.

A line a group: `uid, submission, version, fate, data_source, ground_truth, messages, responses`; a response has
`text, finish_reason, num_tokens, versions` (of the weights, as pairs of a version and how many tokens in a row were
drawn under it)`, score, acc, extra, failure`, and when it was trained on `advantage, ratio`
(the sequence ratio π_θ/π_old at its own mini-batch) and `tokens, token_ids, loss_mask, log_probs` (μ) with
`old_log_probs` and `new_log_probs` (rounded to 1e-5).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from gspo.runs.files import write_atomic
from gspo.types import Group, Rollout


class GroupLog:
    """Collects the groups of one step and writes them when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._groups: list[tuple[Group, str]] = []

    def add(self, group: Group, fate: str) -> None:
        """Note a group that was judged: `kept`, or the reason why it was dropped."""
        self._groups.append((group, fate))

    def take(self, kept: Iterable[Group] = ()) -> list[tuple[Group, str]]:
        """The groups of the step that ends and their fates, with those `kept`; what is added later is the next one's."""
        groups, self._groups = self._groups, []
        return groups + [(group, "kept") for group in kept]

    def write(
        self, step: int, trained: dict[int, list[dict[str, Any]]], groups: list[tuple[Group, str]] | None = None
    ) -> None:
        """Write step `step`; `trained` maps a submission number to what training adds to each response.

        `groups` are those that were taken before, when others may have been added since.
        """
        groups = self.take() if groups is None else groups
        records = [_record(group, fate, trained.get(group.submission)) for group, fate in groups]
        records.sort(key=lambda r: (r["submission"], r["fate"]))
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        write_atomic(self.folder / f"step-{step:06d}.jsonl.gz", gzip.compress(text.encode(), 5, mtime=0))


def _record(group: Group, fate: str, trained: list[dict[str, Any]] | None) -> dict[str, Any]:
    responses = [_response(r) for r in group.rollouts]
    for response, extra in zip(responses, trained or ()):
        response.update(extra)
    return {
        "uid": group.prompt.uid,
        "submission": group.submission,
        "version": group.version,
        "fate": fate,
        "data_source": group.prompt.data_source,
        "ground_truth": group.prompt.ground_truth,
        "messages": [dict(m) for m in group.prompt.messages],
        "responses": responses,
    }


def _response(rollout: Rollout) -> dict[str, Any]:
    reward = rollout.reward
    return {
        "text": rollout.text,
        "finish_reason": rollout.finish_reason,
        "num_tokens": len(rollout.token_ids),
        "versions": [[version, len(list(run))] for version, run in groupby(rollout.versions)],
        "score": None if reward is None else reward.score,
        "acc": None if reward is None else reward.acc,
        "extra": {} if reward is None else dict(reward.extra),
        "failure": rollout.failure,
    }


def read_groups(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one step's file."""
    with gzip.open(path, "rt", encoding="utf-8") as f:
        for line in f:
            yield json.loads(line)
