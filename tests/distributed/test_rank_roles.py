"""What the ranks of a group return becomes one result: each row once, however many ranks share a sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo.distributed.rank_roles import RankCritic, RankPolicy, RankReference, RankRewardModel, RankRoles, Shares
from gspo.distributed.rank_worker import RankModels, RankScores, RankUpdate, RankWorker
from gspo.metrics import Metric
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


def roles_of(ranks_per_sequence: int, *by_share: Any) -> tuple[RankRoles, list[Any]]:
    """Roles over ranks that return these results of an update, and the calls that they get."""
    calls: list[Any] = []
    facts = SimpleNamespace(
        ranks_per_sequence=ranks_per_sequence, has_critic=False, has_reference=True, has_reward_model=False
    )

    class Called(Ranks):
        def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
            calls.append((method.__name__, *args))
            return [facts] if method is RankWorker.build else super().call(method, *args)

    ranks: Any = Called(list(by_share), ranks_per_sequence)
    return RankRoles(ranks, lambda device: RankModels(SimpleNamespace())), calls


@pytest.mark.parametrize("ranks_per_sequence", [1, 2])
def test_an_update_returns_the_rows_that_the_ranks_scored_and_the_entropy_of_all(ranks_per_sequence: int) -> None:
    before = batch().with_old(ROWS * 0, ROWS * 0, unscored_rows=[0, 1, 2])
    before = before.with_advantages(before.mask, before.mask)

    def part(rows: list[int], share: torch.Tensor, loss: float, weight: float) -> RankUpdate:
        metrics = {"actor/pg_loss": Metric.mean(loss * weight, weight), "tokens": Metric("sum", weight)}
        return RankUpdate(metrics, 2 * share, rows, ROWS[rows] - 1, ROWS[rows] * 0 + 0.5)

    first, second = part([0, 2], FIRST, 1.0, 4.0), part([1], SECOND, 4.0, 2.0)
    roles, calls = roles_of(ranks_per_sequence, first, second)
    assert roles.critic is None and roles.reward_model is None and roles.reference is not None
    update = roles.update_policy(before, max, step=7, regulariser=min, beside=None)
    assert calls[1] == ("update", before, max, 7, min, None)
    assert torch.equal(update.log_probs, 2 * ROWS) and torch.equal(update.batch.old_log_probs, ROWS - 1)
    assert update.batch.unscored_rows == () and torch.equal(update.batch.entropy, ROWS * 0 + 0.5)
    assert update.metrics["actor/entropy"].result() == 0.5
    loss = update.metrics["actor/pg_loss"].result()
    assert loss == 2.0 and update.metrics["tokens"].result() == 6.0  # weighted by the tokens, each share once


def test_a_rank_sends_the_rows_that_it_scored_and_plain_metrics() -> None:
    before = batch().with_old(ROWS, ROWS, unscored_rows=[0, 1, 2])
    before = before.with_advantages(before.mask, before.mask)
    after = before.with_rows([2, 0], ROWS[[2, 0]] - 1, ROWS[[2, 0]] + 9)
    metrics = {"actor/entropy": Metric.mean(1.0), "x": Metric.mean(torch.tensor(6.0), torch.tensor(2.0))}
    given: list[Any] = []

    def update_policy(*args: Any, **options: Any) -> Any:
        given.append((args, options))
        return SimpleNamespace(metrics=metrics, batch=after, log_probs=ROWS)

    ranks = SimpleNamespace(resident=lambda *held: nullcontext())
    policy = SimpleNamespace(ranks=ranks, optimizer="optimizer")
    worker = RankWorker()
    worker._models = RankModels(SimpleNamespace(policy=policy, update_policy=update_policy))  # pyright: ignore
    part = worker.run("update", (before, max, 7, min))
    assert given == [((before, max), {"step": 7, "regulariser": min, "beside": None})]
    assert part.scored_rows == [0, 2] and torch.equal(part.old_log_probs, ROWS[[0, 2]] - 1)
    assert torch.equal(part.entropy, ROWS[[0, 2]] + 9) and torch.equal(part.log_probs, ROWS)
    assert part.metrics == {"x": Metric("mean", 6.0, 2.0)} and type(part.metrics["x"].value) is float


def test_requests_are_shared_by_their_number_and_results_of_an_engine_come_back(monkeypatch) -> None:
    seen: list[Any] = []
    engine = SimpleNamespace(submit=seen.append, step=lambda: ["done"], generate=list, close=lambda: seen.append("end"))
    worker = RankWorker()
    worker._models = RankModels(SimpleNamespace(), engine=engine)  # pyright: ignore
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    requests: Any = [SimpleNamespace(submission=n) for n in (1, 2, 4, 6, 7)]
    assert worker.engine_advance(requests) == ["done"] and [r.submission for r in seen] == [1, 4, 7]
    assert [r.submission for r in worker.engine_generate(requests)] == [2, 7]  # by their place in the list
    worker.unload()
    worker.unload()
    assert seen[-1] == "end" and seen.count("end") == 1
