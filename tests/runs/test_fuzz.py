"""Readers of run folders and group files on damaged ones: an answer, or a refusal by name, and nothing else."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.report.live import LiveRuns
from gspo.report.write import build_report
from gspo.runs.group_log import read_groups
from gspo.untrusted import Unreadable
from tests.report.synthetic import Plan, make_run
from tests.support.mutations import damaged_bytes, damaged_value, to_text

PLAN = Plan(steps=3, groups=2, n=2, questions=3, val_every=2, tokens=3)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("good") / "run", PLAN)


def read_everything(run: Path) -> None:
    """What `gspo report` and the dashboard read."""
    build_report(run, pictures=False)
    live = LiveRuns(run.parent)
    (summary,) = live.summaries()
    answer = live.index(run, 0, 0)
    assert answer["complete"] and json.dumps([summary, live.overview(run), answer])


def with_file(good: Path, name: str, data: bytes) -> None:
    """Read a copy of the run in which one file is this."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(good, run)
        (run / name).write_bytes(data)
        read_everything(run)


FILES = ["metrics.jsonl", "config.yaml", "config.json", "result.json", "groups/step-000001.jsonl.gz"]


def present(good: Path) -> list[str]:
    return [name for name in FILES if (good / name).exists()]


@settings(max_examples=40)
@given(data=st.data())
def test_bytes_of_any_file_may_be_damaged(good: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(present(good)))
    with_file(good, name, data.draw(damaged_bytes((good / name).read_bytes())))


def lines_of(path: Path) -> list[Any]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in raw.splitlines()]


@settings(max_examples=60)
@given(data=st.data())
def test_values_of_any_file_may_be_anything(good: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([n for n in present(good) if not n.endswith(".yaml")]))
    if ".jsonl" in name:
        lines = lines_of(good / name)
        index = data.draw(st.integers(0, len(lines) - 1))
        lines[index] = data.draw(damaged_value(lines[index]))
        raw = b"".join(to_text(line) + b"\n" for line in lines)
        with_file(good, name, gzip.compress(raw) if name.endswith(".gz") else raw)
    else:
        with_file(good, name, to_text(data.draw(damaged_value(json.loads((good / name).read_text())))))


@settings(max_examples=80)
@given(data=st.data())
def test_a_group_file_gives_groups_or_names_its_line(good: Path, data: st.DataObject) -> None:
    source = good / "groups" / "step-000001.jsonl.gz"
    raw = gzip.decompress(source.read_bytes())
    if data.draw(st.booleans()):
        packed = gzip.compress(data.draw(damaged_bytes(raw)))
    else:
        packed = data.draw(damaged_bytes(source.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / source.name
        path.write_bytes(packed)
        try:
            assert all(isinstance(record["responses"], list) for record in read_groups(path))
        except Unreadable as error:
            assert str(path) in str(error)
