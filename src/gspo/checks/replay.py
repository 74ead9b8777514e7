"""Shadow losses: other losses computed on the groups that a run was trained on.

The group files contain, for every trained response, its advantage and the log-probs of its tokens under μ, π_old and
π_θ at its own mini-batch. A loss is a function of these, so its clip fraction and its gradient **with respect to the
log-probs** are exact without a model (log-probs are recorded to 1e-5). With a checkpoint, the gradient is continued to
the parameters by the chain rule through that model.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gspo import untrusted
from gspo.algo.aggregation import count_totals
from gspo.algo.objective import BoundLoss
from gspo.algo.settings import LossSettings
from gspo.build.role_settings import order_seed
from gspo.build.settings import build_objective
from gspo.config import TrainerConfig, load
from gspo.data.chat_template import encode_prompt
from gspo.data.rows import Row
from gspo.models.load import load_model, load_tokenizer
from gspo.runs.folder import RunFolder
from gspo.runs.group_log import read_groups
from gspo.runs.metric_table import MetricTable
from gspo.runs.reading import step_files
from gspo.training.batch.batching import group_order, micro_batch, mini_batches
from gspo.training.policy import PolicySettings, TokenScorer
from gspo.types import LossInputs, ScoredBatch, TrainBatch

MAX_ROWS = 16  # responses per forward when the gradient is taken with respect to the parameters
Encode = Callable[[Sequence[Mapping[str, Any]]], tuple[int, ...]]


class ReplayError(ValueError):
    """A run or a step that cannot be replayed; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """One loss on one step: clip fraction, gradient norm, and the cosine to the gradient of the trained loss."""

    step: int
    loss: str
    value: float
    clip_fraction: float
    grad_norm: float
    cosine: float | None  # None where one of the two gradients is 0


@dataclass(frozen=True, slots=True)
class _Step:
    batch: ScoredBatch
    advantages: Tensor
    log_probs: Tensor
    mini_batches: list[list[int]]


class Replay:
    """Reads a run's recorded groups and computes other losses on them."""

    def __init__(self, folder: Path, checkpoint: Path | None = None) -> None:
        self.run = RunFolder(folder)
        try:
            saved = untrusted.read_yaml(self.run.config_file)
        except (FileNotFoundError, NotADirectoryError):
            raise ReplayError(f"{folder}: not a run folder; expected config.yaml in it") from None
        except untrusted.Unreadable as error:
            raise ReplayError(str(error)) from None
        if not isinstance(saved, dict) or "${" in str(saved):  # a recorded config has values only
            raise ReplayError(f"{self.run.config_file}: is not a recorded config; expected a mapping of keys to values")
        self.config = load(base=saved).config
        self.trained = self.config.actor_rollout_ref.actor.policy_loss.loss_mode
        self._metrics = MetricTable().read(self.run.metrics_file)
        self._scorer = None if checkpoint is None else _Jacobian(checkpoint, self.config)
        self._encode = None if checkpoint is None else _encoder(checkpoint, self.config)

    @property
    def space(self) -> str:
        """The variables of the gradients whose norms and cosines are computed."""
        return "log-probs" if self._scorer is None else "parameters"

    def steps(self) -> list[int]:
        """The steps with recorded groups."""
        return list(step_files(self.run.groups))

    def shadows(self, step: int, losses: Sequence[str]) -> list[Shadow]:
        """Every loss on the mini-batches of one step, the trained loss first."""
        recorded = _read_step(self.run, step, self.config, self._encode)
        names = list(dict.fromkeys([self.trained, *losses]))
        gradients = {name: self._gradient(recorded, name, step) for name in names}
        own = gradients[self.trained][2]
        return [
            Shadow(step, name, value, clipped, float(grad.norm()), _cosine(grad, own))
            for name, (value, clipped, grad) in gradients.items()
        ]

    def _gradient(self, recorded: _Step, name: str, step: int) -> tuple[float, float, Tensor]:
        """Mean loss and clip fraction over the mini-batches, and their gradients one after another."""
        loss = BoundLoss(name, self._settings(name, step))
        batch = recorded.batch
        by_token = torch.zeros_like(recorded.log_probs)
        values, clipped = [], []
        for rows in recorded.mini_batches:
            leaf = recorded.log_probs[rows].clone().requires_grad_(True)
            out = loss(
                LossInputs(
                    log_probs=leaf,
                    old_log_probs=batch.old_log_probs[rows],
                    advantages=recorded.advantages[rows],
                    mask=batch.mask[rows],
                    totals=count_totals(batch.mask[rows]),
                    rollout_log_probs=batch.rollout_log_probs[rows],
                )
            )
            out.loss.backward()
            assert leaf.grad is not None
            by_token[rows] = leaf.grad
            values.append(float(out.loss.detach()))
            clipped.append(out.metrics["actor/pg_clipfrac"].result())
        gradient = by_token.flatten()
        if self._scorer is not None:
            gradient = torch.cat([self._scorer.pull_back(batch, by_token, rows) for rows in recorded.mini_batches])
        return fmean(values), fmean(clipped), gradient

    def _settings(self, name: str, step: int) -> LossSettings:
        """The run's settings with the step's clip range for the trained loss; default settings for other losses."""
        own = build_objective(self.config).settings
        if name != self.trained:
            return LossSettings(norm_length=own.norm_length, behaviour=own.behaviour)
        place = bisect_left(self._metrics.steps, step)
        row = self._metrics.row(place) if step in self._metrics.steps[place : place + 1] else {}
        low, high = (row.get(f"actor/clip_ratio_{side}") for side in ("low", "high"))
        return dataclasses.replace(own, clip_low=low or own.clip_low, clip_high=high or own.clip_high)


