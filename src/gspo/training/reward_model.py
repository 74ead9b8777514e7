"""The reward model: a decoder with one score per text, frozen as a role of reinforcement learning, or trained on pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.metrics import Metric, Metrics, merge_metrics
from gspo.training.batch.batching import Kind, plan_micro_batches
from gspo.training.critic import ValueModel
from gspo.training.forward import Forward
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.parallel.ranks import ALONE, Ranks, idle_row
from gspo.training.schedule import Schedule
from gspo.types import TrainBatch

CENTER_COEF = 0.01  # of (chosen + rejected)², which keeps scores around 0 (arXiv 2312.09244)

Text = tuple[int, ...]  # tokens


@dataclass(frozen=True, slots=True)
class RewardModelSettings:
    """How texts run: at most `max_tokens` per forward. `offload` keeps the weights in host memory between calls."""

    max_tokens: int = 16384
    layout: Kind = "packed"
    offload: bool = False


def text_batch(texts: Sequence[Text]) -> TrainBatch:
    """Texts as prompts of a response of one token, whose place is where the score of the whole text is read."""
    n = len(texts)
    return TrainBatch(
        prompt_ids=list(texts),
        response_ids=[(0,)] * n,
        mask=torch.ones(n, 1),
        group_ids=torch.arange(n),
        scores=torch.zeros(n, dtype=torch.float64),
        rollout_log_probs=torch.zeros(n, 1),
    )


class RewardModel:
    """Scores texts, packed in forwards under a token budget."""

    def __init__(self, model: ValueModel, settings: RewardModelSettings, ranks: Ranks = ALONE) -> None:
        self.scorer, self.settings, self.ranks = model.eval(), settings, ranks
        self.device = next(model.decoder.parameters()).device
        self.runner = Forward.of(model.decoder, settings.layout, sequence=ranks.sequence)
        if self._is_offloaded:
            self.scorer.to("cpu")

    @torch.no_grad()
    def scores(self, texts: Sequence[Text]) -> Tensor:
        """The scores [n], float32; 0 in other ranks' rows."""
        batch, out = text_batch(texts), torch.zeros(len(texts))
        with self._resident(), self.runner.running():
            for rows in self._plan(batch):
                got = self._forward(batch, rows).cpu()
                if rows:
                    out[rows] = got
        self.ranks.rest()
        return out

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        """The rows of each forward of this rank."""
        num, kind = batch.num_sequences, self.runner.kind
        (plan,) = plan_micro_batches(
            batch, num, max_tokens=self.settings.max_tokens, max_rows=1, kind=kind, ranks=self.ranks
        )
        return plan

    def _forward(self, batch: TrainBatch, rows: Sequence[int]) -> Tensor:
        """The scores of some rows; without rows, those of a forward that does not count."""
        micro = self.runner.uncached(batch, rows or [idle_row(batch)], self.device)
        return self.ranks.add_up(self.ranks.run(self.scorer, micro)).squeeze(-1)

    @property
    def _is_offloaded(self) -> bool:
        return self.settings.offload and self.ranks is ALONE and self.device.type != "cpu"

    @contextmanager
    def _resident(self) -> Iterator[None]:
        """A context in which the weights are on the device."""
        if not self._is_offloaded:
            yield
            return
        self.scorer.to(self.device)
        try:
            yield
        finally:
            self.scorer.to("cpu")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one question, as tokens with the question: one is better."""

    uid: str
    chosen: Text
    rejected: Text

    @property
    def num_tokens(self) -> int:
        return len(self.chosen) + len(self.rejected)


class TrainedRewardModel(RewardModel):
    """A reward model with its optimizer. `model` is the classifier that is saved; it shares the scorer's weights."""

    def __init__(
        self, classifier: Any, optimizer: MasterOptimizer, schedule: Schedule, settings: RewardModelSettings
    ) -> None:
        super().__init__(ValueModel.of_classifier(classifier), settings)
        self.model, self.optimizer, self.schedule = classifier.eval(), optimizer, schedule

    def update(self, pairs: Sequence[Pair], *, step: int) -> Metrics:
        """One optimizer step on the Bradley-Terry loss: the mean of -log σ(chosen - rejected)."""
        batch = text_batch([text for pair in pairs for text in (pair.chosen, pair.rejected)])
        micros, lr = self._pairs_within_budget(pairs), self.schedule.at(step)
        found: Metrics = {}
        total = torch.zeros((), device=self.device)
        self.optimizer.begin(len(micros))
        with self.runner.running():
            for rows in micros:
                chosen, rejected = self._forward(batch, rows).view(-1, 2).unbind(-1)
                losses = preference_losses(chosen, rejected)
                loss = losses.sum() / len(pairs)
                loss.backward()
                total += loss.detach()
                merge_metrics(found, preference_metrics("train", chosen.detach(), rejected.detach()))
        result = self.optimizer.step(lr, total)
        skipped = Metric("sum", 0.0 if result.applied else 1.0)
        norm = {"actor/grad_norm": Metric.mean(result.grad_norm)} if result.applied else {}
        return {**found, **norm, "actor/skipped_updates": skipped, "actor/lr": Metric("last", lr)}

    def evaluate(self, pairs: Sequence[Pair]) -> tuple[Metrics, Tensor]:
        """Loss and accuracy on held-out pairs, and all their scores [n,2]."""
        scores = self.scores([text for pair in pairs for text in (pair.chosen, pair.rejected)]).view(-1, 2)
        return preference_metrics("val", scores[:, 0], scores[:, 1]), scores

    def _pairs_within_budget(self, pairs: Sequence[Pair]) -> list[list[int]]:
        """The rows of each forward: whole pairs in order, at most `max_tokens` unless one pair is longer."""
        micros: list[list[int]] = []
        room = 0
        for number, pair in enumerate(pairs):
            if pair.num_tokens > room or not micros:
                micros.append([])
                room = self.settings.max_tokens
            micros[-1] += [2 * number, 2 * number + 1]
            room -= pair.num_tokens
        return micros


def preference_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log σ(chosen - rejected), with a small pull of their sum to 0, so that a score above 0 means good."""
    return -F.logsigmoid(chosen - rejected) + CENTER_COEF * (chosen + rejected) ** 2


def preference_metrics(prefix: str, chosen: Tensor, rejected: Tensor) -> Metrics:
    """Loss, the share of pairs in the right order, the share of answers on the right side of 0, and the margin."""
    count = float(len(chosen))
    sides = ((chosen > 0).float() + (rejected < 0).float()) / 2
    values = {
        "loss": preference_losses(chosen, rejected),
        "accuracy": (chosen > rejected).float(),
        "sign_accuracy": sides,
        "margin": chosen - rejected,
    }
    return {f"{prefix}/{name}": Metric.mean(value.sum(), count) for name, value in values.items()}
