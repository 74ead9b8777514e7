"""The policy being trained: it scores a batch (π_old) and updates on it (π_θ) with the same arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gspo.algo.diagnostics import entropy_metric
from gspo.kernels.device_memory import keep_freed_memory, upload
from gspo.metrics import Metric, Metrics, merge_metrics
from gspo.models.output_head import Head
from gspo.training.batch.batching import Kind, MicroBatch, count_rows, plan_micro_batches
from gspo.training.forward import Forward
from gspo.training.head_gradient import HeadGradient
from gspo.training.log_probs import chosen_log_probs
from gspo.training.optim.adamw import MasterOptimizer, StepResult
from gspo.training.parallel.ranks import ALONE, Ranks, idle_row
from gspo.training.schedule import Schedule
from gspo.types import AdvantageBatch, BatchTotals, LossInputs, LossOutput, ScoredBatch, TrainBatch

LossFunction = Callable[[LossInputs], LossOutput]
Upcoming = Callable[[], TrainBatch]
Seen = tuple[list[int], Tensor, Tensor | None]  # rows, their log-probs and entropies
# (log_probs, ref_log_probs or None, entropy or None, mask, totals) → extra loss terms and their metrics
Regulariser = Callable[[Tensor, Tensor | None, Tensor | None, Tensor, BatchTotals], LossOutput | None]


@dataclass(frozen=True, slots=True)
class Supervision:
    """Examples whose answers are imitated in the same optimizer steps: weight · their mean negative log-prob.

    Each optimizer step has an equal share of the examples.
    """

    batch: TrainBatch
    weight: float


@dataclass(frozen=True, slots=True)
class Update:
    """The result of an update: its metrics, and the log-probs [B,T] of each mini-batch before its optimizer step.

    `batch` is the batch it trained on, with π_old and entropies of every row.
    """

    metrics: Metrics
    log_probs: Tensor
    batch: AdvantageBatch


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How a batch is split and run. `micro_batch_rows` is used only when `micro_batch_tokens` is None."""

    temperature: float = 1.0
    mini_batch_groups: int = 8
    num_epochs: int = 1
    micro_batch_tokens: int | None = 16384
    micro_batch_rows: int = 8
    old_log_prob_source: Literal["recompute", "rollout", "first_pass"] = "first_pass"
    entropy_in_loss: bool = False
    entropy_checkpointing: bool = False  # recompute log-probs and entropies in the backward
    layout: Kind = "shared"
    flex_attention: bool = False  # in packed layouts, instead of flash or SDPA
    score_tokens: int | None = None  # per micro-batch when π_old is computed
    score_rows: int | None = None  # with neither, π_old uses the micro-batches of training and ratios are exact
    compiled: bool = False  # compile layers, and capture CUDA graphs with the flash kernel


