"""Small trainings, each a function of where the model is placed: in one process, or in shards on several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gspo.algo.objective import BoundLoss, BoundRegulariser
from gspo.algo.settings import LossSettings
from gspo.training.batch.batching import collate
from gspo.training.critic import Critic, CriticSettings, ValueModel
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.parallel.fsdp import Shards, ShardSettings, full
from gspo.training.parallel.ranks import ALONE, Ranks
from gspo.training.policy import Policy, PolicySettings, Supervision, TokenScorer
from gspo.training.reference import Reference
from gspo.training.reward_model import RewardModel, RewardModelSettings
from gspo.training.schedule import Schedule
from gspo.types import AdvantageBatch, Group
from tests.training.models import classifier, gemma2, llama, qwen3_moe
from tests.training.test_policy import groups

Numbers = dict[str, Any]
Case = Callable[[bool], Numbers]
EPS = 1e-3  # of AdamW: with 1e-8 a gradient of 1e-9 that rounds otherwise would move a weight by the whole rate


def uneven(num: int = 5, seed: int = 0) -> list[Group]:
    """Groups of 4, 1, 3, 4 and 2 answers, with prompts and answers of many lengths."""
    sizes = [4, 1, 3, 4, 2]
    return [g.with_rollouts(g.rollouts[: sizes[i % 5]]) for i, g in enumerate(groups(num=num, seed=seed))]


def place(model: nn.Module, sharded: bool, device: str = "cpu", **settings: Any) -> Ranks:
    if not sharded:
        return ALONE
    return Shards(model, torch.device(device), ShardSettings(**settings))


def gathered(ranks: Ranks, parts: Tensor) -> Tensor:
    """All rows of a tensor that is 0 in other ranks' rows."""
    return ranks.sum(parts)


def made(ranks: Ranks, make: Callable[[], Any]) -> Any:
    with torch.no_grad():
        out = ranks.run(make)
    ranks.rest()
    return out


def build_policy(
    model: Any, sharded: bool, *, clip: float = 100.0, sharding: dict[str, Any] | None = None, **settings: Any
) -> Policy:
    ranks = place(model, sharded, **(sharding or {}))
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-2, eps=EPS, grad_clip=clip)
    chosen = PolicySettings(**{"mini_batch_groups": 2, "micro_batch_tokens": 60, **settings})
    return made(ranks, lambda: Policy(model, optimizer, Schedule(1e-2), chosen, ranks))


def prepared(policy: Policy, of: list[Group], seed: int, order_seed: int | None = None) -> AdvantageBatch:
    """A scored batch with advantages drawn by `seed`."""
    batch = policy.score(collate(of, order_seed))
    for name in ("old_log_probs", "entropy"):
        if (part := getattr(batch, name)) is not None:
            batch = dataclasses.replace(batch, **{name: gathered(policy.ranks, part)})
    drawn = torch.randn(batch.num_sequences, 1, generator=torch.Generator().manual_seed(seed))
    return batch.with_advantages(drawn * batch.mask, drawn * batch.mask)


def numbers(model: Any, optimizer: MasterOptimizer, ranks: Ranks) -> Numbers:
    """Weights and moments, in one piece."""
    ranks.rest()
    state = {f"state {k}": full(v).float().clone() for k, v in optimizer.state_tensors().items()}
    return state | {f"weight {k}": full(p.detach()).float().clone() for k, p in model.named_parameters()}


def updates(
    policy: Policy, num: int = 3, of: Callable[[int], list[Group]] | None = None, shuffle: bool = False
) -> Numbers:
    """Several updates; their metrics (of this rank), log-probs of all rows, and the resulting weights and moments."""
    out: Numbers = {}
    for step in range(num):
        order_seed = step if shuffle else None
        batch = prepared(policy, of(step) if of else uneven(seed=step), seed=step, order_seed=order_seed)
        update = policy.update(batch, BoundLoss("gspo", LossSettings(clip_low=0.02, clip_high=0.02)), step=step)
        out[f"log_probs {step}"] = gathered(policy.ranks, update.log_probs)
        out[f"metrics {step}"] = update.metrics
    return out | numbers(policy.model, policy.optimizer, policy.ranks)


def shared_prompts(sharded: bool) -> Numbers:
    return updates(build_policy(llama(), sharded))


def padded_rows(sharded: bool) -> Numbers:
    return updates(build_policy(llama(), sharded, layout="plain", micro_batch_tokens=None, micro_batch_rows=2))


def recomputed_old(sharded: bool) -> Numbers:
    policy = build_policy(llama(), sharded, layout="packed", old_log_prob_source="recompute", num_epochs=2)
    return updates(policy)


def shuffled_mini_batches(sharded: bool) -> Numbers:
    return updates(build_policy(llama(), sharded, num_epochs=2), shuffle=True)


