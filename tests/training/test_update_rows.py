"""Which values reach which rows of an update, what each mini-batch reports, and what is left out of the report."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from gspo.algo.objective import BoundLoss, BoundRegulariser
from gspo.algo.settings import LossSettings
from gspo.metrics import Metric
from gspo.training.batch.batching import collate, count_rows
from gspo.training.policy import Policy
from gspo.types import AdvantageBatch, BatchTotals, LossInputs, LossOutput
from tests.training.test_ranks import place
from tests.training.test_update_values import CUTS, assert_gradient, make, masked_groups

GSPO = BoundLoss("gspo", LossSettings())


def random_batch(policy: Policy, order_seed: int | None = None) -> AdvantageBatch:
    """A batch in which no two tokens have the same advantage, reference or behaviour policy, in turns of 3 tokens."""
    drawn = torch.Generator().manual_seed(8)
    batch = collate(masked_groups(), order_seed)
    shape = batch.mask.shape
    behaviour = -4.0 + 0.3 * torch.randn(shape, generator=drawn, dtype=torch.float64)
    reference = -4.0 + 0.3 * torch.randn(shape, generator=drawn, dtype=torch.float64)
    turns = (torch.arange(shape[1]) // 3).expand(shape).where(batch.mask.bool(), -1)
    batch = dataclasses.replace(batch, rollout_log_probs=behaviour, ref_log_probs=reference, turn_ids=turns)
    advantages = torch.randn(shape, generator=drawn)
    return policy.score(batch).with_advantages(advantages, batch.mask)


@pytest.mark.parametrize("cut", ["whole", "shared", "padded rows"])
def test_the_gradient_away_from_the_old_policy_is_that_of_the_formula(cut: str) -> None:
    """GSPO by turn against μ, with KL and entropy: every token's own advantage, ratio and reference."""
    policy = make(old_log_prob_source="rollout", entropy_in_loss=True, **CUTS[cut])
    batch = random_batch(policy)
    assert batch.turn_ids is not None and batch.ref_log_probs is not None
    loss = BoundLoss("gspo", LossSettings(clip_low=0.99, clip_high=99.0, level="turn"))
    regulariser = BoundRegulariser("token-mean", kl_coef=0.7, kl_kind="k2", entropy_coeff=0.3)
    policy.update(batch, loss, step=0, regulariser=regulariser)
    mask, turns = batch.mask.bool(), batch.turn_ids

    def loss_of(log_probs: Tensor, entropies: Tensor) -> Tensor:
        rows = []
        for row in range(len(mask)):
            tokens = []
            for turn in range(int(turns[row].max()) + 1):
                own = mask[row] & (turns[row] == turn)
                ratio = (log_probs[row] - batch.rollout_log_probs[row])[own].mean().exp()
                tokens.append(-batch.advantages[row][own].double() * ratio)
            rows.append(torch.cat(tokens).mean())
        kl = 0.5 * (log_probs - batch.ref_log_probs).square()[mask].mean()
        return torch.stack(rows).mean() + 0.7 * kl - 0.3 * entropies[mask].mean()

    assert_gradient(policy, loss_of, batch)


class Watch:
    """A loss and a regulariser that keep what they were called with, and a loss of 0.01 · log π."""

    def __init__(self) -> None:
        self.inputs: list[LossInputs] = []
        self.terms: list[tuple[Tensor | None, Tensor | None, Tensor, BatchTotals]] = []

    def __call__(self, x: LossInputs) -> LossOutput:
        self.inputs.append(dataclasses.replace(x, log_probs=x.log_probs.detach().clone()))
        number = Metric.mean(float(len(self.inputs)))
        clip = {"actor/pg_clipfrac": number, "actor/seq_importance_ratio": number, "actor/other": number}
        return LossOutput(0.01 * (x.log_probs * x.mask).sum(), clip)

    def regulariser(
        self, log_probs: Tensor, ref: Tensor | None, entropy: Tensor | None, mask: Tensor, totals: BatchTotals
    ) -> LossOutput | None:
        self.terms.append((ref, entropy, mask, totals))
        return None


