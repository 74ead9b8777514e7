"""Every packed token is where its row says: random rows, in any order, with gaps in their masks and empty responses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch

from gspo.training.batch import packing
from gspo.training.batch.batching import MicroBatch, collate, micro_batch
from gspo.training.batch.packing import Block, Span
from gspo.types import Group, Prompt, Reward, Rollout, TrainBatch


def random_batch(seed: int) -> TrainBatch:
    """Groups of 1 to 4 responses of 0 to 6 tokens, of which some have a branch with a context of its own.

    No two tokens of the batch are equal.
    """
    rng = random.Random(seed)
    unused = iter(range(10_000))

    def part(**fields: object) -> Rollout:
        size = rng.choice((0, 1, 1, 2, 3, 6))
        tokens, mask = tuple(next(unused) for _ in range(size)), tuple(int(rng.random() < 0.7) for _ in range(size))
        whole = Rollout(tokens, (-1.0,) * size, mask, (0,) * size, "stop", reward=Reward(1.0))
        return dataclasses.replace(whole, **fields)  # type: ignore[arg-type]

    def context() -> tuple[int, ...]:
        return tuple(next(unused) for _ in range(rng.randint(1, 4)))

    groups = []
    for number in range(4):
        rollouts = [part() for _ in range(rng.randint(1, 4))]
        rollouts[0] = dataclasses.replace(rollouts[0], branches=(part(context=context()),) * (number % 2))
        groups.append(Group(Prompt(str(number), (), context()), tuple(rollouts), number, 0))
    return collate(groups)


def rows_of(batch: TrainBatch, seed: int) -> list[int]:
    """Some of the rows, in any order."""
    rows = random.Random(seed).sample(range(batch.num_sequences), batch.num_sequences - 1)
    return rows if any(batch.response_ids[row] for row in rows) else list(range(batch.num_sequences))


def assert_predictions(batch: TrainBatch, rows: Sequence[int], micro: MicroBatch, kind: str) -> None:
    """Each trained token of each row once: its id, its slot, and the token before it as the one that predicts it."""
    width = batch.mask.shape[1]
    wanted = {}
    for i, row in enumerate(rows):
        tokens = batch.prompt_ids[row] + batch.response_ids[row]
        for t, token in enumerate(batch.response_ids[row]):
            if batch.mask[row, t]:
                at = len(batch.prompt_ids[row]) + t
                wanted[i * width + t] = (token, tokens[at - 1], at - 1)
    ids = micro.input_ids.flatten()[micro.positions].tolist()
    if kind == "plain":
        places = (micro.positions % micro.input_ids.shape[1]).tolist()
    else:
        assert micro.layout is not None
        places = micro.layout.position_ids[0][micro.positions].tolist()
        hidden = torch.arange(micro.input_ids.numel(), dtype=torch.float64)[:, None]
        assert micro.layout.predicting(hidden).flatten().tolist() == micro.positions.tolist()
    slots = micro.slots.tolist()
    assert len(slots) == len(set(slots)) == len(wanted)
    assert dict(zip(slots, zip(micro.targets.tolist(), ids, places))) == wanted
    assert (micro.rows, micro.num_response) == (list(rows), width)


@pytest.mark.parametrize("kind", ["plain", "packed", "shared"])
def test_every_trained_token_is_predicted_once_by_the_token_before_it(kind):
    for seed in range(12):
        batch = random_batch(seed)
        rows = rows_of(batch, seed)
        assert_predictions(batch, rows, micro_batch(batch, rows, "cpu", kind), kind)


@pytest.mark.parametrize("kind", ["packed", "shared"])
def test_sequences_and_their_prefixes_are_the_tokens_of_their_rows(kind):
    """What a kernel is given: one span per sequence, each continuing the whole prompt of its own row."""
    for seed in range(12):
        batch = random_batch(seed)
        rows, found = rows_of(batch, seed), []

        def keep(extents, device, found=found):
            found.append(list(extents))
            return object()

        micro = micro_batch(batch, rows, "cpu", kind, spans_of=keep)
        ids, layout = micro.input_ids[0].tolist(), micro.layout
        assert layout is not None and layout.blocks == () and layout.spans is not None
        runs, seen = [], 0
        for start, size, before, num_before in found[0]:
            assert start == seen and size > 0  # in packed order, without a gap
            seen += size
            runs.append((*ids[before : before + num_before], *ids[start : start + size]))
            positions = layout.position_ids[0, start : start + size].tolist()
            assert positions == list(range(num_before, num_before + size))
            owner = {int(x) for x in layout.response[start : start + size]}
            assert len(owner) == len({int(x) for x in layout.group[start : start + size]}) == 1
            (row,) = owner
            if row >= 0:
                assert runs[-1] == batch.prompt_ids[row] + batch.response_ids[row][:-1]
        assert seen == len(ids)
        whole = {batch.prompt_ids[row] + batch.response_ids[row][:-1] for row in rows}
        assert whole - set(runs) <= {batch.prompt_ids[row] for row in rows}  # responses of at most one token
        if kind == "packed":
            assert len(runs) == len(rows)


@pytest.mark.parametrize("cheap", [True, False])
def test_blocks_attend_to_the_prompt_of_their_group_and_to_earlier_tokens(cheap, monkeypatch):
    """The mask of each block, token by token, for blocks of many sequences and of few."""
    if not cheap:
        monkeypatch.setattr(packing, "CHEAP_SCORES", 0)
        monkeypatch.setattr(packing, "MASKED_SCORES", 0)
    for seed in range(6):
        batch = random_batch(seed)
        rows = rows_of(batch, seed)
        layout = micro_batch(batch, rows, "cpu", "shared").layout
        assert layout is not None
        num = layout.num_tokens
        position, group, response = layout.position_ids[0], layout.group, layout.response
        same = (response[:, None] == response) | (response == -1)
        wanted = (group[:, None] == group) & same & (position <= position[:, None])
        for window in (None, 1, 3):
            near = wanted if window is None else wanted & (position[:, None] - position < window)
            got = torch.zeros(num, num, dtype=torch.bool)
            for block in layout.blocks:
                assert_block(block, window, got)
            assert torch.equal(got, near)


def assert_block(block: Block, window: int | None, got: torch.Tensor) -> None:
    """Set in `got` [N,N] which tokens the tokens of a block see."""
    mask = block.mask(window, torch.float64).expand(block.queries.num_rows, 1, -1, -1)[:, 0] == 0
    for row, (start, size) in enumerate(zip(block.queries.starts, block.queries.lengths)):
        own = mask[row, :size]
        if block.prefix is not None:
            assert block.prefix_of is not None
            prefix = int(block.prefix_of[row])
            at, length = block.prefix.starts[prefix], block.prefix.lengths[prefix]
            got[start : start + size, at : at + length] = own[:, :length]
            assert not own[:, length : block.prefix.width].any()
            own = own[:, block.prefix.width :]
        got[start : start + size, start : start + size] = own[:, :size]


def test_the_prefix_of_each_row_is_expanded_for_it():
    uneven = rows_of_lengths((2, (3,)), (2, (3, 3, 3)))  # two responses per prompt on average, and neither has two
    for batch in (uneven, *map(random_batch, range(6))):
        layout = micro_batch(batch, list(range(batch.num_sequences)), "cpu", "shared").layout
        assert layout is not None
        values = torch.arange(layout.num_tokens, dtype=torch.float64)[:, None]
        for block in layout.blocks:
            if block.prefix is not None and block.prefix_of is not None:
                expanded = block.expand_prefix(values)[..., 0]
                for row, prefix in enumerate(block.prefix_of.tolist()):
                    start, size = block.prefix.starts[prefix], block.prefix.lengths[prefix]
                    assert expanded[row, :size].tolist() == list(range(start, start + size))


@pytest.mark.parametrize(
    ("starts", "lengths"), [((2, 5, 8), (3, 3, 3)), ((0, 3, 9), (3, 3, 3)), ((0, 3, 4), (3, 1, 2)), ((4,), (2,))]
)
def test_a_span_is_padded_and_back_with_the_gradient_of_each_token_once(starts, lengths):
    """Sequences that follow each other without a gap, with a gap, and of different lengths."""
    span = Span.of(starts, lengths, "cpu")
    values = torch.arange(24, dtype=torch.float64).view(12, 2).requires_grad_()
    padded = span.pad(values)
    assert padded.shape == (len(starts), max(lengths), 2)
    tokens = [start + i for start, size in zip(starts, lengths) for i in range(size)]
    for row, (start, size) in enumerate(zip(starts, lengths)):
        assert torch.equal(padded[row, :size], values[start : start + size])
    back = span.unpad(padded)
    assert torch.equal(back, values[tokens])
    weights = torch.arange(1.0, len(tokens) + 1, dtype=torch.float64)[:, None]
    (back * weights).sum().backward()
    wanted = torch.zeros(12, 2, dtype=torch.float64)
    wanted[tokens] = weights.expand(-1, 2)
    assert torch.equal(values.grad, wanted)


def rows_of_lengths(*groups: tuple[int, Sequence[int]]) -> TrainBatch:
    """Groups of (prompt tokens, tokens of each response that are run), which are one fewer than it has."""

    def part(size: int) -> Rollout:
        return Rollout((5,) * (size + 1), (0.0,) * (size + 1), (1,) * (size + 1), (0,), "stop", reward=Reward(1.0))

    made = [(Prompt(str(i), (), (i,) * num), [part(size) for size in sizes]) for i, (num, sizes) in enumerate(groups)]
    return collate([Group(prompt, tuple(rollouts), i, 0) for i, (prompt, rollouts) in enumerate(made)])


@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [
        ((9, 9, 9), [(9, 9, 9)]),
        ((9, 6), [(9, 6)]),  # padding adds less than half
        ((9, 4, 4, 4), [(9,), (4, 4, 4)]),
        ((2, 9, 7, 2), [(9, 7), (2, 2)]),  # the longest first
        ((9, 6, 1, 1), [(9,), (6,), (1, 1)]),  # 6 padded to 9 would be half more
    ],
)
def test_sequences_are_apart_where_padding_would_be_costly(lengths, blocks, monkeypatch):
    batch = rows_of_lengths((1, [length - 1 for length in lengths]))
    rows = list(range(len(lengths)))

    def found() -> list[tuple[int, ...]]:
        layout = micro_batch(batch, rows, "cpu", "packed").layout
        assert layout is not None
        return [block.queries.lengths for block in layout.blocks]

    assert found() == [lengths]  # a small block is never cut
    monkeypatch.setattr(packing, "CHEAP_SCORES", 0)
    assert found() == blocks


@pytest.mark.parametrize(("prompts", "num_blocks"), [((2, 2), 1), ((2, 3), 2)])
def test_groups_are_apart_where_each_needs_a_mask_of_its_own(prompts, num_blocks, monkeypatch):
    """Responses after prompts of one length share a mask; after other lengths only small blocks do."""
    batch = rows_of_lengths(*((num, (3, 3)) for num in prompts))

    def answers() -> int:
        layout = micro_batch(batch, [0, 1, 2, 3], "cpu", "shared").layout
        assert layout is not None
        return sum(block.prefix is not None for block in layout.blocks)

    assert answers() == 1
    monkeypatch.setattr(packing, "MASKED_SCORES", 0)
    assert answers() == num_blocks
