"""Scorers: groups in, groups with rewards out.

    sampler ── submit(group) ──▶ PoolScorer ──┬─ cheap built-ins only: graded here, before submit returns
                                              └─ else one job per response ──▶ WorkerPool; returns at once
    sampler ── collect() ──────▶ PoolScorer ──── waits for every job, in order of submission

A job always ends: with a result, at its deadline, or when its worker has died too often. So `collect` returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeGuard, get_args

from gspo.processes import num_cores
from gspo.rewards import builtin
from gspo.rewards.compose import (
    DEFAULT,
    PLAIN,
    Finishing,
    Grader,
    Manager,
    Overlong,
    RewardLike,
    RewardScale,
    as_specs,
    build_grading,
)
from gspo.rewards.functions import RewardFunction, RewardSpec
from gspo.rewards.pool.worker_pool import JobFailed, WorkerPool
from gspo.rewards.pool.workers import ForkedWorkers, ThreadWorkers, WorkerSource
from gspo.rewards.protocol import Graded, RewardError, Scorer
from gspo.rewards.results import from_json
from gspo.rewards.signatures import Response
from gspo.types import Group, Prompt, Reward, Rollout

AnyReward = RewardSpec | RewardFunction


class PoolScorer:
    """Scores in the worker pool while generation goes on. Groups that only need cheap built-ins never leave the process.

    One response is one job, except for functions that need the whole group; so a response that hangs or kills its
    worker fails alone.
    """

    def __init__(
        self,
        specs: Sequence[AnyReward],
        *,
        finishing: Finishing = PLAIN,
        num_workers: int = 0,
        timeout: float = 10.0,
        memory: int = 1024,
        retries: int = 1,
    ) -> None:
        self._specs = list(specs)
        self._finishing = finishing
        self._in_threads = any(isinstance(spec, RewardFunction) for spec in specs)
        self._num_workers = num_workers or (1 if self._in_threads else num_cores())
        self._timeout, self._memory, self._retries = timeout, memory, retries
        self.pool: WorkerPool | None = None  # starts with the first group that needs it
        self._cheap = Grader(specs) if all(map(_is_builtin, specs)) else None
        # With each group, a function that waits for its results.
        self._pending: list[tuple[Group, Callable[[], list[Graded]]]] = []

    def submit(self, group: Group) -> None:
        responses = responses_of(group)
        if self._cheap and self.grades_here(group.prompt.data_source):
            graded = self._cheap.grade(group.prompt, responses)
            self._pending.append((group, lambda: graded))
            return
        pool = self.start(group.prompt.data_source)
        parts = [responses] if pool.source.info["whole_group"] else [[response] for response in responses]
        jobs = [pool.submit((group.prompt, part)) for part in parts if part]
        self._pending.append((group, partial(self._results, group, jobs)))

    def grades_here(self, data_source: str) -> bool:
        """Whether the rows of a data source are graded in this process, when they are submitted."""
        return all(_is_cheap(spec, data_source) for spec in self._specs)

    def collect(self, num: int | None = None) -> list[Group]:
        pending = self._pending[:num]
        self._pending = self._pending[len(pending) :]
        return [
            group.with_rollouts(
                tuple(self._finishing.apply(*pair) for pair in zip(group.rollouts, results(), strict=True))
            )
            for group, results in pending
        ]

    def start(self, data_source: str = "") -> WorkerPool:
        """Start the pool if it is not running; RewardError when the reward function cannot be loaded.

        What the rows of `data_source` need is imported before workers are forked.
        """
        if self.pool is None:
            # Built-in graders keep their own deadlines and never hang. More of them at once would only make the
            # programs that they run miss theirs.
            growth = {"max_workers": self._num_workers} if all(map(_is_builtin, self._specs)) else {}
            self.pool = WorkerPool(
                self._make_workers(data_source),
                num_workers=self._num_workers,
                timeout=self._timeout,
                retries=self._retries,
                **growth,
            )
        return self.pool

    def close(self) -> None:
        self._pending = []
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _make_workers(self, data_source: str) -> WorkerSource:
        if self._in_threads:
            return ThreadWorkers(*build_grading(self._specs, seeded=False))
        return ForkedWorkers(
            "gspo.rewards.compose:build_grading",
            (self._specs, _preloads(self._specs, data_source)),
            memory=self._memory,
        )

    def _results(self, group: Group, jobs: Sequence[Future[Any]]) -> list[Graded]:
        """The answers of the workers, checked. A job without a result is a failure of each of its responses."""
        graded: list[Graded] = []
        size = len(group.rollouts) // max(len(jobs), 1)
        for job in jobs:
            try:
                items = job.result()
                if not isinstance(items, list) or len(items) != size:
                    raise JobFailed("its worker did not answer with a list of results")
                graded += map(from_json, items)
            except JobFailed as error:
                head = f"{self._name_for(group.prompt)} failed on row {group.prompt.uid!r}"
                graded += [f"{head}, response {len(graded) + i}: {error}" for i in range(size)]
        return graded

    def _name_for(self, prompt: Prompt) -> str:
        names = self.pool.source.info["names"] if self.pool else []
        return f"reward function {', '.join(names) or f'for data_source {prompt.data_source!r}'}"


def responses_of(group: Group) -> list[Response]:
    """The group's responses as reward functions see them."""
    return [
        Response(rollout.text, rollout.model_token_ids, index, rollout.finish_reason, rollout.turns)
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
    scale: RewardScale | None = None,
    format_weight: float = 0.0,
    repetition_penalty: float = 0.0,
    sandbox_level: int | None = None,
    allow_unsandboxed_code: bool = False,
) -> Scorer:
    """The scorer for a reward: None (each row's built-in), a name, "file.py:function", a function, or several of these.

    `memory` is in MiB per worker; `num_workers=0` means one per core. A test of model-written code gets half of
    `timeout`: the sandbox then grades a program that hangs as wrong before the job itself reaches its deadline.
    """
    code = {"timeout": timeout / 2, "level": sandbox_level, "allow_unsandboxed": allow_unsandboxed_code}
    shaping = {"format": format_weight, "repetition": repetition_penalty}
    specs = [_with_code(spec, code) for spec in as_specs(reward)]
    specs += [RewardSpec(name, weight=weight) for name, weight in shaping.items() if weight]
    if manager not in get_args(Manager):
        raise RewardError(f"reward_model.reward_manager={manager!r}, expected one of {', '.join(get_args(Manager))}")
    if overlong is not None and manager != "dapo":
        raise RewardError(f"the overlong penalty needs reward_model.reward_manager=dapo; {manager} does not apply it")
    scorer = PoolScorer(
        specs,
        finishing=Finishing(manager, overlong, scale),
        num_workers=num_workers,
        timeout=timeout,
        memory=memory,
        retries=retries,
    )
    if not all(map(_is_builtin, specs)):
        scorer.start()  # a function that cannot be loaded is an error now, not at the first group
    return scorer


