"""Training on a GPU in bf16: the flash path, the fused head, compiled layers and captured graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo.models.output_head import Head
from gspo.training.batch.attention import FLASH
from gspo.training.batch.batching import collate
from gspo.training.forward import Forward
from gspo.training.log_probs import chosen_log_probs
from tests.rollout.models import make_model
from tests.training.models import llama
from tests.training.test_policy import groups, policy, ready, token_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def gradients(family: str, kind: str, dtype: torch.dtype):
    """Hidden states of a ragged batch, and the gradient of a function of them that treats every token differently."""
    model = make_model(family).cuda().to(dtype)
    forward = Forward.of(model.base_model, kind)
    assert forward.reason is None
    batch = collate(groups(num=6))
    micro = forward.micro(batch, list(range(batch.num_sequences)), "cuda")
    with forward.running():
        out = micro.scatter(forward.hidden(micro).float().sum(-1))
        (out * torch.linspace(0, 1, out.numel(), device="cuda").view_as(out)).sum().backward()
    return out.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_packed_gradients_in_bf16_are_as_close_to_float32_as_those_of_padded_rows(family, kind):
    exact = gradients(family, "plain", torch.float32)
    plain = gradients(family, "plain", torch.bfloat16)
    packed = gradients(family, kind, torch.bfloat16)
    for got, padded, want in zip(packed, plain, exact):
        assert distance(got, want) < 1.2 * distance(padded, want) + 1e-3


def test_packed_gradients_in_float32_are_those_of_padded_rows():
    for got, want in zip(gradients("llama", "shared", torch.float32), gradients("llama", "plain", torch.float32)):
        assert distance(got, want) < 1e-5


def test_the_fused_head_gives_float64s_log_probs_entropies_and_gradients():
    model = llama(vocab_size=5000, tie_word_embeddings=False).cuda().bfloat16()
    head = Head.of(model)
    hidden = torch.randn(300, head.linear.in_features, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(0, 5000, (300,), device="cuda")
    weights = torch.linspace(0, 1, 300, device="cuda")
    got, entropy = chosen_log_probs(head, hidden, targets, 1.25, entropy=True)
    assert entropy is not None
    (got.sum() * 0.3 + (entropy * weights).sum()).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, head.linear.weight)]
    log_probs = torch.log_softmax(wide[0] @ wide[1].t() / 1.25, -1)
    want, want_entropy = log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)
    (want.sum() * 0.3 + (want_entropy * weights).sum()).backward()
    assert torch.allclose(got.double(), want, atol=1e-5) and torch.allclose(entropy.double(), want_entropy, atol=1e-5)
    assert distance(hidden.grad, wide[0].grad) < 5e-3
    assert distance(head.linear.weight.grad, wide[1].grad) < 5e-3


def test_captured_updates_have_a_ratio_of_one_and_the_gradients_of_eager_ones():
    norms = {}
    for compiled in (False, True):
        p = policy(llama().cuda().bfloat16(), old_log_prob_source="recompute", compiled=compiled)
        p.schedule = dataclasses.replace(p.schedule, lr=0.0)
        batch = ready(p)
        update = p.update(batch, token_loss, step=0)
        assert torch.equal(update.log_probs, batch.old_log_probs), "the same weights give the same bits"
        assert p.runner.kernels is FLASH
        if compiled:
            assert p.runner.graphed is not None and p.runner.graphed.reason is None and p.runner.graphed._graphs
        norms[compiled] = update.metrics["actor/grad_norm"].result()
    assert norms[True] == pytest.approx(norms[False], rel=0.02)
