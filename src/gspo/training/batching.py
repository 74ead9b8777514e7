"""From groups to tensors: collation, mini-batches, and micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.types import Group, TrainBatch


def collate(groups: Sequence[Group]) -> TrainBatch:
    """Groups to a right-padded batch; rows keep the order of groups and of responses within them."""
    rows = [(i, group.prompt, rollout) for i, group in enumerate(groups) for rollout in group.rollouts]
    width = max(len(r.token_ids) for _, _, r in rows)
    return TrainBatch(
        prompt_ids=[p.token_ids for _, p, _ in rows],
        response_ids=[r.token_ids for _, _, r in rows],
        mask=_pad([r.loss_mask for _, _, r in rows], width),
        group_ids=torch.tensor([i for i, _, _ in rows]),
        scores=torch.tensor(
            [r.reward.final for _, _, r in rows if r.reward is not None], dtype=torch.float64
        ),
        rollout_log_probs=_pad([r.log_probs for _, _, r in rows], width),
    )


def _pad(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    out = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=torch.float32)
    return out


def mini_batches(group_ids: Tensor, num_groups: int, order: Sequence[int] | None = None) -> list[list[int]]:
    """Row numbers of each mini-batch: `num_groups` whole groups at a time, groups taken in `order`."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        rows.setdefault(group, []).append(row)
    names = list(rows) if order is None else list(order)
    return [
        [row for name in names[start : start + num_groups] for row in rows[name]]
        for start in range(0, len(names), num_groups)
    ]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward: row numbers into the batch and their padded tokens.

    `positions` are the flat indices into [b, L] whose next token is a response token; `targets` those tokens;
    `slots` where their values go in a flat [b, T].
    """

    rows: list[int]
    input_ids: Tensor  # [b, L]
    positions: Tensor  # [N]
    targets: Tensor  # [N]
    slots: Tensor  # [N]
    num_response: int  # T of the batch

    def scatter(self, values: Tensor) -> Tensor:
        """Values of the N response tokens to their places in [b, T], zero elsewhere, differentiably."""
        out = values.new_zeros(len(self.rows) * self.num_response)
        return out.index_put((self.slots,), values).view(len(self.rows), self.num_response)


def split_by_tokens(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split rows so that rows × longest row stays within `max_tokens` (a single longer row goes alone).

    Rows are taken longest first, so that neighbours are alike and little is padding; ties keep their order.
    """
    ordered = sorted(rows, key=lambda row: -lengths[row])
    out: list[list[int]] = []
    for row in ordered:
        if out and (len(out[-1]) + 1) * lengths[out[-1][0]] <= max_tokens:
            out[-1].append(row)
        else:
            out.append([row])
    return out


def split_by_rows(rows: Sequence[int], size: int) -> list[list[int]]:
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def plan_micro_batches(
    batch: TrainBatch, num_groups: int, *, max_tokens: int | None, max_rows: int
) -> list[list[list[int]]]:
    """Rows of each micro-batch of each mini-batch of `num_groups` groups; `max_rows` counts without `max_tokens`."""
    lengths = [len(p) + len(r) for p, r in zip(batch.prompt_ids, batch.response_ids)]
    return [
        split_by_rows(rows, max_rows) if max_tokens is None else split_by_tokens(lengths, rows, max_tokens)
        for rows in mini_batches(batch.group_ids, num_groups)
    ]


def micro_batch(batch: TrainBatch, rows: Sequence[int], device: torch.device | str) -> MicroBatch:
    """The padded tensors of one forward. The pad token is 0: causality keeps it from being seen."""
    width = batch.mask.shape[1]
    length = max(len(batch.prompt_ids[r]) + len(batch.response_ids[r]) for r in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    positions, targets, slots = [], [], []
    for i, row in enumerate(rows):
        prompt, response = batch.prompt_ids[row], batch.response_ids[row]
        input_ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        first = i * length + len(prompt) - 1
        positions.append(torch.arange(first, first + len(response)))
        slots.append(torch.arange(i * width, i * width + len(response)))
        targets.extend(response)
    return MicroBatch(
        rows=list(rows),
        input_ids=input_ids.to(device),
        positions=torch.cat(positions).to(device),
        targets=torch.tensor(targets, dtype=torch.long, device=device),
        slots=torch.cat(slots).to(device),
        num_response=width,
    )
