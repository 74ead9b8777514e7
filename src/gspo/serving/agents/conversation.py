"""The tokens of one conversation: what the model wrote, what the agent added, and where a later request may continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.types import FinishReason, Rollout, Turn


@dataclass(frozen=True, slots=True)
class Point:
    """The end of a turn: what a request has to begin with to continue from here. `size` counts the response's tokens."""

    size: int
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    text: str | None = None


@dataclass(eq=False, slots=True)
class Conversation:
    """A token list that is only ever appended to. `context` is what came before the model's first token."""

    context: tuple[int, ...]
    place: tuple[int, int]  # by which it is known in the engine
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # the id of each turn's answer
    points: list[Point] = field(default_factory=list)
    reason: FinishReason = "aborted"
    is_busy: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.context, *self.token_ids)

    def observe(self, token_ids: Sequence[int], version: int) -> None:
        """Append tokens that the model did not write."""
        size = len(token_ids)
        self.token_ids += token_ids
        self.log_probs += [0.0] * size
        self.loss_mask += [0] * size
        self.versions += (self.versions[-1:] or [version]) * size

    def write(self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        """Append tokens of the model."""
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.loss_mask += [1] * len(token_ids)
        self.versions += versions

    def rewind(self, size: int) -> None:
        """Forget what came after the first `size` tokens of the response: the request that added it failed."""
        for part in (self.token_ids, self.log_probs, self.loss_mask, self.versions):
            del part[size:]
        self.is_busy = False

    def end_turn(self, turn: Turn, name: str, point: Point, reason: FinishReason) -> None:
        self.turns.append(turn)
        self.names.append(name)
        self.points.append(point)
        self.reason, self.is_busy = reason, False

    def rollout(self, reason: FinishReason, prompt: tuple[int, ...] = ()) -> Rollout:
        """The conversation as a rollout of a prompt with these tokens."""
        return Rollout(
            tuple(self.token_ids),
            tuple(self.log_probs),
            tuple(self.loss_mask),
            tuple(self.versions),
            reason,
            turns=tuple(self.turns),
            text=self.turns[-1].text if self.turns else "",
            context=() if self.context == prompt else self.context,
        )
