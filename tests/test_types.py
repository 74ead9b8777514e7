"""Batches that learn π_old and advantages: what each step keeps and fills in."""

from __future__ import annotations

import pytest
import torch

from gspo.types import ScoredBatch, TrainBatch


def scored(unscored: tuple[int, ...], *, rows: int = 4) -> ScoredBatch:
    """Rows of two tokens, whose π_old is 0 where it is not known and the row's number elsewhere."""
    batch = TrainBatch(
        prompt_ids=[(row,) for row in range(rows)],
        response_ids=[(1, 2)] * rows,
        mask=torch.ones(rows, 2),
        group_ids=torch.arange(rows) // 2,
        scores=torch.zeros(rows),
        rollout_log_probs=torch.zeros(rows, 2),
    )
    known = torch.tensor([0.0 if row in unscored else float(row) for row in range(rows)])[:, None].expand(-1, 2)
    return batch.with_old(known, 10 * known, unscored)


def test_rows_that_are_scored_later_are_filled_in_by_their_own_number():
    """As on the second of two ranks, which scores the last rows."""
    before = scored((0, 1, 2, 3))
    after = before.with_rows([3, 2], torch.tensor([[-3.0, -4.0], [-5.0, -6.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    assert after.old_log_probs.tolist() == [[0, 0], [0, 0], [-5, -6], [-3, -4]]
    assert after.entropy is not None and after.entropy.tolist() == [[0, 0], [0, 0], [5, 6], [3, 4]]
    assert after.unscored_rows == (0, 1)
    assert before.old_log_probs.abs().sum() == 0 and before.unscored_rows == (0, 1, 2, 3)


def test_scoring_no_row_changes_nothing():
    before = scored((1,))
    assert before.with_rows([], torch.zeros(0, 2), torch.zeros(0, 2)) is before


def test_a_row_is_scored_once():
    with pytest.raises(AssertionError):
        scored((1,)).with_rows([2], torch.zeros(1, 2), torch.zeros(1, 2))


def test_advantages_keep_everything_that_was_scored():
    before = scored((1,))
    after = before.with_advantages(torch.ones(4, 2), torch.full((4, 2), 2.0))
    assert after.unscored_rows == (1,) and torch.equal(after.old_log_probs, before.old_log_probs)
    assert after.advantages.sum() == 8 and after.returns.sum() == 16
