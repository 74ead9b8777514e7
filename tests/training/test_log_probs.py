"""Log-probs and entropies of chosen tokens: with and without each option, against a plain softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from gspo.models.output_head import Head
from gspo.training import log_probs as module
from gspo.training.log_probs import chosen_log_probs
from tests.training.models import VOCAB, gemma2, llama

SIZE = 11


@pytest.mark.parametrize(("make", "chunk", "temperature"), [(llama, 4, 0.6), (llama, SIZE, 1.0), (gemma2, 100, 1.7)])
def test_values_and_gradients_with_every_option(make, chunk, temperature, monkeypatch):
    """In chunks, in a single one, and with logits that the model caps."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk * VOCAB)
    model = make()
    head, drawn = Head.of(model), torch.Generator().manual_seed(0)
    hidden, targets = torch.randn(SIZE, 32, generator=drawn), torch.randint(0, VOCAB, (SIZE,), generator=drawn)
    for with_entropy, learns, recompute in itertools.product((False, True), repeat=3):
        h, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        options = {"entropy": with_entropy, "entropy_grad": learns, "recompute": recompute}
        chosen, entropy = chosen_log_probs(head, h, targets, temperature, **options)
        wanted = (Head.of(model).logits(plain).double() / temperature).log_softmax(-1)
        wanted_entropy = -(wanted.exp() * wanted).sum(-1)
        wanted_chosen = wanted[torch.arange(SIZE), targets]
        torch.testing.assert_close(chosen.double(), wanted_chosen, rtol=1e-4, atol=1e-5)
        loss, wanted_loss = chosen.sum(), wanted_chosen.sum()
        assert (entropy is None) == (not with_entropy)
        if entropy is not None:
            torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-4, atol=1e-5)
            loss = loss + 0.5 * entropy.sum()
            wanted_loss = wanted_loss + 0.5 * (wanted_entropy if learns else wanted_entropy.detach()).sum()
        (got,), (want,) = torch.autograd.grad(loss, h), torch.autograd.grad(wanted_loss, plain)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_no_tokens_have_no_log_probs():
    head, nothing = Head.of(llama()), torch.zeros(0, dtype=torch.long)
    for recompute in (False, True):
        chosen, entropy = chosen_log_probs(head, torch.zeros(0, 32), nothing, 1.0, entropy=True, recompute=recompute)
        assert chosen.shape == (0,) and entropy is not None and entropy.shape == (0,)


@pytest.mark.parametrize(("limit", "keeps"), [(40 * VOCAB, True), (40 * VOCAB - 1, False)])
def test_logits_above_a_number_of_elements_are_computed_again(limit, keeps, monkeypatch):
    monkeypatch.setattr(module, "KEEP_ELEMENTS", limit)
    head, hidden, sizes = Head.of(llama()), torch.randn(40, 32, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        chosen_log_probs(head, hidden, torch.zeros(40, dtype=torch.long), 1.0)
    assert (40 * VOCAB in sizes) == keeps
