"""A mini-batch of one micro-batch: its half-precision gradients are their own sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gspo.training.optim import adamw as module
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.optim.offloaded import OffloadedOptimizer
from tests.training.models import llama
from tests.training.test_offload import assert_same, offloaded, state

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 1]])


def step(model, optimizer: MasterOptimizer, *, scale: float = 1.0, alone: bool = True, lr: float = 1e-3):
    if alone:
        optimizer.begin(1)
    (scale * model(IDS).logits.float() ** 2).sum().backward()
    return optimizer.step(lr)


def pair(make=MasterOptimizer, dtype=torch.bfloat16, **settings):
    """A model and its optimiser, twice."""
    models = [llama().to(dtype) for _ in range(2)]
    return [(m, make(m.named_parameters(), lr=1.0, weight_decay=0.1, **settings)) for m in models]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [MasterOptimizer, offloaded])
def test_one_backward_moves_weights_by_the_bits_of_a_sum_of_one(make, fused, monkeypatch):
    monkeypatch.setattr(module, "WIDENED_ELEMENTS", 1000)  # several parts, some of one large tensor
    (model, optimizer), (same, other) = pair(make, fused=fused, grad_clip=None)
    for lr in (1e-3, 5e-3):
        got, want = step(model, optimizer, lr=lr), step(same, other, alone=False, lr=lr)
        assert got.applied and want.applied
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-6)
    assert_same(state(optimizer), state(other))


@pytest.mark.parametrize("make", [MasterOptimizer, offloaded])
def test_gradients_without_sums_are_clipped_in_float32(make):
    (model, optimizer), (same, other) = pair(make, grad_clip=0.1)
    assert step(model, optimizer).grad_norm > 0.1
    step(same, other, alone=False)
    got, want = state(optimizer), state(other)
    for name in want:
        assert torch.allclose(got[name].float(), want[name].float(), rtol=1e-5, atol=1e-9), name


@pytest.mark.parametrize("make", [MasterOptimizer, offloaded])
def test_a_bad_gradient_without_a_sum_changes_nothing_and_is_forgotten(make):
    (model, optimizer), (same, other) = pair(make)
    step(model, optimizer), step(same, other)
    before = state(optimizer)
    assert not step(model, optimizer, scale=float("inf")).applied
    assert_same(state(optimizer), before)
    step(model, optimizer), step(same, other)
    assert_same(state(optimizer), state(other))


def test_no_float32_gradient_is_there_between_the_backward_and_the_step():
    ((model, optimizer), _) = pair()
    optimizer.begin(1)
    model(IDS).logits.float().sum().backward()
    assert all(m.grad is None for m in optimizer.masters.values())
    assert all(p.grad is None for p in model.parameters())
    assert {g.dtype for g in optimizer._sums.narrow.values()} == {torch.bfloat16}


def test_gradients_of_a_failed_backward_are_not_in_the_next_step():
    (model, optimizer), (same, other) = pair()
    optimizer.begin(1)
    model(IDS).logits.float().sum().backward()  # and then something fails before the step
    step(model, optimizer), step(same, other)
    assert_same(state(optimizer), state(other))


def test_a_second_backward_after_only_one_was_announced_is_refused():
    ((model, optimizer), _) = pair()
    optimizer.begin(1)
    model(IDS).logits.float().sum().backward()
    with pytest.raises(AssertionError, match="second backward"):
        model(IDS).logits.float().sum().backward()


def test_float32_parameters_are_summed_as_ever():
    (model, optimizer), (same, other) = pair(dtype=torch.float32)
    step(model, optimizer), step(same, other, alone=False)
    assert_same(state(optimizer), state(other))


def test_a_model_of_mixed_precision_steps_once():
    models = [llama().to(torch.bfloat16) for _ in range(2)]
    for m in models:
        m.model.norm.float()
    made = [MasterOptimizer(m.named_parameters(), lr=1.0, grad_clip=None) for m in models]
    for m, optimizer, alone in zip(models, made, (True, False)):
        if alone:
            optimizer.begin(1)
        hidden = m.model.embed_tokens(IDS).float()
        (m.model.norm(hidden) ** 2).sum().backward()
        optimizer.step(1e-2)
    assert_same(state(made[0]), state(made[1]))
    assert {float(t) for name, t in state(made[0]).items() if name.startswith("step/")} == {1.0}


def test_offloaded_pieces_convert_half_precision_gradients(monkeypatch):
    (model, optimizer), (same, other) = pair(
        lambda named, **s: OffloadedOptimizer(named, piece_elements=64, **s), grad_clip=None
    )
    step(model, optimizer), step(same, other, alone=False)
    assert_same(state(optimizer), state(other))


@pytest.mark.parametrize("make", [MasterOptimizer, offloaded])
@pytest.mark.parametrize("grad_clip", [None, 0.5])
def test_steps_are_those_of_adamw_with_every_setting(make, grad_clip):
    """The rate of each step, the betas, eps, the weight decay and the clipping, against torch's AdamW."""
    settings = {"betas": (0.7, 0.8), "eps": 1e-2, "weight_decay": 0.3}
    model, same = llama(), llama()
    optimizer = make(model.named_parameters(), lr=9.0, grad_clip=grad_clip, **settings)
    adamw = torch.optim.AdamW(same.parameters(), lr=9.0, **settings)
    for lr in (1e-3, 5e-2, 0.0, 2e-2):
        result = step(model, optimizer, lr=lr)
        adamw.zero_grad()
        (same(IDS).logits ** 2).sum().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in same.parameters()])
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)  # before clipping
        assert float(norm) > 1
        if grad_clip:
            torch.nn.utils.clip_grad_norm_(same.parameters(), grad_clip)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
    for (name, a), b in zip(model.named_parameters(), same.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def test_two_announced_backwards_are_summed_in_float32():
    ((model, optimizer), (same, other)) = pair(grad_clip=None)
    optimizer.begin(2)
    for _ in range(2):
        (model(IDS).logits.float() ** 2).sum().backward()
    assert {m.grad.dtype for m in optimizer.masters.values()} == {torch.float32}
    optimizer.step(1e-3)
    for _ in range(2):  # not announced
        (same(IDS).logits.float() ** 2).sum().backward()
    other.step(1e-3)
    assert_same(state(optimizer), state(other))


def test_masters_of_half_precision_weights_are_part_of_the_state():
    """The bits below bfloat16 are in the master only: without it a resumed run would round them away."""
    ((model, optimizer), (same, other)) = pair()
    step(model, optimizer, lr=1e-6)
    saved = {name: t.clone() for name, t in optimizer.state_tensors().items()}
    assert {name for name in saved if name.startswith("master/")} == {f"master/{n}" for n in optimizer.parameters}
    same.load_state_dict(model.state_dict())
    other.load_state_tensors(saved)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in other.masters.values())
    for _ in range(2):
        step(model, optimizer, lr=1e-6), step(same, other, lr=1e-6)
    assert_same(state(optimizer), state(other))


