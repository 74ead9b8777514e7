"""The slot cache against plain lists: what is written where, and what attention gets to read."""

from __future__ import annotations

import torch

from gspo.build.device import held_memory
from gspo.rollout.native.padded_cache import SlotCache

_HEADS, _SIZE = 2, 3


def _states(*numbers: float) -> torch.Tensor:
    """[rows, heads, 1, size], each row filled with its number, heads told apart by a tenth."""
    per_head = torch.tensor(numbers)[:, None] + torch.arange(_HEADS) / 10
    return per_head[:, :, None, None].expand(-1, -1, 1, _SIZE)


def test_each_row_writes_at_its_own_position_and_reads_the_shared_width():
    cache = SlotCache(num_slots=4, max_length=5)
    cache.begin_step(torch.tensor([2, 0, 4]), width=5)
    keys, values = cache.update(_states(1, 2, 3), -_states(1, 2, 3), layer_idx=0)
    expected = torch.zeros(3, _HEADS, 5, _SIZE)
    for row, position in enumerate([2, 0, 4]):
        expected[row, :, position] = _states(row + 1)[0, :, 0]
    assert torch.equal(keys, expected) and torch.equal(values, -expected)


def test_layers_may_differ_in_heads_and_sizes():
    cache = SlotCache(num_slots=2, max_length=3)
    cache.begin_step(torch.tensor([1]), width=2)
    first, _ = cache.update(_states(1), _states(1), layer_idx=0)
    second, _ = cache.update(torch.full((1, 5, 1, 7), 9.0), torch.zeros(1, 5, 1, 7), layer_idx=1)
    assert first.shape == (1, _HEADS, 2, _SIZE) and second.shape == (1, 5, 2, 7)
    assert second[0, :, 1].eq(9).all() and second[0, :, 0].eq(0).all()


def test_a_prefilled_prompt_is_copied_to_every_row_that_shares_it():
    cache = SlotCache(num_slots=4, max_length=4)
    prompts = torch.arange(2 * _HEADS * 3 * _SIZE).float().view(2, _HEADS, 3, _SIZE)
    cache.store(1, torch.tensor([0, 0, 1]), [(prompts, -prompts)], [3, 3, 3])
    cache.begin_step(torch.tensor([3, 3, 3, 3]), width=4)
    keys, values = cache.update(_states(0, 0, 0, 0), _states(0, 0, 0, 0), layer_idx=0)
    assert keys[0, :, :3].eq(0).all()
    assert torch.equal(keys[1:, :, :3], prompts[[0, 0, 1]])
    assert torch.equal(values[1:, :, :3], -prompts[[0, 0, 1]])


def test_a_moved_row_keeps_its_tokens():
    cache = SlotCache(num_slots=3, max_length=2)
    cache.begin_step(torch.tensor([0, 0, 0]), width=1)
    cache.update(_states(1, 2, 3), _states(4, 5, 6), layer_idx=0)
    cache.move(torch.tensor([0]), torch.tensor([2]), width=1)
    cache.begin_step(torch.tensor([1, 1]), width=2)
    keys, values = cache.update(_states(7, 8), _states(7, 8), layer_idx=0)
    assert torch.equal(keys[:, :, 0], _states(3, 2)[:, :, 0])
    assert torch.equal(values[:, :, 0], _states(6, 5)[:, :, 0])
    assert torch.equal(keys[:, :, 1], _states(7, 8)[:, :, 0])


def test_rows_and_positions_that_are_never_written_take_no_memory():
    """Two layers whose buffers are 4 GiB each, with a prompt and a token in two rows."""
    cache, before = SlotCache(num_slots=1024, max_length=8192, use_kernel=True), held_memory()
    prompt = torch.ones(1, 2, 100, 64)
    cache.store(0, torch.tensor([0, 0]), [(prompt, prompt)] * 2, [100, 100])
    assert held_memory() - before < 64 << 20
