"""The Sink contract, run on each implementation: built-in ones, what a run always has, and those of a user."""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.loop.recorder import Recorder
from gspo.metrics import Metric
from gspo.registry import PluginError
from gspo.runs.clock import Clock
from gspo.runs.console import COLUMNS, Console
from gspo.runs.folder import RunFolder
from gspo.runs.sinks import SINKS, RunInfo, Sink, open_sinks
from tests.contracts.sink import NAMES, Rows, SinkContract


def open_named(name: str, run: RunInfo) -> Sink:
    """The sink that `trainer.logger=[NAME]` opens."""
    (sink,) = open_sinks(["console", "file", name], run)
    return sink


class TestTensorBoard(SinkContract):
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'gspo[tensorboard]'")

    def open(self, run: RunInfo) -> Sink:
        return open_named("tensorboard", run)

    def read(self, run: RunInfo) -> Rows:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
        rows: Rows = defaultdict(dict)
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                rows[event.step][name] = event.value
        return dict(rows)

    def test_rows_are_on_disk_before_the_sink_closes(self, tmp_path: Path) -> None:
        run = self.info(tmp_path)
        sink = self.open(run)
        sink.log(1, {NAMES[0]: 0.5})
        self.check(run, {1: {NAMES[0]: 0.5}})
        sink.close()


class TestWandb(SinkContract):
    """wandb without a network: it keeps a run's history in a local file."""

    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'gspo[wandb]'")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        yield
        wandb.teardown()  # its background process keeps the settings of its start

    def open(self, run: RunInfo) -> Sink:
        return open_named("wandb", run)

    def read(self, run: RunInfo) -> Rows:
        import wandb
        from wandb.proto.wandb_internal_pb2 import Record

        wandb.teardown()  # its background process writes the end of the file
        rows: Rows = defaultdict(dict)
        for file in Path(os.environ["WANDB_DIR"]).rglob("*.wandb"):
            for data in log_records(file.read_bytes()):
                history = Record.FromString(data).history
                for item in history.item:
                    name, value = item.key or "/".join(item.nested_key), json.loads(item.value_json)
                    if name in NAMES and math.isfinite(value):
                        rows[history.step.num][name] = value
        return dict(rows)


def log_records(data: bytes, block: int = 1 << 15) -> Iterator[bytes]:
    """The records of a .wandb file, a LevelDB log: blocks of parts, each with checksum, length, kind and content."""
    at, record = 7, b""
    while at < len(data):
        if block - at % block < 7:  # too short for the head of a part
            at += block - at % block
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


class TestTrackio(SinkContract):
    """trackio keeps its runs in a local database."""

    @pytest.fixture(autouse=True)
    def local(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
        pytest.importorskip("trackio", reason="trackio is not installed: pip install 'gspo[trackio]'")

    def open(self, run: RunInfo) -> Sink:
        return open_named("trackio", run)

    def read(self, run: RunInfo) -> Rows:
        from trackio.sqlite_storage import SQLiteStorage

        runs = [r for r in SQLiteStorage.get_run_records(run.project) if r["name"] == run.name]
        rows = [row for r in runs for row in SQLiteStorage.get_logs(run.project, run_id=r["id"])]
        return {row["step"]: {n: v for n, v in row.items() if n in NAMES and math.isfinite(v)} for row in rows}


@dataclass
class FunctionSink:
    """A sink of two functions, for the two outputs that every run has: they receive rows as sinks do."""

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


class TestRunFolder(SinkContract):
    def open(self, run: RunInfo) -> Sink:
        folder = RunFolder(run.folder).open()
        return FunctionSink(folder.append_metrics, folder.close)

    def read(self, run: RunInfo) -> Rows:
        rows = {row.pop("step"): row for row in RunFolder(run.folder).rows()}
        return {step: {n: v for n, v in row.items() if v is not None} for step, row in rows.items()}


class TestConsole(SinkContract):
    """Lines of text; the console rounds, and names a metric by its column."""

    @pytest.fixture(autouse=True)
    def output(self) -> None:
        self.text = io.StringIO()

    def open(self, run: RunInfo) -> Sink:
        console = Console()
        console.rich.file = self.text
        return FunctionSink(lambda step, values: console.step(step, None, values), console.stop)

    def read(self, run: RunInfo) -> Rows:
        names = {title: key for title, key, *_ in COLUMNS} | {"held-out": NAMES[3]}
        rows: Rows = {}
        for line in self.text.getvalue().splitlines():
            step, *cells = line.split("  ")
            found = [(names[title], float(value)) for title, value in (cell.split() for cell in cells)]
            number = re.fullmatch(r"step (\d+)", step)
            assert number is not None, line
            rows[int(number[1])] = {name: value for name, value in found if math.isfinite(value)}
        return rows


class ListSink:
    """A user's sink: rows in a file of its own."""

    def __init__(self, run: RunInfo) -> None:
        assert run.config["trainer"]["seed"] == 7
        self.file = run.folder / f"{run.project}-{run.name}.json"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        rows = json.loads(self.file.read_text()) if self.file.exists() else []
        self.file.write_text(json.dumps([*rows, [step, dict(values)]]))

    def close(self) -> None:
        pass


class UserSinkContract(SinkContract):
    def read(self, run: RunInfo) -> Rows:
        file = run.folder / f"{run.project}-{run.name}.json"
        rows = json.loads(file.read_text()) if file.exists() else []
        return {step: {n: v for n, v in row.items() if math.isfinite(v)} for step, row in rows}


class TestRegisteredSink(UserSinkContract):
    """Registered under a name with `@gspo.sink`."""

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SINKS, "_items", dict(SINKS._items))
        gspo.sink("list")(ListSink)

    def open(self, run: RunInfo) -> Sink:
        return open_named("list", run)


