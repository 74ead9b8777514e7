"""What the recipe promises, as tests: `python -m pytest recipes/gspo/test_gspo_dynamic_sampling.py`."""

from __future__ import annotations

from pathlib import Path

import torch

from gspo.algo import compute_policy_loss
from gspo.config import load, resolved_loss
from gspo.sampling.filters import judge
from gspo.types import Group, Prompt, Reward, Rollout

CONFIG = Path(__file__).parent / "config" / "gspo_dynamic_sampling.yaml"


def group(*scores: float) -> Group:
    prompt = Prompt("p", ({"role": "user", "content": "?"},), (1,))
    rollouts = (Rollout((1,), (-1.0,), (1,), (0,), "stop", reward=Reward(s)) for s in scores)
    return Group(prompt, tuple(rollouts), 0, 0)


def test_the_config_asks_for_gspo_with_dynamic_sampling():
    config = load(CONFIG).config
    objective = resolved_loss(config.actor_rollout_ref.actor)
    assert (objective.loss_mode, objective.level, objective.clip) == ("gspo", "sequence", (3e-4, 4e-4))
    assert objective.aggregation == "seq-mean-token-mean"
    assert config.algorithm.filter_groups.enable and config.algorithm.filter_groups.metric == "seq_reward"


def test_groups_of_equal_rewards_are_left_out():
    assert not judge(group(1.0, 1.0, 1.0)).keep and judge(group(1.0, 1.0)).reason == "all_right"
    assert not judge(group(0.0, 0.0, 0.0)).keep and judge(group(0.0, 0.0)).reason == "all_wrong"
    assert judge(group(1.0, 0.0, 0.0)).keep


def test_a_sequence_beyond_the_band_has_no_gradient():
    new = torch.tensor([[-0.9, -0.5], [-1.0, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.0, -0.5], [-1.0, -0.5]])
    loss, metrics = compute_policy_loss("gspo", new, old, torch.ones(2), torch.ones(2, 2))
    loss.backward()
    assert new.grad is not None and not new.grad[0].any() and new.grad[1].all()
    assert metrics["actor/pg_clipfrac_upper"] == 0.5
