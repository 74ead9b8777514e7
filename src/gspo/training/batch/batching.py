"""From groups to tensors: collation, mini-batches, and micro-batches under a token budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gspo.algo.aggregation import count_totals
from gspo.kernels.device_memory import upload
from gspo.kernels.ragged import flat, padded, ranges
from gspo.seeding import derive_seed, permutation
from gspo.training.batch.packing import Layout, SpansOf, pack, share_tokens, trained_slots
from gspo.training.parallel.ranks import ALONE, Ranks, split_over_ranks, spread
from gspo.training.parallel.sequence import SequenceRanks
from gspo.types import BatchTotals, Group, Reward, Rollout, TrainBatch

# The layout of a micro-batch: padded rows, packed rows, or packed with each group's prompt once.
Kind = Literal["plain", "packed", "shared"]


def collate(
    groups: Sequence[Group],
    order_seed: int | None = None,
    *,
    mask_truncated: bool = False,
    mask_malformed: bool = False,
) -> TrainBatch:
    """A right-padded batch from groups. Rows keep the order of groups and of responses within them; branches follow.

    `order_seed` shuffles the groups over mini-batches (see `group_order`). `mask_truncated` trains on no token of a
    response that was cut at the length limit, `mask_malformed` on no turn whose tool call could not be read.
    """
    rows = [(i, group.prompt, rollout) for i, group in enumerate(groups) for rollout in group.rollouts]
    branch_of = [row for row, (_, _, rollout) in enumerate(rows) for _ in rollout.branches]
    rows += [(i, prompt, _as_row(rollout, branch)) for i, prompt, rollout in rows for branch in rollout.branches]
    width = max(len(r.token_ids) for _, _, r in rows)
    rollouts = [r for _, _, r in rows]
    has_turns = any(r.turns for r in rollouts)
    return TrainBatch(
        prompt_ids=[r.context or p.token_ids for _, p, r in rows],
        response_ids=[r.token_ids for _, _, r in rows],
        mask=padded([_trained(r, mask_truncated, mask_malformed) for r in rollouts], width),
        group_ids=torch.tensor([i for i, _, _ in rows]),
        scores=torch.tensor([r.reward.final for _, _, r in rows if r.reward is not None], dtype=torch.float64),
        rollout_log_probs=padded([r.log_probs for _, _, r in rows], width),
        kl_penalties=_kl_penalties([r for _, _, r in rows], width),
        order_seed=order_seed,
        turn_ids=_turn_ids(rollouts, width) if has_turns else None,
        turn_rewards=_turn_rewards(rollouts) if has_turns else None,
        branch_of=tuple(branch_of),
    )


def _as_row(rollout: Rollout, branch: Rollout) -> Rollout:
    """A branch with the score of its rollout."""
    score = None if rollout.reward is None else Reward(rollout.reward.final)
    return dataclasses.replace(branch, reward=score, finish_reason=rollout.finish_reason)


def _kl_penalties(rollouts: Sequence[Rollout], width: int) -> Tensor | None:
    """The KL penalties [B,T] of the tokens; None without any. One that is known as a sum only is on the last token."""
    if not any(r.reward is not None and r.reward.kl_penalty for r in rollouts):
        return None
    out = torch.zeros(len(rollouts), width, dtype=torch.float64)
    for row, rollout in enumerate(rollouts):
        if rollout.reward is not None and rollout.token_ids:
            size = len(rollout.token_ids)
            by_token = rollout.reward.kl_by_token or (*(0.0,) * (size - 1), rollout.reward.kl_penalty)
            out[row, :size] = torch.tensor(by_token, dtype=torch.float64)
    return out


def _trained(rollout: Rollout, mask_truncated: bool, mask_malformed: bool) -> tuple[int, ...]:
    """The loss mask, without responses that were cut or turns whose tool call could not be read."""
    if mask_truncated and rollout.finish_reason == "length":
        return ()
    if not mask_malformed:
        return rollout.loss_mask
    left_out = {i for turn in rollout.turns if turn.malformed for i in range(turn.start, turn.end)}
    return tuple(0 if i in left_out else own for i, own in enumerate(rollout.loss_mask))


def _turn_ids(rollouts: Sequence[Rollout], width: int) -> Tensor:
    ids = torch.full((len(rollouts), width), -1, dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        for number, turn in enumerate(rollout.turns):
            ids[row, turn.start : turn.end] = number
    return ids


def _turn_rewards(rollouts: Sequence[Rollout]) -> Tensor:
    """[B,K] rewards by turn; a KL penalty belongs to the last one."""
    rewards = torch.zeros(len(rollouts), max(len(r.turns) for r in rollouts), dtype=torch.float64)
    for row, rollout in enumerate(rollouts):
        if rollout.reward is not None and rollout.turns:
            parts = rollout.reward.turns or (*[0.0] * (len(rollout.turns) - 1), rollout.reward.score)
            rewards[row, : len(parts)] = torch.tensor(parts, dtype=torch.float64)
            rewards[row, len(rollout.turns) - 1] -= rollout.reward.kl_penalty
    return rewards


def count_rows(batch: TrainBatch, rows: list[int]) -> BatchTotals:
    """The denominators of these rows of a batch."""
    is_rollout = torch.tensor([row < batch.num_rollouts for row in rows], dtype=torch.bool) if batch.branch_of else None
    return count_totals(batch.mask[rows], is_rollout)


def group_order(batch: TrainBatch, epoch: int) -> list[int] | None:
    """The order in which an epoch of an update assigns groups to mini-batches; None for the order of the batch.

    Depends only on the batch and the epoch, so every pass, every rank and a resumed run make the same mini-batches.
    """
    if batch.order_seed is None:
        return None
    groups = list(dict.fromkeys(batch.group_ids.tolist()))
    shuffled = permutation(derive_seed(batch.order_seed, "epoch", epoch), len(groups))
    return [groups[index] for index in shuffled.tolist()]


def mini_batches(group_ids: Tensor, num_groups: int, order: Sequence[int] | None = None) -> list[list[int]]:
    """Row numbers of each mini-batch: `num_groups` whole groups at a time, assigned in `order`.

    Within a mini-batch groups keep the order of the batch, so one with all groups is the same for any `order`.
    """
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        rows.setdefault(group, []).append(row)
    names = list(rows) if order is None else list(order)
    chosen = [set(names[start : start + num_groups]) for start in range(0, len(names), num_groups)]
    return [[row for name in rows if name in members for row in rows[name]] for members in chosen]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward: row numbers of the batch and their tokens, padded [b, L] or, with a `layout`, packed [1, N].

    `positions` are the flat indices into `input_ids` whose next token is a trained token (a shared prompt's last
    token counts once per response), `targets` are those tokens, and `slots` their indices in a flat [b, T].
    """

    rows: list[int]
    input_ids: Tensor
    positions: Tensor  # [M]
    targets: Tensor  # [M]
    slots: Tensor  # [M]
    num_response: int  # T of the batch
    layout: Layout | None = None

    def hidden(self, decoder: Callable[..., Any]) -> Tensor:
        """Hidden states [M, H] that predict the trained tokens. A packed batch needs `swapped_attention` around it."""
        if self.layout is None:
            out = decoder(input_ids=self.input_ids, use_cache=False).last_hidden_state
            return out.flatten(0, 1)[self.positions]
        out = decoder(
            input_ids=self.input_ids[:, self.layout.part],
            position_ids=self.layout.position_ids[:, self.layout.part],
            use_cache=False,
            **self.layout.arguments,
        )
        return self.layout.predicting(out.last_hidden_state[0])

    def scatter(self, values: Tensor) -> Tensor:
        """Values [M] of the trained tokens as [b, T], zero elsewhere; differentiable."""
        out = values.new_zeros(len(self.rows) * self.num_response)
        return out.index_put((self.slots,), values).view(len(self.rows), self.num_response)


