"""Supervised steps of the policy: the loss and gradients of the answers, however they are packed and split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.algo.aggregation import aggregate
from gspo.data.examples import Example
from gspo.training import forward
from gspo.training.batch.batching import MicroBatch, micro_batch
from gspo.training.optim.adamw import MasterOptimizer, StepResult
from gspo.training.policy import Policy, PolicySettings, Supervision
from gspo.training.schedule import Schedule
from gspo.training.sft import answer_batch, answer_loss, example_batch, held_out_loss
from gspo.types import LossInputs, LossOutput, Prompt, TrainBatch
from tests.training.models import VOCAB, gemma2, llama

SIZES = ((5, 3), (2, 9), (11, 1), (1, 4), (7, 7), (3, 2))  # prompt and answer tokens


class RecordingOptimizer(MasterOptimizer):
    """Keeps the summed gradients of each step."""

    def step(self, lr: float, loss: Tensor | None = None) -> StepResult:
        self.grads = {name: m.grad.double() for name, m in self.masters.items() if m.grad is not None}
        return super().step(lr, loss)


def make_examples(seed: int = 0, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Example]:
    numbers = torch.Generator().manual_seed(seed)

    def tokens(num: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (num,), generator=numbers).tolist())

    return [Example(Prompt(str(i), (), tokens(p)), tokens(a)) for i, (p, a) in enumerate(sizes)]


def policy(model: Any, *, grad_clip: float = 1e9, **settings: Any) -> Policy:
    optimizer = RecordingOptimizer(model.named_parameters(), lr=1e-3, weight_decay=0.0, grad_clip=grad_clip)
    kept = {"mini_batch_groups": 1000, "layout": "shared", **settings}
    return Policy(model, optimizer, Schedule(1e-3), PolicySettings(**kept))


def reference(model: Any, examples: Sequence[Example]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in float64, one padded row per example, by transformers' own forward."""
    model = model.double()
    model.zero_grad()
    width = max(e.num_tokens for e in examples)
    ids, labels = torch.zeros(len(examples), width, dtype=torch.long), torch.full((len(examples), width), -100)
    for i, e in enumerate(examples):
        ids[i, : e.num_tokens] = torch.tensor(e.prompt.token_ids + e.answer_ids)
        labels[i, len(e.prompt.token_ids) : e.num_tokens] = torch.tensor(e.answer_ids)
    logits = model(input_ids=ids).logits  # padding is at the end, where causal attention never looks
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(p: Policy, examples: Sequence[Example]) -> tuple[float, dict[str, Tensor]]:
    update = p.update(answer_batch(examples), answer_loss, step=0)
    return update.metrics["train/loss"].result(), p.optimizer.grads  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("make", [llama, gemma2])
