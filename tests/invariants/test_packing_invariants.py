"""A training step does not depend on the layout of its forwards, their cut, or who computes π_old."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.training.batch.batching import collate, micro_batch, plan_micro_batches
from gspo.training.forward import Forward
from gspo.types import Group, Prompt, Reward, Rollout
from tests.rollout.models import make_model
from tests.training.models import VOCAB, llama
from tests.training.test_policy import policy, ready, token_loss

MODEL = make_model("qwen2-sliding")


@st.composite
def batches(draw):
    """Groups of any sizes, some of one response, with prompts and responses of any lengths."""
    rng = random.Random(draw(st.integers(0, 2**32)))

    def tokens(size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(size))

    made = []
    for i in range(draw(st.integers(1, 4))):
        rollouts = []
        for size in draw(st.lists(st.integers(1, 14), min_size=1, max_size=5)):
            row = (tokens(size), (-1.0,) * size, (1,) * size, (0,) * size)
            rollouts.append(Rollout(*row, finish_reason="stop", reward=Reward(0.0)))
        prompt = Prompt(str(i), (), tokens(draw(st.integers(1, 12))))
        made.append(Group(prompt, tuple(rollouts), i, 0))
    return collate(made)


@settings(max_examples=25, deadline=None)
@given(batch=batches(), budget=st.integers(1, 80), kind=st.sampled_from(["packed", "shared"]))
def test_every_response_token_has_the_hidden_state_of_its_own_row(batch, budget, kind):
    forward = Forward.of(MODEL.base_model, kind)
    seen = torch.zeros(*batch.mask.shape, 32)
    with torch.no_grad():
        for rows in plan_micro_batches(batch, 2, max_tokens=budget, max_rows=1, kind=kind):
            for part in rows:
                micro = forward.micro(batch, part, "cpu")
                with forward.running():
                    hidden = micro.hidden(forward.decoder)
                places = (torch.tensor(part)[micro.slots // micro.num_response], micro.slots % micro.num_response)
                assert (seen[places] == 0).all()  # no token is computed by two micro-batches
                seen[places] = hidden
        plain = micro_batch(batch, list(range(batch.num_sequences)), "cpu")
        want = torch.zeros_like(seen).view(-1, 32)
        want[plain.slots] = plain.hidden(MODEL.base_model)
    assert torch.allclose(seen.view(-1, 32), want, atol=2e-4)


def weights_after(**kwargs) -> list[torch.Tensor]:
    p = policy(llama(), **kwargs)
    p.optimizer.adamw.param_groups[0]["eps"] = 1e-3  # keeps near-zero gradients from being amplified
    p.update(ready(p), token_loss, step=0)
    return list(p.model.parameters())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"layout": "packed"},
        {"layout": "shared"},
        {"layout": "shared", "micro_batch_tokens": 20},
        {"layout": "shared", "micro_batch_tokens": None, "micro_batch_rows": 3},
    ],
)
def test_an_update_is_the_same_in_every_layout(kwargs):
    for a, b in zip(weights_after(layout="plain"), weights_after(**kwargs)):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("epochs", [1, 2])
def test_who_computes_the_old_log_probs_changes_no_bit(epochs):
    results = []
    for source in ("recompute", "first_pass"):
        p = policy(llama(), old_log_prob_source=source, num_epochs=epochs)
        batch = ready(p)
        before = batch.old_log_probs.clone()
        update = p.update(batch, token_loss, step=0)
        assert torch.equal(batch.old_log_probs, before), "an update changes no batch in place"
        assert bool(batch.unscored_rows) == (source == "first_pass") and not update.batch.unscored_rows
        entropy = update.metrics["actor/entropy"].result()
        results.append((update.batch.old_log_probs, update.batch.entropy, entropy, *p.model.parameters()))
    assert results[0][2] == results[1][2] > 0
    for a, b in zip(*results):
        assert a == b if isinstance(a, float) else torch.equal(a, b)


def test_the_first_mini_batch_is_not_scored_twice():
    p = policy(llama(), mini_batch_groups=6)
    calls = []
    forward = p.forward
    p.forward = lambda micro, **kw: (calls.append(torch.is_grad_enabled()), forward(micro, **kw))[1]
    p.update(ready(p), token_loss, step=0)
    assert calls == [True]
