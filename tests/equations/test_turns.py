"""Observations are context, not actions: they enter no ratio, loss, gradient or denominator."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gspo.algo.aggregation import count_totals
from gspo.algo.kl import kl_loss
from gspo.algo.losses import get_policy_loss
from gspo.algo.settings import LOSSES, Behaviour, LossSettings
from gspo.training.batch.batching import collate
from gspo.training.policy import PolicySettings, TokenScorer
from gspo.types import Group, LossInputs, Prompt, Reward, Rollout, Turn
from tests.training.models import VOCAB, gpt2, llama
from tests.training.test_policy import policy

SHAPES = [[(3, 2), (4, 3), (2, 0)], [(1, 4), (2, 1), (3, 0)], [(5, 0)], [(2, 3), (1, 0)]]  # (model, observation) tokens


def episodes(num_groups: int = 2, seed: int = 0) -> list[Group]:
    """Groups whose rollouts have up to three turns with observations between them."""
    gen = torch.Generator().manual_seed(seed)

    def tokens(size: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCAB, (size,), generator=gen).tolist())

    groups = []
    for number in range(num_groups):
        rollouts = []
        for index, shape in enumerate(SHAPES):
            ids: tuple[int, ...] = ()
            mask: tuple[int, ...] = ()
            turns = []
            for own, seen in shape:
                turns.append(Turn(len(ids), len(ids) + own))
                ids, mask = ids + tokens(own + seen), mask + (1,) * own + (0,) * seen
            log_probs = tuple(-1.0 * m for m in mask)
            rollouts.append(
                Rollout(ids, log_probs, mask, (0,) * len(ids), "stop", reward=Reward(float(index)), turns=tuple(turns))
            )
        groups.append(Group(Prompt(f"p{number}", (), tokens(4)), tuple(rollouts), number, 0))
    return groups


def without_observations(model, groups: list[Group]) -> tuple[Tensor, Tensor]:
    """Log-probs of the model's tokens alone [B,T], each turn scored with all that precedes it as its prompt; the mask."""
    rollouts = [(g.prompt.token_ids, r) for g in groups for r in g.rollouts]
    width = max(r.num_model_tokens for _, r in rollouts)
    rows, mask = [], torch.zeros(len(rollouts), width, dtype=torch.float64)
    for row, (prompt, rollout) in enumerate(rollouts):
        parts = []
        for turn in rollout.turns:
            before, own = prompt + rollout.token_ids[: turn.start], rollout.token_ids[turn.start : turn.end]
            logits = model(torch.tensor([before + own])).logits[0, len(before) - 1 : -1]
            parts.append(logits.log_softmax(-1).gather(-1, torch.tensor(own)[:, None])[:, 0])
        found = torch.cat(parts)
        mask[row, : len(found)] = 1
        rows.append(torch.nn.functional.pad(found, (0, width - len(found))))
    return torch.stack(rows), mask


def squeeze(values: Tensor, mask: Tensor) -> Tensor:
    """[B,T] without the columns of observations, one row after another, padded again."""
    width = int(mask.sum(-1).max())
    out = torch.zeros(len(mask), width, dtype=values.dtype)
    for row, (line, own) in enumerate(zip(values, mask.bool())):
        out[row, : int(own.sum())] = line[own]
    return out


def inputs(log_probs: Tensor, noise: Tensor, mask: Tensor, advantages: Tensor) -> LossInputs:
    old = log_probs.detach() + noise
    return LossInputs(log_probs, old, advantages, mask, count_totals(mask), old + 0.3 * noise)


@pytest.mark.parametrize("kind", ["plain", "packed", "shared"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_the_same_tokens_with_the_observations_in_the_prompt(loss: str, kind: str) -> None:
    model = gpt2().double()  # its norms stay in float64, unlike those of Llama
    groups = episodes()
    batch = collate(groups)
    scorer = TokenScorer(model, PolicySettings(layout=kind, micro_batch_tokens=10_000))
    assert scorer.runner.kind == kind
    gen = torch.Generator().manual_seed(3)
    mask = batch.mask.double()
    noise = 0.01 * torch.randn(mask.shape, generator=gen, dtype=torch.float64) * mask
    noise = noise + (1 - mask) * 1e3  # what is not the model's must not be read
    advantages = torch.randn(len(mask), 1, generator=gen, dtype=torch.float64).expand(mask.shape)
    settings = LossSettings(norm_length=16.0, behaviour=Behaviour("sequence_mask", 5.0))
    rows = list(range(batch.num_sequences))

    def gradient(log_probs: Tensor, noise: Tensor, mask: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        x = inputs(log_probs, noise, mask, advantages)
        total = get_policy_loss(loss)(x, settings).loss
        ref = x.old_log_probs - 0.1 * mask
        total = total + kl_loss("k3", log_probs, ref, mask, x.totals, "token-mean").loss
        grads = torch.autograd.grad(total, list(model.parameters()))
        return total.detach(), torch.cat([g.flatten() for g in grads])

    with scorer.runner.running():
        log_probs, _ = scorer.forward(scorer.micro(batch, rows))
        got, got_gradient = gradient(log_probs.double(), noise, mask, advantages)
    expected_log_probs, own = without_observations(model, groups)
    want, want_gradient = gradient(
        expected_log_probs, squeeze(noise, mask), own, squeeze(advantages.contiguous(), mask)
    )
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)
    error = (got_gradient - want_gradient).norm() / want_gradient.norm()
    assert error < 1e-10


@pytest.mark.parametrize("source", ["first_pass", "recompute"])
def test_the_first_ratio_over_three_turns_is_one_to_the_last_bit(source: str) -> None:
    p = policy(llama(), micro_batch_tokens=40, old_log_prob_source=source, mini_batch_groups=3)
    batch = p.score(collate(episodes(3)))
    advantages = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1)) * batch.mask
    update = p.update(batch.with_advantages(advantages, advantages), get_policy_loss("gspo_token"), step=0)
    assert update.metrics["actor/seq_importance_ratio/min"].result() == 1.0
    assert update.metrics["actor/seq_importance_ratio/max"].result() == 1.0
    assert torch.equal(update.log_probs, update.batch.old_log_probs)


def test_observations_have_no_log_prob_and_a_row_without_trained_tokens_has_no_gradient() -> None:
    p = policy(llama(), micro_batch_tokens=10_000, mini_batch_groups=2)
    batch = collate(episodes())
    log_probs, entropy = p.log_probs(batch)
    outside = batch.mask == 0
    assert (log_probs[outside] == 0).all() and (entropy[outside] == 0).all()
    assert (log_probs[~outside] < 0).all()
    untrained = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    assert (p.log_probs(untrained)[0] == 0).all()
    ready = p.score(untrained).with_advantages(torch.ones_like(batch.mask), batch.mask)
    assert p.update(ready, get_policy_loss("gspo"), step=0).metrics["actor/grad_norm"].result() == 0.0
