"""Several epochs and several updates in a row, against a plain loop over drawn mini-batches: what changes, what stays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from gspo.algo.objective import BoundLoss, BoundRegulariser
from gspo.algo.settings import LossSettings
from gspo.training import head_gradient
from gspo.training.batch.batching import collate, group_order, mini_batches
from gspo.training.critic import Critic, CriticSettings, ValueModel
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.policy import Policy, PolicySettings
from gspo.training.schedule import Schedule
from gspo.types import AdvantageBatch, TrainBatch
from tests.training.models import llama
from tests.training.test_policy import groups

NUM_EPOCHS, GROUPS = 3, 2  # groups of a mini-batch
SCHEDULE = Schedule(2e-2, "linear", 0, 4)
ADAMW = {"lr": 1.0, "eps": 1e-2, "weight_decay": 0.1, "grad_clip": 0.5}


def small_llama() -> LlamaForCausalLM:
    return llama(hidden_size=16, intermediate_size=16, num_hidden_layers=1)


def drawn_batch(step: int) -> TrainBatch:
    """Three groups whose mini-batches are drawn: one of two groups, and one of one. The first seed is 0."""
    return collate(groups(num=3, n=2, seed=step), order_seed=step)


def parts(batch: TrainBatch) -> list[list[int]]:
    """The rows of each optimizer step, epoch by epoch."""
    return [
        rows for epoch in range(NUM_EPOCHS) for rows in mini_batches(batch.group_ids, GROUPS, group_order(batch, epoch))
    ]


def close(a: torch.nn.Module, b: torch.nn.Module, **tolerance: float) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, msg=name, **tolerance)


def hidden_rows(decoder: Any, batch: TrainBatch, rows: list[int]) -> list[Tensor]:
    """For each row the decoder's own hidden states that predict its response; padding is at the end."""
    texts = [batch.prompt_ids[row] + batch.response_ids[row] for row in rows]
    width = max(map(len, texts))
    out = decoder(torch.tensor([text + (0,) * (width - len(text)) for text in texts])).last_hidden_state
    return [out[i, len(batch.prompt_ids[row]) - 1 : len(texts[i]) - 1] for i, row in enumerate(rows)]


def log_probs_of(model: Any, batch: TrainBatch, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response tokens of these rows, one after another, at the temperature 0.8."""
    logits = model.lm_head(torch.cat(hidden_rows(model.model, batch, rows))) / 0.8
    log_probs = logits.log_softmax(-1)
    targets = torch.tensor([token for row in rows for token in batch.response_ids[row]])
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def returns_of(batch: TrainBatch) -> Tensor:
    return torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(4)) * batch.mask


def test_the_critic_holds_its_values_near_those_before_the_first_epoch():
    """Every epoch clips against the scored values, in its own drawn mini-batches; metrics cover all of them."""
    models = [ValueModel(small_llama().double()) for _ in range(2)]
    optimizers = [MasterOptimizer(model.named_parameters(), **ADAMW) for model in models]
    settings = CriticSettings(mini_batch_groups=GROUPS, num_epochs=NUM_EPOCHS, micro_batch_tokens=20, clip=0.02)
    critic, plain, optimizer = Critic(models[0], optimizers[0], SCHEDULE, settings), models[1], optimizers[1]
    for step in range(2):
        batch = critic.score(drawn_batch(step))
        assert batch.values is not None
        returns, old, (losses, norms, clipped, predicted, tokens) = returns_of(batch), batch.values, ([], [], 0, 0.0, 0)
        for row, hidden in enumerate(hidden_rows(plain.decoder, batch, list(range(batch.num_sequences)))):
            torch.testing.assert_close(old[row, : len(hidden)], plain.head(hidden.float())[:, 0], rtol=1e-3, atol=1e-4)
        metrics = critic.update(batch.with_old(batch.mask).with_advantages(batch.mask, returns), step=step)
        for rows in parts(batch):
            squares = []
            for row, hidden in zip(rows, hidden_rows(plain.decoder, batch, rows)):
                values, size = plain.head(hidden.float())[:, 0], len(hidden)
                held = torch.maximum(torch.minimum(values, old[row, :size] + 0.02), old[row, :size] - 0.02)
                free, kept = ((v - returns[row, :size]).square() for v in (values, held))
                squares.append(torch.maximum(free, kept) / 2)
                clipped, tokens = clipped + int((kept > free).sum()), tokens + size
                predicted += float(values.sum().detach())
            loss = torch.cat(squares).mean()
            optimizer.begin(1)
            loss.backward()
            losses.append(float(loss.detach()))
            norms.append(optimizer.step(SCHEDULE.at(step)).grad_norm)
        close(critic.model, plain, rtol=1e-4, atol=1e-5)
        assert 0 < clipped < tokens and len(losses) == 6
        for name, wanted in (
            ("critic/vf_loss", sum(losses) / 6),
            ("critic/grad_norm", sum(norms) / 6),
            ("critic/vf_clipfrac", clipped / tokens),
            ("critic/vpred_mean", predicted / tokens),
            ("critic/skipped_updates", 0.0),
            ("critic/lr", SCHEDULE.at(step)),
        ):
            assert metrics[name].result() == pytest.approx(wanted, rel=1e-3, abs=1e-6), (step, name)


def policy_loss(model: Any, batch: AdvantageBatch, old: Tensor, rows: list[int]) -> Tensor:
    """PPO's clip against `old`, with KL to the reference and an entropy bonus, as means over the tokens of the rows."""
    assert batch.ref_log_probs is not None
    mask, (log_probs, entropies) = batch.mask[rows].bool(), log_probs_of(model, batch, rows)
    advantages, reference = batch.advantages[rows][mask], batch.ref_log_probs[rows][mask]
    ratio = (log_probs - old[rows][mask]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.2) * advantages)
    return (-surrogate + 0.1 * 0.5 * (log_probs - reference).square() - 0.01 * entropies).mean()


