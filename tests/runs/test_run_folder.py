"""The files of a run folder: rows that are amended, synced and cut, folders without content, and the lock."""

from __future__ import annotations

import json
import os

import pytest

from gspo.runs import folder as module
from gspo.runs.files import write_atomic, write_json
from gspo.runs.folder import RunFolder, RunLocked, step_of


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "name").open()
    yield run
    run.close()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-000012", 12),
        ("step-1000000.jsonl.gz", 1_000_000),
        ("step-000000", 0),
        (".tmp-step-000003", -1),
        ("a", -1),
    ],
)
def test_the_step_of_a_name(name, step):
    assert step_of(name) == step


def test_rows_are_synced_at_most_once_per_second_and_whenever_it_is_asked(run, monkeypatch):
    now, synced = [100.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "sync_file", lambda file: synced.append((now[0], file)))
    for now[0] in (100.0, 100.5, 100.99, 101.0, 101.5):
        run.append_metrics(1, {})
    assert synced == [(100.0, run.metrics_file), (101.0, run.metrics_file)]
    run.sync_metrics()
    now[0] = 102.4
    run.append_metrics(2, {})
    assert len(synced) == 3
    RunFolder(run.path / "empty").sync_metrics()  # there is nothing to sync
    assert len(synced) == 3


def test_values_are_added_to_the_row_of_their_step_alone(run):
    for step in (1, 2, 3):
        run.append_metrics(step, {"a": step, "b": 0.0})
    run.amend_metrics(2, {"b": 5.0, "c": 6.0})
    assert list(run.rows()) == [
        {"step": 1, "a": 1, "b": 0.0},
        {"step": 2, "a": 2, "b": 5.0, "c": 6.0},
        {"step": 3, "a": 3, "b": 0.0},
    ]


def test_rows_end_at_a_damaged_line(run):
    run.append_metrics(1, {})
    with open(run.metrics_file, "a") as file:
        file.write("half\n")
    run.append_metrics(2, {})
    assert [row["step"] for row in run.rows()] == [1]


def test_a_cut_keeps_its_own_step_and_what_is_no_step(run):
    for step in (0, 1, 2):
        run.append_metrics(step, {})
        (run.evals / f"step-{step:06d}.jsonl.gz").touch()
    for name in ("index.jsonl", "notes.jsonl.gz"):
        (run.groups / name).touch()
    assert run.cut_after(2) == 0 and len(list(run.evals.iterdir())) == 3
    assert run.cut_after(-1) == 3 and list(run.evals.iterdir()) == [] and list(run.rows()) == []
    assert len(list(run.groups.iterdir())) == 2 and run.metrics_file.exists()
    other = RunFolder(run.path / "other")
    other.path.mkdir()
    assert other.cut_after(1) == 0 and not other.metrics_file.exists()


@pytest.mark.parametrize("name", ["config.yaml", "groups/step-000001.jsonl.gz", None])
def test_only_a_folder_without_files_is_removed(run, name):
    if name is not None:
        (run.path / name).touch()
    run.remove_if_empty()
    assert run.path.exists() == (name is not None)


def test_the_lock_has_the_number_of_its_process_whoever_had_it_before(run):
    assert (run.path / ".lock").read_text() == str(os.getpid())
    with pytest.raises(RunLocked, match=f"name is in use by process {os.getpid()};"):
        RunFolder(run.path).open()
    run.close()
    (run.path / ".lock").write_text("1234567890123")
    run.open()
    assert (run.path / ".lock").read_text() == str(os.getpid()) and run.name == "name"
    assert not RunFolder(run.path / "nowhere").locked()


def test_a_result_is_known_when_it_is_written(run):
    assert run.result() is None
    write_json(run.result_file, {"steps": 3, "text": "é"})
    assert run.result() == {"steps": 3, "text": "é"} and "é" in run.result_file.read_text(encoding="utf-8")
    assert run.result_file.read_text(encoding="utf-8").endswith("}\n")
    run.write_environment({"a": 1})
    assert json.loads(run.environment_file.read_text()) == {"a": 1}


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    for data in (b"one", b"two"):
        write_atomic(tmp_path / "file", data)
        assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", data)]