def _with_code(spec: AnyReward, code: dict[str, Any]) -> AnyReward:
    """The spec with the code grader's settings, where it may use that grader; its own settings win."""
    if not _is_builtin(spec) or spec.name not in (DEFAULT.name, "code"):
        return spec
    kwargs = {**code, **spec.kwargs}
    if spec.name == DEFAULT.name:
        kwargs = {**spec.kwargs, "code": {**code, **spec.kwargs.get("code", {})}}
    return dataclasses.replace(spec, kwargs=kwargs)


def _is_builtin(spec: AnyReward) -> TypeGuard[RewardSpec]:
    return isinstance(spec, RewardSpec) and spec.path is None


def _is_cheap(spec: AnyReward, data_source: str) -> bool:
    """Whether the rows of a data source may be graded in this process."""
    if not _is_builtin(spec):
        return False
    try:
        by_source = spec.name == DEFAULT.name
        entry = builtin.by_source(data_source) if by_source else builtin.by_name(spec.name)
    except RewardError:
        return True  # nothing to run: the failure's message is made here
    return entry.cheap


def _preloads(specs: Sequence[AnyReward], data_source: str) -> list[str]:
    """Modules to import before forking: those of the named built-ins, and of the one for the first row's source."""
    names = [spec.name for spec in specs if _is_builtin(spec)]
    entries = [builtin.by_name(name) for name in names if name != DEFAULT.name]
    if DEFAULT.name in names and data_source:
        entries.append(builtin.by_source(data_source))
    return [*builtin.registering_modules(), *sorted({module for entry in entries for module in entry.preload})]


def dry_run(scorer: Scorer, prompt: Prompt, response: str | None = None) -> Reward:
    """Score one response (by default the row's ground truth) and return its reward; RewardError on failure.

    Called at the start with the first row: before a model loads it finds a function that fails, and the metrics that
    it returns.
    """
    text = response if response is not None else str(prompt.ground_truth)
    rollout = Rollout((), (), (), (), "stop", text=text)
    scorer.submit(Group(prompt, (rollout,), submission=-1, version=0))
    scored = scorer.collect()[-1].rollouts[0]
    if scored.reward is None:
        raise RewardError(f"the reward was tried on one row before the start: {scored.failure}")
    return scored.reward
