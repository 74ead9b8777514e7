"""The sampler against a plain one that is written out here: prediction, limits, failures and surplus together.

Both run the same prompts and rewards, one group at a time or in rounds. The sampler runs once without an interruption,
and once through a checkpoint after every step.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from gspo.seeding import derive_seed
from gspo.types import Group, Reward
from tests.sampling.world import World, number

PROMPTS, BATCH, SIZE, ROUND, LIMIT = 9, 3, 3, 4, 2  # prompts, groups per step, responses, groups per round, rounds
MIN_PROB, DISCOUNT = 0.3, 0.5


def outcome(seed: int, prompt: int, submission: int, i: int) -> float | None:
    """The score of a response; None where its reward fails. Every third prompt is easy, every third one hard."""
    draw = derive_seed(seed, "outcome", prompt, submission, i) % 100
    if draw < 12:
        return None
    return float(draw < (95, 55, 20)[prompt % 3])


@dataclass
class PlainStep:
    """What one step gives, field by field as the sampler reports it."""

    batch: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    ages: list[int] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


@dataclass
class Started:
    """A group that was started and is not judged."""

    submission: int
    prompt: int
    version: int
    chance: float


class PlainSampler:
    """A sampler with limits, `keep_unfiltered` and prediction, in the shortest way that computes the same."""

    def __init__(self, seed: int, rounds: bool) -> None:
        self.seed, self.rounds, self.version = seed, rounds, 0
        self.position = self.drawn = self.submissions = 0
        self.put_back: deque[int] = deque()
        self.seen: dict[int, tuple[float, float]] = {}
        self.scoring: list[Started] = []

    def mixed(self, prompt: int) -> float | None:
        """P(mixed) under Beta(1 + right, 1 + wrong): 1 minus the chances of all right and of all wrong, as products."""
        if prompt not in self.seen:
            return None
        a, b = (1 + count for count in self.seen[prompt])
        right = wrong = 1.0
        for k in range(SIZE):
            right, wrong = right * (a + k) / (a + b + k), wrong * (b + k) / (a + b + k)
        return 1 - right - wrong

    def draw(self, step: PlainStep) -> Started:
        while True:
            if self.put_back:
                prompt = self.put_back.popleft()
            else:
                prompt, self.position = self.position % PROMPTS, self.position + 1
            self.drawn += 1
            mixed = self.mixed(prompt)
            chance = 1.0 if mixed is None else min(1.0, max(MIN_PROB, 2 * mixed))
            if derive_seed(self.seed, "skip", self.drawn) / 2**63 < chance:
                break
            step.counts["skipped"] += 1
        started = Started(self.submissions, prompt, self.version, chance)
        self.submissions += 1
        step.counts["submitted"] += 1
        return started

    def judge(self, step: PlainStep, kept: list[Started], reserve: list[Started]) -> None:
        for group in self.scoring:
            every = [outcome(self.seed, group.prompt, group.submission, i) for i in range(SIZE)]
            scores = [score for score in every if score is not None]
            step.counts["failed"] += SIZE - len(scores)
            step.scores += scores
            if (mixed := self.mixed(group.prompt)) is not None:
                step.predicted.append(mixed)
            right, wrong = self.seen.get(group.prompt, (0.0, 0.0))
            num_right = sum(scores)
            fresh = (DISCOUNT * right + num_right, DISCOUNT * wrong + len(scores) - num_right)
            self.seen[group.prompt] = fresh
            if len(scores) < 2:
                step.fates["reward_failed"] += 1
                step.counts["wasted"] += SIZE
            elif max(scores) != min(scores):
                step.fates["kept"] += 1
                kept.append(group)
            else:
                step.fates["all_right" if scores[0] else "all_wrong"] += 1
                reserve.append(group)
        self.scoring = []

    def next_step(self) -> PlainStep:
        step, kept, reserve = PlainStep(), [], []
        limit = LIMIT * ROUND
        self.judge(step, kept, reserve)
        while len(kept) < BATCH or (self.rounds and self.scoring):
            room = limit - step.counts["submitted"]
            if self.rounds:
                room = 0 if self.scoring else min(ROUND, room)
            if room:
                started = [self.draw(step) for _ in range(room if self.rounds else 1)]
                self.judge(step, kept, reserve)
                self.scoring = started
            elif self.scoring:
                self.judge(step, kept, reserve)
            else:
                break
        batch = kept[:BATCH]
        for group in kept[BATCH:]:  # only rounds have any
            step.counts["surplus"] += 1
            step.counts["wasted"] += SIZE  # a token per response, whether or not its reward failed
            self.put_back.append(group.prompt)
        extra = reserve[: BATCH - len(batch)]
        step.counts["wasted"] += SIZE * len(reserve[len(extra) :])
        step.counts["unfiltered"] = len(extra)
        step.counts["carried"] = len(self.scoring)
        everything = sorted([*batch, *extra], key=lambda group: group.submission)
        step.batch = [group.submission for group in everything]
        step.weights = [1 / group.chance for group in everything]
        step.ages = [self.version - group.version for group in everything]
        self.version += 1
        return step


def rule(seed: int):
    def score(group: Group, i: int) -> Reward | None:
        value = outcome(seed, number(group), group.submission, i)
        return None if value is None else Reward(value)

    return score


def make(seed: int, rounds: bool, state: dict[str, Any] | None = None) -> World:
    how = {"strategy": "rounds"} if rounds else {"max_in_flight": 1, "max_staleness": 9}
    return World(
        rule(seed),
        prompts=PROMPTS,
        seed=seed,
        train_batch_size=BATCH,
        n=SIZE,
        gen_batch_size=ROUND,
        max_num_gen_batches=LIMIT,
        on_limit="keep_unfiltered",
        predict="skip",
        predict_weight=True,
        predict_min_prob=MIN_PROB,
        predict_discount=DISCOUNT,
        max_failure_rate=1.0,
        state=state,
        **how,
    )


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_every_step_is_that_of_a_plain_sampler(rounds: bool, resumes: bool) -> None:
    total: Counter[str] = Counter()
    for seed in (0, 1, 2):
        plain, world = PlainSampler(seed, rounds), make(seed, rounds)
        for _ in range(12):
            want, recorded = plain.next_step(), len(world.records)
            groups, report = world.step()
            assert [g.submission for g in groups] == want.batch
            assert report.weights == pytest.approx(tuple(want.weights))
            assert report.fates == want.fates and report.num_generated == want.fates.total()
            assert report.num_submitted == want.counts["submitted"] and report.num_skipped == want.counts["skipped"]
            assert report.num_unfiltered == want.counts["unfiltered"] and report.num_carried == want.counts["carried"]
            assert report.discarded["surplus"] == want.counts["surplus"]
            assert report.num_failed_rewards == want.counts["failed"]
            assert (report.score_sum, report.num_scored) == (sum(want.scores), len(want.scores))
            assert report.num_predicted == len(want.predicted)
            assert report.predicted_mixed == pytest.approx(sum(want.predicted))
            assert (report.staleness_sum, report.staleness_max) == (sum(want.ages), max(want.ages, default=0))
            assert report.generated_tokens == SIZE * want.fates.total()
            assert report.wasted_tokens == want.counts["wasted"]
            fates = Counter(fate for _, _, fate, _ in world.records[recorded:])
            assert (
                fates["unfiltered"] == want.counts["unfiltered"] and fates["kept"] == len(groups) - fates["unfiltered"]
            )
            assert fates.total() == want.fates.total() and fates["surplus"] == want.counts["surplus"]
            total += want.counts + Counter(weighted=sum(w > 1 for w in want.weights))
            if resumes:
                world = make(seed, rounds, json.loads(json.dumps(world.sampler.state_dict())))
    assert min(total[name] for name in ("skipped", "unfiltered", "failed", "weighted")) > 5
    assert (total["surplus"] > 5) == rounds and (total["carried"] > 5) == (not rounds)
