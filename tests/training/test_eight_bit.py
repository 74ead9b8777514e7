"""AdamW with moments in 8 bits: close to float32 AdamW, a quarter of its state, and exact on resume."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from gspo.models import ModelError
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.optim.eight_bit import EightBitOptimizer

pytest.importorskip("bitsandbytes")
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 1)).to(dtype)  # 12,288 elements, and 128


def train(model: nn.Module, optimizer: MasterOptimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        loss = ((model(x) - x[:, :1].sin()) ** 2).float().mean()
        optimizer.begin(1)
        loss.backward()
        optimizer.step(1e-2, loss.detach())
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_as_float32_moments_do(dtype: torch.dtype) -> None:
    models = [net(dtype), net(dtype)]
    plain = MasterOptimizer(models[0].named_parameters(), **SETTINGS)
    narrow = EightBitOptimizer(models[1].named_parameters(), **SETTINGS)
    theirs, ours = train(models[0], plain, 0, 60), train(models[1], narrow, 0, 60)
    assert theirs[-1] < 0.5 * theirs[0]
    assert ours[-1] == pytest.approx(theirs[-1], rel=0.15)


def test_the_state_is_a_quarter_and_small_tensors_stay_float32() -> None:
    model = net()
    optimizer = EightBitOptimizer(model.named_parameters(), **SETTINGS)
    train(model, optimizer, 0, 1)
    tensors = optimizer.state_tensors()
    assert {key.partition("/")[0] for key in tensors} == {
        *("step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    }
    assert tensors["exp_avg/0.weight"].dtype == torch.uint8 and tensors["exp_avg/2.weight"].dtype == torch.float32
    assert {key: tuple(t.shape) for key, t in tensors.items()} == optimizer.state_shapes()
    large = sum(t.nbytes for key, t in tensors.items() if key.endswith("/0.weight"))
    assert large < 0.26 * 2 * 4 * 12_288


def test_a_resume_gives_the_same_bits() -> None:
    straight, first, second = net(), net(), net()
    whole = EightBitOptimizer(straight.named_parameters(), **SETTINGS)
    train(straight, whole, 0, 8)
    half = EightBitOptimizer(first.named_parameters(), **SETTINGS)
    train(first, half, 0, 4)
    saved = {key: t.clone() for key, t in half.state_tensors().items()}
    second.load_state_dict(first.state_dict())
    resumed = EightBitOptimizer(second.named_parameters(), **SETTINGS)
    resumed.load_state_tensors(saved)
    train(second, resumed, 4, 8)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters()))
    assert all(torch.equal(a, whole.state_tensors()[key]) for key, a in resumed.state_tensors().items())


def test_small_tensors_move_as_adamw_moves_them_with_every_setting() -> None:
    """Their moments are float32, so each step is that of AdamW, also after a resume."""
    settings = {"lr": 9.0, "betas": (0.6, 0.7), "eps": 1e-2, "weight_decay": 0.5, "grad_clip": None}

    def small() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(8, 4)

    models = [small(), small()]
    plain = MasterOptimizer(models[0].named_parameters(), **settings)
    narrow = EightBitOptimizer(models[1].named_parameters(), **settings)
    for step, lr in enumerate((0.3, 0.1, 0.2)):
        for model, optimizer in zip(models, (plain, narrow)):
            optimizer.begin(1)
            (model(torch.full((2, 8), 0.1 * (step + 1))) ** 2).sum().backward()
            optimizer.step(lr)
        for a, b in zip(*(model.parameters() for model in models)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        state = {key: t.clone() for key, t in narrow.state_tensors().items()}
        assert float(state["step/weight"]) == step + 1
        narrow = EightBitOptimizer(models[1].named_parameters(), **settings)
        narrow.load_state_tensors(state)


def test_a_step_with_bad_numbers_changes_nothing() -> None:
    model = net()
    optimizer = EightBitOptimizer(model.named_parameters(), **SETTINGS)
    train(model, optimizer, 0, 2)
    weights = [p.detach().clone() for p in model.parameters()]
    state = {key: t.clone() for key, t in optimizer.state_tensors().items()}
    optimizer.begin(1)
    (model(torch.full((2, 96), torch.nan)).sum()).backward()
    assert not optimizer.step(1e-2).applied
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert all(torch.equal(t, optimizer.state_tensors()[key]) for key, t in state.items())


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"optim\.eight_bit needs bitsandbytes; .*gspo\[quant\]"):
        EightBitOptimizer(net().named_parameters(), **SETTINGS)
