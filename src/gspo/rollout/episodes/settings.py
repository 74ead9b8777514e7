"""How episodes are set up, as plain values that can be sent to a rollout worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.data.chat_append import ChatAppender, require_append
from gspo.environments.formats import ToolFormat, find_format
from gspo.environments.host import Job
from gspo.environments.loading import EnvironmentSpec
from gspo.environments.pool import EpisodePool, open_pool
from gspo.environments.protocol import EnvironmentProblem
from gspo.processes import num_cores
from gspo.rewards.pool.worker_pool import JobFailed
from gspo.rewards.protocol import RewardError
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.episodes.dialogue import Dialogue, DialogueSettings
from gspo.rollout.episodes.engine import Episodes
from gspo.types import Prompt

CHARS_PER_TOKEN = 16  # a message is first cut by characters, in the worker


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """An environment, its workers and the limits of its conversations. `tools` and `opens` are found by `probe`."""

    spec: EnvironmentSpec
    dialogue: DialogueSettings
    tool_format: str = "auto"
    num_workers: int = 0  # 0: one per core
    timeout: float = 60.0
    tool_timeout: float = 10.0
    memory: int = 1024
    retries: int = 1
    lag: int = 1
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    opens: bool = False

    def open_pool(self) -> EpisodePool:
        """Start the workers; EnvironmentProblem when the environment cannot be loaded."""
        try:
            return open_pool(
                self.spec,
                num_workers=self.num_workers or num_cores(),
                timeout=self.timeout,
                tool_timeout=self.tool_timeout,
                memory=self.memory,
                retries=self.retries,
                max_chars=CHARS_PER_TOKEN * self.dialogue.max_observation,
            )
        except RewardError as error:
            raise EnvironmentProblem(f"environment {self.spec.title!r}: {error}") from error

    def with_tools(self, pool: EpisodePool) -> EpisodeSettings:
        """The settings with what a pool knows of its environment."""
        chosen = pool.source.info["format"] if self.tool_format == "auto" else None
        return dataclasses.replace(self, tools=tuple(pool.tools), tool_format=chosen or self.tool_format)

    def with_opening(self, pool: EpisodePool, prompt: Prompt) -> EpisodeSettings:
        """The settings with whether the environment begins with messages: it is begun once, with a row of the data."""
        question = dataclasses.replace(prompt, token_ids=())
        try:
            answer = pool.play(Job("probe", question)).result()
        except JobFailed as error:
            raise EnvironmentProblem(
                f"environment {self.spec.title!r} was tried on row {prompt.uid!r} before the start: {error}"
            ) from error
        pool.end("probe")
        return dataclasses.replace(self, opens=bool(answer["opening"]))

    def find_format(self, tokenizer: Any) -> ToolFormat | None:
        """The format of tool calls; None for an environment without tools."""
        return find_format(self.tool_format, tokenizer) if self.tools else None

    def prompt_options(self, tokenizer: Any) -> dict[str, Any]:
        """Options of the chat template with which prompts are rendered: the tools, unless their format is inline."""
        found = self.find_format(tokenizer)
        shown = {"tools": [dict(tool) for tool in self.tools]} if found is not None and not found.inline else {}
        return {**self.template_options, **shown}

    def wrap(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        *,
        eos_token_ids: Sequence[int],
        max_length: int,
        pool: EpisodePool | None = None,
    ) -> Episodes:
        """An engine of episodes around `engine`; `pool` are workers that run already."""
        return wrap_engine(engine, self, tokenizer, eos_token_ids=eos_token_ids, max_length=max_length, pool=pool)

    def check_template(self, tokenizer: Any) -> None:
        """Refuse a chat template to which the environment's messages cannot be appended."""
        found = self.find_format(tokenizer)
        if found is None or not found.inline:
            require_append(tokenizer, "user" if found is None else "tool", **self.prompt_options(tokenizer))


def wrap_engine(
    engine: RolloutEngine,
    settings: EpisodeSettings,
    tokenizer: Any,
    *,
    eos_token_ids: Sequence[int],
    max_length: int,
    pool: EpisodePool | None = None,
) -> Episodes:
    """An engine of episodes around `engine`; `pool` are workers that run already."""
    dialogue = Dialogue(
        tokenizer,
        ChatAppender(tokenizer, **settings.prompt_options(tokenizer)),
        settings.find_format(tokenizer),
        settings.dialogue,
        eos_token_ids,
    )
    own = pool or settings.open_pool()
    return Episodes(engine, own, dialogue, max_length=max_length, opens=settings.opens, lag=settings.lag)
