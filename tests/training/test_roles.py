"""What identifies the weights that no checkpoint contains, and which numbers of a checkpoint are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gspo.checkpoint.contents import CheckpointError
from gspo.training.critic import ValueModel
from gspo.training.lora import num_trained
from gspo.training.policy import PolicySettings, TokenScorer
from gspo.training.reference import Reference
from gspo.training.reward_model import RewardModel, RewardModelSettings
from gspo.training.roles import LocalRoles, check_numbers
from tests.training.models import classifier, llama
from tests.training.test_policy import policy


def frozen_reference(seed: int = 1) -> Reference:
    return Reference(TokenScorer(llama(seed).requires_grad_(False), PolicySettings()))


def reward_model(seed: int = 2) -> RewardModel:
    return RewardModel(ValueModel.of_classifier(classifier(seed).requires_grad_(False)), RewardModelSettings())


def test_the_digest_names_every_frozen_model_and_none_that_is_trained():
    trained, reference, judge = policy(llama()), frozen_reference(), reward_model()
    assert LocalRoles(trained).frozen_digest() is None
    assert LocalRoles(trained, reference=Reference(trained)).frozen_digest() is None  # the policy itself
    alone = LocalRoles(trained, reference=reference).frozen_digest()
    with_judge = LocalRoles(trained, reference=reference, reward_model=judge).frozen_digest()
    judged = LocalRoles(trained, reward_model=judge).frozen_digest()
    assert alone is not None and len(alone) == 16 and len({alone, with_judge, judged}) == 3
    with torch.no_grad():
        next(trained.model.parameters()).add_(1.0)
    assert LocalRoles(trained, reference=reference).frozen_digest() == alone
    assert LocalRoles(policy(llama(5)), reference=frozen_reference()).frozen_digest() == alone
    with torch.no_grad():
        list(reference.scorer.model.parameters())[-1].flatten()[-1].add_(1.0)
    assert LocalRoles(trained, reference=reference).frozen_digest() != alone


def test_facts_of_the_policy_are_those_of_its_model():
    model = llama()
    model.model.norm.weight.requires_grad_(False)
    roles = LocalRoles(policy(model), reward_model=reward_model())
    facts = roles.facts()
    assert roles.saves_in_background
    total = sum(p.numel() for p in model.parameters())
    assert (facts.num_trained, facts.num_parameters) == num_trained(model) == (total - 32, total)
    assert (facts.has_critic, facts.has_reference, facts.has_reward_model) == (False, False, True)
    assert ("model.norm.weight", [32], "torch.float32") in facts.shapes and facts.device == "cpu"
    assert (facts.num_ranks, facts.ranks_per_sequence, facts.layout_problem) == (None, 1, None)


@pytest.mark.parametrize(
    ("key", "values", "problem"),
    [
        ("exp_avg/w", [0.0, float("nan")], "not finite"),
        ("w", [float("inf")], "not finite"),
        ("master/w", [float("-inf")], "not finite"),
        ("exp_avg_sq/w", [0.0, -1e-9], "negative"),
        ("step/w", [-1.0], "negative"),
        ("exp_avg_sq/w", [0.0, 0.0], None),
        ("step/w", [0.0], None),
        ("exp_avg/w", [-1.0], None),
        ("exp_avg_sq_scale/w", [-1.0], None),
        ("exp_avg/w", [-1], None),  # codes of 8 bits
    ],
)
def test_numbers_that_no_training_leaves_are_refused(key, values, problem):
    sets = {"other": {"x": torch.ones(1)}, "optimizer": {"y": torch.ones(1), key: torch.tensor(values)}}
    if problem is None:
        check_numbers(Path("run/step_1"), sets)
        return
    with pytest.raises(CheckpointError, match=f"step_1: {key} of optimizer has .*{problem}"):
        check_numbers(Path("run/step_1"), sets)
