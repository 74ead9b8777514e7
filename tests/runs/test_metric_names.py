"""Names of held-out metrics: data sources with slashes, and the same rule in the pages of a report."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

import gspo.report
from gspo.loop import ending
from gspo.loop.counters import Counters
from gspo.runs.console import Console
from gspo.runs.folder import RunFolder
from gspo.runs.metric_names import (
    ACCURACY,
    accuracy_interval,
    aux_name,
    core_name,
    held_out,
    held_out_accuracy,
    held_out_score,
    held_out_source,
    is_accuracy,
)

SOURCES = ("arithmetic", "openai/gsm8k", "a/b/c", "acc/mean@2", "x/acc")
ROW = {
    "val-core/openai/gsm8k/acc/mean@4": 0.25,
    "val-core/openai/gsm8k/acc/best@4": 1.0,
    "val-core/openai/gsm8k/reward/mean@4": -3.0,
    "val-aux/openai/gsm8k/acc/ci_low": 0.125,
    "val-aux/openai/gsm8k/acc/ci_high": 0.5,
    "critic/score_all/mean": 0.75,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_name_gives_back_its_source_and_measure(source):
    for measure in ("acc/mean@1", "acc/best@16", "reward/maj@4"):
        assert held_out(core_name(source, measure)) == (source, measure)
        assert is_accuracy(core_name(source, measure)) == (measure == "acc/mean@1")
    for measure in ("acc/ci_low", "acc/ci_high", "response_length/mean", "reward_failures"):
        assert held_out(aux_name(source, measure)) == (source, measure)
        assert not is_accuracy(aux_name(source, measure))


@pytest.mark.parametrize("name", ["critic/score/mean", "val-core/", "val-core/acc/mean@1", "actor/entropy"])
def test_other_metrics_have_no_source(name):
    assert held_out(name) is None and held_out_source(name) is None and not is_accuracy(name)


def test_the_accuracy_of_a_row_is_the_mean_over_its_sources():
    assert held_out_accuracy(ROW) == held_out_score(ROW) == 0.25
    assert held_out_accuracy({**ROW, "val-core/math/acc/mean@1": 0.75}) == 0.5
    assert held_out_accuracy({"val-core/math/reward/mean@1": -2.0}) is None
    assert held_out_score({"val-core/math/reward/mean@1": -2.0}) == -2.0
    assert held_out_accuracy({"val-core/math/acc/mean@1": None}) is None


def test_the_interval_of_a_row_is_that_of_its_only_source():
    assert accuracy_interval(ROW) == (0.125, 0.5)
    assert accuracy_interval({**ROW, "val-aux/math/acc/ci_low": 0.1}) is None
    assert accuracy_interval({"val-aux/math/acc/ci_low": 0.1}) is None


def test_the_console_and_the_result_know_a_source_with_a_slash(tmp_path):
    console = Console()
    console.rich.file = io.StringIO()
    console.step(3, 8, ROW)
    assert "held-out 0.250" in console.rich.file.getvalue()
    run = RunFolder(tmp_path / "run").open()
    run.append_metrics(0, {**ROW, "val-core/openai/gsm8k/acc/mean@4": 0.125})
    run.append_metrics(1, ROW)
    ending.finished(Console(enabled=False), run, ending.result(run, 1, Counters()), num_examples=0)
    run.close()
    result = json.loads(run.result_file.read_text())
    assert (result["start_acc"], result["final_acc"]) == (0.125, 0.25)
    assert result["final_ci"] == [0.125, 0.5]
    card = (run.path / "RUN.md").read_text()
    assert "Measured on held-out questions of openai/gsm8k only." in card


def test_the_pages_read_names_by_the_same_rule():
    script = (Path(gspo.report.__file__).parent / "static" / "core.js").read_text()
    pattern = re.search(r"G\.accuracySource = .*?/\^(.+?)\$/\.exec", script, re.DOTALL)
    assert pattern is not None and pattern[1].replace("\\/", "/") == ACCURACY
