"""ReMax's baseline: the reward of the policy's greedy answer to each prompt (arXiv 2310.10505)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.metrics import Metric, Metrics
from gspo.rewards.protocol import Scorer
from gspo.rollout.engine import GroupRequest, RolloutEngine, SamplingParams
from gspo.types import Group


class GreedyBaseline:
    """Answers the prompts of a batch greedily with the current weights: no randomness, so nothing to resume.

    Only the prompts of groups that are trained on are answered. Where the reward of a greedy answer fails, the mean of
    the group is the baseline, and the failure is counted.
    """

    def __init__(self, engine: RolloutEngine, scorer: Scorer, params: SamplingParams) -> None:
        self._engine, self._scorer = engine, scorer
        self._params = dataclasses.replace(params, temperature=0.0)

    def score(self, groups: Sequence[Group], version: int) -> tuple[Tensor, Metrics]:
        """The baseline of every row [B] of the collated groups, and metrics of the greedy answers."""
        requests = [GroupRequest(g.prompt, g.submission, 1, version, self._params, seed=0) for g in groups]
        for answer in self._engine.generate(requests):
            self._scorer.submit(answer)
        rewards = [answer.rollouts[0].reward for answer in self._scorer.collect()]
        values = [_mean(g) if r is None else r.score for g, r in zip(groups, rewards)]
        rows = [value for g, value in zip(groups, values) for _ in g.rollouts]
        known = [r.score for r in rewards if r is not None]
        return torch.tensor(rows, dtype=torch.float64), {
            "critic/greedy_score/mean": Metric.mean(sum(known), len(known)),
            "critic/greedy_failures": Metric("sum", len(rewards) - len(known)),
        }


def _mean(group: Group) -> float:
    scores = [r.reward.score for r in group.rollouts if r.reward is not None]
    return sum(scores) / len(scores)