class TokenScorer:
    """A causal language model that computes log-probs of a batch. Dropout is off, so that ratios are comparable."""

    def __init__(self, model: Any, settings: PolicySettings, ranks: Ranks = ALONE) -> None:
        self.model = model.eval()
        self.ranks = ranks
        self.head = Head.of(model)
        self.runner = Forward.of(
            model.base_model,
            settings.layout,
            flex=settings.flex_attention,
            compiled=settings.compiled,
            sequence=ranks.sequence,
        )
        self.settings = settings
        parameter = next(model.parameters())
        self.device = parameter.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)  # of log-probs

    def plan(self, batch: TrainBatch, epoch: int = 0) -> list[list[list[int]]]:
        """Rows of each micro-batch of each mini-batch. Depends on the batch and the epoch only, so all passes agree."""
        return self._plan(batch, self.settings.micro_batch_tokens, self.settings.micro_batch_rows, epoch)

    def _plan(self, batch: TrainBatch, max_tokens: int | None, max_rows: int, epoch: int = 0) -> list[list[list[int]]]:
        return plan_micro_batches(
            batch,
            self.settings.mini_batch_groups,
            max_tokens=max_tokens,
            max_rows=max_rows,
            kind=self.runner.kind,
            ranks=self.ranks,
            epoch=epoch,
        )

    def micro(self, batch: TrainBatch, rows: Sequence[int]) -> MicroBatch:
        """The tensors of one forward; without rows, those of one that does not count (`idle_row`)."""
        return self.runner.micro(batch, rows or [idle_row(batch)], self.device)

    def forward(self, micro: MicroBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies [b,T] of the response tokens, zero on padding; within `runner.running()`."""
        log_probs, entropies = self.ranks.run(self._forward, micro, entropy)
        return self.ranks.add_up(log_probs), None if entropies is None else self.ranks.add_up(entropies)

    def _forward(self, micro: MicroBatch, entropy: bool) -> tuple[Tensor, Tensor | None]:
        hidden = self.runner.hidden(micro)
        log_probs, entropies = chosen_log_probs(
            self.head,
            hidden,
            micro.targets,
            self.settings.temperature,
            entropy=entropy,
            entropy_grad=self.settings.entropy_in_loss,
            recompute=self.settings.entropy_checkpointing,
        )
        return micro.scatter(log_probs), None if entropies is None else micro.scatter(entropies)

    def log_probs(
        self, batch: TrainBatch, plan: Sequence[Sequence[Sequence[int]]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B,T] of a whole batch under the current weights; zero in other ranks' rows.

        Compiled layers run with gradients, as in an update: code compiled for a forward alone may round differently,
        and a ratio of equal weights must be 1.
        """
        log_probs, entropies = (torch.zeros_like(batch.mask, dtype=self.dtype) for _ in range(2))
        found = []
        compiled = self.runner.layers is not None and any(p.requires_grad for p in self.model.parameters())
        with torch.set_grad_enabled(compiled), self.runner.running():
            for micros in self.plan(batch) if plan is None else plan:
                for rows in micros:
                    got, entropy = self.forward(self.micro(batch, rows), entropy=True)
                    found.append((rows, got.detach(), None if entropy is None else entropy.detach()))
        for rows, got, entropy in found:  # after the last forward, so that the loop never waits for a GPU
            if rows and entropy is not None:
                log_probs[rows], entropies[rows] = got.cpu(), entropy.cpu()
        self.ranks.rest()
        return log_probs, entropies


class Policy(TokenScorer):
    """The model being trained, with its optimizer."""

    def __init__(
        self, model: Any, optimizer: MasterOptimizer, schedule: Schedule, settings: PolicySettings, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(model, settings, ranks)
        self.optimizer = optimizer
        self.schedule = schedule
        self._head_gradient = HeadGradient(self.head)
        self.head = dataclasses.replace(self.head, multiply=self._head_gradient.multiply)

    def score(self, batch: TrainBatch) -> ScoredBatch:
        """The batch with π_old, from the same micro-batches that the update will run (exact-ratio mode).

        With `first_pass` the rows of the first mini-batch stay unscored: the update's forward of them computes the same
        bits on the same weights, and `update` returns them as π_old.
        """
        if self.settings.old_log_prob_source == "rollout":
            return batch.with_old(batch.rollout_log_probs)
        plan = self.plan(batch)
        if self.settings.score_tokens or self.settings.score_rows:
            plan = self._plan(batch, self.settings.score_tokens, self.settings.score_rows or 1)
        unscored: list[list[int]] = []
        if self.finds_old(batch):
            unscored, *plan = plan
        return batch.with_old(*self.log_probs(batch, plan), unscored_rows=sorted(_rows_of(unscored)))

    def finds_old(self, batch: TrainBatch) -> bool:
        """Whether the update computes π_old of the first mini-batch.

        Not when a later epoch may run these rows on another rank, which does not have their π_old.
        """
        s = self.settings
        moves = batch.order_seed is not None and s.num_epochs > 1 and self.ranks.num_shares > 1
        return s.old_log_prob_source == "first_pass" and not moves

    def update(
        self,
        batch: AdvantageBatch,
        loss: LossFunction,
        *,
        step: int,
        regulariser: Regulariser | None = None,
        upcoming: Upcoming | None = None,
        beside: Supervision | None = None,
    ) -> Update:
        """One optimizer step per mini-batch. One with a non-finite loss or gradient is skipped and counted.

        `beside` adds a supervised loss. `upcoming` makes the batch of the next update. Its micro-batches are made while
        a GPU works on this one.
        """
        metrics: Metrics = {}
        seen_log_probs = torch.zeros_like(batch.mask, dtype=self.dtype)
        lr = self.schedule.at(step)
        for epoch in range(self.settings.num_epochs):
            seen_log_probs.zero_()  # this rank may have other rows than in the previous epoch
            plan = self.plan(batch, epoch)
            later = {row for micros in plan[1:] for row in _rows_of(micros)}
            assert later.isdisjoint(batch.unscored_rows), "only the first mini-batch's forward is π_old"
            shares = self._shares(beside, len(plan))
            done = [
                self._mini_batch(batch, micros, loss, regulariser, lr, beside, share)
                for micros, share in zip(plan, shares, strict=True)
            ]
            if upcoming is not None and epoch == self.settings.num_epochs - 1:
                self._prepare(upcoming())
            batch = _with_first_pass(batch, done[0].seen)
            for index, one in enumerate(done):  # after the last step, so that the loop never waits for a GPU
                for rows, log_probs, _ in one.seen:
                    seen_log_probs[rows] = log_probs.cpu()
                found = one.metrics()
                by_index = {f"{name}/mb{index}": found[name] for name in _BY_MINI_BATCH if epoch == 0 and name in found}
                merge_metrics(metrics, {**found, **by_index})
        metrics["actor/lr"] = Metric("last", lr)
        if batch.entropy is not None:
            metrics |= entropy_metric(batch.entropy, batch.mask)
        return Update(metrics, seen_log_probs, batch)

    def _prepare(self, batch: TrainBatch) -> None:
        """Make the micro-batches of a batch, which the next update finds ready."""
        for rows in (rows for micros in self.plan(batch) for rows in micros):
            self.micro(batch, rows)

    def _shares(self, beside: Supervision | None, num_mini_batches: int) -> list[list[list[int]]]:
        """For each mini-batch the micro-batches of the examples beside it; none without examples."""
        if beside is None:
            return [[] for _ in range(num_mini_batches)]
        s = self.settings
        shares = plan_micro_batches(
            beside.batch,
            -(-beside.batch.num_sequences // num_mini_batches),
            max_tokens=s.micro_batch_tokens,
            max_rows=s.micro_batch_rows,
            kind=self.runner.kind,
            ranks=self.ranks,
        )
        return shares + [[] for _ in range(num_mini_batches - len(shares))]

    def _mini_batch(
        self,
        batch: AdvantageBatch,
        micros: list[list[int]],
        loss: LossFunction,
        regulariser: Regulariser | None,
        lr: float,
        beside: Supervision | None,
        share: list[list[int]],
    ) -> _MiniBatch:
        counts = self.ranks.total(count_rows(batch, _rows_of(micros)))
        metrics: Metrics = {}
        total = torch.zeros((), device=self.device)
        seen: list[Seen] = []
        self.optimizer.begin(len(micros) + len(share))
        # Sharded gradients are summed over ranks instead.
        in_place = self._head_gradient.active(self.model) if self.ranks is ALONE else nullcontext()
        with self.runner.running(), in_place:
            for rows in micros:
                out = self._micro_step(batch, rows, loss, regulariser, counts, seen)
                total += out.loss.detach()
                merge_metrics(metrics, out.metrics)
            if beside is not None and share:
                num_tokens = self.ranks.total(count_rows(beside.batch, _rows_of(share))).num_tokens
                for rows in share:
                    out = self._supervised_step(beside, rows, num_tokens)
                    total += out.loss
                    merge_metrics(metrics, out.metrics)
        total = self.ranks.sum(total)
        return _MiniBatch(metrics, total, self.optimizer.step(lr, total), seen)

    def _micro_step(
        self,
        batch: AdvantageBatch,
        rows: list[int],
        loss: LossFunction,
        regulariser: Regulariser | None,
        counts: BatchTotals,
        seen: list[Seen],
    ) -> LossOutput:
        if not rows:
            return self._idle_step(batch)
        is_old = rows[0] in batch.unscored_rows  # then so are all rows of the mini-batch
        need_entropy = self.settings.entropy_in_loss or is_old or batch.entropy is None
        log_probs, entropy = self.forward(self.micro(batch, rows), entropy=need_entropy)
        seen.append((rows, log_probs.detach(), None if entropy is None else entropy.detach()))
        mask = upload(batch.mask[rows], self.device)
        old = log_probs.detach() if is_old else upload(batch.old_log_probs[rows], self.device)
        out = loss(
            LossInputs(
                log_probs=log_probs,
                old_log_probs=old,
                advantages=upload(batch.advantages[rows].float(), self.device),
                mask=mask,
                totals=counts,
                rollout_log_probs=upload(batch.rollout_log_probs[rows], self.device),
                turn_ids=None if batch.turn_ids is None else upload(batch.turn_ids[rows], self.device),
            )
        )
        if regulariser is not None:
            ref = None if batch.ref_log_probs is None else upload(batch.ref_log_probs[rows], self.device)
            extra = regulariser(log_probs, ref, entropy, mask, counts)
            if extra is not None:
                out = LossOutput(out.loss + extra.loss, {**out.metrics, **extra.metrics})
        out.loss.backward()
        if batch.entropy is None and entropy is not None:
            out.metrics.update(entropy_metric(entropy, mask))
        return out

    def _supervised_step(self, beside: Supervision, rows: list[int], num_tokens: float) -> LossOutput:
        """The gradient of the answers of some examples; without rows, one of 0 beside the other ranks'."""
        batch = beside.batch
        log_probs, _ = self.forward(self.runner.uncached(batch, rows or [idle_row(batch)], self.device))
        mask = upload(batch.mask[rows], self.device) if rows else torch.zeros_like(log_probs)
        total = -(log_probs * mask).sum()
        loss = beside.weight * total / max(num_tokens, 1.0)
        loss.backward()
        return LossOutput(loss.detach(), {"actor/sft_loss": Metric.mean(total.detach(), mask.sum())})

    def _idle_step(self, batch: TrainBatch) -> LossOutput:
        """Join the other ranks' forward and backward with a loss of 0."""
        log_probs, _ = self.forward(self.micro(batch, []))
        loss = log_probs.sum() * 0.0
        loss.backward()
        return LossOutput(loss.detach(), {})


def _rows_of(micros: Sequence[Sequence[int]]) -> list[int]:
    return [row for rows in micros for row in rows]


def _with_first_pass(batch: AdvantageBatch, seen: Sequence[Seen]) -> AdvantageBatch:
    """The batch with π_old of its unscored rows, from the forwards of the first mini-batch."""
    found = [(rows, old, h) for rows, old, h in seen if rows[0] in batch.unscored_rows and h is not None]
    if not found:
        return batch
    rows, old, entropy = zip(*found)
    return batch.with_rows(_rows_of(rows), torch.cat([x.cpu() for x in old]), torch.cat([x.cpu() for x in entropy]))


_BY_MINI_BATCH = (
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/pg_clipfrac_upper",
    "actor/seq_importance_ratio",
)


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    """A mini-batch whose work is done, or queued on a GPU."""

    found: Metrics
    loss: Tensor
    result: StepResult
    seen: list[Seen]

    def metrics(self) -> Metrics:
        """Its metrics; for a skipped one only that it was, and whether the loss or the gradient was not finite."""
        if self.result.applied:
            norm = Metric.mean(self.result.grad_norm)
            return {**self.found, "actor/grad_norm": norm, "actor/skipped_updates": Metric("sum", 0.0)}
        kind = "gradient" if torch.isfinite(self.loss) else "loss"
        return {"actor/skipped_updates": Metric("sum", 1.0), f"actor/nonfinite_{kind}": Metric("sum", 1.0)}
