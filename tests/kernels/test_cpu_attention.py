"""Attention by our own kernels: values and gradients of plain attention, whatever stands beside a sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gspo.kernels.cpu_attention import CHUNK, PackedSequences, decode_attend, supports
from gspo.kernels.cpu_library import compiler, library
from gspo.rollout.native.shared_prompts import SharedPrompts
from tests.rollout.models import make_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

Extent = tuple[int, int, int, int]
# Prompts and the lengths of their answers: one key, whole vectors, a vector and one, many blocks of queries.
SHAPES = {
    "one": [(1, [])],
    "even": [(32, [63] * 3), (16, [16, 48])],
    "odd": [(5, [3, 17, 1, 60, 2]), (1, [1, 2]), (100, [])],
    "long": [(130, [97, 1, 200])],
    "crowd": [(7, [2, 5, 3] * CHUNK)],
}


def packed(shape: list[tuple[int, list[int]]]) -> tuple[list[Extent], int]:
    """Prompts and answers one after another, as start, length, start of the prefix, its length."""
    extents: list[Extent] = []
    end = 0
    for size, answers in shape:
        start = end
        extents.append((start, size, 0, 0))
        end += size
        for num in answers:
            extents.append((end, num, start, size))
            end += num
    return extents, end


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).float()


def plain(q: Tensor, k: Tensor, v: Tensor, extents: list[Extent], scale: float, window: int | None) -> Tensor:
    repeat, outs = q.shape[1] // k.shape[1], []
    for start, length, prefix, size in extents:
        keys = [*range(prefix, prefix + size), *range(start, start + length)]
        own_k, own_v = (x[keys].repeat_interleave(repeat, 1).transpose(0, 1) for x in (k, v))
        distance = torch.arange(length)[:, None] + size - torch.arange(length + size)
        hidden = (distance < 0) | (distance >= (window or len(q)))
        scores = q[start : start + length].transpose(0, 1) @ own_k.transpose(1, 2) * scale
        outs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ own_v).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(
    "heads, key_heads, size", [(4, 2, 64), (6, 2, 32), (2, 1, 16), (3, 3, 80), (1, 1, 128), (4, 2, 36)]
)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_plain_attention(shape, window, heads, key_heads, size):
    torch.manual_seed(0)
    extents, num = packed(SHAPES[shape])
    single = [numbers(num, n, size).requires_grad_() for n in (heads, key_heads, key_heads)]
    double = [x.detach().double().requires_grad_() for x in single]
    got = PackedSequences.of(extents).attend(*single, 0.3, window)
    want = plain(*double, extents, 0.3, window)
    assert torch.allclose(got.double(), want, atol=2e-5)
    grad = numbers(num, heads, size)
    got.backward(grad)
    want.backward(grad.double())
    for x, y in zip(single, double):
        assert x.grad is not None and y.grad is not None
        assert (x.grad - y.grad).abs().max() <= 3e-5 * y.grad.abs().max().clamp(min=1)


def test_gradients_by_finite_differences():
    torch.manual_seed(1)
    extents, num = packed([(3, [4, 2])])
    q, k, v = (numbers(num, 2, 12) for _ in range(3))
    weights = numbers(num, 2, 12).double()

    def value() -> Tensor:
        return (PackedSequences.of(extents).attend(q, k, v, 0.25, None).double() * weights).sum()

    for x in (q, k, v):
        x.requires_grad_()
        grad = torch.autograd.grad(value(), x)[0]
        x.requires_grad_(False)
        for place in ((0, 0, 3), (2, 1, 7), (4, 0, 0)):
            before, step = float(x[place]), 1e-2
            x[place] = before + step
            up = value()
            x[place] = before - step
            slope = float((up - value()) / (2 * step))
            x[place] = before
            assert float(grad[place]) == pytest.approx(slope, abs=2e-3)


def test_large_scores_and_a_query_of_zeros():
    q, k, v = (torch.zeros(4, 1, 16) for _ in range(3))
    q[3], v[:] = 300.0, torch.arange(4.0)[:, None, None]
    k[1], k[3] = 300.0, -300.0
    got = PackedSequences.of([(0, 4, 0, 0)]).attend(q, k, v, 1.0, None)
    assert torch.allclose(got[:, 0, 0], torch.tensor([0.0, 0.5, 1.0, 1.0]))


def test_a_sequence_does_not_depend_on_those_beside_it_nor_on_threads():
    torch.manual_seed(2)
    extents, num = packed([(9, [20, 31, 7]), (40, [3])])
    q, k, v = numbers(num, 4, 32), numbers(num, 2, 32), numbers(num, 2, 32)
    whole = PackedSequences.of(extents).attend(q, k, v, 0.2, None)
    start, length, prefix, size = extents[2]
    keys = [*range(prefix, prefix + size), *range(start, start + length)]
    alone = PackedSequences.of([(0, size, 0, 0), (size, length, 0, size)]).attend(q[keys], k[keys], v[keys], 0.2, None)
    assert torch.equal(alone[size:], whole[start : start + length])
    threads = torch.get_num_threads()
    grads = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = PackedSequences.of(extents).attend(*inputs, 0.2, None)
        grads.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_decode_step_attends_to_the_cache_and_stores_its_token(group, window):
    torch.manual_seed(3)
    rows, heads, key_heads, size, most = 24, 4, 2, 32, 50
    prompts = [7 + row // group % 5 for row in range(rows)]
    keys, values = numbers(rows, key_heads, most, size), numbers(rows, key_heads, most, size)
    shared = SharedPrompts(rows)
    shared.place(0, [row // group for row in range(rows)], prompts)
    for row in range(rows):
        for cache in (keys, values):
            cache[row, :, : prompts[row]] = cache[row // group * group, :, : prompts[row]]
    lengths = torch.tensor([size + row % 7 for row, size in enumerate(prompts)])
    before = keys.clone(), values.clone()
    q, k, v = numbers(rows, heads, size), numbers(rows, key_heads, size), numbers(rows, key_heads, size)
    got = decode_attend(q, k, v, keys, values, lengths, *shared.chunks(rows), 0.2, window)
    for row, length in enumerate(lengths.tolist()):
        for cache, old, new in ((keys, before[0], k), (values, before[1], v)):
            assert torch.equal(cache[row, :, length], new[row])
            rest = [i for i in range(most) if i != length]
            assert torch.equal(cache[row][:, rest], old[row][:, rest])
        first = max(0, length + 1 - window) if window else 0
        own_k, own_v = (x[row, :, first : length + 1].repeat_interleave(2, 0).double() for x in (keys, values))
        weights = (own_k @ q[row].double()[:, :, None] * 0.2).softmax(1)
        assert torch.allclose(got[row].double(), (weights * own_v).sum(1), atol=1e-5)
    alone = SharedPrompts(rows)
    same = decode_attend(q, k, v, keys, values, lengths, *alone.chunks(rows), 0.2, window)
    assert torch.allclose(same, got, atol=1e-5)
    threads = torch.get_num_threads()
    for num_threads, num in ((1, rows), (2, rows), (2, 11)):  # other chunks
        torch.set_num_threads(num_threads)
        shared.move([], [])
        again = decode_attend(q[:num], k[:num], v[:num], keys, values, lengths[:num], *shared.chunks(num), 0.2, window)
        assert torch.equal(again, got[:num])
    torch.set_num_threads(threads)


def test_rows_that_share_a_prompt_are_taken_together_until_they_part():
    shared = SharedPrompts(6)
    shared.place(0, [0, 0, 1], [5, 5, 4])
    shared.place(3, [0, 0], [5, 5])  # another prefill: not known to be the same

    def together(num: int) -> list[tuple[list[int], int]]:
        rows, chunks = shared.chunks(num)
        return [(rows[first : first + n].tolist(), tokens) for first, n, tokens in chunks.tolist()]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert together(5) == [([0, 1], 5), ([2], 4), ([3, 4], 5)]
        shared.move([0], [4])  # row 0 ended
        assert together(4) == [([1], 5), ([2], 4), ([0, 3], 5)]
    finally:
        torch.set_num_threads(threads)


def test_half_precision_is_refused_and_nothing_is_no_trouble():
    x = torch.zeros(4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"attention in torch\.bfloat16"):
        PackedSequences.of([(0, 4, 0, 0)]).attend(x, x, x, 1.0, None)
    none = torch.zeros(0, 2, 16, requires_grad=True)
    PackedSequences.of([]).attend(none, none, none, 1.0, None).sum().backward()
    assert none.grad is not None and none.grad.shape == none.shape


def test_values_of_another_size_than_keys_are_refused():
    q, k = numbers(4, 2, 16), numbers(4, 2, 16)
    with pytest.raises(ValueError, match="values have a head size of 8, keys of 16"):
        PackedSequences.of([(0, 4, 0, 0)]).attend(q, k, numbers(4, 2, 8), 1.0, None)


def test_which_models_the_kernels_support():
    model = make_model("llama")
    assert library() is not None and supports(model)
    assert not supports(model.to(torch.float64)) and not supports(model.to(torch.bfloat16))
