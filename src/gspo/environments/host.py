"""The episodes of one worker: each is begun, stepped, and played again from its actions where the worker lacks it.

A job names an episode by its key and lists *every* action so far, so a job can run on any worker: the one that has the
episode at the right turn runs the last action only, another one plays the whole episode again. That is how episodes
survive the death of a worker, a growing pool and a resumed run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.environments.loading import EnvironmentSpec, Make, load_environment
from gspo.environments.protocol import Action, Environment, Step
from gspo.rewards.results import as_number
from gspo.seeding import derive_seed
from gspo.types import Prompt

CUT = "…(cut)"


@dataclass(frozen=True, slots=True)
class Job:
    """Play an episode to the end of `actions`; the caller knows the answers to the first `num_known`.

    Without a prompt the episode is over, and is closed.
    """

    key: Hashable
    prompt: Prompt | None = None
    seed: int = 0
    actions: tuple[Action, ...] = ()
    num_known: int = 0


@dataclass(slots=True)
class _Live:
    environment: Environment
    num_steps: int = 0


class EpisodeHost:
    """Runs jobs. `tool_timeout` is the deadline of one tool call; longer contents are cut to `max_chars`."""

    def __init__(self, make: Make, *, tool_timeout: float, max_chars: int, seeded: bool = True) -> None:
        self._make, self._tool_timeout, self._max_chars, self._seeded = make, tool_timeout, max_chars, seeded
        self._live: dict[Hashable, _Live] = {}

    def __call__(self, job: Job) -> dict[str, Any] | None:
        """The answers as plain data: from `num_known` on, or all with the opening where the episode was played again."""
        if job.prompt is None:
            self._end(job.key)
            return None
        live = self._live.get(job.key)
        try:
            if live is not None and job.actions and live.num_steps == job.num_known:
                return {"steps": self._play(live, job, job.num_known)}
            self._end(job.key)
            live = _Live(self._new())
            self._live[job.key] = live
            self._seed(job.seed, -1)
            opening = [self._message(message) for message in live.environment.reset(job.prompt, job.seed)]
            return {"opening": opening, "steps": self._play(live, job, 0)}
        except BaseException:
            self._end(job.key)
            raise

    def _new(self) -> Environment:
        made = self._make()
        if hasattr(made, "tool_timeout"):
            made.tool_timeout = self._tool_timeout  # pyright: ignore[reportAttributeAccessIssue]
        return made

    def _play(self, live: _Live, job: Job, first: int) -> list[dict[str, Any]]:
        steps = []
        for action in job.actions[first:]:
            self._seed(job.seed, live.num_steps)
            step = live.environment.step(action)
            live.num_steps += 1
            steps.append(self._plain(step))
        return steps

    def _plain(self, step: Step) -> dict[str, Any]:
        if not isinstance(step, Step):
            raise TypeError(f"step returned a {type(step).__name__}; expected a gspo.environments.Step")
        return {
            "messages": [self._message(message) for message in step.messages],
            "reward": None if step.reward is None else as_number(step.reward, "the reward of a step"),
            "done": bool(step.done),
            "truncated": bool(step.truncated),
            "metrics": {str(name): as_number(value, f"the metric {name!r}") for name, value in step.metrics.items()},
            "num_errors": int(step.num_errors),
        }

    def _message(self, message: Any) -> dict[str, Any]:
        """A message with a text of bounded length."""
        if isinstance(message, str):
            message = {"role": "user", "content": message}
        if not isinstance(message, Mapping) or "content" not in message:
            raise TypeError(f"a message is {message!r:.200}; expected a dict with role and content")
        content = str(message["content"])
        if len(content) > self._max_chars:
            half = self._max_chars // 2
            content = content[:half] + CUT + content[-half:]
        name = {"name": str(message["name"])} if message.get("name") else {}
        return {"role": str(message.get("role", "user")), **name, "content": content}

    def _seed(self, seed: int, turn: int) -> None:
        """Set the process's global random state: a worker has many episodes, which must not disturb each other."""
        if not self._seeded:
            return
        number = derive_seed(seed, "environment/step", turn) & 0xFFFFFFFF
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number)

    def _end(self, key: Hashable) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            live.environment.close()


def build_host(
    spec: EnvironmentSpec, tool_timeout: float, max_chars: int, seeded: bool = True
) -> tuple[EpisodeHost, dict[str, Any]]:
    """The handler of a pool's workers, and what the trainer must know: the tools, and the format that they prefer."""
    make = load_environment(spec)
    probe = make()
    tools: Sequence[Mapping[str, Any]] = list(probe.tools)
    preferred = getattr(probe, "tool_format", None)
    probe.close()
    host = EpisodeHost(make, tool_timeout=tool_timeout, max_chars=max_chars, seeded=seeded)
    return host, {"tools": [dict(tool) for tool in tools], "format": preferred}
