"""What cannot be trained ends with a message and the documented exit code, not with a traceback."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM, Llama4ForCausalLM, Llama4TextConfig

from gspo.loop.run import exit_code
from gspo.loop.run import run_program as train
from gspo.loop.trainer import Trainer
from gspo.models.load import load_tokenizer
from gspo.runs.console import Console
from tests.support.small_run import config, even_first_byte, make_model


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


def test_lengths_beyond_the_models_positions_are_refused(tmp_path, model, capsys):
    code = train(config(tmp_path, model, "data.max_response_length=200"), reward_fn=even_first_byte)
    assert code == 2
    message = capsys.readouterr().err
    assert "max_position_embeddings=128" in message and "data.max_response_length" in message


def test_a_model_of_nans_is_refused_for_what_it_is(tmp_path, model, capsys):
    weights = load_file(model / "model.safetensors")
    nans = {name: torch.full_like(t, torch.nan) for name, t in weights.items()}
    save_file(nans, model / "model.safetensors", metadata={"format": "pt"})
    assert train(config(tmp_path, model), reward_fn=even_first_byte) == 2
    assert "logits are not finite" in capsys.readouterr().err


def test_weights_that_turn_into_nans_end_as_bad_numbers(tmp_path, model):
    trainer = Trainer(
        config(tmp_path, model, "trainer.val_before_train=false"),
        reward_fn=even_first_byte,
        console=Console(enabled=False),
    )
    with torch.no_grad():
        for weight in trainer.parts.policy.model.parameters():
            weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="log-probs that are not finite") as caught:
        trainer.fit()
    assert exit_code(caught.value) == 4


def test_a_filter_metric_that_the_reward_does_not_return_is_refused_with_a_remedy(tmp_path, model, capsys):
    metric = "algorithm.filter_groups.metric=acc"
    code = train(config(tmp_path, model, metric), reward_fn=lambda prompt, response: 1.0)
    assert code == 2
    message = capsys.readouterr().err
    assert "algorithm.filter_groups.metric='acc'" in message and "{'score': …, 'acc': …}" in message


def test_a_warning_of_the_config_says_so_once(tmp_path, model, capsys):
    alone = "actor_rollout_ref.actor.ppo_mini_batch_size=4"  # one update a rollout batch
    train(config(tmp_path, model, alone, "data.max_response_length=200"), reward_fn=even_first_byte)
    shown = capsys.readouterr()
    assert "warning: actor_rollout_ref.actor.ppo_mini_batch_size" in shown.out + shown.err
    assert "warning: warning:" not in shown.out + shown.err


def make_family(folder, family):
    """A small model of a family that cannot be trained, with the embedded model's tokenizer."""
    tokenizer = load_tokenizer("embedded")
    shared = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shared |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if family == "bloom":
        made = BloomForCausalLM(BloomConfig(**shared))
    else:
        sizes = {"intermediate_size": 32, "intermediate_size_mlp": 64, "head_dim": 8, "num_key_value_heads": 2}
        made = Llama4ForCausalLM(Llama4TextConfig(**shared, **sizes, num_local_experts=2, moe_layers=[1]))
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "reason"),
    [("bloom", "BloomForCausalLM has no position_ids"), ("llama4", "Llama4ForCausalLM cannot be trained")],
)
def test_families_that_cannot_be_trained_are_named_with_the_reason(tmp_path, capsys, family, reason):
    made = make_family(tmp_path / family, family)
    assert train(config(tmp_path, made), reward_fn=even_first_byte) == 2
    assert reason in capsys.readouterr().err
