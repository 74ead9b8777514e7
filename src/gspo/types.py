"""The data that flows through the system: Prompt → Rollout → Group → batch → LossInputs → LossOutput.

A batch passes three stages: TrainBatch (groups as tensors) → ScoredBatch (with π_old) → AdvantageBatch (what an update
trains on). Each adds required fields; none is changed in place.

Words: a *prompt* is one question, a *rollout* one response with its log-probs, a *group* the n rollouts of a
prompt, a *batch* one training step, a *mini-batch* one optimiser step, a *micro-batch* one forward, a *version*
one state of the weights. With an environment a rollout has several *turns* of the model, with *observations* between
them. Tensor names may end in their shape: B sequences, T response tokens, 1 per sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gspo.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor

# `turns`: the limit of turns was reached; `environment`: the environment ended the episode.
FinishReason = Literal["stop", "length", "aborted", "turns", "environment"]
Batch = TypeVar("Batch", bound="TrainBatch")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question as the model sees it. `uid` is stable across resume and names the row in every message."""

    uid: str
    messages: tuple[Mapping[str, Any], ...]
    token_ids: tuple[int, ...]
    data_source: str = "unknown"
    ground_truth: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    opening: tuple[Mapping[str, Any], ...] = ()  # messages with which an environment began, the last of `messages`


@dataclass(frozen=True, slots=True)
class Reward:
    """What a response earned. `acc=None` means the reward function did not provide an accuracy.

    `kl_penalty` is the KL penalty of the whole response, `kl_by_token` how it is spread over its tokens.
    `turns` are the parts of the score that each turn of the model earned; empty without an environment. `noise` is how
    far repeated scores of this response lie apart, 0 when it was scored once. `notes` are plain data for readers of the
    run, such as a judge's verdict and its reason.
    """

    score: float
    acc: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    kl_penalty: float = 0.0
    kl_by_token: tuple[float, ...] = ()
    turns: tuple[float, ...] = ()
    noise: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def final(self) -> float:
        """The score after the KL penalty: what advantages are computed from."""
        return self.score - self.kl_penalty


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: the tokens start..end-1 of its rollout. What follows it, up to the next turn, is observation.

    `reward` is what the environment gave for it, None if nothing. `num_errors` counts the tool calls that failed;
    `malformed` says that the text had a tool call which could not be read. `num_cut` counts messages of the observation
    that were too long and cut. `metrics` are the environment's. `truncated` says that the answer to an agent's request
    ended at its length limit.
    """

    start: int
    end: int
    text: str = ""
    reward: float | None = None
    num_calls: int = 0
    num_errors: int = 0
    malformed: bool = False
    observation: str = ""
    num_cut: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response. Masks are carried with the tokens, never derived from pad or eos ids.

    `loss_mask` is 1 on tokens that the model wrote and 0 on observations. `log_probs` are the behaviour policy's (μ),
    float32, under logits / temperature, and 0 on observations; `versions` is the weights version of each token. `text`
    is what the model wrote, in its last turn where there are `turns`. `reward` is None until scored; `failure` says why
    there is none. `context` are the tokens before the response where they are not the prompt's. `branches` are further
    conversations of the same agent, each with a context of its own; they share the rollout's reward.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str = ""
    reward: Reward | None = None
    failure: str | None = None
    turns: tuple[Turn, ...] = ()
    context: tuple[int, ...] = ()
    branches: tuple[Rollout, ...] = ()

    @property
    def num_model_tokens(self) -> int:
        """Tokens that the model wrote: the length of the response, however much an environment added."""
        return sum(self.loss_mask)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that the model wrote, in the branches too."""
        return self.num_model_tokens + sum(branch.num_model_tokens for branch in self.branches)

    @property
    def model_token_ids(self) -> tuple[int, ...]:
        """The tokens that the model wrote."""
        return tuple(token for token, own in zip(self.token_ids, self.loss_mask) if own)

    def with_reward(self, reward: Reward | None, failure: str | None = None) -> Rollout:
        return dataclasses.replace(self, reward=reward, failure=failure)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt: the unit of advantage, filtering and staleness.

    `submission` is the number under which the prompt was submitted (it seeds the sampling and orders the queue);
    `version` is the weights version at submission. `failed` are rollouts without a reward, which are only recorded.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    submission: int
    version: int
    failed: tuple[Rollout, ...] = ()

    def with_rollouts(self, rollouts: tuple[Rollout, ...]) -> Group:
        return dataclasses.replace(self, rollouts=rollouts)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model wrote, in branches and in rollouts without a reward too."""
        return sum(r.num_generated_tokens for r in (*self.rollouts, *self.failed))


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The groups of one training step, row-aligned: B sequences, right-padded to T response tokens.

    `prompt_ids`/`response_ids` keep the ragged tokens; the padded tensors hold what losses see. `ref_log_probs`,
    `values` and `kl_penalties` are None when what they need is switched off.
    """

    prompt_ids: list[tuple[int, ...]]
    response_ids: list[tuple[int, ...]]
    mask: Tensor  # [B,T] 1 where a token is trained on
    group_ids: Tensor  # [B] int64, rows of one group share a number
    scores: Tensor  # [B] float: reward after KL, per sequence
    rollout_log_probs: Tensor  # [B,T] μ
    ref_log_probs: Tensor | None = None  # [B,T] π_ref
    values: Tensor | None = None  # [B,T]
    kl_penalties: Tensor | None = None  # [B,T] what KL takes off `scores`, by token
    order_seed: int | None = None  # draws which groups share a mini-batch; None: neighbours do
    turn_ids: Tensor | None = None  # [B,T] int64, the turn of a token, -1 on observations; None without turns
    turn_rewards: Tensor | None = None  # [B,K] the parts of `scores` by turn, 0 after a rollout's last
    branch_of: tuple[int, ...] = ()  # the rows of the rollouts whose branches are the last rows of the batch

    @property
    def num_sequences(self) -> int:
        return len(self.response_ids)

    @property
    def num_rollouts(self) -> int:
        """Rows that are rollouts; those after them are branches."""
        return len(self.response_ids) - len(self.branch_of)

    def by_prompt(self, rows: Sequence[int]) -> list[list[int]]:
        """These rows by group and prompt: the rows of one list can share the tokens of their prompt."""
        found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row, group in zip(rows, self.group_ids[list(rows)].tolist()):
            found.setdefault((group, self.prompt_ids[row]), []).append(row)
        return list(found.values())

    def without_branches(self: Batch) -> Batch:
        """The batch of the rollouts alone."""
        num, kept = self.num_rollouts, {"order_seed", "branch_of", "unscored_rows"}  # what is not by row
        by_row = {name: value for name, value in _fields(self).items() if name not in kept and value is not None}
        return dataclasses.replace(self, **{name: value[:num] for name, value in by_row.items()}, branch_of=())

    def with_old(
        self, log_probs: Tensor, entropy: Tensor | None = None, unscored_rows: Sequence[int] = ()
    ) -> ScoredBatch:
        """The batch with π_old [B,T] and its entropies, except in `unscored_rows`."""
        return ScoredBatch(
            **_fields(self), old_log_probs=log_probs, entropy=entropy, unscored_rows=tuple(unscored_rows)
        )


