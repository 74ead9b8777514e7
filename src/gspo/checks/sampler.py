"""Dynamic sampling with scripted answers: groups of equal rewards are dropped, mixed ones kept, all are counted."""

from __future__ import annotations

from gspo.checks.check import Verdict
from gspo.data.cursor import PromptCursor
from gspo.rollout.engine import SamplingParams
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.sampling.dynamic import DynamicSampler
from gspo.sampling.settings import SamplingSettings, Strategy
from gspo.types import Group, Prompt, Reward

KINDS = ("all_right", "mixed", "all_wrong")
NEEDED, SIZE = 4, 3


class _KindScorer:
    """Scores a response by the kind of its prompt: the first response of a mixed group is right."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def submit(self, group: Group) -> None:
        kind = group.prompt.data_source
        right = [kind == "all_right" or (kind == "mixed" and i == 0) for i in range(len(group.rollouts))]
        rollouts = (r.with_reward(Reward(float(x), float(x))) for r, x in zip(group.rollouts, right))
        self._groups.append(group.with_rollouts(tuple(rollouts)))

    def collect(self, num: int | None = None) -> list[Group]:
        groups = self._groups[:num]
        self._groups = self._groups[len(groups) :]
        return groups

    def close(self) -> None:
        self._groups = []


def keep_rule(strategy: Strategy) -> Verdict:
    """A batch contains only mixed groups, in order of submission, and the others are counted by their reason."""
    prompts = [Prompt(f"p{i}", ({"role": "user", "content": "?"},), (1,), data_source=KINDS[i % 3]) for i in range(36)]
    params = SamplingParams(max_tokens=4)
    settings = SamplingSettings(
        train_batch_size=NEEDED, n=SIZE, params=params, gen_batch_size=6, strategy=strategy, max_staleness=0
    )
    source = PromptCursor(prompts, seed=0, shuffle=False, total_epochs=None)
    engine = ScriptedEngine(lambda prompt, submission, index: ScriptedAnswer((1, 2), "x"))
    groups, report = DynamicSampler(source, engine, _KindScorer(), settings, seed=0).next_batch()
    kinds = [g.prompt.data_source for g in groups]
    numbers = [g.submission for g in groups]
    dropped = {kind: report.fates[kind] for kind in ("all_right", "all_wrong")}
    good = kinds == ["mixed"] * NEEDED and numbers == sorted(numbers) and min(dropped.values()) > 0
    text = f"{dropped['all_right']} all right, {dropped['all_wrong']} all wrong"
    return good, f"batch of {', '.join(kinds)}; dropped: {text}"


CHECKS = {
    "dynamic sampling, stream": lambda: keep_rule("stream"),
    "dynamic sampling, rounds": lambda: keep_rule("rounds"),
}
