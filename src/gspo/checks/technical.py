"""Technical correctness of the installed build: numbers, gradients and identities of the loss and the advantages.

Every expectation is computed here from the formulas alone (GSPO, arXiv 2507.18071), never with the code under test.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from gspo.algo.aggregation import count_totals
from gspo.algo.functional import compute_advantage, compute_policy_loss
from gspo.checks.check import Verdict

OLD = ((-1.0, -0.5, -2.0), (-0.3, -0.7), (-1.2, -0.4, -0.9, -0.1))
NEW = ((-0.999, -0.5005, -1.9985), (-0.3012, -0.7004), (-1.2001, -0.4, -0.9002, -0.1))
ADVANTAGES = (1.0, -1.0, -0.5)
GOLDEN = {"seq-mean-token-mean": 0.16642083, "token-mean": 0.11089445, "seq-mean-token-sum": 0.33268334}
GOLDEN_TOKEN_GRADIENT = 0.0416635  # of every token of the third answer; the others are clipped
TIGHT = 1e-8


def _pad(rows: tuple[tuple[float, ...], ...]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *([0.0] * (width - len(row)))] for row in rows], dtype=torch.float64)


def _random_batch(spread: float = 0.05, seed: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(new, old, advantages [B], mask) of answers of different lengths."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 7, 1, 12, 5, 9])
    mask = (torch.arange(12)[None] < lengths[:, None]).double()
    old = -2 * torch.rand(6, 12, generator=random, dtype=torch.float64)
    new = old + spread * torch.randn(6, 12, generator=random, dtype=torch.float64)
    advantages = torch.randn(6, generator=random, dtype=torch.float64)
    return new * mask, old * mask, advantages, mask


def _loss_with_gradient(mode: str, new: Tensor, *rest: Tensor, **options: Any) -> tuple[float, Tensor, Any]:
    """(loss, gradient with respect to the new log-probs, metrics)."""
    leaf = new.clone().requires_grad_(True)
    loss, metrics = compute_policy_loss(mode, leaf, *rest, **options)
    loss.backward()
    assert leaf.grad is not None, "the loss has no gradient"
    return float(loss), leaf.grad, metrics


def _gradient(mode: str, new: Tensor, *rest: Tensor, **options: Any) -> tuple[float, Tensor]:
    return _loss_with_gradient(mode, new, *rest, **options)[:2]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def golden_numbers() -> Verdict:
    """Loss and gradient of three answers worked out by hand, under three aggregations."""
    new, old, advantages = _pad(NEW), _pad(OLD), torch.tensor(ADVANTAGES).double()
    batch, clip = (new, old, advantages, (old != 0).double()), {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a note that the aggregation weighs by length
        found = {name: _gradient("gspo", *batch, loss_agg_mode=name, **clip) for name in GOLDEN}
    worst = max(abs(found[name][0] - expected) for name, expected in GOLDEN.items())
    grad = found["seq-mean-token-mean"][1]
    clipped, third = float(grad[:2].abs().max()), float((grad[2] - GOLDEN_TOKEN_GRADIENT).abs().max())
    if clipped != 0.0 or third > 1e-6:
        expected = f"expected {GOLDEN_TOKEN_GRADIENT} and 0"
        return False, f"gradient {grad[2, 0]:.7f} per token, of clipped ones {clipped:g}; {expected}"
    return worst < 1e-8, f"largest difference of the loss {worst:.1e}"


def gradient_formula() -> Verdict:
    """Unclipped, ∇ = -(1/N) Σ_i s_i A_i (1/|y_i|) Σ_t ∇logp_it."""
    new, old, advantages, mask = _random_batch()
    lengths = mask.sum(-1)
    ratio = ((new - old).sum(-1) / lengths).exp()
    expected = -(ratio * advantages / lengths)[:, None] * mask / len(lengths)
    _, grad = _gradient("gspo", new, old, advantages, mask, clip_ratio_low=0.9, clip_ratio_high=9.0)
    error = _distance(grad, expected)
    return error < TIGHT, f"relative error {error:.1e}"


def clip_acts() -> Verdict:
    """A sequence outside the band on the side that its advantage favours has gradient 0 and is counted; others not."""
    new, old, advantages, mask = _random_batch()
    ratio = ((new - old).sum(-1) / mask.sum(-1)).exp()
    low, high = 0.004, 0.006
    beyond = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    clip = {"clip_ratio_low": low, "clip_ratio_high": high}
    _, grad, metrics = _loss_with_gradient("gspo", new, old, advantages, mask, **clip)
    zero = grad.abs().sum(-1) == 0
    share = float(beyond.double().mean())
    good = bool((zero == beyond).all()) and abs(metrics["actor/pg_clipfrac"] - share) < TIGHT
    text = f"{int(beyond.sum())} of {len(beyond)} sequences clipped, {int(zero.sum())} with gradient 0"
    return good and 0 < share < 1, text


def token_identity() -> Verdict:
    """GSPO and GSPO-token have one value and one gradient for sequence-constant advantages."""
    new, old, advantages, mask = _random_batch()
    clip = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}
    loss, grad = _gradient("gspo", new, old, advantages, mask, **clip)
    other, other_grad = _gradient("gspo_token", new, old, advantages, mask, **clip)
    error = max(abs(loss - other), _distance(grad, other_grad))
    return error < TIGHT, f"largest difference {error:.1e}"


def grpo_identity() -> Verdict:
    """At θ = θ_old, ∇GSPO = ∇GRPO with seq-mean-token-mean; away from it they differ."""
    new, old, advantages, mask = _random_batch()
    options = {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.9, "clip_ratio_high": 9.0}
    same, apart = (
        _distance(*(_gradient(mode, at, old, advantages, mask, **options)[1] for mode in ("gspo", "vanilla")))
        for at in (old, new)
    )
    return same < TIGHT < apart, f"difference {same:.1e} at the old policy, {apart:.1e} away from it"


def length_normalisation() -> Verdict:
    """An answer repeated token by token, twice as long, has the same ratio and the same loss."""
    new, old, advantages, mask = _random_batch()
    options = {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0}
    loss, _ = _gradient("gspo", new, old, advantages, mask, **options)
    doubled = [t.repeat_interleave(2, dim=-1) for t in (new, old, mask)]
    other, _ = _gradient("gspo", doubled[0], doubled[1], advantages, doubled[2], **options)
    return abs(loss - other) < TIGHT, f"loss {loss:.8f} and {other:.8f}"


def sign() -> Verdict:
    """A step against the gradient makes answers with A > 0 likelier and those with A < 0 less likely."""
    _, old, advantages, mask = _random_batch()
    _, grad = _gradient("gspo", old, old, advantages, mask)
    good = bool(((-grad * advantages[:, None])[mask.bool()] > 0).all())
    return good, "every token moves as its advantage says" if good else "some tokens move against their advantage"


def split_invariance() -> Verdict:
    """The gradient of a mini-batch is the sum over its micro-batches, whatever the split and the padding."""
    new, old, advantages, mask = _random_batch()
    _, whole = _gradient("gspo", new, old, advantages, mask)
    totals, parts = count_totals(mask), []
    for rows in ([0], [1, 2], [3, 4, 5]):
        width = int(mask[rows].sum(-1).max())
        short_new, short_old, short_mask = (t[rows, :width] for t in (new, old, mask))
        _, grad = _gradient("gspo", short_new, short_old, advantages[rows], short_mask, totals=totals)
        parts.append(torch.nn.functional.pad(grad, (0, mask.shape[1] - width)))
    error = _distance(torch.cat(parts), whole)
    return error < TIGHT, f"relative error {error:.1e}"


def decoupled_identity() -> Verdict:
    """With μ = π_old the decoupled loss is the standard one; weights beyond the cap remove their tokens."""
    new, old, advantages, mask = _random_batch()
    loss, grad = _gradient("gspo", new, old, advantages, mask)
    same, same_grad = _gradient("gspo", new, old, advantages, mask, rollout_log_probs=old, behav_imp_weight_cap=5.0)
    _, none = _gradient("gspo", new, old, advantages, mask, rollout_log_probs=old - 2 * mask, behav_imp_weight_cap=5.0)
    error = max(abs(loss - same), _distance(same_grad, grad))
    text = f"difference {error:.1e} at weight 1; largest gradient beyond the cap {none.abs().max():g}"
    return error < TIGHT and not none.any(), text


def group_advantages() -> Verdict:
    """GRPO's advantages are (R - mean) / (std + 1e-6) within each group, with the unbiased std."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 0.25, 1.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    mask = torch.ones(8, 1, dtype=torch.float64)
    got = compute_advantage("grpo", rewards[:, None], mask, groups)[0].squeeze(-1)
    expected: list[float] = []
    for start in (0, 4):
        values = rewards[start : start + 4].tolist()
        mean = sum(values) / 4
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
        expected += [(v - mean) / (std + 1e-6) for v in values]
    error = _distance(got, torch.tensor(expected, dtype=torch.float64))
    return error < TIGHT, f"relative error {error:.1e}"


CHECKS = {
    "golden numbers": golden_numbers,
    "gradient formula": gradient_formula,
    "clipping": clip_acts,
    "length normalisation": length_normalisation,
    "sign of the update": sign,
    "GSPO = GSPO-token": token_identity,
    "GSPO = GRPO at the old policy": grpo_identity,
    "micro-batch split": split_invariance,
    "decoupled loss": decoupled_identity,
    "group advantages": group_advantages,
}
