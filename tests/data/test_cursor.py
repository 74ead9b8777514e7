from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.data.cursor import PromptCursor
from gspo.data.rows import DataError
from gspo.types import Prompt


def prompts(n: int) -> list[Prompt]:
    return [Prompt(uid=f"p{i}", messages=(), token_ids=(i,)) for i in range(n)]


def drain(cursor: PromptCursor, n: int) -> list[str]:
    out = []
    for _ in range(n):
        prompt = cursor.next()
        assert prompt is not None
        out.append(prompt.uid)
    return out


def test_every_epoch_hands_out_each_prompt_once_in_another_order() -> None:
    cursor = PromptCursor(prompts(50), seed=3)
    epochs = [drain(cursor, 50) for _ in range(3)]
    assert all(sorted(e) == sorted(p.uid for p in prompts(50)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert drain(PromptCursor(prompts(50), seed=3), 50) == epochs[0]
    assert drain(PromptCursor(prompts(50), seed=4), 50) != epochs[0]


def test_order_is_frozen() -> None:
    """A checkpoint from another numpy must meet the same order."""
    assert drain(PromptCursor(prompts(8), seed=0), 8) == ["p6", "p4", "p1", "p3", "p5", "p0", "p7", "p2"]


def test_without_shuffle_the_order_is_the_data() -> None:
    assert drain(PromptCursor(prompts(3), seed=0, shuffle=False), 6) == ["p0", "p1", "p2"] * 2


def test_no_epochs_have_no_prompts() -> None:
    assert PromptCursor(prompts(4), seed=0, total_epochs=0).next() is None


def test_ends_after_total_epochs_but_hands_out_what_was_put_back() -> None:
    cursor = PromptCursor(prompts(4), seed=0, total_epochs=2)
    drain(cursor, 8)
    assert cursor.next() is None
    cursor.put_back(cursor.by_uid("p2"))
    assert drain(cursor, 1) == ["p2"]
    assert cursor.next() is None


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9),
    actions=st.lists(st.one_of(st.none(), st.integers(0, 8)), max_size=40),
    cut=st.integers(0, 40),
)
def test_resume_anywhere_gives_the_same_stream(size: int, actions: list[int | None], cut: int) -> None:
    """None draws, a number puts that prompt back; after `cut` actions the second cursor goes through JSON."""

    def play(resume_at: int | None) -> list[str]:
        cursor, out = PromptCursor(prompts(size), seed=1), []
        for i, action in enumerate(actions):
            if i == resume_at:
                state = json.loads(json.dumps(cursor.state_dict()))
                cursor = PromptCursor(prompts(size), seed=1)
                cursor.load_state_dict(state)
            if action is None:
                out += drain(cursor, 1)
            else:
                cursor.put_back(cursor.by_uid(f"p{action % size}"))
        return out + drain(cursor, 2 * size)

    assert play(cut) == play(None)


@pytest.mark.parametrize("drawn", [0, 5, 7, 8, 17, 21])
def test_a_resume_in_a_later_epoch_goes_on_in_that_epoch(drawn: int) -> None:
    whole, first = (PromptCursor(prompts(7), seed=2, total_epochs=4) for _ in range(2))
    expected = drain(whole, 28)
    start = first.state_dict()
    assert drain(first, drawn) == expected[:drawn]
    resumed = PromptCursor(prompts(7), seed=2, total_epochs=4)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drain(resumed, 28 - drawn) == expected[drawn:] and resumed.next() is None
    resumed.load_state_dict(start)  # back to the first epoch
    assert drain(resumed, 28) == expected


