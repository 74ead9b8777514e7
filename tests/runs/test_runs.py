"""Metrics and their reductions, the run folder, sinks and the console."""

from __future__ import annotations

import io
import json
import sys
import types

import pytest
import torch

from gspo.loop.trainer import Trainer
from gspo.metrics import Metric, merge_metrics
from gspo.runs.clock import Clock
from gspo.runs.console import Console
from gspo.runs.folder import RunFolder, RunLocked
from gspo.runs.group_log import GroupLog, read_groups
from gspo.runs.sinks import MissingExtra, RunInfo, open_sinks
from gspo.types import Group, Prompt, Reward, Rollout
from tests.support.small_run import config, make_model


def test_a_metric_merges_by_its_own_rule():
    parts = [
        {"m": Metric.mean(6.0, 3), "s": Metric("sum", 1.0), "lo": Metric("min", 2.0), "hi": Metric("max", 2.0)},
        {
            "m": Metric.mean(torch.tensor(2.0), 1),
            "s": Metric("sum", 4.0),
            "lo": Metric("min", -1.0),
            "hi": Metric("max", 9.0),
        },
    ]
    merged: dict[str, Metric] = {}
    for part in parts:
        merge_metrics(merged, part)
    assert {k: v.result() for k, v in merged.items()} == {"m": 2.0, "s": 5.0, "lo": -1.0, "hi": 9.0}
    assert Metric("last", 1.0).merge(Metric("last", 7.0)).result() == 7.0
    assert Metric.mean(0.0, 0.0).result() == 0.0
    for kind, wanted in (("min", -2.0), ("max", 3.0)):  # numbers and tensors of a device mix
        for values in ((3.0, -2.0), (-2.0, 3.0)):
            for first, second in ((float, float), (torch.tensor, torch.tensor), (float, torch.tensor)):
                assert Metric(kind, first(values[0])).merge(Metric(kind, second(values[1]))).result() == wanted
    with pytest.raises(AssertionError):
        Metric("sum", 1.0).merge(Metric("max", 1.0))


def test_stages_add_up_and_nest():
    clock = Clock()
    with clock("outer"):
        assert clock.stage == "outer"
        with clock("inner"):
            assert clock.stage == "inner"
        assert clock.stage == "outer"
    metrics = {k: v.result() for k, v in clock.metrics().items()}
    assert metrics["timing_s/outer"] >= metrics["timing_s/inner"] >= 0
    assert metrics["timing_s/step"] >= metrics["timing_s/outer"]


def test_rows_survive_a_half_written_line_and_are_cut_after_a_step(tmp_path):
    run = RunFolder(tmp_path / "run").open()
    for step in range(4):
        run.append_metrics(step, {"x": float(step), "bad": float("nan")})
        for folder in (run.groups, run.evals):
            (folder / f"step-{step:06d}.jsonl.gz").write_bytes(b"")
    with open(run.metrics_file, "a") as f:
        f.write('{"step": 4, "x"')
    assert [row["x"] for row in run.rows()] == [0.0, 1.0, 2.0, 3.0]
    assert next(run.rows())["bad"] is None
    assert run.cut_after(1) == 2
    assert [row["step"] for row in run.rows()] == [0, 1]
    for folder in (run.groups, run.evals):
        assert sorted(p.name for p in folder.iterdir()) == ["step-000000.jsonl.gz", "step-000001.jsonl.gz"]
    run.amend_metrics(1, {"val": 0.5})
    assert [row.get("val") for row in run.rows()] == [None, 0.5]
    run.close()


def test_the_lock_names_its_holder_and_ends_with_close(tmp_path):
    first = RunFolder(tmp_path / "run").open()
    second = RunFolder(tmp_path / "run")
    assert second.locked()
    with pytest.raises(RunLocked, match="process"):
        second.open()
    first.close()
    assert not second.locked()
    second.open().close()


def group(submission: int) -> Group:
    prompt = Prompt("p/1", ({"role": "user", "content": "1+1="},), (1, 2), "arithmetic", "2")
    rollouts = (
        Rollout((5, 6), (-0.5, -0.25), (1, 1), (0, 0), "stop", "2", Reward(1.0, 1.0, {"style": 0.5})),
        Rollout((7,), (-1.0,), (1,), (0,), "length", "<b>", None, "it raised"),
    )
    return Group(prompt, rollouts, submission, 0)


