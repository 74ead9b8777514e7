"""The gradient of a tied embedding is the same when its rows are added to the output layer's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gspo.models.output_head import Head
from gspo.training import head_gradient as tied_embedding
from gspo.training.head_gradient import HeadGradient
from tests.training.models import llama


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(tied_embedding, "MIN_ELEMENTS", 0)


IDS = torch.tensor([[1, 2, 3, 2], [5, 2, 7, 1]])  # some tokens several times


def backward(model, head: Head, num_chunks: int) -> None:
    hidden = model.base_model(IDS, use_cache=False).last_hidden_state.flatten(0, 1)
    for part in hidden.chunk(num_chunks):
        (head.logits(part) ** 2).sum().backward(retain_graph=True)


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_autograd(tied, num_chunks):
    model = llama(tie_word_embeddings=tied).double()
    head, embedding = Head.of(model), model.get_input_embeddings()
    assert (embedding.weight is head.linear.weight) == tied
    backward(model, head, num_chunks)
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    gradient = HeadGradient(head)
    head = replace(head, multiply=gradient.multiply)
    for _ in range(2):  # the second time in the memory of the first
        model.zero_grad()
        with gradient.active(model):
            assert embedding.sparse == tied
            backward(model, head, num_chunks)
        assert not embedding.sparse
        memory = head.linear.weight.grad
    assert memory is head.linear.weight.grad and memory is gradient._memory
    for name, p in model.named_parameters():
        assert p.grad.layout == torch.strided, name
        assert torch.allclose(p.grad, want[name], rtol=1e-12, atol=1e-12), name


def test_the_same_with_logits_that_are_computed_again():
    model = llama(tie_word_embeddings=True).double()
    head = Head.of(model)

    def run():
        hidden = model.base_model(IDS, use_cache=False).last_hidden_state
        checkpoint(lambda h: (head.logits(h) ** 2).sum(), hidden, use_reentrant=False).backward()

    run()
    want = model.get_input_embeddings().weight.grad
    model.zero_grad()
    gradient = HeadGradient(head)
    head = replace(head, multiply=gradient.multiply)
    with gradient.active(model):
        run()
    got = model.get_input_embeddings().weight.grad
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_outside_a_step_the_gradient_is_autograds():
    model = llama(tie_word_embeddings=False).double()
    gradient = HeadGradient(Head.of(model))
    hidden = torch.randn(3, model.config.hidden_size, dtype=torch.float64)
    weight = gradient._weight
    got = torch.autograd.grad(gradient.multiply(hidden, weight).square().sum(), weight)[0]
    want = torch.autograd.grad((hidden @ weight.t()).square().sum(), weight)[0]
    assert torch.allclose(got, want, rtol=1e-12) and weight.grad is None


def test_an_error_leaves_the_embedding_as_it_was():
    model = llama(tie_word_embeddings=True)
    with pytest.raises(ValueError), HeadGradient(Head.of(model)).active(model):
        raise ValueError
    assert not model.get_input_embeddings().sparse


def test_half_precision_is_not_rounded_once_more_a_row():
    model = llama(tie_word_embeddings=True).bfloat16()
    with HeadGradient(Head.of(model)).active(model):
        assert not model.get_input_embeddings().sparse


def test_a_small_vocabulary_is_not_worth_it(monkeypatch):
    model = llama(tie_word_embeddings=True)
    monkeypatch.setattr(tied_embedding, "MIN_ELEMENTS", model.get_input_embeddings().weight.numel() + 1)
    with HeadGradient(Head.of(model)).active(model):
        assert not model.get_input_embeddings().sparse


@pytest.mark.parametrize(
    ("dtype", "more", "pays"),
    [(torch.float32, 0, True), (torch.float32, 1, False), (torch.float64, 0, True), (torch.bfloat16, 0, False)],
)
def test_it_pays_from_a_size_on_in_full_precision(dtype, more, pays, monkeypatch):
    model = llama().to(dtype)
    monkeypatch.setattr(tied_embedding, "MIN_ELEMENTS", model.get_input_embeddings().weight.numel() + more)
    assert HeadGradient(Head.of(model)).pays is pays


def test_an_embedding_that_is_sparse_stays_so_and_a_frozen_head_has_no_gradient():
    model = llama(tie_word_embeddings=True)
    embedding, gradient = model.get_input_embeddings(), HeadGradient(Head.of(model))
    embedding.sparse = True
    with gradient.active(model):
        assert embedding.sparse
    assert embedding.sparse
    weight = gradient._weight.requires_grad_(False)
    hidden = torch.randn(3, model.config.hidden_size, requires_grad=True)
    with gradient.active(model):
        gradient.multiply(hidden, weight).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, weight.sum(0).expand(3, -1))
