"""A critic that learns what returns depend on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo.training.batch.batching import collate
from gspo.training.critic import Critic, CriticSettings, ValueModel
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.schedule import Schedule
from tests.training.models import FAMILIES, llama
from tests.training.test_policy import groups


def critic(model, lr: float = 1e-2, **settings) -> Critic:
    values = ValueModel(model)
    optimizer = MasterOptimizer(values.named_parameters(), lr=lr)
    return Critic(values, optimizer, Schedule(lr), CriticSettings(**{"mini_batch_groups": 3, **settings}))


def batch_with_returns(p: Critic, seed: int = 0):
    """Returns that a value can know: 1 where the prompt's first token is even, on every token of the answer."""
    batch = p.score(collate(groups(seed=seed)))
    right = torch.tensor([float(prompt[0] % 2 == 0) for prompt in batch.prompt_ids])
    return batch.with_old(batch.rollout_log_probs).with_advantages(batch.mask, right[:, None] * batch.mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_depends_on_the_tokens_before_its_own(family):
    p = critic(FAMILIES[family]())
    torch.nn.init.normal_(p.model.head.weight)
    whole = groups(num=1, n=1, seed=3)
    rollout = whole[0].rollouts[0]
    assert len(rollout.token_ids) >= 3
    other = dataclasses.replace(
        rollout, token_ids=(*rollout.token_ids[:1], 63 - rollout.token_ids[1], *rollout.token_ids[2:])
    )
    a, b = (p.score(collate([whole[0].with_rollouts((r,))])).values[0] for r in (rollout, other))
    assert torch.allclose(a[:2], b[:2], atol=1e-6)  # routed experts see other batches, which rounds otherwise
    assert ((a[2:] - b[2:]).abs() > 1e-4).all()


def test_values_are_those_of_their_rows_in_every_layout():
    """Padded rows are run from the longest to the shortest."""
    cuts = ({}, {"layout": "plain", "micro_batch_tokens": 40}, {"layout": "packed", "micro_batch_tokens": 40})
    batch, found = collate(groups()), []
    for cut in cuts:
        p = critic(llama(), **cut)
        torch.nn.init.normal_(p.model.head.weight, generator=torch.Generator().manual_seed(0))
        found.append(p.score(batch).values)
    assert len({round(float(v), 3) for v in found[0][:, 0]}) == 6  # one for each prompt
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


def test_values_start_at_zero_and_padding_has_none():
    p = critic(llama())
    batch = p.score(collate(groups()))
    assert (batch.values == 0).all()
    torch.nn.init.ones_(p.model.head.bias)
    assert torch.equal(p.score(batch).values != 0, batch.mask.bool())


def test_a_critic_learns_what_the_returns_depend_on():
    p = critic(llama())
    first = None
    for step in range(30):
        metrics = p.update(batch_with_returns(p), step=step)
        first = first or metrics
    assert first["critic/vf_explained_var"].result() == pytest.approx(0, abs=1e-6)
    assert metrics["critic/vf_explained_var"].result() > 0.9
    assert metrics["critic/vf_loss"].result() < 0.1 * first["critic/vf_loss"].result()
    assert metrics["critic/lr"].result() == 1e-2 and metrics["critic/grad_norm"].result() > 0


@pytest.mark.parametrize("cut", [{"micro_batch_tokens": 24}, {"micro_batch_tokens": None, "micro_batch_rows": 3}])
def test_the_update_does_not_depend_on_the_micro_batches(cut):
    whole, split = (critic(llama(), **settings) for settings in ({}, cut))
    for p in (whole, split):
        torch.nn.init.constant_(p.model.head.weight, 0.1)
        p.optimizer.adamw.param_groups[0]["eps"] = 1e-2  # keeps near-zero gradients from being amplified
        p.update(batch_with_returns(p), step=0)
    for x, y in zip(whole.model.parameters(), split.model.parameters()):
        assert torch.allclose(x, y, atol=1e-5)


def test_bad_numbers_skip_the_update_and_leave_the_weights():
    p = critic(llama())
    batch = batch_with_returns(p)
    batch.returns[:] = float("nan")
    before = [x.clone() for x in p.model.parameters()]
    assert p.update(batch, step=0)["critic/skipped_updates"].result() == 2
    assert all(torch.equal(a, b) for a, b in zip(before, p.model.parameters()))


def test_weights_and_optimiser_round_trip_to_the_bit():
    a, b = critic(llama()), critic(llama(seed=5))
    a.update(batch_with_returns(a), step=0)
    b.load_state_tensors({k: {n: t.clone() for n, t in v.items()} for k, v in a.state_tensors().items()})
    for p in (a, b):
        p.update(batch_with_returns(p), step=1)
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters()))


