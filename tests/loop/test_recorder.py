"""The recorder: what a step writes, in which order, and that a sink or a lost group spoils nothing."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.loop.recorder import Recorder
from gspo.metrics import Metric
from gspo.runs.clock import Clock
from gspo.runs.folder import RunFolder
from gspo.runs.group_log import read_groups
from tests.loop.scripted_run import Heard
from tests.loop.test_step_records import trained, two_groups


class Sink:
    def __init__(self, events: list, name: str, *, fails: bool = False) -> None:
        self.events, self.name, self.fails = events, name, fails

    def log(self, step, values) -> None:
        self.events.append((self.name, step, values["x"]))
        if self.fails:
            raise ValueError("no network")

    def close(self) -> None:
        self.events.append((self.name, "closed"))
        if self.fails:
            raise ValueError("no network")


@pytest.fixture
def made(tmp_path):
    run, clock, console = RunFolder(tmp_path / "run").open(), Clock(), Heard()
    writer = BackgroundWriter(clock, console.warn)
    yield SimpleNamespace(run=run, clock=clock, console=console, writer=writer)
    writer.close()
    run.close()


def make(made, **options) -> Recorder:
    return Recorder(made.run, made.clock, made.writer, made.console, **{"save_groups": True, **options})


def test_a_row_has_the_times_of_its_step_and_the_clock_starts_again(made, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gspo.runs.clock.time.perf_counter", lambda: now[0])
    shown = []
    made.console.step = lambda step, total, values: shown.append((step, total, values["x"]))
    for overlapped in (False, True):
        recorder = make(made, overlapped=overlapped)
        made.clock.reset()
        with made.clock("gen"):
            now[0] += 2.0
        now[0] += 3.0
        tokens = {"x": Metric.mean(6.0, 4), "train/generated_tokens": Metric("sum", 10)}
        values = recorder.row(7, 9, tokens)
        assert (values["x"], values["timing_s/gen"], values["timing_s/step"]) == (1.5, 2.0, 5.0)
        assert values["perf/throughput"] == 2.0
        assert values.get("perf/rollout_throughput") == (None if overlapped else 5.0)
        assert made.clock.seconds == {} and made.clock.started == now[0]
    assert shown == [(7, 9, 1.5)] * 2
    rows = [json.loads(line) for line in made.run.metrics_file.read_text().splitlines()]
    assert rows[1] == {"step": 7, **values}


def test_a_sink_that_fails_is_a_warning_and_the_others_go_on(made):
    events: list = []
    recorder = make(made)
    recorder.sinks = [Sink(events, "a"), Sink(events, "b", fails=True), Sink(events, "c")]
    recorder.row(1, 2, {"x": Metric("last", 4.0)})
    assert events == [("a", 1, 4.0), ("b", 1, 4.0), ("c", 1, 4.0)]
    assert [row["x"] for row in made.run.rows()] == [4.0]
    recorder.close()
    assert events[3:] == [("c", "closed"), ("b", "closed"), ("a", "closed")]
    assert made.console.lines == [
        "the sink Sink raised ValueError: no network; step 1 is not logged, training goes on",
        "the sink Sink raised ValueError: no network; it is not closed, training goes on",
    ]


def test_groups_are_written_with_the_step_that_judged_them(made):
    batch = two_groups()
    recorder, done, other = make(made), trained(batch), dataclasses.replace(batch[1], submission=2)
    for fate in ("kept", "unfiltered", "all_right"):
        recorder.group(other, fate, 0)
    recorder.groups(1, done, str)
    made.writer.wait()
    found = list(read_groups(made.run.groups / "step-000001.jsonl.gz"))
    assert [(g["submission"], g["fate"]) for g in found] == [(2, "all_right"), (5, "kept"), (9, "kept")]
    assert found[1]["responses"][1]["tokens"] == ["3", "4"] and found[1]["responses"][0]["advantage"] == 1.0
    recorder.group(other, "all_wrong", 0)
    recorder.restart()  # the run goes back to a checkpoint
    recorder.groups(2, done, str)
    made.writer.wait()
    assert [g["fate"] for g in read_groups(made.run.groups / "step-000002.jsonl.gz")] == ["kept"] * 2


def test_without_save_groups_none_are_written(made):
    recorder = make(made, save_groups=False)
    recorder.group(two_groups()[1], "all_wrong", 0)
    recorder.groups(1, trained(two_groups()), str)
    made.writer.wait()
    assert list(made.run.groups.iterdir()) == []