def test_a_loss_that_is_not_finite_skips_the_step():
    ((model, optimizer), _) = pair(dtype=torch.float32)
    before = state(optimizer)
    (model(IDS).logits ** 2).sum().backward()
    result = optimizer.step(1e-3, torch.tensor(float("nan")))
    assert not result.applied and result.grad_norm > 0
    assert_same(state(optimizer), before)


def small_net(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]).to(dtype)


def square(layer: nn.Module, scale: float = 1.0) -> Tensor:
    return (scale * layer(torch.ones(2, 3, dtype=next(layer.parameters()).dtype)).float() ** 2).sum()


@pytest.mark.parametrize("make", [MasterOptimizer, offloaded])
def test_settings_that_nobody_gave_are_those_of_adamw_with_gradients_clipped_at_1(make):
    net, same = small_net(), small_net()
    optimizer = make(net.named_parameters(), lr=9.0)
    adamw = torch.optim.AdamW(same.parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for scale in (3.0, 0.01, 2.0):  # above, below and above the norm at which they are clipped
        square(net[0], scale).backward(), square(same[0], scale).backward()
        result = optimizer.step(0.1)
        norm = torch.nn.utils.clip_grad_norm_(same.parameters(), 1.0)
        assert (float(norm) > 1) == (scale > 1) and result.grad_norm == pytest.approx(float(norm))
        adamw.param_groups[0]["lr"] = 0.1
        adamw.step()
        adamw.zero_grad()
    for a, b in zip(net.parameters(), same.parameters()):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [MasterOptimizer, offloaded])
def test_the_shapes_of_the_state_are_known_before_it_is_there(make, dtype):
    net = small_net(dtype)
    net[1].bias.requires_grad_(False)
    optimizer = make(net.named_parameters(), lr=1e-2)
    assert set(optimizer.parameters) == {"0.weight", "0.bias", "1.weight"}  # what is frozen has none
    assert optimizer.without_state() == list(optimizer.parameters)
    square(net[0]).backward()
    optimizer.step(1e-2)
    assert optimizer.without_state() == ["1.weight"]
    found = {name: tuple(t.shape) for name, t in optimizer.state_tensors().items()}
    shapes = optimizer.state_shapes()
    masters = {f"master/{name}" for name in optimizer.parameters} if dtype == torch.bfloat16 else set()
    moments = {f"{key}/{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in optimizer.parameters}
    assert set(shapes) == moments | masters
    assert found == {name: shape for name, shape in shapes.items() if name.startswith("master/") or "0." in name}
    assert shapes["exp_avg_sq/1.weight"] == (4, 3) and shapes["step/0.bias"] == ()


@pytest.mark.parametrize("make", [MasterOptimizer, offloaded])
def test_a_state_that_was_prepared_is_that_of_a_first_step(make):
    """Prepared for one parameter, then for all: what is there already stays."""
    nets = [small_net(torch.bfloat16) for _ in range(2)]
    prepared, plain = (make(net.named_parameters(), lr=1e-2) for net in nets)
    prepared.prepare_state(["0.bias"])
    assert set(prepared.without_state()) == {"0.weight", "1.weight", "1.bias"}
    for net, optimizer in zip(nets, (prepared, plain)):
        square(net[0]).backward()
        optimizer.step(1e-2)
    assert_same(state(prepared), state(plain))
    before = state(prepared)
    prepared.prepare_state()
    after = state(prepared)
    assert prepared.without_state() == [] and all(torch.equal(after[name], before[name]) for name in before)
    assert not any(after[f"{key}/1.weight"].any() for key in ("step", "exp_avg", "exp_avg_sq"))
    prepared.move_state("cpu")
    assert_same(state(prepared), after)


def test_a_clip_of_0_clips_nothing():
    nets = [small_net() for _ in range(2)]
    made = [MasterOptimizer(net.named_parameters(), lr=1e-2, grad_clip=clip) for net, clip in zip(nets, (0.0, None))]
    for net, optimizer in zip(nets, made):
        square(net[0], 5.0).backward()
        optimizer.step(1e-2)
    assert_same(*(state(optimizer) for optimizer in made))


def test_gradients_are_widened_in_parts_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(module, "WIDENED_ELEMENTS", 9)
    gradients = [(torch.zeros(()), torch.zeros(size)) for size in (4, 5, 1, 20, 3, 6, 1)]
    parts = [[grad.numel() for _, grad in part] for part in module._parts(gradients)]
    assert parts == [[4, 5], [1], [20], [3, 6], [1]] and list(module._parts([])) == []
