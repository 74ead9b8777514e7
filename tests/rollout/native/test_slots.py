"""The state of running rows: where tokens are recorded, when a row ends, and what moves with it."""

from __future__ import annotations

import dataclasses

import torch

from gspo.rollout.native.slots import TOP_RING, Slots, SlotStart

START = SlotStart(token=4, length=2, first=2, last=5, key=11, stops=(1,))


def record(slots: Slots, *tokens: int) -> list[bool]:
    log_probs = -torch.tensor(tokens).float()
    slots.record(torch.tensor(tokens), log_probs)
    return slots.done[: len(tokens)].tolist()


def test_a_row_ends_with_a_stop_token_or_at_its_last_position():
    slots = Slots(3, 8, torch.device("cpu"))
    slots.place(0, [START, dataclasses.replace(START, last=3), dataclasses.replace(START, stops=())])
    assert record(slots, 7, 7, 1) == [False, False, False]
    assert record(slots, 1, 7, 1) == [True, True, False]
    assert record(slots, 9, 9, 6) == [True, True, False]  # a row that is done does not advance
    assert slots.length.tolist() == [4, 4, 5]
    assert slots.tokens[:, 2:5].tolist() == [[7, 1, 9], [7, 7, 9], [1, 1, 6]]  # the 9s lie past the end
    assert slots.log_probs[2, 2:5].tolist() == [-1, -1, -6]
    assert record(slots, 9, 9, 6) == [True, True, True]


def test_a_row_may_have_any_number_of_stop_tokens():
    slots = Slots(2, 8, torch.device("cpu"))
    many = dataclasses.replace(START, stops=(20, 21, 22, 23, 24, 25))
    slots.place(0, [START])
    slots.place(1, [many])
    assert record(slots, 25, 25) == [False, True]
    slots.place(0, [START, START])
    assert record(slots, 25, 25) == [False, False]  # the stops of the row before are gone
    assert record(slots, 1, 24) == [True, False]


def test_a_moved_row_takes_everything_along():
    slots = Slots(3, 8, torch.device("cpu"))
    slots.place(0, [START, START, dataclasses.replace(START, token=5, key=12, stops=(9,), last=6)])
    record(slots, 7, 1, 8)
    slots.move(torch.tensor([1]), torch.tensor([2]))
    assert slots.ints[:, 1].tolist() == [8, 3, 2, 6, 12]
    assert slots.tokens[1, 2] == 8 and slots.log_probs[1, 2] == -8 and not slots.done[1]
    assert record(slots, 7, 9) == [False, True]


def test_parked_rows_are_done_at_position_0():
    slots = Slots(2, 8, torch.device("cpu"))
    slots.place(0, [START, START])
    slots.park(1, 2)
    assert slots.done.tolist() == [False, True] and slots.length.tolist() == [2, 0]


def test_what_is_read_is_what_was_there_at_the_mark():
    slots = Slots(3, 8, torch.device("cpu"))
    slots.place(0, [START, dataclasses.replace(START, length=3), dataclasses.replace(START, last=2)])
    assert (slots.num_marked, slots.finished()) == (0, [])
    record(slots, 7, 1, 8)
    slots.mark(3)
    record(slots, 1, 9, 9)
    assert (slots.num_marked, slots.finished()) == (3, [1, 2])
    lengths, tokens, log_probs = slots.read([2, 1])
    assert lengths == [3, 4]
    assert tokens[0, 2] == 8 and tokens[1, 3] == 1 and log_probs[1, 3] == -1
    slots.mark(1)
    assert (slots.num_marked, slots.finished()) == (1, [0])
    slots.forget_mark()
    assert (slots.num_marked, slots.finished()) == (0, [])


def test_the_best_tokens_of_the_latest_positions_are_kept_and_move_with_their_row():
    """More positions than are kept: the places of the first ones are used again."""
    generator = torch.Generator().manual_seed(0)
    slots = Slots(3, TOP_RING + 20, torch.device("cpu"))
    end = TOP_RING + 10
    slots.place(0, [dataclasses.replace(START, length=length, last=10**6) for length in (0, 4, 2)])
    assert slots.read_top(0, 0, 0, 2) == ()
    temperature = torch.tensor([[0.5], [1.0], [2.0]])
    expected = {}
    for step in range(end):
        logits = torch.randn(3, 30, generator=generator)
        scores = (logits / temperature).log_softmax(-1)
        for row in range(3):
            values, ids = scores[row].sort(descending=True)
            expected[row, step + int((0, 4, 2)[row])] = list(zip(ids[:2].tolist(), values[:2].tolist()))
        slots.record_top(logits, temperature)
        slots.record(torch.tensor([7, 7, 7]), torch.zeros(3))
    slots.move(torch.tensor([0]), torch.tensor([2]))
    for row, source, length in ((1, 1, end + 4), (0, 2, end + 2)):
        found = slots.read_top(row, length - 5, length, 2)
        for position, best in zip(range(length - 5, length), found, strict=True):
            assert [token for token, _ in best] == [token for token, _ in expected[source, position]]
            assert torch.allclose(torch.tensor(best), torch.tensor(expected[source, position]), atol=1e-5)
    assert slots.read_top(1, end, end + 4, 0) == ()