@pytest.mark.parametrize("order_seed", [None, 5])
def test_each_micro_batch_has_the_values_of_its_own_rows(order_seed: int | None) -> None:
    """Also in the second epoch, and also where mini-batches are drawn."""
    policy = make(lr=1e-2, mini_batch_groups=2, num_epochs=2, micro_batch_tokens=30, old_log_prob_source="recompute")
    batch, watch = random_batch(policy, order_seed), Watch()
    assert batch.ref_log_probs is not None and batch.turn_ids is not None
    update = policy.update(batch, watch, step=0, regulariser=watch.regulariser)
    plan = [micros for epoch in range(2) for micros in policy.plan(batch, epoch)]
    assert len(plan) == 4 and min(len(micros) for micros in plan) > 1
    micros = [(rows, [row for part in parts for row in part]) for parts in plan for rows in parts]
    for (rows, together), x, term in zip(micros, watch.inputs, watch.terms, strict=True):
        assert x.turn_ids is not None and x.rollout_log_probs is not None and term[0] is not None
        assert torch.equal(x.old_log_probs, batch.old_log_probs[rows])
        assert torch.equal(x.advantages, batch.advantages[rows])
        assert torch.equal(x.rollout_log_probs, batch.rollout_log_probs[rows])
        assert torch.equal(x.turn_ids, batch.turn_ids[rows]) and torch.equal(x.mask, batch.mask[rows])
        assert x.totals == term[3] == count_rows(batch, together)
        assert torch.equal(term[0], batch.ref_log_probs[rows]) and torch.equal(term[2], batch.mask[rows])
        assert term[1] is None  # π_old has its entropies, and the loss has no entropy term
    second = micros[len(micros) // 2 :]
    for (rows, _), x in zip(second, watch.inputs[len(micros) // 2 :], strict=True):
        assert torch.equal(update.log_probs[rows], x.log_probs)  # of the last epoch, before each step


def test_metrics_by_mini_batch_are_those_of_the_first_epoch_and_the_rest_covers_all() -> None:
    policy, watch = make(mini_batch_groups=2, num_epochs=2), Watch()
    metrics = policy.update(random_batch(policy), watch, step=0).metrics
    assert len(watch.inputs) == 4  # numbered 1 to 4, one micro-batch each
    for name in ("actor/pg_clipfrac", "actor/seq_importance_ratio"):
        assert [metrics[f"{name}/mb{i}"].result() for i in range(2)] == [1.0, 2.0]
        assert metrics[name].result() == 2.5
    assert metrics["actor/other"].result() == 2.5
    assert not any("other/mb" in name or name.endswith("/mb2") for name in metrics)


def test_a_skipped_mini_batch_reports_that_it_was_and_nothing_else() -> None:
    policy, watch = make(mini_batch_groups=2), Watch()
    batch = random_batch(policy)

    def second_is_bad(x: LossInputs) -> LossOutput:
        out = watch(x)
        return LossOutput(out.loss * (float("nan") if len(watch.inputs) == 2 else 1.0), out.metrics)

    metrics = policy.update(batch, second_is_bad, step=0).metrics
    assert metrics["actor/skipped_updates"].result() == metrics["actor/nonfinite_loss"].result() == 1
    assert "actor/nonfinite_gradient" not in metrics and "actor/pg_clipfrac/mb1" not in metrics
    assert metrics["actor/other"].result() == metrics["actor/pg_clipfrac/mb0"].result() == 1.0
    assert 0 < metrics["actor/grad_norm"].result() < float("inf")


def test_a_gradient_that_is_not_finite_is_reported_as_one() -> None:
    policy = make()

    def steep(x: LossInputs) -> LossOutput:
        return LossOutput((x.log_probs * 0.0).sum().sqrt(), {})  # 0, with a slope of 0 · ∞

    metrics = policy.update(random_batch(policy), steep, step=0).metrics
    assert metrics["actor/nonfinite_gradient"].result() == metrics["actor/skipped_updates"].result() == 1
    assert "actor/nonfinite_loss" not in metrics


def test_without_entropies_of_the_old_policy_those_of_the_update_are_reported() -> None:
    cut = {"old_log_prob_source": "rollout", "micro_batch_tokens": 30}
    policy = make(**cut)
    batch = random_batch(policy)
    assert batch.entropy is None and batch.unscored_rows == ()
    assert torch.equal(batch.old_log_probs, batch.rollout_log_probs)
    _, entropies = policy.log_probs(batch)
    metrics = policy.update(batch, Watch(), step=0).metrics
    wanted = float((entropies * batch.mask).sum() / batch.mask.sum())
    assert metrics["actor/entropy"].result() == pytest.approx(wanted, rel=1e-6)


def test_the_first_mini_batch_that_is_drawn_stays_unscored_where_the_update_finds_its_log_probs() -> None:
    for source in ("first_pass", "recompute"):
        policy = make(mini_batch_groups=2, micro_batch_tokens=30, old_log_prob_source=source)
        batch = random_batch(policy, order_seed=5)
        first = sorted(row for rows in policy.plan(batch)[0] for row in rows) if source == "first_pass" else []
        assert list(batch.unscored_rows) == first
        log_probs, entropies = policy.log_probs(batch)
        wanted = log_probs.clone()
        wanted[first] = 0.0
        assert torch.equal(batch.old_log_probs, wanted) and batch.entropy is not None
        trained = policy.update(batch, Watch(), step=0).batch
        assert torch.equal(trained.old_log_probs, log_probs) and torch.equal(trained.entropy, entropies)
        assert trained.unscored_rows == ()


def test_the_update_does_not_find_the_old_log_probs_of_rows_that_may_move_to_another_rank() -> None:
    policy, batch = make(), collate(masked_groups())
    for seed, epochs, ranks, source in itertools.product((None, 3), (1, 2), (1, 2), ("first_pass", "recompute")):
        policy.settings = dataclasses.replace(policy.settings, num_epochs=epochs, old_log_prob_source=source)
        policy.ranks = place(0, ranks)
        moves = seed is not None and epochs == 2 and ranks == 2
        found = policy.finds_old(dataclasses.replace(batch, order_seed=seed))
        assert found == (source == "first_pass" and not moves), (seed, epochs, ranks, source)


def test_the_next_batch_is_made_once_in_the_last_epoch() -> None:
    policy, watch, calls = make(num_epochs=3), Watch(), []
    batch = random_batch(policy)

    def upcoming() -> AdvantageBatch:
        calls.append(len(watch.inputs))
        return batch

    policy.update(batch, watch, step=0, upcoming=upcoming)
    assert calls == [3]
