"""Evaluation on held-out prompts: greedy or sampled, by data source, with an interval."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo.metrics import Metric, Metrics
from gspo.rewards.graders.answers import extract_answer
from gspo.rewards.protocol import Scorer
from gspo.rollout.engine import GroupRequest, RolloutEngine, SamplingParams
from gspo.runs.group_log import turn_record
from gspo.runs.metric_names import MISSING_SHARE, aux_name, core_name, incomplete_sources
from gspo.runs.turn_metrics import turn_metrics
from gspo.types import Group, Prompt, Reward

TURN_FIGURES = ("/mean", "/share")  # those of turns and tool calls that an evaluation reports


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of one pass over the held-out prompts. `accuracy` is over all sources; None if no reward has `acc`."""

    groups: list[Group]
    metrics: Metrics
    accuracy: float | None
    interval: tuple[float, float] | None

    def problem(self) -> str | None:
        """What the user should know about rewards that failed; None: all are there."""
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        failed = [rollout for rollout in rollouts if rollout.reward is None]
        if not failed:
            return None
        incomplete = incomplete_sources({name: metric.result() for name, metric in self.metrics.items()})
        doubt = " (more than half of a data source: it is never a best one)" if incomplete else ""
        return (
            f"{len(failed)} of {len(rollouts)} rewards of the evaluation failed and its accuracy leaves them out{doubt}; "
            f"the first: {failed[0].failure}"
        )

    def records(self) -> list[dict[str, Any]]:
        """One JSON-able record per question, for the run folder."""
        return [
            {
                "uid": g.prompt.uid,
                "data_source": g.prompt.data_source,
                "ground_truth": g.prompt.ground_truth,
                "messages": [dict(m) for m in g.prompt.messages],
                "responses": [
                    {
                        "text": r.text,
                        "score": None if r.reward is None else r.reward.score,
                        "acc": None if r.reward is None else r.reward.acc,
                        "num_tokens": r.num_model_tokens,
                        "finish_reason": r.finish_reason,
                        **_parts(r.reward),
                        **({"turns": [turn_record(turn) for turn in r.turns]} if r.turns else {}),
                    }
                    for r in g.rollouts
                ],
            }
            for g in self.groups
        ]


def _parts(reward: Reward | None) -> dict[str, Any]:
    """The parts of a reward that has several, and the notes of a judge."""
    if reward is None:
        return {}
    parts = {name: value for name, value in reward.extra.items() if name.startswith("reward/")}
    return {**({"extra": parts} if parts else {}), **({"notes": dict(reward.notes)} if reward.notes else {})}


class Evaluator:
    """Runs the held-out prompts with fixed randomness, so that two evaluations differ only in the weights."""

    def __init__(
        self,
        engine: RolloutEngine,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        n: int,
        seed: int,
        batch_size: int | None = None,
    ) -> None:
        self.engine, self.scorer, self.prompts, self.params = engine, scorer, list(prompts), params
        self.n, self.seed = n, seed
        self.batch_size = batch_size or max(1, len(self.prompts))

    def run(self, version: int) -> Evaluation:
        groups: list[Group] = []
        for start in range(0, len(self.prompts), self.batch_size):
            requests = [
                GroupRequest(prompt, start + i, self.n, version, self.params, self.seed)
                for i, prompt in enumerate(self.prompts[start : start + self.batch_size])
            ]
            for group in self.engine.generate(requests):
                self.scorer.submit(group)
            groups += self.scorer.collect()
        return summarise(groups)


def summarise(groups: Sequence[Group]) -> Evaluation:
    """Metrics of scored groups: `val-core/{source}/{acc|reward}/mean@k`, `best@k`, `maj@k`, and intervals."""
    metrics: Metrics = {}
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.prompt.data_source].append(group)
    for source, members in sorted(by_source.items()):
        for kind, values in _values(members).items():
            metrics |= _source_metrics(source, kind, members, values)
        lengths = [r.num_model_tokens for g in members for r in g.rollouts]
        metrics[aux_name(source, "response_length/mean")] = Metric.mean(sum(lengths), len(lengths))
        failed = sum(r.reward is None for g in members for r in g.rollouts)
        metrics[aux_name(source, "reward_failures")] = Metric("sum", failed)
        if failed:
            metrics[aux_name(source, MISSING_SHARE)] = Metric.mean(failed, len(lengths))
        turns = turn_metrics([r for g in members for r in g.rollouts])
        metrics |= {aux_name(source, name): metric for name, metric in turns.items() if name.endswith(TURN_FIGURES)}
    means = [sum(v) / len(v) for v in _values(groups).get("acc", []) if v]
    accuracy = sum(means) / len(means) if means else None
    interval = None if accuracy is None else wilson(accuracy, len(means))
    return Evaluation(list(groups), metrics, accuracy, interval)


def _values(groups: Sequence[Group]) -> dict[str, list[list[float]]]:
    """Scores and, if every reward has one, accuracies: one list per group. Missing rewards are left out."""
    rewards = [[r.reward for r in g.rollouts if r.reward is not None] for g in groups]
    out = {"reward": [[r.score for r in row] for row in rewards]}
    if any(rewards) and all(r.acc is not None for row in rewards for r in row):
        out["acc"] = [[float(r.acc) for r in row if r.acc is not None] for row in rewards]
    return out


def _source_metrics(source: str, kind: str, groups: Sequence[Group], values: Sequence[Sequence[float]]) -> Metrics:
    scored = [(g, v) for g, v in zip(groups, values) if v]
    if not scored:
        return {}
    k = max(len(g.rollouts) for g in groups)  # also where rewards are missing: a metric keeps its name
    means = [sum(v) / len(v) for _, v in scored]

    def core(measure: str) -> str:
        return core_name(source, f"{kind}/{measure}")

    out = {core(f"mean@{k}"): Metric.mean(sum(means), len(means))}
    if kind == "acc":
        interval = wilson(sum(means) / len(means), len(means))
        if interval is not None:
            out[aux_name(source, "acc/ci_low")] = Metric("last", interval[0])
            out[aux_name(source, "acc/ci_high")] = Metric("last", interval[1])
    if k > 1:
        for size in sorted({2**p for p in range(1, k.bit_length())} | {k}):
            best = [best_of(v, min(size, len(v))) for _, v in scored]
            out[core(f"best@{size}")] = Metric.mean(sum(best), len(best))
        majority = [_majority(g, v) for g, v in scored]
        out[core(f"maj@{k}")] = Metric.mean(sum(majority), len(majority))
    return out


def best_of(values: Sequence[float], k: int) -> float:
    """The expected maximum of `k` of these values drawn without replacement, computed exactly."""
    ordered, n = sorted(values), len(values)
    return sum(v * math.comb(i, k - 1) for i, v in enumerate(ordered)) / math.comb(n, k)


def _majority(group: Group, values: Sequence[float]) -> float:
    """The value of the most frequent answer; the earliest wins a tie. A text without a final answer counts as one."""
    answers = [extract_answer(r.text) or r.text.strip() for r in group.rollouts if r.reward is not None]
    winner = Counter(answers).most_common(1)[0][0]
    return values[answers.index(winner)]


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float] | None:
    """The 95 % Wilson score interval of a share of `n` questions; None for a mean that is no share, such as -0.5."""
    if not 0 <= share <= 1:
        return None
    if n == 0:
        return 0.0, 1.0
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
