"""Other shapes of data: csv, JSON arrays, patterns, saved folders, conversations, usual columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.data.columns import Columns, as_rows
from gspo.data.datasets import has_held_out, load_rows
from gspo.data.rows import DataError, Row

QUESTION = {"question": "2+2=", "solution": "two and two, so \\boxed{4}"}


def facts(row: Row) -> tuple[str, object, str | None]:
    return row.messages[-1]["content"], row.ground_truth, row.answer


def lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def load(name: str, **options: object) -> tuple[list[Row], list[str]]:
    said: list[str] = []
    return load_rows(name, say=said.append, **options), said  # pyright: ignore[reportArgumentType]


def test_csv_with_quotes_several_lines_and_empty_cells(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes('\ufeffprompt,ground_truth,level\r\n"a, b\nc",4,\r\n\r\nd,5,hard\r\n'.encode())
    rows, said = load(str(file))
    assert [facts(r)[:2] for r in rows] == [("a, b\nc", "4"), ("d", "5")]
    assert [r.uid for r in rows] == [f"{file}:2", f"{file}:5"]
    assert (rows[0].extra["level"], rows[1].extra["level"]) == (None, "hard")
    assert said == []


def test_tsv_and_nested_names_in_a_header(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_text("prompt\treward_model.ground_truth\nx, y\t7\n")
    assert facts(load_rows(str(file))[0])[:2] == ("x, y", "7")


def test_csv_of_a_spreadsheet_with_semicolons_and_names_for_people(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("Question;Correct Answer\nx, y;7\n")
    rows, said = load(str(file))
    assert facts(rows[0])[:2] == ("x, y", "7")
    assert "the question is column 'Question', the correct answer is column 'Correct Answer'" in said[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,ground_truth\n", "a.csv:1: has no rows"),
        ("prompt,ground_truth\nx,1\ny,1,2\n", "a.csv:3: has 3 cells; the first line names 2 columns"),
        ("prompt,prompt\nx,1\n", "a.csv:1: has the column names prompt, prompt"),
        ('prompt,ground_truth\n"x,1\n', "a.csv:2: is not readable as csv"),
        ("prompt,ground_truth\nx,\n", "a.csv:2: field 'reward_model.ground_truth' is missing"),
    ],
)
def test_broken_csv_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        load_rows(str(tmp_path / "a.csv"))
    assert message in str(caught.value)


def test_a_json_file_is_an_array_or_lines(tmp_path: Path) -> None:
    records = [{"prompt": "x", "ground_truth": 1}, {"prompt": "y", "ground_truth": 2}]
    array, plain = tmp_path / "a.json", tmp_path / "b.json"
    array.write_text(json.dumps(records, indent=1))
    rows = load_rows(str(array))
    assert (
        [facts(r)[:2] for r in rows]
        == [("x", 1), ("y", 2)]
        == [facts(r)[:2] for r in load_rows(lines(plain, *records))]
    )
    assert rows[1].uid == f"{array}:2"
    array.write_text("[]")
    with pytest.raises(DataError, match=r"a\.json:1: has no rows"):
        load_rows(str(array))
    array.write_text('[{"prompt": "x"')
    with pytest.raises(DataError, match=r"a\.json: is not JSON .* expected an array of objects"):
        load_rows(str(array))


def test_a_pattern_is_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for number, name in enumerate(["b.jsonl", "a.jsonl", "deep/c.jsonl"]):
        lines(tmp_path / name, {"prompt": name, "ground_truth": number})
    assert [facts(r)[0] for r in load_rows(f"{tmp_path}/*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [facts(r)[0] for r in load_rows(f"{tmp_path}/**/*.jsonl")] == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert len(load_rows(f"{tmp_path}/*.jsonl", limit=1)) == 1
    with pytest.raises(DataError, match="matches no file"):
        load_rows(f"{tmp_path}/*.csv")
    odd = lines(tmp_path / "odd[1].jsonl", {"prompt": "odd", "ground_truth": 1})
    assert [facts(r)[0] for r in load_rows(odd)] == ["odd"]


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": whole.select(range(3)), "test": whole.select([3, 4])}).save_to_disk(tmp_path / "two")
    assert [facts(r)[:2] for r in load_rows(str(tmp_path / "one"))] == [(f"{i}+1=", str(i + 1)) for i in range(5)]
    train, val = load_rows(str(tmp_path / "two")), load_rows(str(tmp_path / "two"), "val")
    assert [r.ground_truth for r in train] == ["1", "2", "3"] and [r.ground_truth for r in val] == ["4", "5"]
    assert (train[0].uid, val[0].uid) == (f"{tmp_path}/two[train]:1", f"{tmp_path}/two[test]:1")
    with pytest.raises(DataError, match="has no split 'dev'; it has train, test"):
        load_rows(str(tmp_path / "two"), hub_split="dev")
    assert [has_held_out(str(tmp_path / name), "test") for name in ("one", "two")] == [False, True]


def test_a_saved_folder_is_read_only_inside_itself(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "secret.arrow").write_bytes(b"x")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    with pytest.raises(DataError, match=r"data: is not readable as a saved dataset .*data/secret\.arrow"):
        load_rows(str(folder))


CONVERSATIONS = {
    "messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}],
    "conversations": [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}],
}


@pytest.mark.parametrize("column", sorted(CONVERSATIONS))
def test_a_conversation_ends_in_its_answer(tmp_path: Path, column: str) -> None:
    name = lines(tmp_path / "a.jsonl", {column: CONVERSATIONS[column]})
    (row,), (said,) = load(name)
    assert facts(row) == ("2+2=", "4", "4")
    assert row.messages == ({"role": "user", "content": "2+2="},)
    assert said.startswith(
        f"{name}: the question is column {column!r}, the correct answer is the assistant's last turn"
    )


def test_a_conversation_keeps_its_earlier_turns_and_its_own_ground_truth(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    ((row,), _) = load(lines(tmp_path / "a.jsonl", {"messages": turns, "ground_truth": 7}))
    assert [m["content"] for m in row.messages] == ["a", "b", "c"]
    assert (row.ground_truth, row.answer) == (7, "d")
    name = lines(tmp_path / "b.jsonl", {"messages": turns[1:2]})
    with pytest.raises(DataError, match=r"b\.jsonl:1: field 'messages\[-1\]\.role' is assistant"):
        load_rows(name)
    name = lines(tmp_path / "c.jsonl", {"messages": turns[:1]})
    with pytest.raises(DataError, match=r"field 'reward_model\.ground_truth' is missing"):
        load_rows(name)


@pytest.mark.parametrize(
    ("record", "expected", "said"),
    [
        (QUESTION, ("2+2=", QUESTION["solution"], QUESTION["solution"]), ["'question'", "'solution'"]),
        ({"problem": "x", "answer": "7"}, ("x", "7", "7"), ["'problem'"]),
        ({"query": "x", "label": 3}, ("x", 3, None), ["'query'", "'label'"]),
        ({"question": "x", "answer": "no mark"}, ("x", "no mark", "no mark"), ["'question'"]),
        ({"instruction": "add", "input": "1 2", "output": "3"}, ("add\n\n1 2", "3", "3"), ["'instruction'", "'input'"]),
        ({"instruction": "hi", "input": "", "output": "ho"}, ("hi", "ho", "ho"), ["'instruction'"]),
        ({"prompt": "x", "completion": [{"role": "assistant", "content": "y"}]}, None, ["'completion'"]),
    ],
)
def test_usual_columns_are_guessed_and_said(tmp_path: Path, record: dict, expected: tuple | None, said: list) -> None:
    (row,), sentences = load(lines(tmp_path / "a.jsonl", record))
    assert row.data_source == "unknown"
    assert facts(row) == expected if expected else row.answer == "y"
    assert len(sentences) == 1 and all(word in sentences[0] for word in said)


def test_nothing_is_said_about_columns_that_have_the_names_of_the_format(tmp_path: Path) -> None:
    verl = {"prompt": "x", "reward_model": {"ground_truth": 1}, "question": "no"}
    rows, said = load(lines(tmp_path / "a.jsonl", verl, {"prompt": "y", "answer": 2}))
    assert [facts(row)[:2] for row in rows] == [("x", 1), ("y", 2)]
    assert said == []


def test_named_columns_are_not_guessed(tmp_path: Path) -> None:
    name = lines(tmp_path / "a.jsonl", QUESTION)
    with pytest.raises(DataError, match="field 'task' is missing"):
        load_rows(name, columns=Columns("task"))
    with pytest.raises(DataError, match="field 'truth' is missing"):
        load_rows(name, columns=Columns(ground_truth_key="truth"))
    (row,) = load_rows(name, columns=Columns(ground_truth_key=""))
    assert facts(row)[:2] == ("2+2=", None)


def test_gsm8k_is_recognised_by_its_mark_also_for_imitation() -> None:
    marked = {"question": "1+1?", "answer": "two #### 2"}
    for columns in (Columns(), Columns(ground_truth_key=None)):
        (row,) = as_rows([marked], "train_dataset", columns)
        assert (row.data_source, row.ground_truth, row.answer) == ("gsm8k", "2", "two #### 2")
    assert as_rows([{**marked, "answer": "two"}], "train_dataset")[0].data_source == "unknown"
