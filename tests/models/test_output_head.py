"""The output layer: the model's own scale, softcap and bias, and models whose layer does more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gspo.kernels import UnsupportedModel
from gspo.models.output_head import Head


class Decoder(nn.Module):
    """A decoder of one embedding, whose logits `finish` changes."""

    def __init__(self, finish, bias: bool = False, **config) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=bias)
        self.config, self._finish = SimpleNamespace(**config), finish

    @property
    def base_model(self):
        return lambda input_ids, use_cache: SimpleNamespace(last_hidden_state=self.embed(input_ids))

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self._finish(self.head(self.embed(input_ids))))


CASES = {
    "plain": (lambda x: x, {}),
    "bias": (lambda x: x, {"bias": True}),
    "Granite divides": (lambda x: x / 4, {"logits_scaling": 4.0}),
    "Cohere multiplies": (lambda x: x * 0.25, {"logit_scale": 0.25}),
    "Gemma 2 caps": (lambda x: torch.tanh(x / 0.5) * 0.5, {"final_logit_softcapping": 0.5}),
    "scaled, then capped": (
        lambda x: torch.tanh(2 * x / 0.5) * 0.5,
        {"logit_scale": 2.0, "final_logit_softcapping": 0.5},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_from_hidden_states_are_the_models_own(name):
    finish, config = CASES[name]
    model = Decoder(finish, **config)
    ids = torch.arange(5)[None]
    got = Head.of(model).logits(model.embed(ids)[0])
    torch.testing.assert_close(got, model(ids).logits[0])


@pytest.mark.parametrize(
    ("finish", "config"),
    [
        (lambda x: x + 0.01, {}),
        (lambda x: x * 1.01, {}),
        (lambda x: x, {"logit_scale": 2.0}),
        (lambda x: x, {"final_logit_softcapping": 0.5}),
    ],
)
def test_a_layer_that_does_something_else_is_refused(finish, config):
    with pytest.raises(UnsupportedModel, match="does more than a linear map"):
        Head.of(Decoder(finish, **config))


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(UnsupportedModel, match="not finite"):
        Head.of(Decoder(lambda x: x * float("nan")))
