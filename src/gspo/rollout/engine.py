"""The rollout protocol: what the sampler and the evaluator ask of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gspo.types import Group, Prompt, Rollout


class EngineError(ValueError):
    """The engine cannot run this model, or not at these lengths; the message names what to change."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy (log-probs are then taken at temperature 1)."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1  # <= 0: off
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # benchmarks: always run to max_tokens


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Generate `n` responses to a prompt. Randomness is a function of (seed, submission, response, position) only."""

    prompt: Prompt
    submission: int
    n: int
    version: int  # weights version at submission
    params: SamplingParams
    seed: int  # the run seed mixed with the purpose (training, evaluation …)
    partial: tuple[Rollout, ...] = field(default=())  # responses begun before a restart, to be continued


class RolloutEngine(Protocol):
    """Generates groups. All calls come from one thread; for the same calls an engine gives the same tokens."""

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not yet handed out."""
        ...

    def submit(self, request: GroupRequest) -> None:
        """Queue a group. Returns at once."""
        ...

    def step(self) -> list[Group]:
        """Advance generation by a bounded amount of work and hand out the groups that finished, in order of submission.

        Returns [] when nothing finished. Never blocks for long; does nothing when nothing is in flight.
        """
        ...

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Run these to the end and return them in the order given; groups in flight are left as they are."""
        ...

    def load_weights(self, weights: Any, version: int) -> None:
        """Make new weights live. Unfinished responses go on under them; their caches are rebuilt from their tokens."""
        ...

    def unfinished(self) -> list[GroupRequest]:
        """The groups in flight as requests with their `partial` responses: the engine's whole state between steps.

        Submitting them to a fresh engine with the same weights continues to the same bits, provided that
        `load_weights` was called after the last `step` (tokens are then the whole state).
        """
        ...

    def clear(self) -> None:
        """Forget every group in flight, as if it had not been submitted; the weights stay."""
        ...

    def close(self) -> None: ...
