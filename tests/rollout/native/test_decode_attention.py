"""What one new token per row may see, by plain loops: masks, windows, grouped heads, and rows that share a prompt."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo.rollout.engine import EngineError
from gspo.rollout.native import shared_prompts
from gspo.rollout.native.decode_attention import DecodeMasks, attend_grouped, attention_windows, grouped_attention
from gspo.rollout.native.shared_prompts import SharedPrompts


def config(**values: Any) -> Any:
    made = SimpleNamespace(model_type="toy", **values)
    made.get_text_config = lambda: made
    return made


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({}, {"full_attention": None}),
        ({"sliding_window": 4}, {"full_attention": 4}),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2}, {"full_attention": None}),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, {"full_attention": None}),
        (
            {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            {"full_attention": None, "sliding_attention": 4},
        ),
    ],
)
def test_the_window_of_every_kind_of_layer(values: dict[str, Any], windows: dict[str, int | None]) -> None:
    assert attention_windows(config(**values)) == windows


@pytest.mark.parametrize(
    "values", [{"layer_types": ["full_attention", "linear_attention"]}, {"attention_chunk_size": 8}]
)
def test_other_layers_are_refused_by_name(values: dict[str, Any]) -> None:
    name = "linear_attention" if "layer_types" in values else "chunked_attention"
    with pytest.raises(EngineError, match=f"'toy' has layers of type {name}; the native engine runs"):
        attention_windows(config(**values))


@pytest.mark.parametrize("window", [None, 1, 3, 6, 7])
def test_a_token_sees_itself_and_those_before_it_within_the_window(window: int | None) -> None:
    model: Any = SimpleNamespace(config=config(sliding_window=window))
    masks = DecodeMasks(model, 9, torch.float32, torch.device("cpu"))
    lengths, width = torch.tensor([0, 2, 5, 6]), 7
    mask = masks.build(lengths, width)
    assert isinstance(mask, torch.Tensor) and mask.shape == (4, 1, 1, width)
    for row, position in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, position - window + 1)
        seen = [float(value) == 0.0 for value in mask[row, 0, 0]]
        assert seen == [first <= column <= position for column in range(width)]
    assert mask.min() == torch.finfo(torch.float32).min, "no row is all -inf"
    assert torch.equal(masks.by_window(lengths, width)[window], mask)


def test_a_model_of_mixed_layers_has_a_mask_for_each_kind() -> None:
    mixed = config(sliding_window=2, layer_types=["sliding_attention", "full_attention"])
    model: Any = SimpleNamespace(config=mixed)
    masks = DecodeMasks(model, 5, torch.bfloat16, torch.device("cpu")).build(torch.tensor([3]), 4)
    assert isinstance(masks, dict) and masks["full_attention"].dtype == torch.bfloat16
    assert [(mask[0, 0, 0] == 0).tolist() for mask in (masks["full_attention"], masks["sliding_attention"])] == [
        [True] * 4,
        [False, False, True, True],
    ]


def test_query_heads_that_share_a_key_head_attend_as_if_it_were_repeated() -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 6, 1, 4, generator=generator)
    keys, values = torch.randn(2, 2, 5, 4, generator=generator), torch.randn(2, 2, 5, 3, generator=generator)
    mask = torch.tensor([[0.0, 0.0, -1e30, -1e30, -1e30], [0.0] * 5])[:, None, None]
    module: Any = torch.nn.Module()
    out, weights = grouped_attention(module, query, keys, values, mask, scaling=0.3)
    assert weights is None and out.shape == (2, 1, 6, 3)
    for row in range(2):
        for head in range(6):
            scores = (keys[row, head // 3] @ query[row, head, 0]) * 0.3 + mask[row, 0, 0]
            assert torch.allclose(out[row, 0, head], scores.softmax(0) @ values[row, head // 3], atol=1e-5)
    assert torch.equal(out[:, 0], attend_grouped(query[:, :, 0], keys, values, mask, 0.3))


def chunks(prompts: SharedPrompts, num_rows: int) -> list[tuple[list[int], int]]:
    """The rows of each chunk, and how many tokens they share."""
    rows, found = prompts.chunks(num_rows)
    order = rows.tolist()
    assert sorted(order) == list(range(num_rows))
    firsts = [first for first, _, _ in found.tolist()]
    assert firsts == [sum(count for _, count, _ in found.tolist()[:i]) for i in range(len(firsts))]
    return [(sorted(order[first : first + count]), shared) for first, count, shared in found.tolist()]


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prompts.torch, "get_num_threads", lambda: 1)


@pytest.mark.usefixtures("one_thread")
def test_rows_of_one_prompt_are_chunked_and_follow_their_moves() -> None:
    prompts = SharedPrompts(8)
    prompts.place(0, [0, 0, 1, 0, 1], [7, 7, 3, 7, 3])
    prompts.place(5, [0], [7])
    assert chunks(prompts, 6) == [([0, 1, 3], 7), ([2, 4], 3), ([5], 7)], "another prefill is another prompt"
    assert prompts.chunks(6) is prompts.chunks(6)
    prompts.move([0, 2], [5, 3])
    assert chunks(prompts, 5) == [([1, 2], 7), ([3], 7), ([4], 3), ([0], 7)]
    assert chunks(prompts, 4) == [([1, 2], 7), ([3], 7), ([0], 7)]


@pytest.mark.parametrize(("num_threads", "num_rows", "most"), [(1, 6, 3), (2, 6, 1), (1, 40, 8), (2, 20, 5), (8, 3, 1)])
def test_chunks_are_small_enough_to_give_every_thread_some(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, num_rows: int, most: int
) -> None:
    monkeypatch.setattr(shared_prompts.torch, "get_num_threads", lambda: num_threads)
    prompts = SharedPrompts(num_rows)
    prompts.place(0, [4] * num_rows, [9] * num_rows)
    sizes = [len(rows) for rows, _ in chunks(prompts, num_rows)]
    assert sizes == [most] * (num_rows // most) + ([num_rows % most] if num_rows % most else [])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(5))
def test_any_placing_and_moving_keeps_rows_with_those_of_their_prompt(seed: int) -> None:
    pick = random.Random(seed)
    prompts, held = SharedPrompts(12), [None] * 12
    for number in range(30):
        if pick.random() < 0.6:
            first = pick.randrange(12)
            sources = [pick.randrange(3) for _ in range(min(12 - first, pick.randrange(1, 5)))]
            prompts.place(first, sources, [10 + source for source in sources])
            held[first : first + len(sources)] = [(number, source) for source in sources]
        else:
            target, source = pick.sample(range(12), 2)
            prompts.move([target], [source])
            held[target] = held[source]
    num_rows = next((row for row, prompt in enumerate(held) if prompt is None), 12)
    for rows, shared in chunks(prompts, num_rows):
        assert len({held[row] for row in rows}) == 1 and shared == 10 + held[rows[0]][1]  # type: ignore[index]
