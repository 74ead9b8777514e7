"""Linear layers of small batches on a CPU, by our kernel or transposed: the same numbers, and no other change to a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gspo.kernels import small_batch_linear
from gspo.kernels.cpu_library import compiler, library
from gspo.kernels.small_batch_linear import (
    MAX_KERNEL_ROWS,
    MAX_TRANSPOSED_ROWS,
    MIN_TRANSPOSED_ROWS,
    SmallBatchLinear,
    linear,
)
from tests.rollout.models import drain, make_engine, make_model, make_request


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["kernel", "transposed"])
def way(request, monkeypatch):
    if request.param == "transposed":
        monkeypatch.setattr(small_batch_linear, "library", lambda: None)
    elif compiler() is None:
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize(
    "rows",
    [
        1,
        2,
        MIN_TRANSPOSED_ROWS - 1,
        MIN_TRANSPOSED_ROWS,
        16,
        33,
        MAX_KERNEL_ROWS,
        MAX_TRANSPOSED_ROWS,
        MAX_TRANSPOSED_ROWS + 1,
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_those_of_the_layer(two_threads, way, rows, bias):
    layer = nn.Linear(24, 41, bias=bias)
    x = torch.randn(rows, 1, 24)
    with torch.no_grad():
        want = layer(x)
        with SmallBatchLinear(layer).active():
            assert type(layer) is not nn.Linear
            got = layer(x)
    assert type(layer) is nn.Linear
    assert got.shape == want.shape and got.is_contiguous() and torch.allclose(got, want, atol=1e-6)


def test_the_transposed_product_is_used_only_between_its_limits(two_threads, monkeypatch):
    calls = []
    monkeypatch.setattr(small_batch_linear, "library", lambda: None)
    monkeypatch.setattr(torch, "mm", lambda a, b: calls.append(a.shape) or a @ b)
    layer = nn.Linear(8, 6, bias=False)
    with torch.no_grad(), SmallBatchLinear(layer).active():
        layer(torch.ones(16, 8))
        layer(torch.ones(MAX_TRANSPOSED_ROWS + 1, 8))
    assert calls == [(6, 8)]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("depth, columns", [(16, 3), (48, 64), (50, 130), (576, 1000)])
def test_a_row_does_not_depend_on_those_beside_it(two_threads, depth, columns):
    assert library() is not None
    x, w = torch.randn(MAX_KERNEL_ROWS, depth), torch.randn(columns, depth)
    together = linear(x, w)
    assert torch.allclose(together, x @ w.t(), atol=1e-4)
    for rows in (2, 15, 16, 17, 32, 40):
        assert torch.equal(linear(x[:rows], w), together[:rows])
    torch.set_num_threads(1)
    assert torch.equal(linear(x, w), together)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-moe", "gemma3"])
def test_an_engine_of_two_threads_draws_what_one_of_one_thread_does(two_threads, family):
    requests = [make_request(i, n=4, max_tokens=12) for i in range(8)]
    many = make_engine(make_model(family), num_slots=32)
    for request in requests:
        many.submit(request)
    got = drain(many)
    torch.set_num_threads(1)
    want = make_engine(make_model(family), num_slots=32).generate(requests)
    by_number = {g.prompt.uid: g for g in got}
    for group in want:
        for mine, other in zip(by_number[group.prompt.uid].rollouts, group.rollouts):
            assert mine.token_ids == other.token_ids
            assert mine.log_probs == pytest.approx(other.log_probs, abs=1e-4)
