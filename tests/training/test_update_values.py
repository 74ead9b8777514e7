"""An update in numbers: its gradient against the model's own logits, its rate against AdamW, its loss terms one by one.

A clipped gradient hides a common factor, and so does AdamW, whose first step is the gradient's sign. The gradient is
therefore read from the first moments after one step without clipping: they are (1 - β₁) times the gradient.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gspo.algo.objective import BoundLoss, BoundRegulariser
from gspo.algo.settings import Behaviour, LossSettings
from gspo.training.batch.batching import collate
from gspo.training.critic import Critic, CriticSettings, ValueModel
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.policy import Policy, PolicySettings
from gspo.training.roles import LocalRoles
from gspo.training.schedule import Schedule
from gspo.types import AdvantageBatch, Group, LossInputs, LossOutput
from tests.training.models import llama
from tests.training.test_policy import groups

GSPO = BoundLoss("gspo", LossSettings())
CUTS = {
    "whole": {},
    "packed": {"layout": "packed", "micro_batch_tokens": 40},
    "shared": {"layout": "shared", "micro_batch_tokens": 40},
    "padded rows": {"layout": "plain", "micro_batch_tokens": None, "micro_batch_rows": 3},
}


def masked_groups() -> list[Group]:
    """Groups in which the first token of long responses is not trained on, and μ differs from the policy."""
    out = []
    for group in groups(num=4, n=3, seed=2):
        rollouts = []
        for rollout in group.rollouts:
            size = len(rollout.token_ids)
            mask = (int(size < 4),) + (1,) * (size - 1)
            rollouts.append(
                dataclasses.replace(rollout, loss_mask=mask, log_probs=tuple(-4.0 - 0.1 * i for i in range(size)))
            )
        out.append(group.with_rollouts(tuple(rollouts)))
    return out


def make(lr: float = 1e-3, schedule: Schedule | None = None, weight_decay: float = 0.0, **settings) -> Policy:
    model = llama().double()
    optimizer = MasterOptimizer(model.named_parameters(), lr=lr, weight_decay=weight_decay, grad_clip=None)
    settings = {"mini_batch_groups": 4, "temperature": 0.8, **settings}
    return Policy(model, optimizer, schedule or Schedule(lr), PolicySettings(**settings))


def batch_of(policy: Policy) -> AdvantageBatch:
    """A scored batch with advantages of both signs and log-probs of a reference, the same for every policy."""
    batch = policy.score(collate(masked_groups()))
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(batch.num_sequences, 1, generator=generator).expand(batch.mask.shape)
    reference = torch.full_like(batch.mask, -4.5, dtype=torch.float64)
    return dataclasses.replace(batch, ref_log_probs=reference).with_advantages(advantages, advantages)


def gradient(optimizer: MasterOptimizer) -> dict[str, Tensor]:
    """The gradient of the only step so far."""
    state, prefix = optimizer.state_tensors(), "exp_avg/"
    return {name.removeprefix(prefix): t.double() / 0.1 for name, t in state.items() if name.startswith(prefix)}


def wanted_log_probs(model, batch: AdvantageBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B,T] from the model's own logits, with a gradient, one row at a time."""
    rows = []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        pad = batch.mask.shape[1] - len(response)
        rows.append((torch.nn.functional.pad(chosen, (0, pad)), torch.nn.functional.pad(entropy, (0, pad))))
    log_probs, entropies = zip(*rows)
    return torch.stack(log_probs), torch.stack(entropies)


def assert_gradient(policy: Policy, loss_of, batch: AdvantageBatch) -> None:
    """The update's gradient is that of `loss_of(log_probs, entropies)` by plain autograd on a fresh model."""
    model = llama().double()
    loss_of(*wanted_log_probs(model, batch, policy.settings.temperature)).backward()
    got = gradient(policy.optimizer)
    total = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    assert total > 1e-2
    for name, parameter in model.named_parameters():
        if name in got and parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-6 * total)


def sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1) / mask.sum(-1)


@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_of_an_update_is_that_of_the_formula(cut):
    """GSPO at ratio 1: -mean over sequences of A·mean_t log π, whatever the micro-batches and the layout."""
    policy = make(**CUTS[cut])
    batch = batch_of(policy)
    metrics = policy.update(batch, GSPO, step=0).metrics

    def loss_of(log_probs: Tensor, _: Tensor) -> Tensor:
        return -(batch.advantages[:, 0] * sequence_means(log_probs, batch.mask)).mean()

    assert_gradient(policy, loss_of, batch)
    norm = sum(float(g.square().sum()) for g in gradient(policy.optimizer).values()) ** 0.5
    assert metrics["actor/grad_norm"].result() == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("cut", CUTS)