def test_the_gradient_is_that_of_the_clipped_loss_of_every_token():
    """Random returns and old values, some beyond the clip, against autograd on the decoder's own hidden states."""
    models = [ValueModel(llama()) for _ in range(2)]
    for model in models:
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    optimizer = MasterOptimizer(models[0].named_parameters(), lr=1e-3, grad_clip=None)
    settings = CriticSettings(mini_batch_groups=3, clip=0.3, micro_batch_tokens=30)
    p = Critic(models[0], optimizer, Schedule(1e-3), settings)
    batch, drawn = p.score(collate(groups(num=3))), torch.Generator().manual_seed(2)
    assert len(p.plan(batch)[0]) > 1
    old, returns = (batch.values + torch.randn(batch.mask.shape, generator=drawn) for _ in range(2))
    scored = dataclasses.replace(batch, values=old).with_old(batch.rollout_log_probs)
    metrics = p.update(scored.with_advantages(batch.mask, returns), step=0)

    losses, clipped = [], 0
    for row, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.response_ids)):
        hidden = models[1].decoder(torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
        values = models[1].head(hidden)[:, 0]
        before, target = old[row, : len(response)], returns[row, : len(response)]
        held = torch.maximum(torch.minimum(values, before + 0.3), before - 0.3)
        losses.append(torch.maximum((values - target) ** 2, (held - target) ** 2) / 2)
        clipped += int(((held - target) ** 2 > (values - target) ** 2).sum())
    loss = torch.cat(losses).mean()
    loss.backward()
    assert metrics["critic/vf_loss"].result() == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["critic/vf_clipfrac"].result() == pytest.approx(clipped / batch.mask.sum().item())
    moments = optimizer.state_tensors()
    for name, parameter in models[1].named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(moments[f"exp_avg/{name}"] / 0.1, parameter.grad, rtol=1e-2, atol=1e-3 * scale)
    mask = batch.mask.bool()
    explained = 1 - (returns - old)[mask].double().var(correction=0) / returns[mask].double().var(correction=0)
    assert metrics["critic/vf_explained_var"].result() == pytest.approx(float(explained), rel=1e-6)


def test_a_skipped_mini_batch_of_the_critic_leaves_the_others():
    p = critic(llama())
    batch = batch_with_returns(p)
    batch.returns[0] = float("nan")
    metrics = p.update(batch, step=0)
    assert metrics["critic/skipped_updates"].result() == 1
    assert 0 < metrics["critic/grad_norm"].result() < float("inf")
    assert float(p.optimizer.state_tensors()["step/head.bias"]) == 1


def test_dropout_is_off_in_scores_and_updates():
    """Also where the model that is given was in training mode."""
    quiet, noisy = critic(llama()), critic(llama(attention_dropout=0.9).train())
    for p in (quiet, noisy):
        torch.nn.init.ones_(p.model.head.weight)
        p.update(batch_with_returns(p), step=0)
    assert all(torch.equal(x, y) for x, y in zip(quiet.model.parameters(), noisy.model.parameters()))
    assert torch.equal(*(p.score(collate(groups())).values for p in (quiet, noisy)))


def test_a_critic_in_half_precision_sums_its_micro_batches():
    model = ValueModel(llama(num_hidden_layers=1).bfloat16())
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-3, grad_clip=None)
    p = Critic(model, optimizer, Schedule(1e-3), CriticSettings(mini_batch_groups=6, micro_batch_tokens=60))
    batch = batch_with_returns(p)
    assert len(p.plan(batch)[0]) > 2
    assert p.update(batch, step=0)["critic/skipped_updates"].result() == 0
    mean = float(batch.returns.sum() / batch.mask.sum())  # values are 0: the gradient of the bias is -mean R
    assert float(optimizer.state_tensors()["exp_avg/head.bias"]) == pytest.approx(-0.1 * mean)
