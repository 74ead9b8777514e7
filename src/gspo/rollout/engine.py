"""The rollout engine: what the sampler, the evaluator and the loop ask of whatever generates responses."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.metrics import Metrics
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
    num_top: int = 0  # report the log-probs of this many best tokens at each position, through `written`

    @property
    def drawing(self) -> SamplingParams:
        """The part that decides how a token is drawn: limits and stop tokens as if none had been set."""
        return dataclasses.replace(self, max_tokens=1, stop_token_ids=(), ignore_eos=False)

    def stop_tokens(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Every token that ends a response, given the model's end-of-sequence tokens."""
        return self.stop_token_ids if self.ignore_eos else (*eos_token_ids, *self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Generate `n` responses to a prompt. Randomness is a function of (seed, submission, response, position) only."""

    prompt: Prompt
    submission: int
    n: int
    version: int  # weights version at submission
    params: SamplingParams
    seed: int  # the run seed mixed with the purpose (training, evaluation …)
    partial: tuple[Rollout, ...] = field(default=())  # responses begun before, to be continued from their tokens
    first_response: int = 0  # number of the first response: a part of a group draws what the whole group would
    hold: bool = False  # the responses may be continued by another request: their cache is worth keeping
    watch: bool = False  # `written` reports the tokens of the responses as they come
    draw: int | None = None  # replaces `submission` as a source of randomness


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that a watched response gained. `top` has the best tokens at each position, where `num_top` asked for them."""

    submission: int
    response: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


class RolloutEngine(ABC):
    """Generates groups. All calls come from one thread; for the same calls an engine gives the same tokens.

    The members that are not abstract are about slots, processes, memory and clients that watch; an engine that has none
    of them inherits them.
    """

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Groups submitted and not yet returned by `step`."""

    @abstractmethod
    def submit(self, request: GroupRequest) -> None:
        """Queue a group. Returns at once."""

    @abstractmethod
    def step(self) -> list[Group]:
        """Advance generation by a bounded amount of work and return the groups that finished, in order of submission.

        Returns [] when nothing finished. Never blocks for long; does nothing when nothing is in flight.
        """

    @abstractmethod
    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Run these to the end and return them in the order of the requests; groups in flight are left as they are."""

    @abstractmethod
    def load_weights(self, weights: Any, version: int) -> None:
        """Make new weights live. Unfinished responses go on under them; their caches are rebuilt from their tokens.

        `weights` are tensors by name. The loop passes None: the engine then reads the policy's tensors by itself. An
        engine in a rollout worker always gets the tensors.
        """

    @abstractmethod
    def unfinished(self) -> list[GroupRequest]:
        """The groups in flight as requests with their `partial` responses: the engine's whole state between steps.

        Submitting them to a fresh engine with the same weights continues to the same bits, provided that
        `load_weights` was called after the last `step` (tokens are then the whole state).
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every group in flight, as if it had not been submitted; the weights stay."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. May be called twice."""

    def num_wanted(self, limit: int) -> int | None:
        """How many more responses to submit so that the engine stays busy with at most `limit` of them at once.

        None: the engine does not know, and the caller counts groups.
        """
        return None

    @property
    def num_workers(self) -> int:
        """Rollout workers in processes of their own; 0 when the calling process generates."""
        return 0

    def rest(self) -> None:  # noqa: B027
        """Training is about to use the device: free the memory that can be restored at the next step."""

    def release(self, submission: int, response: int) -> None:  # noqa: B027
        """A response of a request with `hold` will not be continued: free what was kept of it.

        A held response is continued by a request of the same submission and `first_response`, whose partial response
        begins with the held tokens, or it is released. An engine that keeps its cache must give the same tokens as one
        that computes it again.
        """

    def written(self) -> list[Written]:
        """What the responses of requests with `watch` gained since the last call, finished ones included.

        An engine that returns [] does not stream: its groups have all tokens when they finish.
        """
        return []

    def cancel(self, submission: int, response: int) -> None:
        """Forget the request of this submission and `first_response`, if it is in flight."""
        kept = [r for r in self.unfinished() if (r.submission, r.first_response) != (submission, response)]
        self.clear()
        for request in kept:
            self.submit(request)

    def metrics(self) -> Metrics:
        """Counts of worker failures since the start; {} without workers."""
        return {}

    def stacks(self) -> str:
        """What every worker is doing now, for a watchdog; "" without workers. From any thread."""
        return ""

    def kill(self) -> None:  # noqa: B027
        """End every worker at once: for a run that ends in a hurry. From any thread."""


def check_request(request: GroupRequest, max_length: int) -> None:
    """Refuse a request that cannot run, with a ValueError that names the prompt."""
    params, num_prompt = request.params, len(request.prompt.token_ids)
    where = f"prompt {request.prompt.uid!r}"
    if not num_prompt:
        raise ValueError(f"{where}: no tokens; a prompt needs at least one")
    if request.n < 1 or params.max_tokens < 1:
        raise ValueError(f"{where}: n={request.n}, max_tokens={params.max_tokens}; both must be at least 1")
    if not 0 <= params.temperature < math.inf or not 0 < params.top_p <= 1:
        raise ValueError(
            f"{where}: temperature={params.temperature}, top_p={params.top_p}; expected temperature >= 0 and "
            "0 < top_p <= 1"
        )
    if num_prompt + params.max_tokens > max_length:
        raise ValueError(
            f"{where}: {num_prompt} prompt tokens and max_tokens={params.max_tokens} exceed the engine's "
            f"max_length={max_length}; lower data.max_prompt_length or filter over-long prompts"
        )


def check_finished(request: GroupRequest | None, group: Any) -> Group:
    """The group of a request; an EngineError when the engine returned something else or parts of different length."""
    if not isinstance(group, Group):
        raise EngineError(f"the rollout engine returned a {type(group).__name__}; expected a gspo.Group")
    where = f"prompt {group.prompt.uid!r} (submission {group.submission}): the rollout engine returned"
    if request is None or (request.submission, request.prompt.uid) != (group.submission, group.prompt.uid):
        raise EngineError(f"{where} this group, which was not submitted or was returned before")
    if len(group.rollouts) != request.n:
        raise EngineError(f"{where} {len(group.rollouts)} rollouts; expected n={request.n}")
    for i, rollout in enumerate(group.rollouts):
        num_tokens = len(rollout.token_ids)
        for name in ("log_probs", "loss_mask", "versions"):
            if len(getattr(rollout, name)) != num_tokens:
                lengths = f"{len(getattr(rollout, name))} {name} for {num_tokens} tokens"
                raise EngineError(f"{where} {lengths} in response {i}; expected one per token")
        if not all(map(math.isfinite, rollout.log_probs)):
            raise not_finite_error(request, request.first_response + i, max(rollout.versions))
    return group


def check_list(groups: Any) -> list[Any]:
    """What an engine returned, which must be a list."""
    if not isinstance(groups, list):
        raise EngineError(f"the rollout engine returned a {type(groups).__name__}; expected a list of gspo.Group")
    return groups


def check_generated(requests: Sequence[GroupRequest], groups: Any) -> list[Group]:
    """The groups of `generate`, one per request in their order; else an EngineError."""
    if len(check_list(groups)) != len(requests):
        raise EngineError(f"the rollout engine returned {len(groups)} groups for {len(requests)} requests")
    return [check_finished(request, group) for request, group in zip(requests, groups)]


def not_finite_error(request: GroupRequest, response: int, version: int) -> FloatingPointError:
    """The error for log-probs that are NaN or infinite, which stops the run."""
    return FloatingPointError(
        f"prompt {request.prompt.uid!r} (submission {request.submission}, response {response}): the model gave "
        f"log-probs that are not finite under weights version {version}. Resume from an earlier checkpoint with a "
        "lower learning rate, or in float32."
    )
