"""Attention over packed tokens against plain attention with a dense mask: values, gradients, windows and scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gspo.kernels import UnsupportedModel
from gspo.kernels.cpu_attention import PackedSequences
from gspo.kernels.cpu_library import compiler
from gspo.training.batch import packing
from gspo.training.batch.attention import attend_eager, attend_flash, attend_padded
from gspo.training.batch.batching import micro_batch
from gspo.training.batch.packing import Layout
from tests.training.test_packed_rows import random_batch, rows_of

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def dense(layout: Layout, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None):
    """[1, N, heads, size] by one product over all tokens, with a mask from the layout's groups and positions."""
    position, group, response = layout.position_ids[0], layout.group, layout.response
    own = (response[:, None] == response) | (response == -1)
    distance = position[:, None] - position
    visible = (group[:, None] == group) & own & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    scores = q[0] @ k[0].transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[0]).transpose(0, 1)[None]


def tensors(layout: Layout, dtype: torch.dtype) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(7)
    shapes = [(1, heads, layout.num_tokens, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=drawn, dtype=dtype).requires_grad_() for shape in shapes]


def check(attend: Any, layout: Layout, given: dict[str, Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    """`attend` has the values and the gradients of the dense form."""
    scale = options.get("scaling") or SIZE**-0.5
    (q, k, v), plain = tensors(layout, dtype), tensors(layout, dtype)
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    got, nothing = attend(nn.Identity(), q, k, v, None, **given, **options)
    want = dense(layout, *plain, scale, options.get("sliding_window"), options.get("softcap"))
    assert nothing is None
    torch.testing.assert_close(got, want.detach(), **close)
    weights = torch.linspace(-1, 1, want.numel(), dtype=dtype).view_as(want)
    grads = torch.autograd.grad((got * weights).sum(), (q, k, v))
    for a, b in zip(grads, torch.autograd.grad((want * weights).sum(), plain)):
        torch.testing.assert_close(a, b, **close)


OPTIONS = [{}, {"scaling": 0.7}, {"sliding_window": 2}, {"sliding_window": 4, "scaling": 0.1}, {"sliding_window": 99}]


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize("kind", ["packed", "shared"])
def test_blocks_of_sequences_attend_as_one_dense_product(kind, cheap, monkeypatch):
    if not cheap:  # blocks of few sequences
        monkeypatch.setattr(packing, "CHEAP_SCORES", 0)
        monkeypatch.setattr(packing, "MASKED_SCORES", 0)
    for seed, options in enumerate(OPTIONS):
        batch = random_batch(seed)
        layout = micro_batch(batch, rows_of(batch, seed), "cpu", kind).layout
        assert layout is not None
        check(attend_padded, layout, {"layout": layout}, options, torch.float64)
        check(attend_eager, layout, {"layout": layout}, {**options, "softcap": 1.5}, torch.float64)
        check(attend_eager, layout, {"layout": layout}, options, torch.float64)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", ["packed", "shared"])
def test_one_call_of_a_kernel_attends_as_one_dense_product(kind):
    for seed, options in enumerate(OPTIONS):
        batch = random_batch(seed)
        layout = micro_batch(batch, rows_of(batch, seed), "cpu", kind, spans_of=PackedSequences.of).layout
        assert layout is not None
        check(attend_flash, layout, {"spans": layout.spans}, options, torch.float32)


@pytest.mark.parametrize("attend", [attend_padded, attend_eager])
def test_what_a_layer_adds_to_its_scores_is_refused(attend):
    layout = micro_batch(random_batch(0), [0, 1], "cpu", "shared").layout
    assert layout is not None
    for name in ("position_bias", "s_aux"):
        with pytest.raises(UnsupportedModel, match=f"Identity passes {name}"):
            attend(nn.Identity(), *tensors(layout, torch.float32), None, layout=layout, **{name: torch.ones(1)})
