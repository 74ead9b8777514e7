"""Scorers: groups in, groups with rewards out, in the trainer's process or in the worker pool."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gspo.rewards import builtin
from gspo.rewards.compose import (
    DEFAULT,
    Grader,
    Manager,
    Overlong,
    RewardLike,
    as_specs,
    build_grading,
    manage,
)
from gspo.rewards.functions import RewardFunction, RewardSpec
from gspo.rewards.pool.worker_pool import JobFailed, WorkerPool
from gspo.rewards.pool.workers import ForkedWorkers, ThreadWorkers, WorkerSource
from gspo.rewards.protocol import Graded, RewardError, Scorer
from gspo.rewards.results import from_wire
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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A group to be collected: graded here already, or by jobs of the pool."""

    group: Group
    graded: list[Graded] | None = None
    jobs: Sequence[Future[Any]] = ()


class PoolScorer:
    """Scores in the worker pool while generation goes on. Groups that only need cheap built-ins never leave the process.

    The pool starts with the first group that needs it. One response is one job, except for functions that take (or
    await) a whole group; so a response that hangs or kills its worker fails alone.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec | RewardFunction],
        *,
        manager: Manager = "naive",
        overlong: Overlong | None = None,
        num_workers: int = 0,
        timeout: float = 10.0,
        memory: int = 1024,
        retries: int = 1,
    ) -> None:
        self.finisher = Finisher(manager, overlong)
        self._specs = list(specs)
        self._in_threads = any(isinstance(spec, RewardFunction) for spec in specs)
        self._num_workers = num_workers or (1 if self._in_threads else _num_cores())
        self._timeout, self._memory, self._retries = timeout, memory, retries
        self._pool: WorkerPool | None = None
        self._crew: WorkerSource | None = None
        self._info: dict[str, Any] = {}
        self._cheap = Grader(specs) if all(map(_is_builtin, specs)) else None
        self._waiting: list[_Waiting] = []

    def submit(self, group: Group) -> None:
        responses = responses_of(group)
        if self._cheap and all(_is_cheap(spec, group.prompt.data_source) for spec in self._specs):
            self._waiting.append(_Waiting(group, graded=self._cheap.grade(group.prompt, responses)))
            return
        pool = self.start(group.prompt.data_source)
        parts = [responses] if self._info["takes_group"] else [[response] for response in responses]
        jobs = [pool.submit((group.prompt, part)) for part in parts if part]
        self._waiting.append(_Waiting(group, jobs=jobs))

    def collect(self) -> list[Group]:
        waiting, self._waiting = self._waiting, []
        return [
            self.finisher.attach(
                one.group, self._results(one.group, one.jobs) if one.graded is None else one.graded
            )
            for one in waiting
        ]

    def start(self, data_source: str = "") -> WorkerPool:
        """Start the pool if it is not running; RewardError when the reward function cannot be loaded.

        What the rows of `data_source` need is imported before workers are forked.
        """
        if self._pool is None:
            self._crew = self._make_crew(data_source)
            self._info = self._crew.info
            # Built-in graders keep deadlines of their own and never hang. More of them at once would only make the
            # programs that they run miss theirs.
            growth = {"max_workers": self._num_workers} if all(map(_is_builtin, self._specs)) else {}
            self._pool = WorkerPool(
                self._crew,
                num_workers=self._num_workers,
                timeout=self._timeout,
                retries=self._retries,
                **growth,
            )
        return self._pool

    @property
    def server_pid(self) -> int:
        """The process that all workers descend from; 0 when none runs."""
        return self._crew.pid if isinstance(self._crew, ForkedWorkers) else 0

    def close(self) -> None:
        self._waiting = []
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _make_crew(self, data_source: str) -> WorkerSource:
        if self._in_threads:
            return ThreadWorkers(*build_grading(self._specs, seeded=False))
        return ForkedWorkers(
            "gspo.rewards.compose:build_grading",
            (self._specs, _preloads(self._specs, data_source)),
            memory=self._memory,
        )

    def _results(self, group: Group, futures: Sequence[Future[Any]]) -> list[Graded]:
        """What the workers answered, checked; a job without a result is a failure of each of its responses."""
        graded: list[Graded] = []
        size = len(group.rollouts) // max(len(futures), 1)
        for future in futures:
            try:
                items = future.result()
                if not isinstance(items, list) or len(items) != size:
                    raise JobFailed("its worker answered something else than a list of results")
                graded += map(from_wire, items)
            except JobFailed as error:
                graded += [self._job_failure(group.prompt, len(graded) + i, error) for i in range(size)]
        return graded

    def _job_failure(self, prompt: Prompt, index: int, error: JobFailed) -> str:
        names = ", ".join(self._info.get("names") or [f"for data_source {prompt.data_source!r}"])
        return f"reward function {names} failed on row {prompt.uid!r}, response {index}: {error}"


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
    sandbox_level: int | None = None,
    allow_unsandboxed_code: bool = False,
) -> Scorer:
    """The scorer for a reward: None (each row's built-in), a name, "file.py:function", a function, or several of these.

    `memory` is in MiB a worker; `num_workers=0` means one a core. A test of model-written code gets half of `timeout`,
    so that a program that hangs is graded wrong by the sandbox before its reward is given up.
    """
    code = {"timeout": timeout / 2, "level": sandbox_level, "allow_unsandboxed": allow_unsandboxed_code}
    specs = [_with_code(spec, code) for spec in as_specs(reward)]
    specs += _shaping(format_weight, repetition_penalty)
    if manager not in ("naive", "dapo"):
        raise RewardError(f"reward_model.reward_manager={manager!r}, expected naive or dapo")
    if overlong is not None and manager != "dapo":
        raise RewardError(
            "the overlong penalty needs reward_model.reward_manager=dapo; naive does not apply it"
        )
    common: dict[str, Any] = {"manager": manager, "overlong": overlong}
    if all(_is_cheap(spec, "") for spec in specs):
        return InProcessScorer(Grader(specs), **common)
    scorer = PoolScorer(
        specs, num_workers=num_workers, timeout=timeout, memory=memory, retries=retries, **common
    )
    if not all(map(_is_builtin, specs)):
        scorer.start()  # a function that cannot be loaded is an error now, not at the first group
    return scorer


def _with_code(spec: RewardSpec | RewardFunction, code: dict[str, Any]) -> RewardSpec | RewardFunction:
    """The spec with the code grader's settings, where it may use that grader; its own settings come first."""
    if not isinstance(spec, RewardSpec) or spec.path is not None:
        return spec
    if spec.name == DEFAULT.name:
        return dataclasses.replace(
            spec, kwargs={**spec.kwargs, "code": {**code, **spec.kwargs.get("code", {})}}
        )
    return dataclasses.replace(spec, kwargs={**code, **spec.kwargs}) if spec.name == "code" else spec


def _is_builtin(spec: RewardSpec | RewardFunction) -> bool:
    return isinstance(spec, RewardSpec) and spec.path is None


def _is_cheap(spec: RewardSpec | RewardFunction, data_source: str) -> bool:
    if not isinstance(spec, RewardSpec) or spec.path is not None:
        return False
    try:
        by_source = spec.name == DEFAULT.name
        entry = builtin.for_source(data_source) if by_source else builtin.builtin(spec.name)
    except RewardError:
        return bool(data_source)  # nothing to run: the message is made in process
    return entry.cheap


def _preloads(specs: Sequence[RewardSpec | RewardFunction], data_source: str) -> list[str]:
    """Modules to import before forking: those of the built-ins named, and of the one for the first row's source."""
    named = [spec.name for spec in specs if isinstance(spec, RewardSpec) and spec.path is None]
    entries = [builtin.builtin(name) for name in named if name != DEFAULT.name]
    if DEFAULT.name in named and data_source:
        entries.append(builtin.for_source(data_source))
    return [
        *builtin.registering_modules(),
        *sorted({module for entry in entries for module in entry.preload}),
    ]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
