"""The reward model as a part of the reward: each group is scored when it is collected, on the trainer's device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from gspo.data.chat_template import encode_answer, encode_prompt
from gspo.data.rows import DataError, Row
from gspo.training.reward_model import Text
from gspo.types import Group, Prompt, Reward, Rollout

Normalize = Literal["none", "sigmoid", "saved"]


class RewardModelRole(Protocol):
    """The frozen reward model."""

    def scores(self, texts: list[Text]) -> Tensor:
        """The scores [n] of texts."""
        ...


@dataclass(frozen=True)
class Rendering:
    """How a conversation becomes the reward model's tokens: with its own chat template and tokenizer."""

    tokenizer: Any
    max_length: int | None = None

    def text(self, prompt: Prompt, rollout: Rollout) -> Text:
        """The tokens of a prompt and a response; DataError where the template or the length does not allow it."""
        messages = list(prompt.messages)
        for turn in rollout.turns[:-1]:
            messages.append({"role": "assistant", "content": turn.text})
            if turn.observation:
                messages.append({"role": "user", "content": turn.observation})
        asked = encode_prompt(Row(prompt.uid, tuple(messages)), self.tokenizer)
        text = (*asked.token_ids, *encode_answer(rollout.text, self.tokenizer))
        if self.max_length is not None and len(text) > self.max_length:
            reads = f"which reads at most {self.max_length}"
            raise DataError(prompt.uid, f"is {len(text)} tokens for the reward model, {reads}")
        return text


@dataclass(frozen=True, slots=True)
class Normalization:
    """How a score becomes a reward: as it is, σ(score), or (score - mean) / std with the numbers saved with the model."""

    kind: Normalize = "none"
    mean: float = 0.0
    std: float = 1.0

    def apply(self, score: float) -> float:
        if self.kind == "sigmoid":
            return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
        return (score - self.mean) / self.std if self.kind == "saved" else score


class ModelScorer:
    """A Scorer by the reward model. A group is scored alone, so that its scores do not depend on other groups.

    Equal responses are scored once. A response that the model cannot read has no reward.
    """

    def __init__(self, role: RewardModelRole, rendering: Rendering, normalization: Normalization) -> None:
        self._role, self._rendering, self._normalization = role, rendering, normalization
        self._pending: list[Group] = []

    def submit(self, group: Group) -> None:
        self._pending.append(group)

    def collect(self, num: int | None = None) -> list[Group]:
        pending = self._pending[:num]
        self._pending = self._pending[len(pending) :]
        return [self._scored(group) for group in pending]

    def close(self) -> None:
        self._pending = []

    def _scored(self, group: Group) -> Group:
        texts = [self._text(group.prompt, rollout) for rollout in group.rollouts]
        known = list(dict.fromkeys(text for text in texts if not isinstance(text, str)))
        scores = dict(zip(known, self._role.scores(known).tolist())) if known else {}
        rollouts = []
        for rollout, text in zip(group.rollouts, texts):
            if isinstance(text, str):
                rollouts.append(rollout.with_reward(None, text))
            elif not math.isfinite(scores[text]):
                rollouts.append(rollout.with_reward(None, f"the reward model's score is {scores[text]}"))
            else:
                rollouts.append(rollout.with_reward(Reward(self._normalization.apply(scores[text]))))
        return group.with_rollouts(tuple(rollouts))

    def _text(self, prompt: Prompt, rollout: Rollout) -> Text | str:
        try:
            return self._rendering.text(prompt, rollout)
        except DataError as error:
            return str(error)
