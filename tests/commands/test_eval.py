"""`gspo eval`: the numbers of the evaluator, for a folder as for the embedded model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gspo.checks.assess import assess
from gspo.cli import app
from gspo.config import load
from tests.support.small_run import even_first_byte, make_model

ONE_THREAD = "trainer.num_threads=1"


def run(*words: str):
    return CliRunner().invoke(app, ["eval", *words, ONE_THREAD])


def test_json_holds_greedy_and_sampled_measures_of_the_data_source():
    result = run("embedded", "--limit", "12", "--n", "2", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    greedy, sampled = facts["greedy"], facts["sampled"]["sources"]["arithmetic"]
    values = greedy["sources"]["arithmetic"]
    assert facts["num_questions"] == 12 and values["acc/mean@1"] == greedy["accuracy"]
    assert values["acc/ci_low"] < values["acc/mean@1"] < values["acc/ci_high"]
    assert {"acc/mean@2", "acc/best@2", "acc/maj@2", "reward/mean@2"} <= set(sampled)
    assert sampled["acc/best@2"] >= sampled["acc/mean@2"]


def test_words_name_the_model_and_the_interval():
    text = run("embedded", "--limit", "4").stdout
    assert text.startswith("embedded on arithmetic: 4 questions") and "mean@1" in text and "(95 % " in text
    assert "sampled" not in text


def test_a_saved_folder_is_evaluated_as_its_reward_says(tmp_path):
    model = make_model(tmp_path / "model")
    words = [f"actor_rollout_ref.model.path={model}", "data.val_files=arithmetic", "data.num_val_samples=16"]
    words += ["data.max_prompt_length=24", "data.max_response_length=4", ONE_THREAD]
    done = assess(load(None, words).config, num_samples=4, reward_fn=even_first_byte)
    assert done.sampled is not None
    answers = [r for g in done.sampled.groups for r in g.rollouts]
    right = [bool(r.text) and ord(r.text[0]) % 2 == 0 for r in answers]
    assert len(answers) == 64 and done.sampled.accuracy == pytest.approx(sum(right) / 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("embedded", "--data", "no-such-task"), "no-such-task: is not a dataset"),
        (("./no-folder",), "no such folder"),
        (("embedded", "rollout.n=nine"), "rollout.n"),
    ],
)
def test_bad_input_is_named_and_exits_2(words, message):
    result = run(*words)
    assert result.exit_code == 2 and message in result.output


def test_a_broken_model_folder_exits_2_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    result = run(str(tmp_path / "empty"), "--limit", "2")
    assert result.exit_code == 2 and str(tmp_path / "empty") in result.output
