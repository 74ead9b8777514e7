"""Scorers: groups in, groups with rewards out, in the trainer's process or in the worker pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo.rewards.compose import Grader, Manager, Overlong, RewardLike, as_specs, manage
from gspo.rewards.functions import RewardFunction, RewardSpec
from gspo.rewards.protocol import Graded, RewardError, Scorer
from gspo.rewards.signatures import Response
from gspo.types import Group, Prompt, Reward, Rollout


@dataclass(slots=True)
class Finisher:
    """Attaches results to a group's rollouts through the reward manager, and counts what failed."""

    manager: Manager = "naive"
    overlong: Overlong | None = None
    num_scored: int = 0
    num_failed: int = 0
    first_failure: str | None = None

    def attach(self, group: Group, graded: Sequence[Graded]) -> Group:
        """The group with a reward, or a failure and no reward, on each rollout."""
        assert len(graded) == len(group.rollouts)
        return group.with_rollouts(tuple(map(self._finish, group.rollouts, graded)))

    def _finish(self, rollout: Rollout, graded: Graded) -> Rollout:
        if isinstance(graded, Reward):
            self.num_scored += 1
            return rollout.with_reward(manage(graded, len(rollout.token_ids), self.manager, self.overlong))
        self.num_failed += 1
        self.first_failure = self.first_failure or graded
        return rollout.with_reward(None, graded)


class InProcessScorer:
    """Scores at submission, in the caller's process: for cheap, trusted rewards that read a few characters."""

    def __init__(
        self, grader: Grader, *, manager: Manager = "naive", overlong: Overlong | None = None
    ) -> None:
        self.finisher = Finisher(manager, overlong)
        self._grader = grader
        self._groups: list[Group] = []

    def submit(self, group: Group) -> None:
        graded = self._grader.grade(group.prompt, responses_of(group))
        self._groups.append(self.finisher.attach(group, graded))

    def collect(self) -> list[Group]:
        groups, self._groups = self._groups, []
        return groups

    def close(self) -> None:
        self._groups = []


def responses_of(group: Group) -> list[Response]:
    """The group's responses as reward functions see them."""
    return [
        Response(rollout.text, rollout.token_ids, index, rollout.finish_reason)
        for index, rollout in enumerate(group.rollouts)
    ]


def make_scorer(
    reward: RewardLike | Sequence[RewardLike] | None = None,
    *,
    manager: Manager = "naive",
    num_workers: int = 0,
    timeout: float = 10.0,
    memory: int = 1024,
    retries: int = 1,
    overlong: Overlong | None = None,
    format_weight: float = 0.0,
    repetition_penalty: float = 0.0,
) -> Scorer:
    """The scorer for a reward: None (each row's built-in), a name, "file.py:function", a function, or several of these."""
    specs = [*as_specs(reward), *_shaping(format_weight, repetition_penalty)]
    if manager not in ("naive", "dapo"):
        raise RewardError(f"reward_model.reward_manager={manager!r}, expected naive or dapo")
    if overlong is not None and manager != "dapo":
        raise RewardError(
            "the overlong penalty needs reward_model.reward_manager=dapo; naive does not apply it"
        )
    return InProcessScorer(Grader(specs), manager=manager, overlong=overlong)


def _shaping(format_weight: float, repetition_weight: float) -> list[RewardSpec | RewardFunction]:
    shaping = [("format", format_weight), ("repetition", repetition_weight)]
    return [RewardSpec(name, weight=weight) for name, weight in shaping if weight]


def dry_run(scorer: Scorer, prompt: Prompt, response: str | None = None) -> Reward:
    """Score one response (by default the row's ground truth) and return its reward; RewardError on failure.

    Run at start, on the first row: it finds a broken function, and which metrics it returns, before a model loads.
    """
    text = response if response is not None else str(prompt.ground_truth)
    rollout = Rollout((), (), (), (), "stop", text=text)
    scorer.submit(Group(prompt, (rollout,), submission=-1, version=0))
    scored = scorer.collect()[-1].rollouts[0]
    if scored.reward is None:
        raise RewardError(f"the reward was tried on one row before the start: {scored.failure}")
    return scored.reward
