"""`gspo replay`: the trained loss gives back what training recorded; other losses differ as their formulas say."""

from __future__ import annotations

import json

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