def mean_over_steps(shadows: Sequence[Shadow]) -> dict[str, dict[str, float | None]]:
    """The means over steps, by loss."""
    out: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(s.loss for s in shadows):
        mine = [s for s in shadows if s.loss == name]
        cosines = [s.cosine for s in mine if s.cosine is not None]
        out[name] = {
            "clip_fraction": fmean(s.clip_fraction for s in mine),
            "grad_norm": fmean(s.grad_norm for s in mine),
            "cosine": fmean(cosines) if cosines else None,
        }
    return out


class _Jacobian:
    """Turns a gradient with respect to log-probs into one with respect to the parameters of a checkpoint's model."""

    def __init__(self, folder: Path, config: TrainerConfig) -> None:
        model = load_model(str(folder), dtype="float32")
        temperature = config.actor_rollout_ref.rollout.temperature
        self._scorer = TokenScorer(model, PolicySettings(temperature=temperature, micro_batch_tokens=None))
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def pull_back(self, batch: TrainBatch, by_token: Tensor, rows: Sequence[int]) -> Tensor:
        """Σ_it (∂L/∂logp_it) ∂logp_it/∂θ over a mini-batch, flat."""
        total = torch.zeros(sum(p.numel() for p in self._parameters), dtype=torch.float64)
        for start in range(0, len(rows), MAX_ROWS):
            part = list(rows[start : start + MAX_ROWS])
            log_probs, _ = self._scorer.forward(micro_batch(batch, part, "cpu"))
            weighted = (log_probs.double() * by_token[part]).sum()
            grads = torch.autograd.grad(weighted, self._parameters)
            total += torch.cat([g.flatten().double() for g in grads])
        return total


