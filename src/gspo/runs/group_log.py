"""Every group of a step, kept or dropped, as one compressed file `groups/step-NNNNNN.jsonl.gz`.

One line per group: `uid, submission, version, fate, data_source, ground_truth, messages, responses`; a response has
`text, finish_reason, num_tokens, versions` (pairs of a weight version and the number of consecutive tokens drawn with
it)`, score, acc, extra, failure`, with a judge `notes` (its verdict, reason, tokens and seconds), with an environment
`turns` (text, observation, reward, calls and errors of each, and the numbers of its first and one past its last token),
and when it was trained on `advantage, ratio` (the sequence ratio π_θ/π_old at its own mini-batch) and `tokens,
token_ids, loss_mask, log_probs` (μ) with `old_log_probs` and `new_log_probs` (rounded to 1e-5). Responses without a
reward are the last of their group.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from gspo import untrusted
from gspo.runs.files import write_atomic
from gspo.runs.group_index import GroupIndex, index_step
from gspo.types import Group, Rollout, Turn


class GroupLog:
    """Collects the groups of one step and writes them when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._groups: list[tuple[Group, str]] = []

    def add(self, group: Group, fate: str) -> None:
        """Add a group with its fate: `kept`, or the reason why it was dropped."""
        self._groups.append((group, fate))

    def take(self, kept: Iterable[Group] = ()) -> list[tuple[Group, str]]:
        """Return and forget the groups so far with their fates, and add those `kept`: the groups of a step that ends."""
        groups, self._groups = self._groups, []
        return groups + [(group, "kept") for group in kept]

    def write(self, step: int, trained: dict[int, list[dict[str, Any]]], groups: list[tuple[Group, str]]) -> None:
        """Write groups from `take`; `trained` maps a submission number to what training adds to each response."""
        records = [_record(group, fate, trained.get(group.submission)) for group, fate in groups]
        records.sort(key=lambda r: (r["submission"], r["fate"]))
        write_records(self.folder, step, records)


def write_records(folder: Path, step: int, records: Sequence[Mapping[str, Any]], *, held_out: bool = False) -> None:
    """Write the records of a step as `step-NNNNNN.jsonl.gz`, and its line in the folder's index."""
    file = folder / f"step-{step:06d}.jsonl.gz"
    write_atomic(file, gzip.compress(b"".join(map(_line, records)), 5, mtime=0))
    GroupIndex(folder).add(step, file, index_step(records, held_out))


def _line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON. orjson takes a tenth of the time, during which no other thread runs."""
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # an integer of more than 64 bits in a row's ground truth
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _record(group: Group, fate: str, trained: list[dict[str, Any]] | None) -> dict[str, Any]:
    responses = [_response(r) for r in (*group.rollouts, *group.failed)]
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
        **({"prompt_ids": list(group.prompt.token_ids)} if any(r.turns for r in group.rollouts) else {}),
        "responses": responses,
    }


def _response(rollout: Rollout) -> dict[str, Any]:
    reward = rollout.reward
    return {
        "text": rollout.text,
        "finish_reason": rollout.finish_reason,
        "num_tokens": rollout.num_model_tokens,
        "versions": [[version, len(list(run))] for version, run in groupby(rollout.versions)],
        "score": None if reward is None else reward.score,
        "acc": None if reward is None else reward.acc,
        "extra": {} if reward is None else dict(reward.extra),
        "failure": rollout.failure,
        **({"notes": dict(reward.notes)} if reward is not None and reward.notes else {}),
        **({"turns": [turn_record(turn) for turn in rollout.turns]} if rollout.turns else {}),
    }


def turn_record(turn: Turn) -> dict[str, Any]:
    """A turn as plain data."""
    return {
        "start": turn.start,
        "end": turn.end,
        "text": turn.text,
        "observation": turn.observation,
        "reward": turn.reward,
        "calls": turn.num_calls,
        "errors": turn.num_errors,
        **({"malformed": True} if turn.malformed else {}),
    }


def read_groups(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one step's file; a damaged file or line is Unreadable, named with the line."""
    for number, line in enumerate(untrusted.gzip_lines(path), 1):
        place = f"{path}:{number}"
        try:
            record = untrusted.parse_json(line.decode("utf-8"), place)
        except UnicodeDecodeError as error:
            raise untrusted.Unreadable(place, f"is not UTF-8 ({error.reason})") from None
        if not isinstance(record, dict) or not isinstance(record.get("responses"), list):
            raise untrusted.Unreadable(place, "is not a group; expected an object with a list `responses`")
        yield record