@pytest.mark.parametrize("budget", [10_000, 24, 1], ids=["one forward", "some", "one example each"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.float64, 1e-6)])
def test_loss_and_gradients_are_those_of_padded_rows_in_float64(
    make: Any, budget: int, dtype: Any, close: float
) -> None:
    examples = make_examples()
    loss, grads = reference(make(), examples)
    found, packed = step(policy(make().to(dtype), micro_batch_tokens=budget), examples)
    assert found == pytest.approx(loss, rel=close)
    assert set(packed) == set(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(packed[name], grad, rtol=0, atol=close * float(grad.abs().max()), msg=name)


def test_an_example_does_not_see_its_neighbours() -> None:
    """An example's log-probs are the same alone and between others, in any order."""
    examples, p = make_examples(), policy(llama())
    together, _ = p.log_probs(answer_batch(examples))
    reversed_, _ = p.log_probs(answer_batch(examples[::-1]))
    for i, example in enumerate(examples):
        alone, _ = p.log_probs(answer_batch([example]))
        size = len(example.answer_ids)
        torch.testing.assert_close(together[i, :size], alone[0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(reversed_[len(examples) - 1 - i, :size], alone[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", ["plain", "packed", "shared"])
def test_every_layout_gives_the_same_step(layout: Any) -> None:
    examples = make_examples()
    loss, grads = step(policy(llama()), examples)
    other, found = step(policy(llama(), layout=layout, micro_batch_tokens=30), examples)
    assert other == pytest.approx(loss, rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def test_equal_prompts_are_examples_of_their_own() -> None:
    first, second = make_examples(sizes=((4, 3), (4, 5)))
    same = Example(first.prompt, second.answer_ids)
    loss, grads = reference(llama(), [first, same])
    found, packed = step(policy(llama()), [first, same])
    assert found == pytest.approx(loss, rel=2e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(packed[name], grad, rtol=0, atol=2e-5 * float(grad.abs().max()))


def test_the_first_step_moves_by_the_sign_of_the_gradient() -> None:
    """Without decay and clipping AdamW's first step is lr · sign(gradient)."""
    examples, start = make_examples(), llama()
    p = policy(llama())
    _, grads = step(p, examples)
    for name, new in p.model.named_parameters():
        moved = new.detach() - start.get_parameter(name).detach()
        sure = grads[name].abs() > 1e-4
        torch.testing.assert_close(moved[sure], -1e-3 * grads[name][sure].sign().float(), atol=2e-6, rtol=2e-3)


def test_gradients_are_clipped() -> None:
    p, q = policy(llama(), grad_clip=1e9), policy(llama(), grad_clip=1e-3)
    norms = [one.update(answer_batch(make_examples()), answer_loss, step=0) for one in (p, q)]
    assert norms[0].metrics["actor/grad_norm"].result() == norms[1].metrics["actor/grad_norm"].result() > 1e-3
    first = [next(iter(one.optimizer.adamw.state.values()))["exp_avg"].norm() for one in (p, q)]
    assert first[1] < 0.01 * first[0]


def test_the_next_batch_is_made_ahead_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `upcoming`, steps have the same bits, and an update finds the micro-batches of its batch ready."""
    batches = [answer_batch(make_examples(seed)) for seed in range(3)]
    plain, ahead = policy(llama(), micro_batch_tokens=24), policy(llama(), micro_batch_tokens=24)
    for i, batch in enumerate(batches):
        plain.update(batch, answer_loss, step=i)
    made: list[int] = []

    def recording(batch: TrainBatch, rows: Sequence[int], *args: Any, **kwargs: Any) -> MicroBatch:
        made.append(next(i for i, b in enumerate(batches) if b.prompt_ids is batch.prompt_ids))
        return micro_batch(batch, rows, *args, **kwargs)

    monkeypatch.setattr(forward, "micro_batch", recording)
    for i, batch in enumerate(batches):
        made.append(-1)  # an update begins
        following = batches[(i + 1) % 3]
        ahead.update(batch, answer_loss, step=i, upcoming=lambda following=following: following)
    sizes = [len(ahead.plan(batch)[0]) for batch in batches]
    assert min(sizes) > 1
    assert made == [-1, *[0] * sizes[0], *[1] * sizes[1], -1, *[2] * sizes[2], -1, *[0] * sizes[0]]
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), ahead.model.parameters()))


def test_held_out_loss_is_the_mean_over_all_answer_tokens() -> None:
    examples = make_examples()
    loss, _ = reference(llama(), examples)
    for size in (1, 4, 100):
        metrics = held_out_loss(policy(llama()), examples, size)
        assert metrics["val/loss"].result() == pytest.approx(loss, rel=1e-5)
        assert metrics["val/perplexity"].result() == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-5)


def test_a_step_that_is_not_finite_is_skipped_and_counted() -> None:
    model = llama()
    p = policy(model)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = float("inf")
    before = [p.clone() for p in model.parameters()]
    update = p.update(answer_batch(make_examples()), answer_loss, step=0)
    assert update.metrics["actor/skipped_updates"].result() == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def clipped(x: LossInputs) -> LossOutput:
    """A policy loss with a ratio and advantages of its own."""
    ratio = torch.exp(x.log_probs - x.log_probs.detach())
    return LossOutput(aggregate(-ratio * x.advantages, x.mask, x.totals, "token-mean"), {})


@pytest.mark.parametrize("layout", ["plain", "packed", "shared"])
def test_examples_beside_a_batch_add_their_weighted_gradient(layout: str) -> None:
    examples, others = make_examples(), make_examples(seed=1, sizes=((4, 3), (6, 5), (2, 2)))
    batch = answer_batch(examples)
    batch = dataclasses.replace(
        batch, advantages=torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(2))
    )
    _, supervised = reference(llama(), others)

    alone, both = (policy(llama(), layout=layout, micro_batch_tokens=14) for _ in range(2))
    alone.update(batch, clipped, step=0)
    update = both.update(batch, clipped, step=0, beside=Supervision(example_batch(others), 0.5))
    assert isinstance(alone.optimizer, RecordingOptimizer) and isinstance(both.optimizer, RecordingOptimizer)
    for name, gradient in both.optimizer.grads.items():
        torch.testing.assert_close(gradient, alone.optimizer.grads[name] + 0.5 * supervised[name], rtol=1e-4, atol=1e-6)
    loss, _ = reference(llama(), others)
    assert update.metrics["actor/sft_loss"].result() == pytest.approx(loss, rel=1e-5)


def test_every_optimizer_step_has_its_share_of_the_examples() -> None:
    batch, others = answer_batch(make_examples()), make_examples(seed=1, sizes=((4, 3), (6, 5), (2, 2)))
    for num_epochs in (1, 2):  # of three optimizer steps, one example each
        split = policy(llama(), mini_batch_groups=2, num_epochs=num_epochs)
        update = split.update(batch, clipped, step=0, beside=Supervision(example_batch(others), 1.0))
        assert update.metrics["actor/sft_loss"].weight == num_epochs * (3 + 5 + 2)


def test_the_loss_of_a_share_is_a_mean_over_its_own_tokens() -> None:
    """Two optimizer steps at a rate of 0, without advantages: the last one has the gradient of the last example alone."""
    batch, others = answer_batch(make_examples()), make_examples(seed=1, sizes=((4, 3), (6, 5), (2, 2)))
    split = policy(llama(), mini_batch_groups=3)
    split.schedule = Schedule(0.0)
    split.update(batch, clipped, step=0, beside=Supervision(example_batch(others), 0.5))
    _, wanted = reference(llama(), others[2:])
    assert isinstance(split.optimizer, RecordingOptimizer)
    for name, gradient in split.optimizer.grads.items():
        torch.testing.assert_close(gradient, 0.5 * wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("num_steps", "wanted"),
    [(3, [[0], [1], [2]]), (2, [[0, 1], [2]]), (1, [[0, 1, 2]]), (6, [[0], [1], [2], [], [], []])],
)
def test_examples_are_shared_out_over_the_optimizer_steps_in_order(num_steps: int, wanted: list[list[int]]) -> None:
    others = example_batch(make_examples(seed=1, sizes=((4, 3), (6, 5), (2, 2))))
    shares = policy(llama())._shares(Supervision(others, 1.0), num_steps)
    assert [sorted(row for rows in share for row in rows) for share in shares] == wanted
    assert policy(llama())._shares(None, num_steps) == [[]] * num_steps


class Fixed:
    """A policy whose every token has one log-prob, also those that are not part of an answer."""

    def __init__(self, value: float) -> None:
        self.value = value

    def log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        return torch.full(batch.mask.shape, self.value), torch.zeros(batch.mask.shape)


@pytest.mark.parametrize(("value", "perplexity"), [(-2.0, 7.38905609893065), (-699.0, None), (-701.0, float("inf"))])
def test_the_perplexity_of_a_hopeless_model_is_infinite(value: float, perplexity: float | None) -> None:
    found = held_out_loss(Fixed(value), make_examples(), 2)  # pyright: ignore[reportArgumentType]
    assert found["val/loss"].result() == pytest.approx(-value)
    assert float(found["val/loss"].weight) == sum(answer for _, answer in SIZES)
    assert found["val/perplexity"].result() == (
        pytest.approx(perplexity) if perplexity else pytest.approx(math.exp(699))
    )


def test_a_batch_of_examples_has_every_answer_token_and_groups_of_one() -> None:
    batch = answer_batch(make_examples(sizes=((2, 3), (4, 1))))
    assert batch.mask.tolist() == [[1, 1, 1], [1, 0, 0]] and batch.group_ids.tolist() == [0, 1]
    assert [len(ids) for ids in batch.prompt_ids] == [2, 4] and [len(ids) for ids in batch.response_ids] == [3, 1]
    assert batch.scores.tolist() == [0.0, 0.0] and batch.unscored_rows == ()
    assert not any(t.any() for t in (batch.advantages, batch.returns, batch.old_log_probs, batch.rollout_log_probs))


def test_a_single_micro_batch_and_examples_beside_it_are_summed_in_float32() -> None:
    """In half precision a step of one backward keeps its gradient narrow; this one has two."""
    batch, others = answer_batch(make_examples()), example_batch(make_examples(seed=1, sizes=((4, 3),)))
    both = policy(llama().bfloat16())
    update = both.update(batch, clipped, step=0, beside=Supervision(others, 0.5))
    assert update.metrics["actor/skipped_updates"].result() == 0
    assert isinstance(both.optimizer, RecordingOptimizer) and set(both.optimizer.grads) == set(both.optimizer.masters)
