"""The optimizer with its state in host memory computes the bits of the one with its state on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gspo.training.critic import ValueModel
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.optim.offloaded import OffloadedOptimizer
from gspo.training.policy import Policy, PolicySettings
from gspo.training.schedule import Schedule
from tests.training.models import llama
from tests.training.test_policy import ready, token_loss

Make = Callable[..., MasterOptimizer]
IDS = [[1, 2, 3], [4, 5], [2, 6, 1, 7]]


def offloaded(named, **settings) -> OffloadedOptimizer:
    """With pieces so small that tensors span several pieces and pieces contain several tensors."""
    return OffloadedOptimizer(named, piece_elements=320, **settings)


def make_model(dtype: torch.dtype) -> nn.Module:
    return llama().to(dtype)


def train(model, optimizer: MasterOptimizer, lrs: list[float], scale: float = 1.0) -> list[tuple[float, bool]]:
    """A step a learning rate, each of several micro-batches: the norms, and whether it was applied."""
    results = []
    for lr in lrs:
        for ids in IDS:
            (scale * model(torch.tensor([ids])).logits.float() ** 2).sum().backward()
        result = optimizer.step(lr)
        results.append((result.grad_norm, result.applied))
    return results


def state(optimizer: MasterOptimizer) -> dict[str, Tensor]:
    weights = {f"weights/{name}": p.detach() for name, p in optimizer.parameters.items()}
    return {name: t.clone() for name, t in (weights | optimizer.state_tensors()).items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("grad_clip", [None, 0.1, 1e6])
def test_steps_have_the_bits_of_an_optimiser_that_keeps_its_state(dtype, fused, grad_clip):
    made = []
    for make in (MasterOptimizer, offloaded):
        model = make_model(dtype)
        settings = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
        optimizer = make(model.named_parameters(), lr=1.0, grad_clip=grad_clip, fused=fused, **settings)
        made.append((train(model, optimizer, [1e-3, 5e-3, 1e-4]), state(optimizer)))
    (results, want), (offloaded_results, got) = made
    assert results == offloaded_results
    assert_same(got, want)
    assert any(name.startswith("master/") for name in want) == (dtype == torch.bfloat16)
    assert {float(t) for name, t in got.items() if name.startswith("step/")} == {3.0}


@pytest.mark.parametrize("piece_elements", [1, 64, 1000, 1 << 24])
def test_the_size_of_the_pieces_changes_no_bit(piece_elements):
    model, same = make_model(torch.bfloat16), make_model(torch.bfloat16)
    plain = MasterOptimizer(model.named_parameters(), lr=1.0)
    optimizer = OffloadedOptimizer(same.named_parameters(), lr=1.0, piece_elements=piece_elements)
    assert train(model, plain, [1e-3, 1e-3]) == train(same, optimizer, [1e-3, 1e-3])
    assert_same(state(optimizer), state(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bad_step_changes_nothing_and_does_not_count(dtype):
    made = []
    for make in (MasterOptimizer, offloaded):
        model = make_model(dtype)
        optimizer = make(model.named_parameters(), lr=1e-3)
        results = train(model, optimizer, [1e-3])
        before = state(optimizer)
        ((_, applied),) = train(model, optimizer, [1e-3], scale=float("inf"))
        assert not applied
        assert_same(state(optimizer), before)
        (model(torch.tensor([[1, 2]])).logits.float() ** 2).sum().backward()
        assert not optimizer.step(1e-3, loss=torch.tensor(float("nan"))).applied
        assert_same(state(optimizer), before)
        results += train(model, optimizer, [1e-3])
        made.append((results, state(optimizer)))
    assert made[0][0] == made[1][0]
    assert_same(made[0][1], made[1][1])


@pytest.mark.parametrize("makers", [(MasterOptimizer, offloaded), (offloaded, MasterOptimizer), (offloaded,) * 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_kind_resumes_the_state_of_the_other(makers, dtype):
    first, second = makers
    whole = make_model(dtype)
    kept = first(whole.named_parameters(), lr=1e-3)
    train(whole, kept, [1e-3, 2e-3])
    saved = {name: t.clone() for name, t in kept.state_tensors().items()}
    handed_over = {name: t.clone() for name, t in saved.items()}
    resumed = make_model(dtype)
    resumed.load_state_dict(whole.state_dict())
    other = second(resumed.named_parameters(), lr=1e-3)
    other.load_state_tensors(handed_over)
    assert_same(state(other), state(kept))
    assert train(whole, kept, [1e-3, 2e-3]) == train(resumed, other, [1e-3, 2e-3])
    assert_same(state(other), state(kept))
    assert_same(handed_over, saved)  # it is not written to


def test_state_that_shares_one_memory_is_written_and_read_as_tensors_of_their_own(tmp_path):
    model = make_model(torch.bfloat16)
    optimizer = offloaded(model.named_parameters(), lr=1e-3)
    train(model, optimizer, [1e-3])
    kept = {name: t.clone() for name, t in optimizer.state_tensors().items()}
    for name, tensors in (("there", optimizer.state_tensors()), ("apart", kept)):
        save_file(tensors, tmp_path / name)
    assert_same(load_file(tmp_path / "there"), kept)
    assert (tmp_path / "there").read_bytes() == (tmp_path / "apart").read_bytes()


def test_a_master_that_was_loaded_is_what_the_model_holds():
    model = make_model(torch.bfloat16)
    optimizer = offloaded(model.named_parameters(), lr=1e-3)
    name, weight = next(iter(optimizer.parameters.items()))
    optimizer.load_state_tensors({f"master/{name}": torch.full(weight.shape, 0.3)})
    assert torch.equal(weight, torch.full_like(weight, 0.3))


def test_parameters_without_a_gradient_stay_as_they_are():
    made = []
    for make in (MasterOptimizer, offloaded):
        torch.manual_seed(0)
        net = nn.ModuleList(nn.Linear(30, 30) for _ in range(3)).bfloat16()
        optimizer = make(net.named_parameters(), lr=1e-2)
        for used in ((0, 2), (2,), (0, 2)):
            for index in used:
                net[index](torch.ones(2, 30, dtype=torch.bfloat16)).sum().backward()
            optimizer.step(1e-2)
        made.append(state(optimizer))
    assert_same(*made)
    assert made[1]["step/2.weight"] == 3 and made[1]["step/0.weight"] == 2 and "step/1.weight" not in made[1]


def test_a_step_without_gradients_changes_nothing():
    net = nn.Linear(3, 3).bfloat16()
    optimizer = offloaded(net.named_parameters(), lr=1e-2)
    before = state(optimizer)
    assert optimizer.step(1e-2).grad_norm == 0
    assert_same(state(optimizer), before)


def test_precisions_and_layouts_side_by_side():
    """A critic's float32 head on a bf16 decoder, and a parameter that is not contiguous."""
    made = []
    for make in (MasterOptimizer, offloaded):
        torch.manual_seed(0)
        model = ValueModel(llama().bfloat16())
        turned = nn.Parameter(torch.randn(40, 30).t().bfloat16())
        assert not turned.is_contiguous()
        optimizer = make([*model.named_parameters(), ("turned", turned)], lr=1e-2)
        for _ in range(2):
            hidden = model.decoder(torch.tensor([[1, 2, 3]])).last_hidden_state
            (model.head(hidden.float() + 0.5) - 1).square().sum().backward()
            (turned.float() * torch.arange(1200.0).view(30, 40)).sum().backward()
            optimizer.step(1e-2)
        made.append(state(optimizer))
    assert_same(*made)
    assert made[1]["weights/head.bias"].abs().max() > 0


def test_a_policy_trains_to_the_same_bits():
    made = []
    for make in (MasterOptimizer, offloaded):
        model = llama().bfloat16()
        optimizer = make(model.named_parameters(), lr=1e-3)
        policy = Policy(model, optimizer, Schedule(1e-3), PolicySettings(mini_batch_groups=2))
        for step in range(2):
            update = policy.update(ready(policy, seed=step), token_loss, step=step)
        metrics = {name: metric.result() for name, metric in update.metrics.items()}
        made.append((metrics, state(optimizer)))
    assert made[0][0] == made[1][0] and made[0][0]["actor/grad_norm"] > 0
    assert_same(made[0][1], made[1][1])
