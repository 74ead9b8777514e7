"""A quick sample before a run: a few groups are generated, rewarded and scored with the real model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from gspo.build.data.given import Inputs
from gspo.build.data.training_data import load_prompts
from gspo.build.parts import RunParts
from gspo.build.run import build
from gspo.build.settings import sampling_settings
from gspo.checks.doctor.noise import Noise, measure_noise
from gspo.config import BatchPlan, ResolvedLoss, TrainerConfig, resolved_loss
from gspo.rollout.engine import GroupRequest
from gspo.sampling.filters import judge
from gspo.seeding import derive_seed
from gspo.training.batch.batching import collate
from gspo.types import Group, Prompt

NUM_GROUPS = 8
MAX_ROWS = 32  # responses that are scored twice
SPREAD = 0.0306  # σ(log s) · √|y| at which ε = 3e-4/4e-4 clips 15 % of responses with thousands of tokens
UPDATE_COST = 3.0  # of forward and backward, relative to a forward


@dataclass(frozen=True, slots=True)
class Probe:
    """The findings of a quick sample of `num_groups` groups. `cut` is the share of responses at the length limit."""

    num_groups: int
    keep_rate: float
    all_right: float
    mean_length: float
    cut: float
    reward: float | None
    generated_tokens_per_s: float
    scored_tokens_per_s: float
    step_seconds: float
    clip_fraction: float | None
    noises: list[Noise]


def probe(config: TrainerConfig, *, num_groups: int = NUM_GROUPS, **inputs: Any) -> Probe:
    """Generate and score responses to a few training prompts. `inputs` are those of `build` (a reward function, rows)."""
    parts = build(config, Inputs(**inputs))
    try:
        prompts = load_prompts(config, parts.tokenizer, "train", inputs.get("train_dataset"))
        spaced = prompts[:: max(1, len(prompts) // num_groups)][:num_groups]
        return _measure(config, parts, spaced)
    finally:
        parts.close()


def _measure(config: TrainerConfig, parts: RunParts, prompts: list[Prompt]) -> Probe:
    groups, gen_seconds = _generate(config, parts, prompts)
    generated = sum(g.num_tokens for g in groups)
    verdicts = [judge(g, config.algorithm.filter_groups.metric) for g in groups]
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [r.reward.score for r in rollouts if r.reward is not None]
    batch = collate(_first_rows(groups, MAX_ROWS))
    start = time.perf_counter()
    parts.policy.log_probs(batch)
    score_seconds = time.perf_counter() - start
    scored = sum(len(p) + len(r) for p, r in zip(batch.prompt_ids, batch.response_ids))
    objective = resolved_loss(config.actor_rollout_ref.actor)
    keep = sum(v.keep for v in verdicts) / len(verdicts)
    length = generated / len(rollouts)
    speeds = generated / gen_seconds, scored / score_seconds
    prompt = sum(len(g.prompt.token_ids) for g in groups) / len(groups)
    return Probe(
        num_groups=len(groups),
        keep_rate=keep,
        all_right=sum(v.reason == "all_right" for v in verdicts) / len(verdicts),
        mean_length=length,
        cut=sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        reward=sum(rewards) / len(rewards) if rewards else None,
        generated_tokens_per_s=speeds[0],
        scored_tokens_per_s=speeds[1],
        step_seconds=_step_seconds(config, keep, length, prompt, speeds),
        clip_fraction=expected_clip_fraction(objective, length),
        noises=measure_noise(parts.policy, batch, objective),
    )


def _generate(config: TrainerConfig, parts: RunParts, prompts: list[Prompt]) -> tuple[list[Group], float]:
    """(groups with rewards, seconds of their generation)."""
    settings = sampling_settings(config)
    seed = derive_seed(config.trainer.seed, "doctor")
    requests = [GroupRequest(p, i, settings.n, 0, settings.params, seed) for i, p in enumerate(prompts)]
    start = time.perf_counter()
    groups = parts.engine.generate(requests)
    seconds = time.perf_counter() - start
    scorer = parts.scorers[0]
    for group in groups:
        scorer.submit(group)
    return scorer.collect(), seconds


def _first_rows(groups: list[Group], limit: int) -> list[Group]:
    """The responses with a reward, at most `limit` in all, as groups."""
    out: list[Group] = []
    left = limit
    for group in groups:
        rollouts = tuple(r for r in group.rollouts if r.reward is not None)[:left]
        if rollouts:
            out.append(group.with_rollouts(rollouts))
            left -= len(rollouts)
        if left <= 0:
            break
    if not out:
        raise ValueError(
            "no reward could be computed for the sampled responses; test the reward function with `gspo rewards try`"
        )
    return out


def _step_seconds(
    config: TrainerConfig, keep: float, length: float, prompt: float, speeds: tuple[float, float]
) -> float:
    """Estimated seconds per step: generation of all groups that a batch needs, scoring and updates."""
    plan = BatchPlan.of(config)
    filtered = config.algorithm.filter_groups.enable
    needed = plan.prompts / max(keep, 1 / (10 * plan.prompts)) if filtered else plan.prompts
    generation = needed * plan.group_size * length / speeds[0]
    tokens = plan.rollouts * (prompt + length)
    return generation + tokens * (1 + UPDATE_COST * plan.num_epochs) / speeds[1]


def expected_clip_fraction(objective: ResolvedLoss, length: float) -> float | None:
    """Share of sequences clipped after the first mini-batch, if the policy moves as far as in the paper's runs.

    log s is a mean over |y| tokens, so its spread decreases as 1/√|y|. Half of the sequences can clip on each side.
    """
    if not objective.clips or not objective.is_sequence_level:
        return None
    low, high = (epsilon * math.sqrt(max(length, 1.0)) / SPREAD for epsilon in objective.clip)
    # P(Z > z) of a standard normal is erfc(z / √2) / 2.
    return 0.25 * sum(math.erfc(z / math.sqrt(2)) for z in (low, high))
