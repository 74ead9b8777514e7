"""What every implementation of Roles must do. A test class derives from RolesContract and gives it `make`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gspo.algo.objective import BoundLoss
from gspo.algo.settings import LossSettings
from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.contents import MAPPINGS, ROLLOUTS
from gspo.training.batch.batching import collate
from gspo.training.critic import Critic, CriticSettings, ValueModel
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.policy import TokenScorer, Update
from gspo.training.reference import Reference
from gspo.training.roles import LocalRoles, Roles
from gspo.training.schedule import Schedule
from gspo.types import AdvantageBatch
from tests.distributed.cases import EPS, build_policy, made, place, uneven
from tests.training.models import llama

Make = Callable[[Path | None], Roles]  # the folder of the policy's weights; None: new ones
NUM_PARAMETERS = sum(p.numel() for p in llama().parameters())


def local_roles(sharded: bool, path: Path | None) -> LocalRoles:
    """A policy with the weights of `path`, a critic, and a reference with other weights, in this process."""
    model = llama() if path is None else AutoModelForCausalLM.from_pretrained(path)
    policy = build_policy(model, sharded)
    values = ValueModel(llama())
    value_ranks = place(values, sharded)
    optimizer = MasterOptimizer(values.named_parameters(), lr=1e-2, eps=EPS)
    settings = CriticSettings(mini_batch_groups=2, micro_batch_tokens=60)
    critic = made(value_ranks, lambda: Critic(values, optimizer, Schedule(1e-2), settings, value_ranks))
    frozen = llama(seed=1).requires_grad_(False)
    ranks = place(frozen, sharded)
    scorer = made(ranks, lambda: TokenScorer(frozen, policy.settings, ranks))
    return LocalRoles(policy, critic=critic, reference=Reference(scorer))


def scored(roles: Roles, seed: int = 0) -> AdvantageBatch:
    """A batch after all roles have scored it, with advantages drawn by `seed`."""
    assert roles.critic is not None and roles.reference is not None
    batch = roles.critic.score(roles.reference.score(roles.policy.score(collate(uneven(seed=seed)))))
    drawn = torch.randn(batch.num_sequences, 1, generator=torch.Generator().manual_seed(seed))
    return batch.with_advantages(drawn * batch.mask, drawn * batch.mask)


def train(roles: Roles, step: int) -> Update:
    """One step of policy and critic."""
    assert roles.critic is not None
    batch = scored(roles, seed=step)
    roles.critic.update(batch, step=step)
    return roles.update_policy(batch, BoundLoss("gspo", LossSettings()), step=step)


def weights(roles: Roles) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in roles.weights().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class RolesContract:
    """`make(path)` builds the models of `local_roles`."""

    @pytest.fixture
    def roles(self, make: Make) -> Roles:
        return make(None)

    def test_every_role_scores_and_learns(self, roles: Roles) -> None:
        facts = roles.facts()
        assert (facts.num_trained, facts.num_parameters) == (NUM_PARAMETERS, NUM_PARAMETERS)
        assert facts.has_critic and facts.has_reference and facts.frozen_digest is not None
        assert roles.critic is not None and roles.reference is not None
        batch = scored(roles)
        log_probs, entropies = roles.policy.log_probs(batch)
        known = [row for row in range(batch.num_sequences) if row not in batch.unscored_rows]
        assert known and batch.unscored_rows and torch.equal(batch.old_log_probs[known], log_probs[known])
        assert batch.values is not None and not batch.values.any(), "a new critic's values are 0"
        assert batch.ref_log_probs is not None and not torch.allclose(batch.ref_log_probs, log_probs)

        before = weights(roles)
        update = roles.update_policy(batch, BoundLoss("gspo", LossSettings()), step=0)
        first = list(batch.unscored_rows)
        assert not update.batch.unscored_rows and update.batch.entropy is not None
        assert torch.equal(update.batch.old_log_probs[first], log_probs[first])
        assert torch.equal(update.batch.entropy[first], entropies[first])
        assert torch.equal(update.log_probs[first], log_probs[first]), "those of the weights before the update"
        assert update.metrics["actor/seq_importance_ratio/mb0"].result() == pytest.approx(1.0)
        assert update.metrics["actor/entropy"].result() > 0
        assert not same(weights(roles), before)
        assert torch.equal(roles.reference.log_probs(batch), batch.ref_log_probs), "the reference does not learn"
        assert "critic/vf_loss" in roles.critic.update(batch, step=0)
        values = roles.critic.score(batch).values
        assert values is not None and values.any()

    def test_a_learning_rate_of_0_changes_nothing(self, roles: Roles) -> None:
        before = weights(roles)
        roles.scale_lr(0.0)
        assert train(roles, 0).metrics["actor/lr"].result() == 0.0
        assert same(weights(roles), before)

    def test_published_and_saved_weights_are_those_of_an_ordinary_model(self, roles: Roles, tmp_path: Path) -> None:
        train(roles, 0)
        now = weights(roles)
        with roles.published_weights() as published:
            assert same(dict(published), now)
        roles.save_model(tmp_path)
        assert same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), now)

    def test_a_checkpoint_continues_to_the_bit(self, make: Make, tmp_path: Path) -> None:
        roles = make(None)
        train(roles, 0)
        path = checkpoint.save(
            tmp_path,
            1,
            write_model=roles.save_model,
            tensors=roles.tensors(),
            write_shards=roles.write_shards,
            state=checkpoint.state_text(1, {name: {} for name in (*MAPPINGS, *ROLLOUTS)}),
        )
        old = train(roles, 1).log_probs
        expected = weights(roles)
        roles.close()
        resumed = make(path)
        resumed.load(checkpoint.load(path))
        assert torch.equal(train(resumed, 1).log_probs, old) and same(weights(resumed), expected)

    def test_close_may_come_twice(self, roles: Roles) -> None:
        assert isinstance(roles.stacks(), str)
        roles.close()
        roles.close()