@pytest.mark.parametrize(
    ("source", "dtype", "near"), [("first_pass", torch.float64, 1e-5), ("recompute", torch.float32, 3e-4)]
)
def test_every_epoch_and_every_update_is_a_plain_step_on_drawn_mini_batches(monkeypatch, source, dtype, near):
    """In float32 the output layer's gradient is summed in reused memory."""
    monkeypatch.setattr(head_gradient, "MIN_ELEMENTS", 0 if dtype == torch.float32 else 1 << 30)
    models = [small_llama().to(dtype) for _ in range(2)]
    optimizers = [MasterOptimizer(model.named_parameters(), **ADAMW) for model in models]
    how = {"temperature": 0.8, "entropy_in_loss": True, "micro_batch_tokens": 20, "old_log_prob_source": source}
    settings = PolicySettings(mini_batch_groups=GROUPS, num_epochs=NUM_EPOCHS, **how)
    policy, plain, optimizer = Policy(models[0], optimizers[0], SCHEDULE, settings), models[1], optimizers[1]
    loss = BoundLoss("vanilla", LossSettings(clip_low=0.1, clip_high=0.2, clip_c=None))
    regulariser = BoundRegulariser("token-mean", kl_coef=0.1, kl_kind="k2", entropy_coeff=0.01)
    for step in range(2):
        made, batch = torch.Generator().manual_seed(step), drawn_batch(step)
        reference = -4.0 + 0.5 * torch.randn(batch.mask.shape, generator=made)
        batch = policy.score(dataclasses.replace(batch, ref_log_probs=reference.to(dtype)))
        ready = batch.with_advantages(torch.randn(batch.mask.shape, generator=made), batch.mask)
        update = policy.update(ready, loss, step=step, regulariser=regulariser)
        old, mask, norms = torch.zeros(batch.mask.shape, dtype=dtype), batch.mask.bool(), []
        old[mask] = log_probs_of(plain, batch, list(range(batch.num_sequences)))[0].detach()
        for rows in parts(batch):
            optimizer.begin(1)
            policy_loss(plain, ready, old, rows).backward()
            norms.append(optimizer.step(SCHEDULE.at(step)).grad_norm)
        assert len(norms) == 6
        close(policy.model, plain, rtol=10 * near, atol=near)
        torch.testing.assert_close(update.batch.old_log_probs[mask], old[mask], rtol=0, atol=10 * near)
        assert update.metrics["actor/grad_norm"].result() == pytest.approx(sum(norms) / 6, rel=1e-3)
        assert update.metrics["actor/pg_clipfrac"].result() > 0
