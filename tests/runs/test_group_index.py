"""The index beside group files: written with them, made again where it is missing, damaged or older than its file."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gspo.runs.group_index import FIELDS, HELD_OUT, INDEX, GroupIndex, index_file, index_step, question_of, spread
from gspo.runs.group_log import write_records


def records(step: int, num: int = 2) -> list[dict[str, Any]]:
    response = {"score": 1.0, "acc": 1.0, "num_tokens": 5, "ratio": 1.25, "text": "x"}
    message = {"role": "user", "content": f"question {step}"}
    return [{"uid": f"{step}-{i}", "fate": "kept", "messages": [message], "responses": [response]} for i in range(num)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        write_records(tmp_path, step, records(step))
    return tmp_path


def read(folder: Path, step: int) -> tuple[dict[str, Any], bool]:
    index = GroupIndex(folder)
    index.refresh()
    return index.entry(step, folder / f"step-{step:06d}.jsonl.gz")


def test_the_index_written_with_the_groups_is_what_their_file_gives(folder: Path) -> None:
    for step in (1, 2, 3):
        entry, stored = read(folder, step)
        assert stored and entry == index_file(folder / f"step-{step:06d}.jsonl.gz")
        assert [line[0] for line in entry["groups"]] == [f"{step}-0", f"{step}-1"] and entry["ratios"] == [0.25, 0.25]


def test_a_copied_folder_keeps_its_index(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.glob("*.*"):
        if file.is_file():
            shutil.copyfile(file, copy / file.name)
            os.utime(copy / file.name, (1, 1))
    assert read(copy, 2)[1]


@pytest.mark.parametrize("damage", ["gone", "cut", "other_size", "same_size", "types", "deep"])
def test_a_line_that_does_not_belong_to_its_file_is_not_used(folder: Path, damage: str) -> None:
    file, index = folder / "step-000002.jsonl.gz", folder / INDEX
    if damage == "gone":
        index.unlink()
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:150])
    elif damage == "other_size":
        file.write_bytes(gzip.compress(b"".join(json.dumps(r).encode() + b"\n" for r in records(2, 1))))
    elif damage == "same_size":
        data = gzip.decompress(file.read_bytes()).replace(b"question 2", b"question 7")
        packed = gzip.compress(data, 5, mtime=0)
        assert len(packed) == file.stat().st_size
        file.write_bytes(packed)
        os.utime(file, (1, 1))
    elif damage == "types":
        index.write_text(index.read_text().replace('"2-0"', "[7]"))
    else:
        head = index.read_text().splitlines()[1].partition('"groups"')[0]
        index.write_text(head + '"groups":' + "[" * 20_000 + "\n")
    entry, stored = read(folder, 2)
    assert not stored and entry == index_file(file)


def test_a_step_that_is_written_again_has_its_new_entry(folder: Path) -> None:
    write_records(folder, 2, records(2, 5))
    entry, stored = read(folder, 2)
    assert stored and len(entry["groups"]) == 5


def test_a_write_that_was_cut_off_spoils_its_own_line_only(folder: Path) -> None:
    with open(folder / INDEX, "ab") as f:
        f.write(b'{"step":9,"size":1')
    write_records(folder, 4, records(4))
    assert all(read(folder, step)[1] for step in (1, 2, 3, 4))


def test_lines_that_are_added_later_are_found(folder: Path) -> None:
    index = GroupIndex(folder)
    index.refresh()
    write_records(folder, 4, records(4))
    index.refresh()
    assert index.entry(4, folder / "step-000004.jsonl.gz")[1]


def test_steps_are_spread_evenly_with_the_last_one() -> None:
    assert spread(range(10), 10) == list(range(10))
    assert spread(range(11), 10) == [0, 2, 4, 6, 8, 10]
    assert spread(range(12), 4) == [0, 4, 8, 11]
    assert spread([], 4) == []


def response(**values: object) -> dict[str, object]:
    return {"num_tokens": 3, **values}


USER = [{"role": "system", "content": "S"}, {"role": "user", "content": "first"}, {"role": "user", "content": "a\n b "}]


@pytest.mark.parametrize(
    ("record", "line", "ratios"),
    [
        (
            {"uid": "u", "fate": "kept", "data_source": "math", "messages": USER, "ground_truth": 5, "version": 7,
             "responses": [response(score=1.0, acc=1.0, ratio=1.25), response(score=0.0, acc=0.0, ratio=0.5), response()]},
            ["u", "kept", "math", 2, 0.5, 0.5, 9, "a b", "5", 7], [0.25, -0.5],
        ),
        ({"responses": []}, ["", "", "", 0, None, None, 0, "", "", None], []),
        ({"responses": [response(), "odd"]}, ["", "", "", 1, None, None, 3, "", "", None], []),
        ({"responses": [response(score=2.5), response(score=-1)]}, ["", "", "", 2, None, 0.75, 6, "", "", None], []),
        ({"responses": [response(score=1 / 3), response(score=1 / 3)]}, ["", "", "", 2, None, 0.3333, 6, "", "", None], []),
        ({"responses": [response(acc=1 / 3, score=0)]}, ["", "", "", 1, 0.3333, 0.0, 3, "", "", None], []),
        ({"responses": [{"num_tokens": "9", "ratio": "x", "score": "1"}]}, ["", "", "", 1, None, None, 0, "", "", None], []),
        ({"responses": [{"ratio": 1.0 + 1e-9}], "version": "7"}, ["", "", "", 1, None, None, 0, "", "", None], [0.0]),
        (
            {"uid": "u" * 400, "fate": "f" * 400, "data_source": "d" * 400, "ground_truth": "t" * 60, "responses": [],
             "messages": [{"role": "user", "content": "q" * 200}]},
            ["u" * 300, "f" * 300, "d" * 300, 0, None, None, 0, "q" * 160, "t" * 48, None], [],
        ),
    ],
)  # fmt: skip
def test_what_a_line_says_about_a_group(record: dict, line: list, ratios: list) -> None:
    assert index_step([record]) == {"groups": [line], "ratios": ratios}
    held_out = index_step([record], held_out=True)["groups"][0]
    assert held_out == [line[0], "held_out", *line[2:]] and dict(zip(FIELDS, held_out))["fate"] == HELD_OUT


def test_the_ratios_of_a_step_are_those_of_all_its_groups_in_order() -> None:
    groups = [{"responses": [{"ratio": 2.0}, {"ratio": None}, {"ratio": 0.5}]}, {"responses": [{"ratio": 1.5}]}]
    assert index_step(groups)["ratios"] == [1.0, -0.5, 0.5]


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        (None, ""),
        ([], ""),
        ("text", ""),
        (["odd", {"role": "user", "content": "x"}], "x"),
        ([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], "one"),
        ([{"role": "assistant", "content": "one"}, {"role": "tool", "content": "two"}], "two"),
        ([{"role": "user"}], ""),
        ([{"role": "user", "content": [{"text": "a"}, {"image": 1}, "odd", {"text": "b"}]}], "a b"),
    ],
)
def test_the_question_is_the_last_message_of_a_user(messages: object, question: str) -> None:
    assert question_of(messages) == question
