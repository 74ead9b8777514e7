"""What identifies the weights that no checkpoint contains, and what a checkpoint gives back to each role."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from gspo.checkpoint.contents import CheckpointError
from gspo.training.critic import ValueModel
from gspo.training.lora import num_trained
from gspo.training.policy import PolicySettings, TokenScorer
from gspo.training.reference import Reference
from gspo.training.reward_model import RewardModel, RewardModelSettings
from gspo.training.roles import LocalRoles, check_numbers
from tests.training.models import classifier, llama
from tests.training.test_critic import batch_with_returns, critic
from tests.training.test_policy import policy, ready, token_loss


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


def new_roles() -> LocalRoles:
    """A policy in half precision and a critic that no update has reached."""
    return LocalRoles(policy(llama(num_hidden_layers=1).bfloat16()), critic=critic(llama(num_hidden_layers=1)))


@cache
def trained_roles() -> LocalRoles:
    """The same after an update of each."""
    made = new_roles()
    made.policy.update(ready(made.policy), token_loss, step=0)
    assert made.critic is not None
    made.critic.update(batch_with_returns(made.critic), step=0)
    return made


def saved(roles: LocalRoles, folder: Path, without: tuple[str, str] | None = None) -> SimpleNamespace:
    """The tensor sets of the roles in files, as a checkpoint has them; one tensor of a set may be missing."""
    sets = {name: {key: t.detach().clone() for key, t in members.items()} for name, members in roles.tensors().items()}
    if without is not None:
        del sets[without[0]][without[1]]
    for name, members in sets.items():
        file = folder / "training" / f"{name}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: t.contiguous() for key, t in members.items()}, file)
    state = {"step": 1, "config": {}, "counters": {}, "without_state": {}}
    return SimpleNamespace(path=folder, state=state, set_names=list(sets), tensors=sets)


def assert_state(roles: LocalRoles, loaded: SimpleNamespace, left_out: tuple[str, str] | None = None) -> None:
    """Every tensor is that of the checkpoint, but the step and the moments of one parameter are not there."""
    for name, members in roles.tensors().items():
        wanted = dict(loaded.tensors[name])
        if left_out is not None and name == left_out[0]:
            wanted = {k: t for k, t in wanted.items() if k.startswith("master/") or k.partition("/")[2] != left_out[1]}
        assert members.keys() == wanted.keys() and len(wanted) > 5
        assert all(torch.equal(members[key], wanted[key]) for key in wanted), name


def test_every_set_of_a_checkpoint_is_loaded_into_its_role(tmp_path):
    loaded = saved(trained_roles(), tmp_path)
    assert set(loaded.tensors) == {"optimizer", "critic/model", "critic/optimizer"}
    fresh = new_roles()
    assert fresh.without_state().keys() == {"optimizer", "critic/optimizer"}
    assert fresh.load(loaded) == []
    assert_state(fresh, loaded)
    assert fresh.without_state() == {}
    name, weight = next(iter(fresh.policy.optimizer.parameters.items()))
    assert torch.equal(weight, loaded.tensors["optimizer"][f"master/{name}"].to(weight.dtype))


@pytest.mark.parametrize("of", ["optimizer", "critic/optimizer"])
def test_a_parameter_without_one_moment_starts_at_0_and_keeps_its_master(of, tmp_path):
    source = trained_roles()
    parameter = "model.norm.weight" if of == "optimizer" else "head.bias"
    loaded = saved(source, tmp_path, without=(of, f"exp_avg_sq/{parameter}"))
    with pytest.raises(CheckpointError, match=rf"training/{of}: missing: exp_avg_sq/{parameter}"):
        new_roles().load(loaded)
    fresh = new_roles()
    (note,) = fresh.load(loaded, reset=True)
    assert f"training/{of} starts at 0 where it does not fit: missing: exp_avg_sq/{parameter}" in note
    assert_state(fresh, saved(source, tmp_path / "whole"), left_out=(of, parameter))
    assert fresh.without_state() == {of: [parameter]}


def test_a_parameter_without_its_master_keeps_its_moments(tmp_path):
    loaded = saved(trained_roles(), tmp_path, without=("optimizer", "master/model.norm.weight"))
    fresh = new_roles()
    own = fresh.policy.optimizer.state_tensors()["master/model.norm.weight"].clone()
    fresh.load(loaded, reset=True)
    found = fresh.policy.optimizer.state_tensors()
    assert fresh.without_state() == {} and torch.equal(found["master/model.norm.weight"], own)
    assert all(torch.equal(found[key], tensor) for key, tensor in loaded.tensors["optimizer"].items())


def test_weights_that_are_not_finite_are_refused_wherever_they_are(tmp_path):
    loaded = saved(trained_roles(), tmp_path)
    loaded.tensors["critic/model"]["head.bias"][0] = float("nan")
    with pytest.raises(CheckpointError, match=r"head\.bias of critic/model has values that are not finite"):
        new_roles().load(loaded)
    loaded, fresh = saved(trained_roles(), tmp_path / "other"), new_roles()
    with torch.no_grad():
        fresh.policy.model.model.norm.weight[0] = float("inf")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight of the model has values that are not finite"):
        fresh.load(loaded)
