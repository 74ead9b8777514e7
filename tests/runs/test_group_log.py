"""The records of groups: every field of every response, in order, also of failed ones and of those with turns."""

from __future__ import annotations

import gzip
import json

import pytest

from gspo.runs.group_log import GroupLog, read_groups, turn_record, write_records
from gspo.types import Group, Prompt, Reward, Rollout, Turn
from gspo.untrusted import Unreadable


def make_group(submission: int = 4, **changes) -> Group:
    prompt = Prompt("q/1", ({"role": "user", "content": "1+1="},), (1, 2), "sums", {"value": 2})
    reward = Reward(0.5, 1.0, {"style": 0.25}, notes={"verdict": "good"})
    right = Rollout((5, 6, 7), (-0.5,) * 3, (1, 0, 1), (3, 3, 4), "stop", "2", reward)
    wrong = Rollout((8,), (-1.0,), (1,), (4,), "length", "é", Reward(0.0))
    failed = Rollout((9, 9), (-1.0,) * 2, (1, 1), (4, 4), "stop", "?", None, "it raised")
    return Group(prompt, changes.get("rollouts", (right, wrong)), submission, 3, failed=(failed,))


def written(folder, *groups, trained=None, step: int = 7) -> list[dict]:
    log = GroupLog(folder)
    log.write(step, trained or {}, list(groups))
    return list(read_groups(folder / f"step-{step:06d}.jsonl.gz"))


def test_a_record_has_every_field_of_the_group_and_of_its_responses(tmp_path):
    trained = {4: [{"advantage": 1.5}, {"advantage": -1.5}], 5: [{"advantage": 9.0}]}
    (record,) = written(tmp_path, (make_group(), "kept"), trained=trained)
    right, wrong, failed = record.pop("responses")
    assert record == {
        "uid": "q/1",
        "submission": 4,
        "version": 3,
        "fate": "kept",
        "data_source": "sums",
        "ground_truth": {"value": 2},
        "messages": [{"role": "user", "content": "1+1="}],
    }
    assert right == {
        "text": "2",
        "finish_reason": "stop",
        "num_tokens": 2,  # those of the model: a masked token is an observation
        "versions": [[3, 2], [4, 1]],
        "score": 0.5,
        "acc": 1.0,
        "extra": {"style": 0.25},
        "failure": None,
        "notes": {"verdict": "good"},
        "advantage": 1.5,
    }
    assert (wrong["text"], wrong["acc"], wrong["extra"], wrong["advantage"]) == ("é", None, {}, -1.5)
    assert "notes" not in wrong and "turns" not in wrong
    assert (failed["score"], failed["failure"]) == (None, "it raised") and "advantage" not in failed


def test_turns_are_recorded_with_the_tokens_of_the_prompt(tmp_path):
    turns = (
        Turn(0, 2, text="go", observation="seen", reward=0.5, num_calls=2, num_errors=1),
        Turn(2, 3, malformed=True),
    )
    rollout = Rollout((5, 6, 7), (-0.5,) * 3, (1, 1, 1), (3,) * 3, "stop", "2", Reward(1.0), turns=turns)
    plain = Rollout((5,), (-0.5,), (1,), (3,), "stop", "2", Reward(1.0))
    (record,) = written(tmp_path, (make_group(rollouts=(plain, rollout)), "kept"))
    assert record["prompt_ids"] == [1, 2] and "turns" not in record["responses"][0]
    assert record["responses"][1]["turns"] == [turn_record(turn) for turn in turns]
    assert turn_record(turns[0]) == {
        "start": 0,
        "end": 2,
        "text": "go",
        "observation": "seen",
        "reward": 0.5,
        "calls": 2,
        "errors": 1,
    }
    assert turn_record(turns[1])["malformed"] is True


def test_groups_are_sorted_by_submission_and_fate_and_the_bytes_depend_on_nothing_else(tmp_path):
    groups = [(make_group(9), "b"), (make_group(2), "kept"), (make_group(9), "a")]
    assert [(r["submission"], r["fate"]) for r in written(tmp_path, *groups)] == [(2, "kept"), (9, "a"), (9, "b")]
    first = (tmp_path / "step-000007.jsonl.gz").read_bytes()
    written(tmp_path, *groups[::-1])
    assert (tmp_path / "step-000007.jsonl.gz").read_bytes() == first


def test_groups_are_taken_once_with_the_kept_ones_last(tmp_path):
    log = GroupLog(tmp_path)
    dropped, kept = make_group(1), make_group(2)
    log.add(dropped, "all_wrong")
    assert log.take(kept=[kept]) == [(dropped, "all_wrong"), (kept, "kept")]
    assert log.take() == []


def test_integers_of_any_size_and_keys_that_are_numbers_are_written(tmp_path):
    write_records(tmp_path, 1, [{"ground_truth": 10**30, "responses": []}, {"a": {3: "é"}, "responses": []}])
    assert list(read_groups(tmp_path / "step-000001.jsonl.gz")) == [
        {"ground_truth": 10**30, "responses": []},
        {"a": {"3": "é"}, "responses": []},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"5", "is not a group"),
        (b'{"uid": 1}', "is not a group"),
        (b'{"responses": {}}', "is not a group"),
        (b'{"responses": [', "is not JSON"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_a_line_that_is_no_group_is_named(tmp_path, line, reason):
    file = tmp_path / "groups.gz"
    file.write_bytes(gzip.compress(json.dumps({"responses": []}).encode() + b"\n" + line + b"\n"))
    with pytest.raises(Unreadable, match=rf"groups\.gz:2: {reason}"):
        list(read_groups(file))
