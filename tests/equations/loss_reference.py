"""Policy losses and their gradients in plain Python, written from the formulas without the library's code."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch

LOSSES = ("gspo", "gspo_token", "vanilla", "dapo", "cispo", "geo_mean", "sapo")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")
DEFAULTS = {
    "gspo": (3e-4, 4e-4, "seq-mean-token-mean"),
    "gspo_token": (3e-4, 4e-4, "seq-mean-token-mean"),
    "vanilla": (0.2, 0.2, "token-mean"),
    "dapo": (0.2, 0.28, "token-mean"),
    "cispo": (0.2, 0.28, "token-mean"),
    "geo_mean": (0.4, 0.4, "seq-mean-token-mean"),
    "sapo": (0.2, 0.2, "seq-mean-token-mean"),
}


@dataclass
class Case:
    """Ragged rows of numbers: one list a sequence."""

    new: list[list[float]]
    old: list[list[float]]
    adv: list[float]
    mu: list[list[float]] = field(default_factory=list)

    def tensors(self, width: int | None = None, fill: float = float("nan")) -> dict[str, torch.Tensor]:
        """Right-padded float64 tensors; padding holds `fill`, which must never be seen."""
        width = width or max(1, max(len(row) for row in self.new))

        def pad(rows: list[list[float]]) -> torch.Tensor:
            return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)

        mask = [[1] * len(row) + [0] * (width - len(row)) for row in self.new]
        return {
            "log_probs": pad(self.new),
            "old_log_probs": pad(self.old),
            "advantages": torch.tensor(self.adv, dtype=torch.float64),
            "response_mask": torch.tensor(mask),
            "rollout_log_probs": pad(self.mu or self.old),
        }


def random_case(seed: int, spread: float, num_rows: int = 7, max_length: int = 6, empty: bool = True) -> Case:
    """Rows of random length (one of them empty), log-ratios of about `spread`, advantages of both signs and 0."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, max_length) for _ in range(num_rows)]
    if empty:
        lengths[num_rows // 2] = 0
    old = [[-rng.uniform(0.05, 3.0) for _ in range(n)] for n in lengths]
    new = [[value + rng.gauss(0, spread) for value in row] for row in old]
    mu = [[value + rng.gauss(0, 0.5) for value in row] for row in old]
    adv = [rng.choice((-1, 1)) * rng.uniform(0.2, 2.0) for _ in lengths]
    adv[0] = 0.0
    return Case(new, old, adv, mu)


def spread_of(loss: str) -> float:
    """A spread of log-ratios that puts tokens or sequences on both sides of the loss's clip range."""
    return 1e-3 if loss in ("gspo", "gspo_token") else 0.5


def loss_and_gradient(
    loss: str,
    case: Case,
    *,
    low: float | None = None,
    high: float | None = None,
    c: float = 3.0,
    aggregation: str | None = None,
    norm_length: float = 1.0,
    weights: list[list[float]] | None = None,
) -> tuple[float, list[list[float]]]:
    """(loss, d loss / d log-prob) of one whole mini-batch, from the closed forms."""
    default_low, default_high, default_aggregation = DEFAULTS[loss]
    low = default_low if low is None else low
    high = default_high if high is None else high
    aggregation = aggregation or default_aggregation
    num_tokens = sum(len(row) for row in case.new)
    num_sequences = sum(1 for row in case.new if row)
    total, gradient = 0.0, [[0.0] * len(row) for row in case.new]
    for i, (new, old, adv) in enumerate(zip(case.new, case.old, case.adv)):
        length = len(new)
        for t in range(length):
            weight = {
                "token-mean": 1 / num_tokens,
                "token-sum": 1.0,
                "seq-mean-token-sum": 1 / num_sequences,
                "seq-mean-token-mean": 1 / (num_sequences * length),
                "seq-mean-token-sum-norm": 1 / (num_sequences * norm_length),
            }[aggregation]
            weight *= weights[i][t] if weights else 1.0
            value, partials = token_term(loss, new, old, adv, t, low, high, c)
            total += weight * value
            for k, partial in partials.items():
                gradient[i][k] += weight * partial
    return total, gradient


def token_term(
    loss: str, new: list[float], old: list[float], adv: float, t: int, low: float, high: float, c: float
) -> tuple[float, dict[int, float]]:
    """One token's loss and its derivative by every log-prob of the sequence it depends on."""
    n = len(new)
    log_ratios = [a - b for a, b in zip(new, old)]
    r, s = math.exp(log_ratios[t]), math.exp(sum(log_ratios) / n)
    everywhere = range(n)
    if loss in ("gspo", "gspo_token"):
        clipped = min(max(s, 1 - low), 1 + high)
        value = max(-adv * s, -adv * clipped)
        acts = (adv > 0 and s > 1 + high) or (adv < 0 and s < 1 - low)
        slope = 0.0 if acts else -adv * s
        return value, ({t: slope} if loss == "gspo_token" else dict.fromkeys(everywhere, slope / n))
    if loss in ("vanilla", "dapo"):
        value = max(-adv * r, -adv * min(max(r, 1 - low), 1 + high))
        acts = (adv > 0 and r > 1 + high) or (adv < 0 and r < 1 - low)
        if adv < 0 and value > -adv * c:
            return -adv * c, {}
        return value, ({} if acts else {t: -adv * r})
    if loss == "cispo":
        weight = min(max(r, 1 - low), 1 + high)
        return -weight * adv * new[t], {t: -weight * adv}
    if loss == "geo_mean":
        inside = [not ((adv > 0 and l > high) or (adv < 0 and l < -low)) for l in log_ratios]
        kept = [l if ok else (high if adv > 0 else -low) for l, ok in zip(log_ratios, inside)]
        g = math.exp(sum(kept) / n)
        return -adv * g, {k: -adv * g / n for k in everywhere if inside[k]}
    assert loss == "sapo"
    tau = 1.0 if adv > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -adv * gate * 4 / tau, {t: -adv * 4 * gate * (1 - gate) * r}
