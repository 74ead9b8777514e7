"""The environment protocol: what an environment is asked, what it sees of the model, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gspo.types import Prompt

Message = Mapping[str, Any]
"""A chat message: `role` and `content`."""


class EnvironmentProblem(ValueError):
    """An environment that cannot be set up. The message names the key and a remedy."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote. `error` says why it could not be read; the model sees it as the tool's answer."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


class Action(str):
    """The text of one turn, with its tool calls, its tokens and its number (from 0).

    `was_cut` says that the length limit cut it, `is_last` that no turn follows it, because of that limit or of one of
    the number of turns.
    """

    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    turn: int
    was_cut: bool
    is_last: bool

    def __new__(
        cls,
        text: str,
        tool_calls: Sequence[ToolCall] = (),
        token_ids: Sequence[int] = (),
        turn: int = 0,
        was_cut: bool = False,
        is_last: bool = False,
    ) -> Action:
        self = super().__new__(cls, text)
        self.tool_calls, self.token_ids, self.turn = tuple(tool_calls), tuple(token_ids), turn
        self.was_cut, self.is_last = was_cut, is_last or was_cut
        return self


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to a turn.

    `messages` are what the model sees next. `reward` is what the turn earned; None where the run's reward function
    grades the whole. `done` ends the episode, `truncated` ends it at a limit of the environment. `metrics` are numbers
    for the log: of each name a rollout's last value counts, and `acc` is its accuracy. `num_errors` counts failed
    calls.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_errors: int = 0


class Environment(Protocol):
    """One episode. For the same prompt, seed and actions it must answer the same: resumed runs play it again.

    A failure of a tool is an answer that the model sees. An exception means that the environment itself failed: the
    rollout then has no reward.
    """

    tools: Sequence[Mapping[str, Any]]  # JSON schemas for the chat template; may be empty

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        """Begin the episode of a prompt; returns messages that follow those of the prompt."""
        ...

    def step(self, action: Action) -> Step:
        """Answer a turn of the model."""
        ...

    def close(self) -> None:
        """Free everything that the episode holds."""
        ...
