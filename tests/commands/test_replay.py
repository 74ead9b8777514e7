"""`gspo replay`: the trained loss gives back what training recorded; other losses differ as their formulas say."""

from __future__ import annotations

import gzip
import json
import os
import shutil

import pytest
import torch
from typer.testing import CliRunner

from gspo.checks.replay import Replay, ReplayError
from gspo.cli import app
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from gspo.runs.group_log import read_groups
from tests.support.small_run import config, even_first_byte, make_model

LOSSES = ["gspo", "gspo_token", "vanilla", "cispo", "sapo", "geo_mean"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps with two mini-batches each, a large rate, and clipping."""
    folder = tmp_path_factory.mktemp("replay")
    model = make_model(folder / "model")
    words = ("trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr=3e-3")
    Trainer(config(folder, model, *words), reward_fn=even_first_byte, console=Console(enabled=False)).fit()
    return folder / "run"


@pytest.fixture(scope="module")
def rows(run):
    return {r["step"]: r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def test_the_trained_loss_gives_back_the_recorded_clip_fraction_and_loss(run, rows):
    replay = Replay(run)
    assert replay.steps() == [1, 2, 3] and replay.space == "log-probs"
    clipped = 0.0
    for step in replay.steps():
        shadow = replay.shadows(step, [])[0]
        assert (shadow.loss, shadow.cosine) == ("gspo", pytest.approx(1.0))
        assert shadow.clip_fraction == pytest.approx(rows[step]["actor/pg_clipfrac"])
        assert shadow.value == pytest.approx(rows[step]["actor/pg_loss"], abs=2e-5)
        clipped += shadow.clip_fraction
    assert clipped > 0  # otherwise this run shows nothing


def test_the_gradient_is_that_of_the_formula(run):
    """Unclipped sequences: -(1/N) s_i A_i / |y_i| on each token; clipped ones 0."""
    total = 0.0
    groups = [g for g in read_groups(run / "groups" / "step-000002.jsonl.gz") if g["fate"] == "kept"]
    groups.sort(key=lambda g: g["submission"])
    for start in (0, 2):
        responses = [r for g in groups[start : start + 2] for r in g["responses"]]
        for r in responses:
            log_ratio = torch.tensor(r["new_log_probs"]).double() - torch.tensor(r["old_log_probs"]).double()
            ratio, a, size = float(log_ratio.mean().exp()), r["advantage"], len(log_ratio)
            clipped = (a > 0 and ratio > 1.004) or (a < 0 and ratio < 0.997)
            total += 0.0 if clipped else (ratio * a / size / len(responses)) ** 2 * size
    shadow = Replay(run).shadows(2, [])[0]
    assert shadow.grad_norm == pytest.approx(total**0.5, rel=1e-6)


def test_other_losses_differ_as_they_must(run):
    replay = Replay(run)
    for step in (1, 2, 3):
        by_name = {s.loss: s for s in replay.shadows(step, LOSSES)}
        assert list(by_name) == LOSSES
        token = by_name["gspo_token"]
        assert token.cosine is not None and by_name["cispo"].cosine is not None
        assert 0 < by_name["cispo"].cosine < 1
        # With its own narrow default range GSPO-token clips at least what the run's wider range clips.
        assert token.clip_fraction >= by_name["gspo"].clip_fraction
        assert by_name["vanilla"].clip_fraction <= by_name["gspo"].clip_fraction


def test_a_checkpoint_takes_the_gradient_to_the_parameters(run):
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    replay = Replay(run, checkpoint)
    shadows = {s.loss: s for s in replay.shadows(3, ["vanilla"])}
    assert replay.space == "parameters"
    assert shadows["gspo"].cosine == pytest.approx(1.0)
    assert shadows["vanilla"].cosine is not None and 0 < shadows["vanilla"].cosine < 1
    assert shadows["gspo"].grad_norm > 0


def test_the_command_prints_means_and_json(run):
    words = ["replay", str(run), "--losses", "vanilla,cispo", "--steps", "2-3"]
    text = CliRunner().invoke(app, words).stdout
    assert "trained with gspo" in text and "with respect to log-probs" in text and "2 steps" in text
    facts = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert facts["gradients_of"] == "log-probs" and set(facts["mean"]) == {"gspo", "vanilla", "cispo"}
    assert [s["step"] for s in facts["steps"]] == [2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--losses", "gsop"], "did you mean 'gspo'"),
        (["--steps", "9"], "recorded are 1 to 3"),
        (["--steps", "x"], "expected A or A-B"),
    ],
)
def test_bad_words_are_named_and_exit_2(run, words, message):
    result = CliRunner().invoke(app, ["replay", str(run), *words])
    assert result.exit_code == 2 and message in result.output


def test_a_folder_without_a_run_or_groups_is_refused(tmp_path, run):
    with pytest.raises(ReplayError, match="not a run folder"):
        Replay(tmp_path)
    with pytest.raises(ReplayError, match="no such file"):
        Replay(run).shadows(7, [])


def test_shuffled_mini_batches_are_those_that_were_trained(tmp_path, monkeypatch):
    words = ("actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.loss_agg_mode=token-mean")
    words += ("data.max_response_length=80", "trainer.total_training_steps=3")  # answers of many lengths
    cfg = config(tmp_path, make_model(tmp_path / "model"), *words)
    Trainer(cfg, reward_fn=even_first_byte, console=Console(enabled=False)).fit()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    want = {row["step"]: row["actor/pg_loss"] for row in lines if row["step"] > 0}
    replay = Replay(tmp_path / "run")
    got = {step: replay.shadows(step, [])[0].value for step in want}
    assert got == pytest.approx(want, abs=2e-5)
    monkeypatch.setattr("gspo.checks.replay.order_seed", lambda config, step: None)
    neighbours = {step: replay.shadows(step, [])[0].value for step in want}
    assert neighbours != pytest.approx(want, abs=2e-5)  # another cut has other denominators


def _damaged(run, tmp_path, change):
    """A copy of the run in which `change` was applied to the lines of step 2."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    file = copy / "groups" / "step-000002.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    file.write_bytes(gzip.compress("\n".join(change(lines)).encode() + b"\n"))
    return copy, file


def _first_trained(lines, change):
    """Change the first response of the first trained group; returns the lines and its number."""
    for number, line in enumerate(lines):
        group = json.loads(line)
        if "new_log_probs" in group["responses"][0]:
            change(group["responses"][0], group)
            return [*lines[:number], json.dumps(group), *lines[number + 1 :]], number + 1
    raise AssertionError("no trained group")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: [lines[0], lines[1][:-40], *lines[2:]], ":2: is not JSON"),
        (lambda lines: [lines[0], "[" * 20_000, *lines[2:]], ":2: is nested deeper"),
        (lambda lines: [lines[0], "5", *lines[2:]], ":2: is not a group"),
    ],
)
def test_a_damaged_line_is_named(run, tmp_path, change, reason):
    copy, file = _damaged(run, tmp_path, change)
    done = CliRunner().invoke(app, ["replay", str(copy)])
    assert done.exit_code == 2 and f"error: {file}{reason}" in done.output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r, g: r.update(log_probs=r["log_probs"][:-1]), "numbers in `log_probs`"),
        (lambda r, g: r.update(new_log_probs=["x"]), "no list of numbers `new_log_probs`"),
        (lambda r, g: r.pop("old_log_probs"), "no list of numbers `old_log_probs`"),
        (lambda r, g: r.update(advantage=None), "no number `advantage`"),
        (lambda r, g: r.update(score="high"), "no number `score`"),
        (lambda r, g: g.pop("submission"), "no whole number `submission`"),
        (lambda r, g: g["responses"].append(7), "is not an object"),
    ],
)
def test_a_group_that_lacks_what_a_loss_needs_is_named_by_its_line(run, tmp_path, change, reason):
    places = []

    def apply(lines):
        out, number = _first_trained(lines, change)
        places.append(number)
        return out

    copy, file = _damaged(run, tmp_path, apply)
    done = CliRunner().invoke(app, ["replay", str(copy)])
    assert done.exit_code == 2 and f"error: {file}:{places[0]}: " in done.output and reason in done.output


def test_a_group_file_that_is_cut_short_or_no_file_is_named(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    file = copy / "groups" / "step-000002.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-20])
    done = CliRunner().invoke(app, ["replay", str(copy)])
    assert done.exit_code == 2 and f"error: {file}: is cut short" in done.output
    file.unlink()
    os.mkfifo(file)
    done = CliRunner().invoke(app, ["replay", str(copy)])
    assert done.exit_code == 2 and f"error: {file}: is a named pipe" in done.output
