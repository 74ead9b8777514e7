"""Overrides of a model's config act as if they stood in its config.json, or are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

from gspo.models import embedded_path
from gspo.models.load import ModelError, load_config, load_model
from gspo.models.overrides import KEY, changed_values, overridden

IDS = torch.tensor([[12, 40, 7, 99, 3, 3, 18, 200]])
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def rewritten(folder: Path, **values: Any) -> Path:
    """A copy of the embedded model whose config.json holds these values; None removes one."""
    shutil.copytree(embedded_path(), folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize(
    ("overrides", "file"),
    [
        ({"rms_norm_eps": 0.5}, {"rms_norm_eps": 0.5}),
        ({"rms_norm_eps": 1}, {"rms_norm_eps": 1.0}),
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 2}),
        ({"hidden_act": "gelu"}, {"hidden_act": "gelu"}),
        ({"rope_theta": 500}, THETA),
        ({"rope_parameters": {"rope_theta": 500.0}}, THETA),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        ),
        ({"rope_theta": 500.0, "rms_norm_eps": 0.5}, {**THETA, "rms_norm_eps": 0.5}),
    ],
)
def test_the_model_is_the_one_of_a_config_file_that_says_so(tmp_path, overrides, file):
    ours = load_model("embedded", overrides=overrides)
    plain = AutoModelForCausalLM.from_pretrained(rewritten(tmp_path / "file", **file))
    assert torch.equal(logits(ours), logits(plain))
    assert (logits(ours) - logits(load_model("embedded"))).abs().max() > 0.01
    ours.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(ours))
    again = load_model(str(tmp_path / "saved"), overrides=overrides)  # as a resumed run does
    assert torch.equal(logits(again), logits(ours))


def test_a_file_with_the_older_names_of_rotary_parameters(tmp_path):
    scaling = {"type": "linear", "factor": 8.0}
    folder = rewritten(tmp_path / "old", rope_parameters=None, rope_theta=100.0, rope_scaling=scaling)
    for overrides, want in (
        ({"rope_theta": 500.0}, {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}),
        ({"rope_parameters": {"factor": 2}}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 100.0}),
    ):
        found = load_config(str(folder), overrides).rope_parameters
        assert {name: value for name, value in found.items() if name != "type"} == want


def test_names_that_a_config_has_under_another_name(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=3, n_head=2)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), overrides={"num_hidden_layers": 1})
    assert len(model.transformer.h) == 1 and model.config.n_layer == 1


def test_special_tokens_are_those_of_generation_too():
    model = load_model("embedded", overrides={"eos_token_id": 7})
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_norm_esp": 1e-3}, r"\.rms_norm_esp=0.001: LlamaConfig has no .* did you mean rms_norm_eps\?"),
        ({"qqqqqq": 1}, r"\.qqqqqq=1: .* it has .*rms_norm_eps"),
        ({"to_dict": 1}, r"\.to_dict=1: LlamaConfig has no value"),
        ({"rope_parameters": {"rope_tehta": 7}}, r"\.rope_parameters\.rope_tehta=7: .* did you mean rope_theta\?"),
        ({"rope_scaling": 3}, r"\.rope_scaling=3: expected a mapping"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"LlamaConfig refuses it: .*factor"),
        ({"rms_norm_eps": "small"}, r"'rms_norm_eps': 'small'.* LlamaConfig refuses it: .*expected float"),
        ({"hidden_size": 145}, r"LlamaConfig refuses it: .*multiple"),
        ({"dtype": "bfloat16"}, r"\.dtype='bfloat16': .*set actor_rollout_ref\.model\.dtype"),
        ({"attn_implementation": "eager"}, r"set actor_rollout_ref\.model\.attn_implementation"),
        ({"hidden_act": "nope"}, r"'hidden_act': 'nope'.* cannot be loaded"),
        ({"id2label": {"3": "x"}}, r"\.id2label\.3='x': has no effect"),
    ],
)
def test_what_cannot_be_overridden_is_refused_by_name(overrides, message):
    with pytest.raises(ModelError, match=KEY.replace(".", r"\.") + ".*" + message):
        load_model("embedded", overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 72}, r"model\.embed_tokens\.weight is \(261, 144\), not \(261, 72\)"),
        ({"vocab_size": 100}, r"is \(261, 144\), not \(100, 144\)"),
        ({"num_hidden_layers": 6}, r"not in the weights, such as model\.layers\.4"),
        ({"tie_word_embeddings": False}, r"not in the weights, such as lm_head\.weight"),
    ],
)
def test_weights_that_do_not_fit_the_overrides_are_refused_with_both_shapes(overrides, message):
    name = next(iter(overrides))
    with pytest.raises(ModelError, match=rf"override_config={{'{name}'.*{message}.*override only"):
        load_model("embedded", overrides=overrides)


def test_weights_that_do_not_fit_their_own_config_are_refused_too(tmp_path):
    with pytest.raises(ModelError, match=r"than config\.json asks for: .* is \(261, 144\), not \(100, 144\)"):
        load_model(str(rewritten(tmp_path / "m", vocab_size=100)))


def test_rotary_parameters_by_layer_are_named_by_layer():
    own = Gemma3TextConfig()
    with pytest.raises(ModelError, match=r"rope_theta: Gemma3TextConfig has several.*sliding_attention"):
        overridden(own, own.to_dict(), {"rope_theta": 5.0})
    made = overridden(own, own.to_dict(), {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}})
    assert made.rope_parameters["full_attention"]["rope_theta"] == 5.0
    other = made.rope_parameters["sliding_attention"]
    assert other == own.rope_parameters["sliding_attention"]


def test_another_program_gets_the_same_config_by_setting_the_changed_values():
    overrides = {"rope_theta": 500.0, "num_hidden_layers": 2}
    own, made = load_config("embedded"), load_config("embedded", overrides)
    changed = changed_values(own, made)
    assert changed == {"num_hidden_layers": 2, "rope_parameters": made.rope_parameters}
    other = AutoConfig.from_pretrained(embedded_path())
    for name, value in changed.items():
        setattr(other, name, value)
    plain, ours = (AutoModelForCausalLM.from_pretrained(embedded_path(), config=c) for c in (other, made))
    assert torch.equal(logits(plain), logits(ours))