def test_kl_and_entropy_terms_enter_the_gradient_with_their_signs(cut):
    policy = make(entropy_in_loss=True, **CUTS[cut])
    batch = batch_of(policy)
    regulariser = BoundRegulariser("token-mean", kl_coef=0.7, kl_kind="k2", entropy_coeff=0.3)
    policy.update(batch, GSPO, step=0, regulariser=regulariser)

    def loss_of(log_probs: Tensor, entropies: Tensor) -> Tensor:
        policy_loss = -(batch.advantages[:, 0] * sequence_means(log_probs, batch.mask)).mean()
        kl = (0.5 * (log_probs - batch.ref_log_probs).square() * batch.mask).sum() / batch.mask.sum()
        return policy_loss + 0.7 * kl - 0.3 * (entropies * batch.mask).sum() / batch.mask.sum()

    assert_gradient(policy, loss_of, batch)


def test_the_decoupled_loss_weighs_by_the_rollouts_own_log_probs():
    policy = make()
    batch = batch_of(policy)
    policy.update(batch, BoundLoss("gspo", LossSettings(behaviour=Behaviour("sequence_truncate", 1.0))), step=0)

    def loss_of(log_probs: Tensor, _: Tensor) -> Tensor:
        weights = sequence_means(log_probs.detach() - batch.rollout_log_probs, batch.mask).exp().clamp(max=1.0)
        assert weights.max() == 1.0 > 0.9 > weights.min()  # the cap acts on some
        return -(weights * batch.advantages[:, 0] * sequence_means(log_probs, batch.mask)).mean()

    assert_gradient(policy, loss_of, batch)


@pytest.mark.parametrize("step", [0, 2, 9])
def test_the_rate_of_the_schedule_is_the_one_that_is_applied(step):
    """AdamW's first step moves every weight with a large gradient by the learning rate."""
    schedule = Schedule(1e-2, "cosine", warmup_steps=4, total_steps=14, min_ratio=0.1)
    policy = make(lr=1.0, schedule=schedule)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    metrics = policy.update(batch_of(policy), GSPO, step=step).metrics
    moved = max(float((p.detach() - before[name]).abs().max()) for name, p in policy.model.named_parameters())
    assert moved == pytest.approx(schedule.at(step), rel=1e-3)
    assert metrics["actor/lr"].result() == schedule.at(step)


@pytest.mark.parametrize("step", [0, 2, 9])
def test_the_critics_rate_follows_its_schedule(step):
    schedule = Schedule(1e-2, "cosine", warmup_steps=4, total_steps=14, min_ratio=0.1)
    model = ValueModel(llama())
    optimizer = MasterOptimizer(model.named_parameters(), lr=1.0, weight_decay=0.0)
    critic = Critic(model, optimizer, schedule, CriticSettings(mini_batch_groups=4))
    batch = critic.score(batch_of(make()))
    metrics = critic.update(dataclasses.replace(batch, returns=torch.ones_like(batch.mask)), step=step)
    # The head starts at 0, so its bias moves by the rate.
    assert abs(float(model.head.bias.detach())) == pytest.approx(schedule.at(step), rel=1e-3)
    assert metrics["critic/lr"].result() == schedule.at(step)


@pytest.mark.parametrize("cut", [{}, {"micro_batch_tokens": 24}, {"micro_batch_tokens": None, "micro_batch_rows": 3}])
def test_the_critics_gradient_is_that_of_half_the_squared_error(cut):
    model = ValueModel(llama())
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-3, grad_clip=None)
    critic = Critic(model, optimizer, Schedule(1e-3), CriticSettings(**{"mini_batch_groups": 4, **cut}))
    batch = critic.score(batch_of(make()))
    returns = torch.arange(batch.num_sequences)[:, None] * batch.mask / 10
    metrics = critic.update(dataclasses.replace(batch, returns=returns), step=0)
    got = gradient(optimizer)["head.bias"]
    # Values are 0, so d/db ½·mean (V - R)² = -mean R over trained tokens.
    assert float(got) == pytest.approx(-float(returns.sum() / batch.mask.sum()), rel=1e-5)
    error = 0.5 * float((returns**2).sum() / batch.mask.sum())
    assert metrics["critic/vf_loss"].result() == pytest.approx(error, rel=1e-5)