Scored = TypeVar("Scored", bound="ScoredBatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch(TrainBatch):
    """A batch with π_old. In `unscored_rows` it is not known yet (0): the update's own first forward gives it.

    `entropy` is None when π_old was not computed here but taken from the rollouts.
    """

    old_log_probs: Tensor  # [B,T]
    entropy: Tensor | None  # [B,T] of π_old, for logging
    unscored_rows: tuple[int, ...]

    def with_rows(self: Scored, rows: Sequence[int], log_probs: Tensor, entropy: Tensor) -> Scored:
        """The batch with π_old and entropies [len(rows),T] of rows that were not scored."""
        if not rows:
            return self
        assert self.entropy is not None and set(rows) <= set(self.unscored_rows)
        old, entropies = self.old_log_probs.clone(), self.entropy.clone()
        old[rows], entropies[rows] = log_probs, entropy
        left = tuple(sorted(set(self.unscored_rows) - set(rows)))
        return dataclasses.replace(self, old_log_probs=old, entropy=entropies, unscored_rows=left)

    def with_advantages(self, advantages: Tensor, returns: Tensor) -> AdvantageBatch:
        """The batch with advantages and returns [B,T]."""
        return AdvantageBatch(**_fields(self), advantages=advantages, returns=returns)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageBatch(ScoredBatch):
    """A batch with advantages: everything that the updates of one training step need."""

    advantages: Tensor  # [B,T]
    returns: Tensor  # [B,T]


def _fields(batch: TrainBatch) -> dict[str, Any]:
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Denominators of a whole mini-batch over all ranks, known before its first forward.

    `num_sequences` counts rollouts with at least one trained token; a branch counts with its rollout.
    """

    num_tokens: float
    num_sequences: float


@dataclass(frozen=True, slots=True)
class LossInputs:
    """All a policy loss may see. Tensors are [B,T]; `mask` is 1 on trained tokens; only `log_probs` has a gradient."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    totals: BatchTotals
    rollout_log_probs: Tensor | None = None
    turn_ids: Tensor | None = None  # int64, the number of the turn that a token belongs to; None without turns


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss already divided by the global totals (so micro-batch losses add up) and its mergeable metrics."""

    loss: Tensor
    metrics: Metrics
