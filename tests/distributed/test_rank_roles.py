"""What the ranks of a group return becomes one result: each row once, however many ranks share a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo.distributed.rank_roles import RankCritic, RankPolicy, RankReference, RankRewardModel, Shares
from gspo.distributed.rank_worker import RankScores
from gspo.training.batch.batching import collate
from gspo.types import Group, Prompt, Reward, Rollout


class Ranks:
    """A group whose ranks return what they are given. Ranks that share their sequences return the same."""

    def __init__(self, by_share: list[Any], ranks_per_sequence: int) -> None:
        self._results = [result for result in by_share for _ in range(ranks_per_sequence)]

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self._results


ROWS = torch.tensor([[-1.0, -2.0], [-3.0, 0.0], [-4.0, -5.0]])
FIRST, SECOND = (ROWS * torch.tensor(rows)[:, None] for rows in ([1.0, 0.0, 1.0], [0.0, 1.0, 0.0]))


def batch() -> Any:
    rollouts = tuple(Rollout((5,) * n, (-1.0,) * n, (1,) * n, (0,) * n, "stop", reward=Reward(1.0)) for n in (2, 1, 2))
    return collate([Group(Prompt("p", (), (1,)), rollouts, 0, 0)])


@pytest.mark.parametrize("ranks_per_sequence", [1, 2, 4])
def test_every_row_comes_from_the_rank_that_has_it(ranks_per_sequence: int) -> None:
    def shares(*by_share: Any) -> Shares:
        group: Any = Ranks(list(by_share), ranks_per_sequence)
        return Shares(group, ranks_per_sequence)

    log_probs, entropy = RankPolicy(shares((FIRST, -FIRST), (SECOND, -SECOND))).log_probs(batch())
    assert torch.equal(log_probs, ROWS) and torch.equal(entropy, -ROWS)
    assert torch.equal(RankReference(shares(FIRST, SECOND)).log_probs(batch()), ROWS)
    assert torch.equal(RankCritic(shares(FIRST, SECOND)).score(batch()).values, ROWS)
    assert torch.equal(RankRewardModel(shares(FIRST[:, 0], SECOND[:, 0])).scores([(1,)] * 3), ROWS[:, 0])
    parts = RankScores(FIRST, -FIRST, [2]), RankScores(SECOND, -SECOND, [1])
    scored = RankPolicy(shares(*parts)).score(batch())
    assert torch.equal(scored.old_log_probs, ROWS) and scored.unscored_rows == (1, 2)