class TestSinkByItsModule(UserSinkContract):
    """Named as `module:function` in `trainer.logger`."""

    def open(self, run: RunInfo) -> Sink:
        return open_named(f"{__name__}:ListSink", run)


def test_a_recorder_passes_each_row_to_every_sink_and_closes_all_of_them(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def make(name: str) -> Sink:
        return FunctionSink(
            lambda step, values: calls.append((name, step, dict(values))), lambda: calls.append((name, "closed"))
        )

    run, clock, console = RunFolder(tmp_path / "run").open(), Clock(), Console(enabled=False)
    recorder = Recorder(run, clock, BackgroundWriter(clock, console.warn), console, save_groups=False)
    recorder.sinks = [make("first"), make("second")]
    values = recorder.row(3, 8, {"train/groups_kept": Metric("sum", 5.0)})
    recorder.close()
    assert calls == [("first", 3, values), ("second", 3, values), ("second", "closed"), ("first", "closed")]
    assert list(run.rows()) == [{"step": 3, **values}] and values["train/groups_kept"] == 5.0
    run.close()


def test_a_sink_that_fails_is_a_warning_and_the_others_get_the_row(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("no server")

    warnings: list[str] = []
    console = Console(enabled=False)
    console.warn = warnings.append
    run, clock, logged = RunFolder(tmp_path / "run").open(), Clock(), []
    recorder = Recorder(run, clock, BackgroundWriter(clock, console.warn), console, save_groups=False)
    recorder.sinks = [
        FunctionSink(lambda step, _: logged.append(step), lambda: logged.append("closed")),
        FunctionSink(fail, fail),
        FunctionSink(lambda step, _: logged.append(step), lambda: logged.append("closed")),
    ]
    recorder.row(3, 8, {})
    recorder.close()
    run.close()
    assert logged == [3, 3, "closed", "closed"]
    assert [w.split(";")[0] for w in warnings] == ["the sink FunctionSink raised ConnectionError: no server"] * 2
    assert "step 3 is not logged" in warnings[0]


def test_a_sink_that_cannot_be_opened_is_named_and_the_open_ones_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: RunInfo) -> Sink:
        raise ConnectionError("no server")

    closed: list[str] = []
    monkeypatch.setattr(SINKS, "_items", dict(SINKS._items))
    gspo.sink("good")(lambda run: FunctionSink(lambda step, values: None, lambda: closed.append("good")))
    gspo.sink("refusing")(refuse)
    gspo.sink("empty")(lambda run: object())
    run = RunInfo(tmp_path, "project", "name", {})
    with pytest.raises(PluginError, match=r"trainer\.logger: refusing raised ConnectionError: no server"):
        open_sinks(["good", "refusing"], run)
    with pytest.raises(PluginError, match=r"trainer\.logger: empty: a sink of type object has no method log"):
        open_sinks(["good", "empty"], run)
    assert closed == ["good", "good"]
