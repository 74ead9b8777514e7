"""The value function of PPO: a decoder with one number per token, trained on the returns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo.algo.value_loss import explained_variance, value_loss
from gspo.kernels.device_memory import upload
from gspo.metrics import Metric, Metrics, merge_metrics
from gspo.training.batch.batching import Kind, MicroBatch, count_rows, plan_micro_batches
from gspo.training.forward import Forward
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.parallel.ranks import ALONE, Ranks, idle_row
from gspo.training.schedule import Schedule
from gspo.types import AdvantageBatch, Batch, BatchTotals, LossOutput, TrainBatch


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """How a batch is split, and the clip of values. `micro_batch_rows` is used only when `micro_batch_tokens` is None."""

    mini_batch_groups: int = 8
    num_epochs: int = 1
    micro_batch_tokens: int | None = 16384
    micro_batch_rows: int = 8
    clip: float = 0.5
    layout: Kind = "shared"


class ValueModel(nn.Module):
    """A causal decoder with a linear map from hidden states to one float32 value instead of its output layer.

    The map starts at 0, so the first values are 0 and the first advantages are the rewards alone.
    """

    def __init__(self, model: Any, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.decoder = model.base_model
        if head is not None:
            self.head = head
            return
        size = model.get_output_embeddings().weight.shape[1]
        device = next(self.decoder.parameters()).device
        self.head = nn.Linear(size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @staticmethod
    def of_classifier(model: Any) -> ValueModel:
        """A classifier with one label: its own decoder and score, which becomes float32."""
        return ValueModel(model, model.score.float())

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values [b,T]. The value at response token t is computed from the tokens before t."""
        return micro.scatter(self.head(micro.hidden(self.decoder).float()).squeeze(-1))


class Critic:
    """A value model with its optimizer."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: MasterOptimizer,
        schedule: Schedule,
        settings: CriticSettings,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.optimizer, self.schedule = model.eval(), optimizer, schedule
        self.settings, self.ranks = settings, ranks
        self.device = next(model.decoder.parameters()).device
        self.runner = Forward.of(model.decoder, settings.layout, sequence=ranks.sequence)

    def plan(self, batch: TrainBatch, epoch: int = 0) -> list[list[list[int]]]:
        """Rows of each micro-batch of each mini-batch. Depends on the batch and the epoch only."""
        s = self.settings
        return plan_micro_batches(
            batch,
            s.mini_batch_groups,
            max_tokens=s.micro_batch_tokens,
            max_rows=s.micro_batch_rows,
            kind=self.runner.kind,
            ranks=self.ranks,
            epoch=epoch,
        )

    def forward(self, batch: TrainBatch, rows: list[int]) -> Tensor:
        """Values [b,T]; without rows, those of a forward that does not count (`idle_row`)."""
        micro = self.runner.micro(batch, rows or [idle_row(batch)], self.device)
        return self.ranks.add_up(self.ranks.run(self.model, micro))

    @torch.no_grad()
    def score(self, batch: Batch) -> Batch:
        """The batch with `values` under the current weights; zero in other ranks' rows."""
        values = torch.zeros_like(batch.mask)
        with self.runner.running():
            for micros in self.plan(batch):
                for rows in micros:
                    got = self.forward(batch, rows).cpu()
                    if rows:
                        values[rows] = got
        self.ranks.rest()
        return dataclasses.replace(batch, values=values * batch.mask)

    def update(self, batch: AdvantageBatch, *, step: int) -> Metrics:
        """One optimizer step per mini-batch. One with a non-finite loss or gradient is skipped and counted."""
        assert batch.values is not None, "score() comes first"
        metrics: Metrics = {}
        lr = self.schedule.at(step)
        for epoch in range(self.settings.num_epochs):
            for micros in self.plan(batch, epoch):
                merge_metrics(metrics, self._mini_batch(batch, micros, lr))
        explained = explained_variance(batch.values, batch.returns, batch.mask)
        return metrics | {"critic/lr": Metric("last", lr), "critic/vf_explained_var": Metric("last", explained)}

    def _mini_batch(self, batch: AdvantageBatch, micros: list[list[int]], lr: float) -> Metrics:
        totals = self.ranks.total(count_rows(batch, [row for rows in micros for row in rows]))
        metrics: Metrics = {}
        total = torch.zeros((), device=self.device)
        self.optimizer.begin(len(micros))
        with self.runner.running():
            for rows in micros:
                out = self._micro_step(batch, rows, totals)
                total += out.loss.detach()
                merge_metrics(metrics, out.metrics)
        result = self.optimizer.step(lr, self.ranks.sum(total))
        if not result.applied:
            return {"critic/skipped_updates": Metric("sum", 1.0)}
        norm = Metric.mean(result.grad_norm)
        return metrics | {"critic/grad_norm": norm, "critic/skipped_updates": Metric("sum", 0.0)}

    def _micro_step(self, batch: AdvantageBatch, rows: list[int], totals: BatchTotals) -> LossOutput:
        assert batch.values is not None
        values = self.forward(batch, rows)
        if not rows:
            loss = values.sum() * 0.0
            loss.backward()
            return LossOutput(loss.detach(), {})
        out = value_loss(
            values,
            upload(batch.values[rows], self.device),
            upload(batch.returns[rows].float(), self.device),
            upload(batch.mask[rows], self.device),
            self.settings.clip,
            totals,
        )
        out.loss.backward()
        return out

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and optimizer state, by file name."""
        return {"critic/model": dict(self.model.state_dict()), "critic/optimizer": self.optimizer.state_tensors()}

    def load_state_tensors(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.model.load_state_dict(tensors["critic/model"])
        self.optimizer.load_state_tensors(tensors["critic/optimizer"])