def mixture_of_experts(sharded: bool) -> Numbers:
    return updates(build_policy(qwen3_moe(), sharded, layout="packed"))


def untied_and_checkpointed(sharded: bool) -> Numbers:
    model = llama(tie_word_embeddings=False)
    model.gradient_checkpointing_enable()
    return updates(build_policy(model, sharded, entropy_checkpointing=True))


def clipped(sharded: bool) -> Numbers:
    return updates(build_policy(llama(), sharded, clip=0.05))


def fewer_rows_than_ranks(sharded: bool) -> Numbers:
    return updates(build_policy(llama(), sharded), of=lambda step: uneven(seed=step)[1:2])


def copies(sharded: bool) -> Numbers:
    """Every rank holds the whole model: gradients are summed over copies."""
    sharding = {"fsdp_size": 1, "reshard_after_forward": False}
    return updates(build_policy(llama(), sharded, sharding=sharding))


def not_resharded(sharded: bool) -> Numbers:
    """Gathered weights stay gathered between a forward and its backward."""
    return updates(build_policy(llama(), sharded, sharding={"reshard_after_forward": False}))


def reference_and_entropy(sharded: bool, **sharding: Any) -> Numbers:
    policy = build_policy(llama(), sharded, entropy_in_loss=True, sharding=sharding)
    frozen = llama(seed=1).requires_grad_(False)
    ranks = place(frozen, sharded, **sharding)
    reference = Reference(made(ranks, lambda: TokenScorer(frozen, policy.settings, ranks)))
    regulariser = BoundRegulariser("seq-mean-token-mean", kl_coef=0.3, entropy_coeff=0.05)
    out: Numbers = {}
    for step in range(2):
        batch = prepared(policy, uneven(seed=step), seed=step)
        ref = gathered(ranks, reference.log_probs(batch))
        batch = dataclasses.replace(batch, ref_log_probs=ref)
        out[f"ref {step}"] = batch.ref_log_probs
        update = policy.update(batch, BoundLoss("gspo", LossSettings()), step=step, regulariser=regulariser)
        out[f"metrics {step}"] = update.metrics
    return out | numbers(policy.model, policy.optimizer, policy.ranks)


def critic(sharded: bool, **sharding: Any) -> Numbers:
    model = ValueModel(llama())
    ranks = place(model, sharded, **sharding)
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-2, eps=EPS)
    settings = CriticSettings(mini_batch_groups=2, micro_batch_tokens=60)
    role = made(ranks, lambda: Critic(model, optimizer, Schedule(1e-2), settings, ranks))
    out: Numbers = {}
    for step in range(3):
        batch = role.score(collate(uneven(seed=step)))
        batch = dataclasses.replace(batch, values=gathered(ranks, batch.values))
        drawn = torch.randn(batch.num_sequences, 1, generator=torch.Generator().manual_seed(step))
        batch = batch.with_old(batch.rollout_log_probs).with_advantages(drawn * batch.mask, drawn * batch.mask)
        out[f"values {step}"] = batch.values
        out[f"metrics {step}"] = role.update(batch, step=step)
    return out | numbers(model, optimizer, ranks)


def reward_model(sharded: bool, **sharding: Any) -> Numbers:
    """Scores of texts of many lengths, more and fewer than there are ranks."""
    model = ValueModel.of_classifier(classifier().requires_grad_(False))
    ranks = place(model, sharded, **sharding)
    role = made(ranks, lambda: RewardModel(model, RewardModelSettings(max_tokens=60), ranks))
    texts = [rollout.token_ids for group in uneven() for rollout in group.rollouts]
    return {f"scores {count}": gathered(ranks, role.scores(texts[:count])) for count in (1, len(texts))}


def examples_beside(sharded: bool, **sharding: Any) -> Numbers:
    """A supervised loss in the same optimizer steps; one of them has no examples."""
    policy = build_policy(llama(), sharded, sharding=sharding)
    others = collate(uneven(num=2, seed=7))
    others = dataclasses.replace(others, group_ids=torch.arange(others.num_sequences))
    out: Numbers = {}
    for step in range(2):
        batch = prepared(policy, uneven(seed=step), seed=step)
        beside = Supervision(others, 0.5)
        update = policy.update(batch, BoundLoss("gspo", LossSettings()), step=step, beside=beside)
        out[f"metrics {step}"] = update.metrics
    return out | numbers(policy.model, policy.optimizer, policy.ranks)


def bad_numbers(sharded: bool) -> Numbers:
    """One infinite advantage: its mini-batch is skipped on all ranks, the others are not."""
    policy = build_policy(llama(), sharded)
    batch = prepared(policy, uneven(), seed=0)
    batch.advantages[0] = float("inf")
    update = policy.update(batch, BoundLoss("gspo", LossSettings()), step=0)
    return {"metrics 0": update.metrics} | numbers(policy.model, policy.optimizer, policy.ranks)


