"""The policy's forward, its exact ratio, and its independence of micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM

from gspo.metrics import Metric
from gspo.models.output_head import Head
from gspo.training import log_probs as head_module
from gspo.training.batch.batching import collate, split_by_tokens
from gspo.training.log_probs import chosen_log_probs
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.policy import Policy, PolicySettings
from gspo.training.schedule import Schedule
from gspo.types import Group, LossInputs, LossOutput, Prompt, Reward, Rollout
from tests.training.models import FAMILIES, VOCAB, llama


def groups(num: int = 6, n: int = 4, seed: int = 0) -> list[Group]:
    gen = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        size = int(torch.randint(low, high, (), generator=gen))
        return tuple(torch.randint(0, VOCAB, (size,), generator=gen).tolist())

    out = []
    for i in range(num):
        prompt = Prompt(f"p{i}", (), tokens(2, 9))
        rollouts = []
        for j in range(n):
            ids = tokens(1, 12)
            size = len(ids)
            reward = Reward(float(j % 2))
            rollouts.append(Rollout(ids, (-1.0,) * size, (1,) * size, (0,) * size, "stop", reward=reward))
        out.append(Group(prompt, tuple(rollouts), i, 0))
    return out


def policy(model, **settings) -> Policy:
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-3)
    return Policy(model, optimizer, Schedule(1e-3), PolicySettings(**{"mini_batch_groups": 2, **settings}))


def token_loss(x: LossInputs) -> LossOutput:
    ratio = torch.exp(x.log_probs - x.old_log_probs)
    loss = -(ratio * x.advantages * x.mask).sum() / x.totals.num_tokens
    off = ((ratio != 1) & (x.mask > 0)).sum()
    return LossOutput(loss, {"off": Metric("sum", off), "actor/pg_loss": Metric("sum", loss.detach())})


def ready(p: Policy, seed: int = 0):
    batch = p.score(collate(groups(seed=seed)))
    gen = torch.Generator().manual_seed(1)
    return batch.with_advantages(torch.randn(batch.mask.shape, generator=gen), batch.mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_the_models_own_logits(family):
    model = FAMILIES[family]()
    p = policy(model, temperature=0.7)
    batch = collate(groups())
    got, entropy = p.log_probs(batch)
    for row, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.response_ids)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        want = logits.log_softmax(-1)
        chosen = want.gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert torch.allclose(got[row, : len(response)].double(), chosen, atol=2e-5)
        assert torch.allclose(entropy[row, : len(response)].double(), -(want.exp() * want).sum(-1), atol=2e-5)
        assert (got[row, len(response) :] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ratio_of_the_first_mini_batch_is_one_to_the_last_bit(family):
    p = policy(FAMILIES[family](), micro_batch_tokens=64)
    metrics = p.update(ready(p), token_loss, step=0).metrics
    # 6 groups, 2 a mini-batch: the first has no ratio off 1; after one update the others have.
    assert metrics["off"].result() > 0
    first = policy(FAMILIES[family](), micro_batch_tokens=64, mini_batch_groups=6)
    assert first.update(ready(first), token_loss, step=0).metrics["off"].result() == 0


@pytest.mark.parametrize("micro_batch_tokens", [24, 400])
def test_the_same_of_a_wide_model_with_biases(micro_batch_tokens):
    """Products of few and of many rows, large enough that another way to compute them gives other bits."""
    torch.manual_seed(0)
    shape = {"hidden_size": 640, "intermediate_size": 1200, "num_hidden_layers": 2, "vocab_size": VOCAB}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=10, num_key_value_heads=2)).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    p = policy(model, micro_batch_tokens=micro_batch_tokens, mini_batch_groups=6, old_log_prob_source="recompute")
    assert p.update(ready(p), token_loss, step=0).metrics["off"].result() == 0


@pytest.mark.parametrize("cut", [{"score_rows": 1}, {"score_tokens": 24}])
def test_the_old_log_probs_may_be_computed_in_other_micro_batches(cut):
    usual = policy(llama(), old_log_prob_source="recompute").score(collate(groups()))
    p = policy(llama(), old_log_prob_source="recompute", **cut)
    sizes = []
    forward = p.forward
    p.forward = lambda micro, **kw: (sizes.append(len(micro.rows)), forward(micro, **kw))[1]
    other = p.score(collate(groups()))
    assert torch.allclose(other.old_log_probs, usual.old_log_probs, atol=1e-5)
    assert max(sizes) == 1 if "score_rows" in cut else len(sizes) > 3


def test_first_pass_is_the_same_update_as_recompute():
    a, b = (policy(llama(), old_log_prob_source=source) for source in ("recompute", "first_pass"))
    for p in (a, b):
        p.update(ready(p), token_loss, step=0)
    for x, y in zip(a.model.parameters(), b.model.parameters()):
        assert torch.equal(x, y)


@pytest.mark.parametrize("cut", [{"micro_batch_tokens": 24}, {"micro_batch_tokens": None, "micro_batch_rows": 3}])
def test_the_update_does_not_depend_on_the_micro_batches(cut):
    whole, split = policy(llama().double()), policy(llama().double(), **cut)
    for p in (whole, split):
        p.optimizer.adamw.param_groups[0]["eps"] = 1e-3  # keeps near-zero gradients from being amplified
        p.update(ready(p), token_loss, step=0)
    for x, y in zip(whole.model.parameters(), split.model.parameters()):
        assert torch.allclose(x, y, atol=1e-6)


def test_chunking_the_head_changes_neither_values_nor_gradients(monkeypatch):
    model = llama()
    head = Head.of(model)
    hidden = torch.randn(50, 32)
    targets = torch.randint(0, VOCAB, (50,))
    results = []
    for elements, kept in ((1 << 24, 1 << 26), (VOCAB * 7, 1 << 26), (VOCAB * 7, VOCAB * 7)):
        monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(head_module, "KEEP_ELEMENTS", kept)
        h = hidden.clone().requires_grad_()
        model.zero_grad()
        log_probs, entropy = chosen_log_probs(head, h, targets, 1.3, entropy=True)
        (log_probs.sin().sum() + entropy.sum()).backward()
        results.append((log_probs.detach(), entropy.detach(), h.grad, head.linear.weight.grad.clone()))
    for whole, *cut in zip(*results):
        assert all(torch.allclose(whole, other, atol=1e-5) for other in cut)


def test_recomputing_the_entropy_keeps_no_logits_and_changes_nothing():
    model = llama()
    head = Head.of(model)
    hidden, targets = torch.randn(40, 32), torch.randint(0, VOCAB, (40,))
    results = []
    for recompute in (False, True):
        sizes = []
        h = hidden.clone().requires_grad_()
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t):
            log_probs, entropy = chosen_log_probs(head, h, targets, 0.9, entropy=True, recompute=recompute)
        results.append((sizes, log_probs.detach(), entropy.detach()))
        (log_probs.sum() - 0.1 * entropy.sum()).backward()
        results[-1] += (h.grad, head.linear.weight.grad.clone())
    (kept, *plain), (recomputed, *again) = results
    assert 40 * VOCAB in kept and 40 * VOCAB not in recomputed
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_dropout_is_off_in_scores_and_updates():
    """Also where the model that is given was in training mode."""
    quiet, noisy = policy(llama()), policy(llama(attention_dropout=0.9).train())
    for p in (quiet, noisy):
        p.update(ready(p), token_loss, step=0)
    assert all(torch.equal(x, y) for x, y in zip(quiet.model.parameters(), noisy.model.parameters()))


def test_bad_numbers_skip_the_update_and_leave_the_weights():
    p = policy(llama())
    batch = ready(p)
    before = [x.clone() for x in p.model.parameters()]
    batch.advantages[:] = float("nan")
    metrics = p.update(batch, token_loss, step=0).metrics
    assert metrics["actor/skipped_updates"].result() == 3
    assert all(torch.equal(a, b) for a, b in zip(before, p.model.parameters()))
    assert not p.optimizer.state_tensors()


def test_bf16_weights_follow_float32_masters():
    model = llama().bfloat16()
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-5)
    name, weight = next(iter(optimizer.parameters.items()))
    start = optimizer.masters[name].clone()
    for _ in range(3):
        (model(torch.tensor([[1, 2, 3]])).logits.float() ** 2).sum().backward()
        assert weight.grad is None  # moved to the master
        optimizer.step(1e-5)
    moved = optimizer.masters[name] - start
    assert 0 < moved.abs().max() < 1e-4  # small steps add up in the master …
    assert torch.equal(weight, optimizer.masters[name].bfloat16())  # … and the model holds its rounding


@pytest.mark.parametrize(("waiting", "large"), [(1, 1 << 20), (2000, 1 << 20), (1 << 28, 1 << 20), (1 << 28, 1025)])
def test_bf16_gradients_add_up_in_float32(monkeypatch, waiting, large):
    monkeypatch.setattr("gspo.training.optim.adamw.WAITING_BYTES", waiting)
    monkeypatch.setattr("gspo.training.optim.adamw.LARGE_ELEMENTS", large)
    model = llama().bfloat16()
    inputs = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]]), torch.tensor([[2, 6, 1, 7]])]
    want: dict[str, torch.Tensor] = {}
    for ids in inputs:  # before there are hooks
        (model(ids).logits.float() ** 2).sum().backward()
        for name, p in model.named_parameters():
            want[name] = p.grad.float() if name not in want else want[name] + p.grad
            p.grad = None
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-5)
    for ids in inputs:
        (model(ids).logits.float() ** 2).sum().backward()
    assert all(torch.equal(optimizer.masters[name].grad, total) for name, total in want.items())


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory")


def test_gradients_after_a_backward_that_failed_are_not_lost():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    optimizer = MasterOptimizer(net.named_parameters(), lr=0.1)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="out of memory"):
        net[1](_Faulty.apply(net[0](x))).sum().backward()
    net(x).sum().backward()
    assert all(master.grad is not None for master in optimizer.masters.values())
    assert optimizer.step(0.1).grad_norm > 0


def test_a_backward_within_a_backward_adds_to_the_same_sums():
    inner, last = (nn.Linear(4, 4, bias=False).bfloat16() for _ in range(2))
    optimizer = MasterOptimizer(nn.ModuleList([inner, last]).named_parameters(), lr=0.1)
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)

    def grads(apply):
        for before in (False, True):  # the weight is used before the inner part as well, or after it
            h = apply(inner(x)) if before else inner(apply(x))
            last(h).sum().backward()
        got = [master.grad.clone() for master in optimizer.masters.values()]
        optimizer.zero_grad()
        return got

    want = grads(inner)
    got = grads(lambda h: checkpoint(inner, h, use_reentrant=True))
    for a, b in zip(want, got):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.02)


def test_optimiser_state_round_trips_to_the_bit():
    def steps(optimizer, model, num):
        for _ in range(num):
            (model(torch.tensor([[1, 2, 3]])).logits ** 2).sum().backward()
            optimizer.step(1e-3)

    a = llama()
    opt_a = MasterOptimizer(a.named_parameters(), lr=1e-3)
    steps(opt_a, a, 2)
    b = llama(seed=5)
    b.load_state_dict(a.state_dict())
    opt_b = MasterOptimizer(b.named_parameters(), lr=1e-3)
    opt_b.load_state_tensors({k: v.clone() for k, v in opt_a.state_tensors().items()})
    steps(opt_a, a, 2)
    steps(opt_b, b, 2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


def test_token_budget_is_kept_and_every_row_is_there_once():
    lengths = [5, 9, 3, 20, 7, 7, 1]
    parts = split_by_tokens(lengths, range(7), 18)
    assert sorted(r for part in parts for r in part) == list(range(7))
    assert all(len(p) == 1 or len(p) * max(lengths[r] for r in p) <= 18 for p in parts)


def test_schedules():
    cosine = Schedule(1.0, "cosine", warmup_steps=4, total_steps=14, min_ratio=0.1)
    assert [cosine.at(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine.at(4) == 1.0
    assert cosine.at(9) == pytest.approx(0.55)
    assert cosine.at(14) == cosine.at(99) == pytest.approx(0.1)
    assert cosine.at(6) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.2)) / 2)
    line = Schedule(2.0, "linear", warmup_steps=2, total_steps=10, min_ratio=0.25)
    assert [line.at(s) for s in (0, 1, 2, 4, 6, 10, 50)] == pytest.approx([1.0, 2.0, 2.0, 1.625, 1.25, 0.5, 0.5])
    assert Schedule(2.0).at(1000) == 2.0
    for kind in ("linear", "cosine"):
        assert Schedule(2.0, kind, warmup_steps=4, total_steps=None).at(1000) == 2.0
        assert Schedule(2.0, kind, total_steps=8).at(8) == 0.0 and Schedule(2.0, kind, total_steps=8).at(0) == 2.0
        assert Schedule(2.0, kind, warmup_steps=5, total_steps=5, min_ratio=0.5).at(5) == 2.0
        assert Schedule(2.0, kind, warmup_steps=5, total_steps=5, min_ratio=0.5).at(6) == 1.0
    assert [Schedule(2.0, "constant", 4, 10, 0.1).at(s) for s in (0, 3, 4, 10)] == [0.5, 2.0, 2.0, 2.0]