def _encoder(folder: Path, config: TrainerConfig) -> Encode:
    """A function from messages to prompt tokens, which encodes as the run did."""
    tokenizer = load_tokenizer(str(folder))
    options = config.data.apply_chat_template_kwargs

    def encode(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return encode_prompt(Row("recorded", tuple(messages)), tokenizer, **options).token_ids

    return encode


def _read_step(run: RunFolder, step: int, config: TrainerConfig, encode: Encode | None) -> _Step:
    """The trained groups of a step as the batch of that step, in its order and mini-batches."""
    path = run.groups / f"step-{step:06d}.jsonl.gz"
    try:
        groups = [g for n, g in enumerate(read_groups(path), 1) if _is_trained(g, f"{path}:{n}")]
    except FileNotFoundError:
        raise ReplayError(f"{path}: no such file; groups are recorded with trainer.save_groups=true") from None
    except untrusted.Unreadable as error:
        raise ReplayError(str(error)) from None
    if not groups:
        raise ReplayError(f"{path}: contains no trained group with log-probs")
    groups.sort(key=lambda g: g["submission"])
    rows = list(_rows(groups, encode))
    width = max(len(r["new_log_probs"]) for _, _, r in rows)

    def padded(values: Iterator[Sequence[float]]) -> Tensor:
        return torch.tensor([[*v, *([0.0] * (width - len(v)))] for v in values], dtype=torch.float64)

    mask = padded(r.get("loss_mask") or [1.0] * len(r["new_log_probs"]) for _, _, r in rows)
    batch = TrainBatch(
        prompt_ids=[p for _, p, _ in rows],
        response_ids=[tuple(r.get("token_ids", ())) for _, _, r in rows],
        mask=mask,
        group_ids=torch.tensor([g for g, _, _ in rows]),
        scores=torch.tensor([r["score"] or 0.0 for _, _, r in rows]),
        rollout_log_probs=padded(r["log_probs"] for _, _, r in rows),
        order_seed=order_seed(config, step - 1),  # steps are numbered from 0 while they train
    ).with_old(padded(r["old_log_probs"] for _, _, r in rows))
    advantages = torch.tensor([r["advantage"] for _, _, r in rows], dtype=torch.float64)[:, None] * mask
    actor = config.actor_rollout_ref.actor
    order = group_order(batch, actor.ppo_epochs - 1)  # the log-probs of the last epoch are recorded
    cut = mini_batches(batch.group_ids, actor.ppo_mini_batch_size, order)
    return _Step(batch, advantages, padded(r["new_log_probs"] for _, _, r in rows), cut)


def _is_trained(group: Mapping[str, Any], place: str) -> bool:
    """Whether a group has the log-probs of a training step. A group that has them in part is refused by its line."""
    responses = _with_reward(group)
    if not responses or not isinstance(responses[0], dict) or "new_log_probs" not in responses[0]:
        return False
    if not isinstance(group.get("submission"), int):
        raise ReplayError(f"{place}: the group has no whole number `submission`")
    for number, response in enumerate(responses):
        problem = _response_problem(response)
        if problem:
            raise ReplayError(f"{place}: response {number} {problem}")
    return True


def _with_reward(group: Mapping[str, Any]) -> list[Any]:
    """The responses of a group without those whose reward is missing, which are not trained on."""
    return [r for r in group["responses"] if not isinstance(r, dict) or r.get("failure") is None]


def _response_problem(response: Any) -> str | None:
    """What a response of a trained group lacks; None when it is complete."""
    if not isinstance(response, dict):
        return "is not an object"
    lists = {name: response.get(name) for name in ("new_log_probs", "old_log_probs", "log_probs")}
    lists |= {name: response[name] for name in ("loss_mask", "token_ids") if response.get(name)}
    for name, values in lists.items():
        if not isinstance(values, list) or not set(map(type, values)) <= {int, float, bool}:
            return f"has no list of numbers `{name}`"
        if len(values) != len(lists["new_log_probs"] or ()):
            return f"has {len(values)} numbers in `{name}`, {len(lists['new_log_probs'] or ())} in `new_log_probs`"
    for name, kinds in (("advantage", int | float), ("score", int | float | None)):
        if not isinstance(response.get(name), kinds):
            return f"has no number `{name}`"
    return None


def _rows(
    groups: Sequence[Mapping[str, Any]], encode: Encode | None
) -> Iterator[tuple[int, tuple[int, ...], Mapping[str, Any]]]:
    """(group number, prompt tokens if there is `encode`, response) of every trained response."""
    for number, group in enumerate(groups):
        recorded = group.get("prompt_ids")  # with an environment, whose tools and opening are part of the prompt
        prompt = tuple(recorded) if recorded else () if encode is None else encode(group["messages"])
        for response in _with_reward(group):
            if encode is not None and "token_ids" not in response:
                raise ReplayError(f"prompt {group['uid']!r}: token ids were not recorded; leave --checkpoint out")
            yield number, prompt, response


def _cosine(a: Tensor, b: Tensor) -> float | None:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms > 0 and math.isfinite(norms) else None