def test_a_value_far_from_its_old_one_is_clipped_by_the_settings():
    model = ValueModel(llama())
    torch.nn.init.ones_(model.head.bias)
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-3, grad_clip=None)
    critic = Critic(model, optimizer, Schedule(1e-3), CriticSettings(mini_batch_groups=4, clip=0.2))
    batch = batch_of(make())
    batch = dataclasses.replace(batch, values=torch.zeros_like(batch.mask), returns=2.0 * batch.mask)
    metrics = critic.update(batch, step=0)
    # V = 1 is beyond 0 ± 0.2 on the side of the return 2: held at 0.2, without a gradient.
    assert metrics["critic/vf_clipfrac"].result() == 1
    assert metrics["critic/vf_loss"].result() == pytest.approx(0.5 * 1.8**2)
    assert metrics["critic/grad_norm"].result() == 0


def test_every_mini_batch_has_its_own_denominators():
    """Two mini-batches of two groups: the loss of each is a mean over its own tokens."""
    policy = make(mini_batch_groups=2)
    batch = batch_of(policy)
    seen = []

    def loss(x: LossInputs) -> LossOutput:
        seen.append((float(x.mask.sum()), x.totals.num_tokens, x.totals.num_sequences, len(x.mask)))
        return GSPO(x)

    policy.update(batch, loss, step=0)
    assert len(seen) == 2
    for tokens, num_tokens, num_sequences, rows in seen:
        assert (tokens, rows) == (num_tokens, num_sequences)
    assert sum(s[0] for s in seen) == float(batch.mask.sum())


@pytest.mark.parametrize("source", ["first_pass", "recompute"])
def test_later_mini_batches_and_epochs_are_compared_with_the_weights_before_the_update(source):
    policy = make(lr=1e-2, mini_batch_groups=2, num_epochs=2, old_log_prob_source=source)
    start, _ = policy.log_probs(collate(masked_groups()))
    olds, ratios = [], []

    def loss(x: LossInputs) -> LossOutput:
        olds.append(x.old_log_probs)
        ratios.append(float(((x.log_probs - x.old_log_probs) * x.mask).abs().max().detach()))
        return GSPO(x)

    update = policy.update(batch_of(policy), loss, step=0)
    assert len(olds) == 4
    half = start.shape[0] // 2
    for old, wanted in zip(olds, [start[:half], start[half:]] * 2):
        torch.testing.assert_close(old, wanted, rtol=0, atol=1e-9)
    assert ratios[0] == 0 and min(ratios[1:]) > 1e-3
    torch.testing.assert_close(update.batch.old_log_probs, start, rtol=0, atol=1e-9)
    assert set(update.metrics) >= {"actor/pg_clipfrac/mb0", "actor/pg_clipfrac/mb1"}


def test_the_entropy_that_is_reported_is_a_mean_over_trained_tokens():
    policy = make()
    batch = batch_of(policy)
    with torch.no_grad():
        _, entropies = wanted_log_probs(policy.model, batch, 0.8)
    metrics = policy.update(batch, GSPO, step=0).metrics
    wanted = float((entropies * batch.mask).sum() / batch.mask.sum())
    assert metrics["actor/entropy"].result() == pytest.approx(wanted, rel=1e-5)


def test_a_loss_that_is_not_finite_is_skipped_although_its_gradient_is():
    policy = make()
    before = [p.detach().clone() for p in policy.model.parameters()]

    def loss(x: LossInputs) -> LossOutput:
        return LossOutput(x.log_probs.sum() * 0.01 + float("inf"), {})

    metrics = policy.update(batch_of(policy), loss, step=0).metrics
    assert metrics["actor/skipped_updates"].result() == 1 and metrics["actor/nonfinite_loss"].result() == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))


def test_a_lower_rate_applies_to_every_trained_role():
    model = ValueModel(llama())
    optimizer = MasterOptimizer(model.named_parameters(), lr=1.0)
    critic = Critic(model, optimizer, Schedule(4e-3), CriticSettings())
    roles = LocalRoles(make(schedule=Schedule(2e-3, "cosine", 1, 8, 0.5)), critic=critic)
    roles.scale_lr(0.25)
    roles.scale_lr(0.5)
    assert roles.policy.schedule == Schedule(2.5e-4, "cosine", 1, 8, 0.5)
    assert critic.schedule == Schedule(5e-4)


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_critic_passes_over_its_batch_as_often_as_it_should(epochs):
    model = ValueModel(llama())
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-3)
    critic = Critic(model, optimizer, Schedule(1e-3), CriticSettings(mini_batch_groups=2, num_epochs=epochs))
    batch = critic.score(batch_of(make()))
    critic.update(dataclasses.replace(batch, returns=torch.ones_like(batch.mask)), step=0)
    assert float(optimizer.state_tensors()["step/head.bias"]) == 2 * epochs