def test_groups_are_written_once_a_step_in_order(tmp_path):
    log = GroupLog(tmp_path)
    log.add(group(9), "all_wrong")
    trained = {3: [{"advantage": 0.5, "ratio": 1.0}, {"advantage": -0.5, "ratio": 1.0}]}
    log.write(1, trained, log.take(kept=[group(3)]))
    kept, dropped = read_groups(tmp_path / "step-000001.jsonl.gz")
    assert (kept["submission"], kept["fate"], dropped["fate"]) == (3, "kept", "all_wrong")
    first, second = kept["responses"]
    assert (first["score"], first["advantage"], first["extra"]) == (1.0, 0.5, {"style": 0.5})
    assert (second["score"], second["failure"], second["text"]) == (None, "it raised", "<b>")
    assert "advantage" not in dropped["responses"][0]
    log.write(2, {}, log.take())
    assert list(read_groups(tmp_path / "step-000002.jsonl.gz")) == []


def test_a_group_that_was_trained_on_after_all_is_written_once(tmp_path):
    limit = ("algorithm.filter_groups.on_limit=keep_unfiltered", "algorithm.filter_groups.max_num_gen_batches=2")
    settings = config(tmp_path, make_model(tmp_path / "model"), "trainer.total_training_steps=1", *limit)
    Trainer(settings, reward_fn=lambda prompt, response: 1.0, console=Console(enabled=False)).fit()
    groups = list(read_groups(tmp_path / "run" / "groups" / "step-000001.jsonl.gz"))
    assert len({g["submission"] for g in groups}) == len(groups)
    kept = [g for g in groups if g["fate"] == "kept"]
    (row,) = (row for row in RunFolder(tmp_path / "run").rows() if row["step"] == 1)
    assert len(kept) == row["train/groups_unfiltered"] == row["train/groups_trained"] > 0
    assert all("advantage" in r for g in kept for r in g["responses"])


def test_tensorboard_gets_every_finite_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(["console", "tensorboard"], RunInfo(tmp_path, "p", "r", {}))
    sink.log(1, {"a/b": 0.5, "nan": float("nan")})
    sink.log(2, {"a/b": 0.75})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("a/b")] == [(1, 0.5), (2, 0.75)]
    assert "nan" not in events.Tags()["scalars"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_are_called_alike(tmp_path, monkeypatch, name):
    calls = []
    module = types.ModuleType(name)
    module.init = lambda **kw: calls.append(("init", kw))
    module.log = lambda values, step: calls.append(("log", values, step))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, module)
    (sink,) = open_sinks([name], RunInfo(tmp_path, "p", "r", {"seed": 1}))
    sink.log(3, {"x": 1.0})
    sink.close()
    assert calls == [
        ("init", {"project": "p", "name": "r", "config": {"seed": 1}}),
        ("log", {"x": 1.0}, 3),
        ("finish",),
    ]


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gspo\[wandb\]'"):
        open_sinks(["wandb"], RunInfo(tmp_path, "p", "r", {}))


def test_plain_lines_when_not_a_terminal(capsys):
    console = Console()
    console.step(2, 10, {"critic/score_all/mean": 0.5, "timing_s/step": 1.0, "val-core/x/acc/mean@1": 0.25})
    console.side_by_side("answers", ["before", "after"], [["[red]1[/red]", "2"]])
    said = capsys.readouterr().out
    assert "step 2/10" in said and "reward 0.500" in said and "held-out 0.250" in said
    assert "[red]1[/red]" in said  # a model's text is shown, never interpreted


def test_a_terminal_gets_a_table_every_few_steps(monkeypatch):
    out = io.StringIO()
    console = Console(every=2)
    console.rich.file = out
    console.rich._force_terminal = True
    for step in (1, 2):
        console.step(step, 4, {"critic/score_all/mean": 0.5, "timing_s/step": 1.0})
    console.stop()
    assert "reward" in out.getvalue() and "0.500" in out.getvalue()


def test_metric_rows_are_json(tmp_path):
    run = RunFolder(tmp_path / "run").open()
    run.append_metrics(1, {"a": 1.5, "b": float("inf")})
    assert json.loads(run.metrics_file.read_text()) == {"step": 1, "a": 1.5, "b": None}
    run.close()