def split_by_tokens(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split rows, longest first, so that rows × longest row stays within `max_tokens`; a longer row is alone."""
    out: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if out and (len(out[-1]) + 1) * lengths[out[-1][0]] <= max_tokens:
            out[-1].append(row)
        else:
            out.append([row])
    return out


def split_by_rows(rows: Sequence[int], size: int) -> list[list[int]]:
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def balance(costs: Sequence[int], max_cost: int) -> list[list[int]]:
    """Items in few bins of at most `max_cost` and about equal sums; an item that costs more is alone in its bin."""
    num_bins = max(1, -(-sum(min(cost, max_cost) for cost in costs) // max_cost))
    while True:
        bins = spread(costs, num_bins)
        small = all(len(items) == 1 or sum(costs[item] for item in items) <= max_cost for items in bins)
        if small or num_bins >= len(costs):
            return [items for items in bins if items]
        num_bins += 1


def split_packed(batch: TrainBatch, rows: Sequence[int], max_tokens: int, kind: Kind) -> list[list[int]]:
    """Rows in micro-batches of about equal numbers of packed tokens.

    Rows that share a prompt are split only if they exceed `max_tokens`.
    """
    answer = {row: max(0, len(batch.response_ids[row]) - 1) for row in rows}
    units: list[list[int]] = []
    for members in batch.by_prompt(rows) if kind == "shared" else split_by_rows(rows, 1):
        room = max(1, max_tokens - len(batch.prompt_ids[members[0]]))
        units += [[members[i] for i in part] for part in balance([answer[row] for row in members], room)]
    costs = [len(batch.prompt_ids[unit[0]]) + sum(answer[row] for row in unit) for unit in units]
    return [[row for i in part for row in units[i]] for part in balance(costs, max_tokens)]


def plan_micro_batches(
    batch: TrainBatch,
    num_groups: int,
    *,
    max_tokens: int | None,
    max_rows: int,
    kind: Kind = "plain",
    ranks: Ranks = ALONE,
    epoch: int = 0,
) -> list[list[list[int]]]:
    """This rank's rows of each micro-batch of each mini-batch of `num_groups` groups. `max_tokens` replaces `max_rows`.

    All ranks run the same number of micro-batches. An empty one is a forward that does not count (`idle_row`). Ranks
    that share sequences run the same ones, with `max_tokens` for each of them.
    """
    budget = None if max_tokens is None else max_tokens * ranks.ranks_per_sequence
    plan = []
    for rows in mini_batches(batch.group_ids, num_groups, group_order(batch, epoch)):
        shares = split_over_ranks(batch, rows, ranks.num_shares, share_prompts=kind == "shared")
        cuts = [_cut(batch, share, budget, max_rows, kind) for share in shares]
        own, most = cuts[ranks.share], max(len(cut) for cut in cuts)
        plan.append(own + [[] for _ in range(most - len(own))])
    return plan


def _cut(batch: TrainBatch, rows: Sequence[int], max_tokens: int | None, max_rows: int, kind: Kind) -> list[list[int]]:
    if not rows:
        return []
    if max_tokens is None:
        return split_by_rows(rows, max_rows)
    if kind != "plain":
        return split_packed(batch, rows, max_tokens, kind)
    lengths = [len(p) + len(r) for p, r in zip(batch.prompt_ids, batch.response_ids)]
    return split_by_tokens(lengths, rows, max_tokens)


def micro_batch(
    batch: TrainBatch,
    rows: Sequence[int],
    device: torch.device | str,
    kind: Kind = "plain",
    *,
    spans_of: SpansOf | None = None,
    sequence: SequenceRanks | None = None,
) -> MicroBatch:
    """The tensors of one forward. Padded rows end in token 0, which causal attention never sees.

    With `sequence` the predictions are those of this rank's part of a packed row.
    """
    width = batch.mask.shape[1]
    if kind != "plain":
        input_ids, layout, targets, slots = pack(batch, rows, device, share=kind == "shared", spans_of=spans_of)
        if sequence is not None:
            layout, own = share_tokens(layout, sequence)
            targets, slots = targets[own], slots[own]
        positions = torch.cat([layout.own, layout.shared[layout.shared_by]])
        return MicroBatch(list(rows), input_ids, positions, targets, slots, width, layout)
    length = max(len(batch.prompt_ids[r]) + len(batch.response_ids[r]) for r in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        prompt, response = batch.prompt_ids[row], batch.response_ids[row]
        input_ids[i, : len(prompt) + len(response)] = flat([prompt, response])
    lengths = [len(batch.response_ids[row]) for row in rows]
    before = [i * length + len(batch.prompt_ids[row]) - 1 for i, row in enumerate(rows)]
    slots = ranges([i * width for i in range(len(rows))], lengths)
    trained = trained_slots(batch, rows, slots)
    return MicroBatch(
        rows=list(rows),
        input_ids=upload(input_ids, device),
        positions=upload(ranges(before, lengths)[trained], device),
        targets=upload(flat(batch.response_ids[row] for row in rows)[trained], device),
        slots=upload(slots[trained], device),
        num_response=width,
    )
