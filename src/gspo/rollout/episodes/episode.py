"""The state of one response in an environment, and of its group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo.environments.host import Job
from gspo.environments.protocol import Action
from gspo.rollout.engine import GroupRequest
from gspo.rollout.episodes.dialogue import Dialogue
from gspo.rollout.progress import EMPTY
from gspo.seeding import derive_seed
from gspo.types import FinishReason, Group, Prompt, Rollout, Turn

# `resetting`, `waiting`: for the environment; `writing`: in the engine; `over`: finished.
State = Literal["resetting", "writing", "waiting", "over"]


@dataclass(eq=False, slots=True)
class EpisodeGroup:
    """A group in flight. `prompt` is that of the request with the opening of the environment, once it is known."""

    request: GroupRequest
    prompt: Prompt
    episodes: list[Episode] = field(default_factory=list)
    diverged: bool = False  # to be generated anew when none of its responses is in the engine

    @staticmethod
    def of(request: GroupRequest) -> EpisodeGroup:
        """A group with the responses of a request, some of them begun."""
        group = EpisodeGroup(request, request.prompt)
        for index in range(request.n):
            begun = request.partial[index] if index < len(request.partial) else EMPTY
            group.episodes.append(Episode(group, index, begun))
        return group

    @property
    def seed(self) -> int:
        """The seed of the environments: the same for all responses, so that they are compared in the same world."""
        return derive_seed(self.request.seed, "environment", self.request.submission)

    @property
    def question(self) -> Prompt:
        """The prompt as environments see it: the same when an episode is played again, so without tokens and opening."""
        prompt = self.prompt
        asked = prompt.messages[: len(prompt.messages) - len(prompt.opening)]
        return dataclasses.replace(prompt, messages=asked, token_ids=(), opening=())

    @property
    def is_over(self) -> bool:
        return not self.diverged and all(episode.state == "over" for episode in self.episodes)

    def group(self) -> Group:
        """The finished group."""
        r = self.request
        return Group(self.prompt, tuple(e.rollout for e in self.episodes), r.submission, r.version)

    def restart(self, dialogue: Dialogue) -> None:
        """Forget everything: the group is generated anew."""
        if self.prompt.opening:
            self.prompt = dataclasses.replace(self.question, token_ids=dialogue.opened(self.question, ()))
        self.request = dataclasses.replace(self.request, prompt=self.prompt, partial=())
        self.diverged = False
        self.episodes = [Episode(self, index, EMPTY) for index in range(self.request.n)]

    def as_request(self, running: dict[tuple[int, int], Rollout]) -> GroupRequest:
        """The request that continues this group; `running` are the responses in the engine."""
        if self.diverged:
            return dataclasses.replace(self.request, partial=())
        parts = [episode.with_tokens_of(running.get(episode.number)) for episode in self.episodes]
        begun = max((i + 1 for i, part in enumerate(parts) if part != EMPTY), default=0)
        return dataclasses.replace(self.request, prompt=self.prompt, partial=tuple(parts[:begun]))


@dataclass(eq=False, slots=True)
class Episode:
    """One response: its tokens up to the last point that was handed over, and what it waits for."""

    group: EpisodeGroup
    index: int
    rollout: Rollout
    state: State = "writing"
    answer: Future[Any] | None = None
    due: int = 0  # the tick in which the answer is read
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rollout.finish_reason != "aborted" and not self.has_unread_turn:
            self.state = "over"

    @property
    def number(self) -> tuple[int, int]:
        """What identifies the response in the engine, and sorts it."""
        return self.group.request.submission, self.group.request.first_response + self.index

    @property
    def name(self) -> str:
        """The name of its prompt in the engine, which has each response by itself."""
        return f"{self.group.prompt.uid}#{self.number[1]}"

    @property
    def key(self) -> tuple[int, int, int]:
        """What identifies its environment."""
        return (self.group.request.seed, *self.number)

    @property
    def turn_start(self) -> int:
        """Where the turn begins that is being written: after the last observation."""
        mask = self.rollout.loss_mask
        ended = self.rollout.turns[-1].end if self.rollout.turns else 0
        return next((i for i in range(ended, len(mask)) if mask[i]), len(mask))

    @property
    def has_unread_turn(self) -> bool:
        """Whether an engine has finished a turn that it had not handed over when this response was saved."""
        return self.rollout.finish_reason != "aborted" and self.turn_start < len(self.rollout.token_ids)

    def with_tokens_of(self, running: Rollout | None) -> Rollout:
        """The response with what an engine has written since; engines know nothing of turns."""
        return self.rollout if running is None else dataclasses.replace(running, turns=self.rollout.turns, text="")

    @property
    def turn_is_over(self) -> bool:
        """Whether its last turn has ended and was not answered."""
        turns = self.rollout.turns
        return bool(turns) and turns[-1].end == len(self.rollout.token_ids)

    def read_actions(self, dialogue: Dialogue, max_tokens: int) -> None:
        """Restore the actions from the tokens, for a response that was begun elsewhere."""
        ids = self.rollout.token_ids
        self.actions = [
            dialogue.action(ids[turn.start : turn.end], number, was_cut=turn.end >= max_tokens)
            for number, turn in enumerate(self.rollout.turns)
        ]

    def job(self, num_known: int) -> Job:
        """What the environment has to play; the answers to the first `num_known` actions are known here."""
        return Job(self.key, self.group.question, self.group.seed, tuple(self.actions), num_known)

    def end_turn(self, rollout: Rollout, action: Action) -> None:
        """Take over the tokens of a finished turn; what the engine wrote after it is dropped."""
        start = self.turn_start
        end = start + len(action.token_ids)
        turn = Turn(
            start, end, str(action), num_calls=len(action.tool_calls), malformed=any(c.error for c in action.tool_calls)
        )
        self.actions.append(action)
        self.rollout = Rollout(
            token_ids=rollout.token_ids[:end],
            log_probs=rollout.log_probs[:end],
            loss_mask=rollout.loss_mask[:end],
            versions=rollout.versions[:end],
            finish_reason="aborted",
            turns=(*self.rollout.turns, turn),
        )

    def record(self, step: Mapping[str, Any]) -> None:
        """Add the environment's answer to the last turn."""
        *before, turn = self.rollout.turns
        turn = dataclasses.replace(
            turn,
            reward=step["reward"],
            num_errors=step["num_errors"],
            observation="\n".join(message["content"] for message in step["messages"]),
            metrics=step["metrics"],
        )
        self.rollout = dataclasses.replace(self.rollout, turns=(*before, turn))

    def observe(self, token_ids: tuple[int, ...], num_cut: int) -> None:
        """Append the tokens of an observation: no action of the model, so without log-prob and mask."""
        rollout, size = self.rollout, len(token_ids)
        *before, turn = rollout.turns
        self.rollout = dataclasses.replace(
            rollout,
            token_ids=rollout.token_ids + token_ids,
            log_probs=rollout.log_probs + (0.0,) * size,
            loss_mask=rollout.loss_mask + (0,) * size,
            versions=rollout.versions + rollout.versions[-1:] * size,
            turns=(*before, dataclasses.replace(turn, num_cut=num_cut)),
        )

    def finish(self, reason: FinishReason, failure: str | None = None) -> None:
        """End the episode."""
        text = self.rollout.turns[-1].text if self.rollout.turns else ""
        self.rollout = dataclasses.replace(self.rollout, finish_reason=reason, text=text, failure=failure)
        self.state, self.answer = "over", None
