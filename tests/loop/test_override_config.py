"""`model.override_config` is the config of every model of a run: trainer, workers, reference, critic, checkpoint."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo.checkpoint.resume import ResumeRefused
from gspo.checks.assess import assess
from gspo.loop.run import run_program as run_training
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.training.batch.batching import collate
from gspo.types import Group
from tests.loop.runs import rows, train, trainer
from tests.support.small_run import config, even_first_byte, final_state, make_model

OVERRIDE = "actor_rollout_ref.model.override_config={rope_theta: 50, rms_norm_eps: 0.3}"
VALUES = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rms_norm_eps": 0.3}
STEPS = "trainer.total_training_steps=2"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory, model):
    """The same model with the overrides in its config.json."""
    folder = tmp_path_factory.mktemp("rewritten")
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    values = {**json.loads((model / "config.json").read_text()), **VALUES}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("whole")
    train(folder, model, OVERRIDE, STEPS)
    return folder


def answers(t) -> list[Group]:
    prompts = [g.prompt for g in t.parts.sampler.next_batch()[0]]
    params = SamplingParams(6, temperature=1.0)
    return t.parts.engine.generate([GroupRequest(p, i, 4, 0, params, i) for i, p in enumerate(prompts)])


def plain_log_probs(folder, group: Group) -> torch.Tensor:
    """Log-probs of a group's tokens by plain transformers, one after another."""
    plain, found = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for rollout in group.rollouts:
        prompt = group.prompt.token_ids
        with torch.no_grad():
            scores = plain(torch.tensor([prompt + rollout.token_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(rollout.token_ids)[:, None]
        found.append(scores.log_softmax(-1).gather(-1, chosen)[:, 0])
    return torch.cat(found)


def test_trainer_and_engine_compute_what_transformers_does_with_that_config(tmp_path, model, rewritten):
    t = trainer(tmp_path, model, OVERRIDE)
    for group in answers(t):
        group = dataclasses.replace(
            group, rollouts=tuple(r.with_reward(even_first_byte(None, r.text)) for r in group.rollouts)
        )
        want = plain_log_probs(rewritten, group)
        batch = collate([group])
        trained = t.parts.roles.policy.log_probs(batch)[0][batch.mask.bool()]
        drawn = torch.tensor([p for r in group.rollouts for p in r.log_probs])
        assert torch.allclose(trained, want, atol=1e-5) and torch.allclose(drawn, want, atol=1e-5)
        assert (want - plain_log_probs(model, group)).abs().max() > 0.05
    t.close()


def test_a_run_is_that_of_a_model_whose_file_says_so(tmp_path, rewritten, whole):
    train(tmp_path, rewritten, STEPS)
    assert final_state(tmp_path / "run") == final_state(whole / "run")


def test_a_checkpoint_loads_plainly_as_the_model_that_was_trained(tmp_path, model):
    t = trainer(tmp_path, model, OVERRIDE, "trainer.total_training_steps=1")
    t.train_step()
    t.save()
    ids = torch.arange(20)[None] + 3
    with torch.no_grad():
        ours = t.parts.roles.policy.model(ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-000001")
        assert torch.equal(loaded.eval()(ids).logits, ours)
    t.close()


def test_a_resumed_run_is_the_whole_run_to_the_bit(tmp_path, model, whole):
    train(tmp_path, model, OVERRIDE, STEPS, stop_after=1)
    with pytest.raises(ResumeRefused, match=r"override_config\.rms_norm_eps: 0\.3 in the checkpoint, 'unset' now"):
        train(tmp_path, model, STEPS)
    train(tmp_path, model, OVERRIDE, STEPS)
    assert final_state(tmp_path / "run") == final_state(whole / "run")


def test_worker_processes_generate_with_the_same_model(tmp_path, model, whole):
    train(tmp_path, model, OVERRIDE, STEPS, f"{ROLLOUT}.num_workers=2")
    assert final_state(tmp_path / "run")["weights"] == final_state(whole / "run")["weights"]


def test_reference_and_critic_have_the_same_config(tmp_path, model):
    words = ("actor_rollout_ref.actor.use_kl_loss=true", "algorithm.adv_estimator=gae")
    t = trainer(tmp_path, model, OVERRIDE, *words)
    t.train_step()
    decoders = (t.parts.roles.reference.scorer.model, t.parts.roles.critic.model.decoder)
    assert [d.config.rms_norm_eps for d in decoders] == [0.3, 0.3]
    assert [float(d.base_model.rotary_emb.inv_freq[1]) for d in decoders] == pytest.approx([50 ** (-2 / 8)] * 2)
    t.close()
    assert rows(tmp_path)[0]["actor/kl_loss"] < 0.01


def test_adapters_are_merged_into_the_same_model(tmp_path, model):
    lora = "actor_rollout_ref.model.lora_rank=2"
    train(tmp_path, model, OVERRIDE, lora, STEPS, stop_after=1)
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step-000001" / "config.json").read_text())
    assert {name: saved[name] for name in VALUES} == VALUES
    assert train(tmp_path, model, OVERRIDE, lora, STEPS)["steps"] == 2


def test_an_evaluation_is_that_of_the_overridden_model(tmp_path, model, rewritten):
    found = [
        assess(config(tmp_path, folder, *words).config, reward_fn=even_first_byte).to_dict()["greedy"]
        for folder, words in ((model, [OVERRIDE]), (rewritten, []), (model, []))
    ]
    assert found[0] == found[1] != found[2]


def test_special_tokens_end_responses_in_workers_too(tmp_path, model):
    stops = list(range(40, 140))
    word = f"actor_rollout_ref.model.override_config={{eos_token_id: {stops}}}"
    for number, words in enumerate(([], [f"{ROLLOUT}.num_workers=2"])):
        t = trainer(tmp_path / str(number), model, word, *words)
        ended = [r.token_ids for g in answers(t) for r in g.rollouts if r.finish_reason == "stop"]
        t.close()
        assert any(ids[-1] in stops for ids in ended) and not any(set(ids[:-1]) & set(stops) for ids in ended)


def test_what_does_not_fit_ends_with_code_2_and_the_key(tmp_path, model, capsys):
    for value, message in (("hidden_size: 16", "another shape"), ("rms_norm_esp: 1", "did you mean rms_norm_eps?")):
        cfg = config(tmp_path, model, f"actor_rollout_ref.model.override_config={{{value}}}")
        assert run_training(cfg, reward_fn=even_first_byte) == 2
        shown = capsys.readouterr().err
        assert "actor_rollout_ref.model.override_config" in shown and message in shown
