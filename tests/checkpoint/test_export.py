"""What a run leaves: a folder plain `transformers` loads, and curves that do not depend on micro-batches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.build.data.training_data import load_prompts
from gspo.data.rows import DataError
from gspo.loop.trainer import Trainer
from gspo.rollout.engine import GroupRequest, SamplingParams
from tests.loop.runs import rows, train, trainer
from tests.support.small_run import config, even_first_byte, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def test_the_saved_folder_gives_the_same_greedy_answers_in_plain_transformers(tmp_path, model):
    t = trainer(tmp_path, model, "trainer.total_training_steps=2")
    prompts = load_prompts(t.config, t.parts.tokenizer, "val")[:6]
    t.fit()
    requests = [GroupRequest(p, i, 1, 2, SamplingParams(6, temperature=0.0), 0) for i, p in enumerate(prompts)]
    ours = [g.rollouts[0].token_ids for g in t.parts.engine.generate(requests)]
    folder = tmp_path / "run" / "checkpoints" / "step-000002"
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, tokens in zip(prompts, ours):
        ids = tokenizer.apply_chat_template(
            [dict(m) for m in prompt.messages], add_generation_prompt=True, return_dict=False
        )
        out = loaded.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :]
        assert tuple(out.tolist()) == tokens


def test_the_curves_do_not_depend_on_the_micro_batches(tmp_path, model):
    for name, cut in {"wide": "16384", "narrow": "48"}.items():
        train(tmp_path / name, model, f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={cut}")
    wide, narrow = rows(tmp_path / "wide"), rows(tmp_path / "narrow")
    for a, b in zip(wide, narrow, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/seq_importance_ratio", "critic/score_all/mean"):
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-5), (a["step"], name)


def test_sampled_evaluation_reports_mean_best_and_majority(tmp_path, model):
    val = "actor_rollout_ref.rollout.val_kwargs"
    train(tmp_path, model, f"{val}.n=4", f"{val}.do_sample=true", "trainer.total_training_steps=1")
    row = rows(tmp_path)[-1]
    core = "val-core/arithmetic/acc"
    assert 0 <= row[f"{core}/mean@4"] <= row[f"{core}/best@2"] <= row[f"{core}/best@4"] <= 1
    assert f"{core}/maj@4" in row
    low, high = row["val-aux/arithmetic/acc/ci_low"], row["val-aux/arithmetic/acc/ci_high"]
    assert low <= row[f"{core}/mean@4"] <= high


def test_a_start_that_fails_gives_the_run_folder_back(tmp_path, model):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match=r"no rows|empty"):
        trainer(tmp_path / "runs", model, f"data.train_files={empty}")
    trainer(tmp_path / "runs", model).close()


def test_a_refused_start_leaves_no_folder(tmp_path, model):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError):
        trainer(tmp_path / "runs", model, f"data.train_files={empty}")
    assert not (tmp_path / "runs" / "run").exists()


def test_a_longer_run_is_unfinished_again(tmp_path, model):
    train(tmp_path, model, "trainer.total_training_steps=1")
    assert (tmp_path / "run" / "result.json").exists()
    result = train(tmp_path, model, "trainer.total_training_steps=3", stop_after=2)
    assert result["steps"] == 2
    assert not (tmp_path / "run" / "result.json").exists()


def test_failed_rewards_are_said(tmp_path, model, capsys):
    def sometimes(prompt, response):
        if response.index == 1:
            raise ZeroDivisionError("half a pear")
        return even_first_byte(prompt, response)

    resolved = config(tmp_path, model, "trainer.total_training_steps=2", "reward.max_failure_rate=1.0")
    Trainer(resolved, reward_fn=sometimes).fit()
    said = capsys.readouterr().out
    assert all(r["train/reward_failures"] > 0 for r in rows(tmp_path))
    assert "rewards failed and are missing" in said and "half a pear" in said
