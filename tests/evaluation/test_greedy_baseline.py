"""ReMax's baseline: one greedy answer per group, its reward on every row of the group."""

from __future__ import annotations

import pytest

from gspo.evaluation.greedy_baseline import GreedyBaseline
from gspo.rollout.engine import SamplingParams
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.types import Group, Prompt, Reward, Rollout


class Scores:
    """Scores a greedy answer by the number in its prompt's uid; uid 1 fails."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def submit(self, group: Group) -> None:
        self.groups.append(group)

    def collect(self, num: int | None = None) -> list[Group]:
        groups, self.groups = self.groups, []
        return [g.with_rollouts(tuple(r.with_reward(self._reward(g)) for r in g.rollouts)) for g in groups]

    def _reward(self, group: Group) -> Reward | None:
        return None if group.prompt.uid == "1" else Reward(10.0 * float(group.prompt.uid))

    def close(self) -> None: ...


class Recording(ScriptedEngine):
    def generate(self, requests):
        self.requests = list(requests)
        return super().generate(requests)


def trained(uid: str, scores: list[float]) -> Group:
    rollouts = tuple(Rollout((1,), (0.0,), (1,), (0,), "stop", reward=Reward(s, kl_penalty=5.0)) for s in scores)
    return Group(Prompt(uid, (), (1,)), rollouts, submission=int(uid) + 20, version=0)


def test_every_row_of_a_group_has_the_reward_of_its_greedy_answer():
    engine = Recording(lambda prompt, submission, index: ScriptedAnswer((1,)))
    params = SamplingParams(max_tokens=4, temperature=0.7, top_k=3)
    groups = [trained("2", [0.0, 1.0, 1.0]), trained("1", [0.0, 1.0]), trained("3", [0.5])]
    baselines, metrics = GreedyBaseline(engine, Scores(), params).score(groups, version=6)
    # The greedy answer of uid 1 has no reward: the mean of its group takes its place.
    assert baselines.tolist() == [20.0, 20.0, 20.0, 0.5, 0.5, 30.0]
    assert metrics["critic/greedy_score/mean"].result() == pytest.approx(25.0)
    assert metrics["critic/greedy_failures"].result() == 1
    for request, group in zip(engine.requests, groups, strict=True):
        assert (request.prompt, request.n, request.version) == (group.prompt, 1, 6)
        assert (request.submission, request.seed) == (group.submission, 0)
        assert request.params == SamplingParams(max_tokens=4, temperature=0.0, top_k=3)


def test_the_mean_that_replaces_a_failed_answer_leaves_out_failed_rewards():
    engine = Recording(lambda prompt, submission, index: ScriptedAnswer((1,)))
    whole = trained("1", [4.0, 1.0, 0.0])
    some = whole.with_rollouts((*whole.rollouts[:2], whole.rollouts[2].with_reward(None, "it broke")))
    baselines, metrics = GreedyBaseline(engine, Scores(), SamplingParams(max_tokens=4)).score([some], version=0)
    assert baselines.tolist() == [2.5, 2.5, 2.5]
    assert metrics["critic/greedy_score/mean"].result() == 0.0 and metrics["critic/greedy_failures"].result() == 1
