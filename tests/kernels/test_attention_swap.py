"""Attention functions are exchanged within a context, restored after it, and refuse what they would leave out."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

from gspo.kernels import UnsupportedModel
from gspo.kernels.attention_swap import configs_of, refuse_unsupported, swapped_attention
from tests.rollout.models import make_model

IDS = torch.arange(6)[None]


def zero_attention(module, query, key, value, attention_mask, **kwargs):
    """An attention whose effect shows: nothing is attended to."""
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register("test_zero", zero_attention)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_the_registered_function_runs_within_the_context_only():
    model = make_model("llama")
    before = logits(model)
    with swapped_attention(configs_of(model), {"sdpa": "test_zero"}):
        assert not torch.allclose(logits(model), before)
    assert torch.equal(logits(model), before) and model.config._attn_implementation == "sdpa"


def test_an_error_within_the_context_restores_the_attention():
    model = make_model("llama")
    with pytest.raises(RuntimeError, match="on purpose"), swapped_attention(configs_of(model), {"sdpa": "test_zero"}):
        raise RuntimeError("on purpose")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["position_bias", "s_aux"])
def test_what_a_layer_adds_to_its_scores_is_refused_by_name(name):
    refuse_unsupported(torch.nn.Identity(), {name: None, "dropout": 0.1})
    with pytest.raises(UnsupportedModel, match=f"Identity passes {name}"):
        refuse_unsupported(torch.nn.Identity(), {name: torch.zeros(1)})