def test_state_does_not_grow_with_the_data() -> None:
    small, large = PromptCursor(prompts(5), seed=0), PromptCursor(prompts(5000), seed=0)
    drain(small, 5), drain(large, 4000)
    assert len(json.dumps(large.state_dict())) <= len(json.dumps(small.state_dict())) + 6


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (PromptCursor(prompts(4), seed=1), "seed"),
        (PromptCursor(prompts(5), seed=0), "epoch_size"),
        (PromptCursor(prompts(4), seed=0, shuffle=False), "shuffle"),
    ],
)
def test_state_of_another_run_is_refused(other: PromptCursor, field: str) -> None:
    with pytest.raises(DataError, match=field):
        PromptCursor(prompts(4), seed=0).load_state_dict(other.state_dict())


def test_bad_data_is_named() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptCursor([], seed=0)
    with pytest.raises(DataError, match=r"p1.*unique"):
        PromptCursor([*prompts(2), prompts(2)[1]], seed=0)
    with pytest.raises(DataError, match="no prompt 'gone'"):
        PromptCursor(prompts(2), seed=0).by_uid("gone")


def test_prompts_put_back_come_first_and_in_that_order_also_after_a_resume() -> None:
    cursor = PromptCursor(prompts(5), seed=0, shuffle=False)
    taken = [cursor.next() for _ in range(3)]
    for prompt in (taken[2], taken[0], taken[1]):
        cursor.put_back(prompt)
    resumed = PromptCursor(prompts(5), seed=0, shuffle=False)
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    for each in (cursor, resumed):
        assert drain(each, 5) == ["p2", "p0", "p1", "p3", "p4"]


def test_the_order_of_later_epochs_is_frozen_too() -> None:
    cursor = PromptCursor(prompts(8), seed=0)
    drain(cursor, 8)
    second, third = drain(cursor, 8), drain(cursor, 8)
    assert second == ["p1", "p7", "p2", "p3", "p5", "p6", "p0", "p4"]
    assert third == ["p2", "p0", "p6", "p4", "p3", "p1", "p7", "p5"]
    assert drain(PromptCursor(prompts(8), seed=1), 8) == ["p3", "p5", "p0", "p7", "p6", "p4", "p2", "p1"]


def test_the_epoch_is_that_of_the_next_fresh_prompt() -> None:
    cursor = PromptCursor(prompts(3), seed=0, total_epochs=2)
    epochs = []
    while (prompt := cursor.next()) is not None:
        epochs.append(cursor.epoch)
        if len(epochs) == 2:
            cursor.put_back(prompt)  # drawn again, and no fresh one
    assert epochs == [0, 0, 0, 1, 1, 1, 2] and cursor.epoch_size == 3
    assert cursor.state_dict() == {"position": 6, "put_back": [], "seed": 0, "shuffle": True, "epoch_size": 3}


def test_a_resumed_cursor_ends_where_the_first_would_and_a_longer_run_goes_on() -> None:
    cursor = PromptCursor(prompts(3), seed=0, total_epochs=1)
    first = drain(cursor, 2)
    for epochs, left in ((1, 1), (2, 4)):
        resumed = PromptCursor(prompts(3), seed=0, total_epochs=epochs)
        resumed.load_state_dict(cursor.state_dict())
        rest = drain(resumed, left)
        assert resumed.next() is None and {*first, rest[0]} == {"p0", "p1", "p2"}


def test_a_state_may_be_loaded_over_another_and_names_prompts_that_are_gone() -> None:
    cursor = PromptCursor(prompts(4), seed=0, shuffle=False)
    state = cursor.state_dict()
    cursor.put_back(prompts(4)[1])
    drain(cursor, 3)
    cursor.put_back(prompts(4)[2])
    cursor.load_state_dict(state)
    assert drain(cursor, 4) == ["p0", "p1", "p2", "p3"]
    with pytest.raises(DataError, match="no prompt 'gone'"):
        cursor.load_state_dict({**state, "put_back": ["p1", "gone"]})
    with pytest.raises(DataError, match="checkpoint: field 'epoch_size' is 9; this run has 4"):
        cursor.load_state_dict({**state, "epoch_size": 9})
    with pytest.raises(DataError, match="no prompt 'other'"):
        cursor.put_back(Prompt("other", (), (1,)))
