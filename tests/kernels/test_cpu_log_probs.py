"""Log-probs, entropies and their gradients by our own kernel are those of float64."""

from __future__ import annotations

import pytest
import torch

from gspo.kernels.cpu_library import compiler
from gspo.kernels.cpu_log_probs import ChosenLogProbs

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize("size", [1, 3, 16, 50, 512, 2047, 30_001])
@pytest.mark.parametrize("spread", [0.1, 5.0, 60.0])
def test_values_and_gradients(size, spread):
    torch.manual_seed(size)
    logits = (torch.randn(7, size) * spread).requires_grad_()
    targets = torch.randint(size, (7,))
    wide = logits.detach().double().requires_grad_()
    logs = wide.log_softmax(-1)
    want = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    got = ChosenLogProbs.apply(logits, targets)
    slopes = [torch.randn(7) for _ in range(2)]
    for g, w in zip(got, want):
        assert torch.allclose(g.double(), w, rtol=1e-6, atol=2e-6)
    for chosen, entropy in ((1, 0), (0, 1), (1, 1)):
        parts = [(i, slopes[i]) for i, used in enumerate((chosen, entropy)) if used]
        ours = torch.autograd.grad([got[i] for i, _ in parts], logits, [s for _, s in parts], retain_graph=True)[0]
        theirs = torch.autograd.grad(
            [want[i] for i, _ in parts], wide, [s.double() for _, s in parts], retain_graph=True
        )[0]
        assert torch.allclose(ours.double(), theirs, rtol=1e-4, atol=3e-6 * max(1.0, spread))


def test_tokens_that_cannot_be_drawn_have_no_part():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]], requires_grad=True)
    chosen, entropy = ChosenLogProbs.apply(logits, torch.tensor([2]))
    assert torch.allclose(chosen, torch.tensor(0.5).log()) and torch.allclose(entropy, torch.tensor(2.0).log())
    (chosen + entropy).sum().backward()
    assert torch.allclose(logits.grad, torch.tensor([[-0.5, 0.0, 0.5, 0.0]]), atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_numbers_are_not_hidden(bad):
    logits = torch.zeros(2, 40)
    logits[0, 17] = bad
    chosen, entropy = ChosenLogProbs.apply(logits, torch.tensor([3, 3]))
    assert chosen.isfinite().tolist() == entropy.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("token", [-1, 40, 4000])
def test_a_token_that_is_not_in_the_vocabulary_is_named(token):
    with pytest.raises(IndexError, match=f"token {token} of a vocabulary of 40"):
        ChosenLogProbs.apply(torch.zeros(2, 40), torch.tensor([3, token]))
