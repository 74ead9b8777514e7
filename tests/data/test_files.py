"""Rows from files: verl's format, GSM8K's, named columns; broken ones are named by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.data.columns import Columns, as_rows
from gspo.data.datasets import has_held_out, load_rows
from gspo.data.rows import DataError, Row
from tests.faults.data_rows import BROKEN

VERL = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "math",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "answer": "it is 2"},
}


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def test_verl_rows(tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", VERL, VERL)
    rows = load_rows(name)
    assert [r.uid for r in rows] == [f"{name}:1", f"{name}:2"]
    assert rows[0].messages == ({"role": "user", "content": "1+1="},)
    assert (rows[0].data_source, rows[0].ground_truth, rows[0].answer) == ("math", "2", "it is 2")
    assert rows[0].extra == {"ability": "math", "split": "train", "index": 0, "answer": "it is 2"}


def test_extra_info_wins_over_a_column_of_the_same_name(tmp_path: Path) -> None:
    (row,) = load_rows(write(tmp_path / "a.jsonl", {**VERL, "index": 99, "level": 3}))
    assert (row.extra["index"], row.extra["level"]) == (0, 3)


def test_blank_lines_keep_the_count(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n" + json.dumps(VERL) + "\n\n{\n")
    with pytest.raises(DataError, match=r"a\.jsonl:4: is not JSON"):
        load_rows(str(file))
    assert load_rows(str(file), limit=1)[0].uid.endswith(":2")


def test_a_byte_order_mark_before_the_first_row_is_no_part_of_it(tmp_path: Path) -> None:
    plain, marked = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(plain, VERL, VERL)
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert [r.messages for r in load_rows(str(marked))] == [r.messages for r in load_rows(str(plain))]
    marked.write_bytes(b"\xef\xbb\xbf\n" + plain.read_bytes())
    assert [r.uid for r in load_rows(str(marked))] == [f"{marked}:2", f"{marked}:3"]
    marked.write_bytes(plain.read_bytes() + b"\xef\xbb\xbf" + plain.read_bytes())
    with pytest.raises(DataError, match=r"b\.jsonl:3: is not JSON"):
        load_rows(str(marked))


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL, {**VERL, "data_source": "gsm8k"}]), file)
    rows = load_rows(str(file))
    (same,) = load_rows(write(tmp_path / "a.jsonl", VERL))
    assert (rows[0].messages, rows[0].ground_truth, rows[0].extra) == (same.messages, same.ground_truth, same.extra)
    assert [r.data_source for r in rows] == ["math", "gsm8k"]
    assert rows[1].uid == f"{file}:2"


def test_broken_parquet_is_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(DataError, match=r"bad\.parquet:1: is not readable as parquet"):
        load_rows(str(bad))
    file = tmp_path / "b.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL, {**VERL, "prompt": None}]), file)
    with pytest.raises(DataError, match=r"b\.parquet:2: field 'prompt' is missing"):
        load_rows(str(file))


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_rows_are_named(tmp_path: Path, name: str) -> None:
    line, field = BROKEN[name]
    file = tmp_path / "x.jsonl"
    file.write_bytes(json.dumps(VERL).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError) as caught:
        load_rows(str(file))
    assert str(caught.value).startswith(f"{file}:2: ")
    assert field in str(caught.value)


def test_empty_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").touch()
    with pytest.raises(DataError, match=r"e\.jsonl:1: has no rows"):
        load_rows(str(tmp_path / "e.jsonl"))
    with pytest.raises(DataError, match="is not a file"):
        load_rows(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        load_rows(str(tmp_path))


def test_named_columns(tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", {"q": "2+2=", "meta": {"a": 4}, "task": "math", "sol": "four"})
    columns = Columns("q", "meta.a", "task", "sol")
    (row,) = load_rows(name, columns=columns)
    assert (row.messages[0]["content"], row.ground_truth, row.data_source, row.answer) == ("2+2=", 4, "math", "four")
    with pytest.raises(DataError, match=r"a\.jsonl:1: field 'prompt' is missing.*q, meta, task, sol.*prompt_key"):
        load_rows(name)
    with pytest.raises(DataError, match="field 'solution' is missing"):
        load_rows(name, columns=Columns("q", "meta.a", "task", "solution"))


def test_a_reward_that_needs_no_truth(tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", {"prompt": "say hello"})
    with pytest.raises(DataError, match="ground_truth_key"):
        load_rows(name)
    (row,) = load_rows(name, columns=Columns(ground_truth_key=""))
    assert (row.ground_truth, row.data_source) == (None, "unknown")


def test_python_objects() -> None:
    ready = Row("mine", ({"role": "user", "content": "x"},))
    rows = as_rows([ready, VERL], "train_dataset")
    assert rows[0] is ready
    assert rows[1].uid == "train_dataset:2"
    with pytest.raises(DataError, match="train_dataset:1: is a int"):
        as_rows([3], "train_dataset")  # pyright: ignore[reportArgumentType]


GSM = {"question": "Tom has 1,200 pens and buys 34. How many?", "answer": "1,200 + 34 = 1,234\n#### 1,234"}


def test_gsm8k_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", GSM, GSM)
    write(tmp_path / "test.jsonl", {**GSM, "answer": "#### -7"})
    by_path = load_rows(str(tmp_path / "train.jsonl"))
    by_folder = load_rows(f"gsm8k:{tmp_path}")
    assert by_path == by_folder
    assert (by_path[0].ground_truth, by_path[0].data_source, by_path[0].answer) == ("1234", "gsm8k", GSM["answer"])
    assert by_path[0].messages[0]["content"].startswith(GSM["question"])
    assert [r.ground_truth for r in load_rows(f"gsm8k:{tmp_path}", "val")] == ["-7"]
    assert len(load_rows(f"gsm8k:{tmp_path}", limit=1)) == 1


@pytest.mark.parametrize("answer", ["no mark", "#### ", "#### twelve", "#### 1 2", 7])
def test_gsm8k_without_a_number(tmp_path: Path, answer: object) -> None:
    name = write(tmp_path / "train.jsonl", GSM, {**GSM, "answer": answer})
    with pytest.raises(DataError, match=r"train\.jsonl:2: field 'answer'"):
        load_rows(name)


def test_system_prompt_goes_before_rows_that_have_none(tmp_path: Path) -> None:
    own = {**VERL, "prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]}
    rows = load_rows(write(tmp_path / "a.jsonl", VERL, own), system_prompt="S")
    assert [r.messages[0]["content"] for r in rows] == ["S", "own"]
    assert len(rows[0].messages) == 2


def contents(name: str, **options: object) -> list[str]:
    return [row.messages[-1]["content"] for row in load_rows(name, **options)]  # pyright: ignore[reportArgumentType]


ROW = {"prompt": "x", "ground_truth": 1}


def test_a_home_folder_is_found_in_every_kind_of_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", ROW)
    (tmp_path / "b.jsonl").mkdir()  # a folder is none of the files of a pattern
    assert contents("~/a.jsonl") == contents("~/*.jsonl") == contents("jsonl:~/a.jsonl") == ["x"]
    write(tmp_path / "odd[1].jsonl", {**ROW, "prompt": "odd"})
    assert contents("~/odd[1].jsonl") == ["odd"]


def test_the_suffix_decides_how_a_file_is_read(tmp_path: Path) -> None:
    lists = write(tmp_path / "a.jsonl", [ROW])
    with pytest.raises(DataError, match=r"a\.jsonl:1: is a list"):
        load_rows(lists)
    assert contents(write(tmp_path / "b.ndjson", ROW)) == contents(write(tmp_path / "c.json", ROW)) == ["x"]
    (tmp_path / "d.json").write_bytes(b"\xef\xbb\xbf \n\t" + json.dumps([ROW, ROW]).encode())
    assert contents(str(tmp_path / "d.json")) == ["x", "x"]
    write(tmp_path / "e.txt", ROW)
    with pytest.raises(DataError, match=r"e\.txt: ends in '\.txt'; expected one of \.jsonl, \.json"):
        load_rows(str(tmp_path / "e.txt"))


def test_csv_cells_keep_their_line_ends_and_may_be_long(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    long = "y" * 200_000
    file.write_bytes(f'prompt , ground_truth\r\n"a\r\nb",1\r\n{long},2\r\n'.encode())
    assert contents(str(file)) == ["a\r\nb", long]
    file.write_text("prompt\tground_truth\na;b,c\t1\n")
    assert contents(str(file)) == ["a;b,c"]
    file.write_text("prompt;ground_truth\na\tb,c;1\n")
    assert contents(str(file)) == ["a\tb,c"]
    file.write_text("prompt,ground;truth,ground_truth\na;b,1,2\n")
    assert contents(str(file)) == ["a;b"]
    file.write_text("prompt,ground_truth\nshort\n")
    with pytest.raises(DataError, match=r"a\.csv:2: field 'reward_model\.ground_truth' is missing"):
        load_rows(str(file))
    for header in ("prompt,", "prompt, prompt "):
        file.write_text(f"{header}\nx,1\n")
        with pytest.raises(DataError, match=r"a\.csv:1: has the column names prompt, .*expected different names"):
            load_rows(str(file))
    file.write_bytes(b"prompt,ground_truth\nx,1\n\xff,2\n")
    with pytest.raises(DataError, match=r"a\.csv:\d: or a line below is not UTF-8 \(byte 0xff\)"):
        load_rows(str(file))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "x", "ground_truth": NaN}', r"is JSON that cannot be used \(NaN is not a JSON number\)"),
        (b'{"prompt": "x", "ground_truth": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"prompt": "\xff"}', r"is not UTF-8 \(byte 13: invalid start byte\)"),
        (b'{"prompt" "x"}', r"is not JSON \(column 11: .*\); expected one object per line"),
        (b"[" * 100_000, "is JSON that cannot be used"),
    ],
)
def test_a_line_that_cannot_be_used_says_why(tmp_path: Path, line: bytes, problem: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps(ROW).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{problem}"):
        load_rows(str(file))


def test_what_has_a_held_out_part_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ROW)
    for name in (file, f"gsm8k:{file}", f"jsonl:{file}", f"{tmp_path}/*.jsonl", "nowhere.parquet"):
        assert not has_held_out(name, "test")
    assert has_held_out("arithmetic", None) and has_held_out("reasoning_gym:chain_sum", None)
    assert has_held_out("owner/name", "test") and not has_held_out("owner/name", None)
    assert has_held_out(f"gsm8k:{tmp_path}", None)


def test_names_are_tried_in_order_and_a_limit_is_over_all_files(tmp_path: Path) -> None:
    for letter in "abc":
        write(tmp_path / f"{letter}.jsonl", *({**ROW, "prompt": f"{letter}{i}"} for i in range(2)))
    assert contents(f"{tmp_path}/*.jsonl", limit=3) == ["a0", "a1", "b0"]
    assert contents(f"{tmp_path}/[bc].jsonl") == ["b0", "b1", "c0", "c1"]
    for name, problem in (
        ("jsonl:nowhere.jsonl", "is not a file"),
        ("parquet:nowhere", "is not a file"),
        ("/nowhere/at/all", "is not a dataset"),
        ("a/b/c", "is not a dataset"),
        ("nowhere", "is not a dataset"),
    ):
        with pytest.raises(DataError, match=problem):
            load_rows(name)


def test_what_is_guessed_of_several_files_is_said_once(tmp_path: Path) -> None:
    for letter in "ab":
        write(tmp_path / f"{letter}.jsonl", {"question": letter, "label": 1})
    said: list[str] = []
    load_rows(f"{tmp_path}/*.jsonl", say=said.append)
    assert len(said) == 1 and said[0].startswith(f"{tmp_path}/*.jsonl: the question is column 'question'")