def bad_gradients(sharded: bool) -> Numbers:
    """A finite loss with a gradient that is not: skipped on all ranks, and no weight changes."""
    policy = build_policy(llama(), sharded, mini_batch_groups=5)
    batch = prepared(policy, uneven(), seed=0)
    before = numbers(policy.model, policy.optimizer, policy.ranks)
    update = policy.update(batch, _InfiniteSlope(), step=0)
    after = numbers(policy.model, policy.optimizer, policy.ranks)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    return {"metrics 0": update.metrics} | after


class _InfiniteSlope:
    """0 with an infinite slope in one row of the batch's first group, in other rows the sum of log-probs."""

    def __call__(self, x: Any) -> Any:
        from gspo.types import LossOutput

        first = (x.advantages[:, :1] == x.advantages[:, :1].max()).float()
        loss = (x.log_probs * x.mask).sum() / x.totals.num_tokens
        steep = torch.sqrt((x.log_probs - x.log_probs.detach()).abs() * first + (1 - first))
        return LossOutput(loss + ((steep - steep.detach()) * x.mask).sum(), {})


def low_precision(sharded: bool) -> Numbers:
    """bf16 compute over float32 masters."""
    model = llama().to(torch.bfloat16)
    policy = build_policy(model, sharded, sharding={"compute_dtype": torch.bfloat16})
    out = updates(policy)
    masters = policy.optimizer.masters.values()
    assert all(m.dtype == torch.float32 for m in masters)
    return out


TWO_PER_SEQUENCE = {"ranks_per_sequence": 2}


def sequences(sharded: bool) -> Numbers:
    """Two ranks share every sequence, with shared prompts and layers that are computed again in the backward."""
    model = llama()
    model.gradient_checkpointing_enable()
    return updates(build_policy(model, sharded, sharding=TWO_PER_SEQUENCE))


def sequences_eager(sharded: bool) -> Numbers:
    """Attention block by block, with a window in every second layer."""
    settings = {"layout": "packed", "old_log_prob_source": "recompute", "num_epochs": 2}
    return updates(build_policy(gemma2(), sharded, sharding=TWO_PER_SEQUENCE, **settings))


def sequences_of_experts(sharded: bool) -> Numbers:
    return updates(build_policy(qwen3_moe(), sharded, layout="packed", sharding=TWO_PER_SEQUENCE))


def sequences_with_reference(sharded: bool) -> Numbers:
    return reference_and_entropy(sharded, **TWO_PER_SEQUENCE)


def sequences_critic(sharded: bool) -> Numbers:
    return critic(sharded, **TWO_PER_SEQUENCE)


def sequences_reward_model(sharded: bool) -> Numbers:
    return reward_model(sharded, **TWO_PER_SEQUENCE)


def sequences_with_examples(sharded: bool) -> Numbers:
    return examples_beside(sharded, **TWO_PER_SEQUENCE)


def sequences_on_four(sharded: bool) -> Numbers:
    """More ranks than key heads, and rows with fewer tokens than ranks."""
    policy = build_policy(llama(), sharded, sharding={"ranks_per_sequence": 4}, micro_batch_tokens=1)
    return updates(policy, of=lambda step: shortened(uneven(seed=step), step))


def shortened(of: list[Group], step: int) -> list[Group]:
    """The groups with, in the first, prompts of one token and answers of two."""
    first = of[0]
    prompt = dataclasses.replace(first.prompt, token_ids=first.prompt.token_ids[:1])
    short = tuple(
        dataclasses.replace(r, token_ids=r.token_ids[:2], log_probs=r.log_probs[:2], loss_mask=r.loss_mask[:2])
        for r in first.rollouts[:1]
    )
    return [dataclasses.replace(first, prompt=prompt, rollouts=short), *of[1:]]


PER_SEQUENCE = {  # case → ranks that share a sequence
    "sequences": 2,
    "sequences_eager": 2,
    "sequences_of_experts": 2,
    "sequences_with_reference": 2,
    "sequences_critic": 2,
    "sequences_reward_model": 2,
    "sequences_with_examples": 2,
    "sequences_on_four": 4,
}
CASES: dict[str, Case] = {
    f.__name__: f
    for f in (
        shared_prompts,
        padded_rows,
        recomputed_old,
        shuffled_mini_batches,
        mixture_of_experts,
        untied_and_checkpointed,
        clipped,
        fewer_rows_than_ranks,
        copies,
        not_resharded,
        reference_and_entropy,
        critic,
        reward_model,
        examples_beside,
        bad_numbers,
        bad_gradients,
        low_precision,
        sequences,
        sequences_eager,
        sequences_of_experts,
        sequences_with_reference,
        sequences_critic,
        sequences_reward_model,
        sequences_with_examples,
        sequences_on_four,
    )
}
