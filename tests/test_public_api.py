"""The front door: the names that users import from `gspo`, and their signatures. A change here breaks their code."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

import gspo

SIGNATURES = {
    "SupervisedTrainer": "(cfg, train_dataset=None, val_dataset=None, *, out=None, reward_fn=None, tokenizer=None, "
    "sinks=(), callbacks=(), console=None, backend=None)",
    "Trainer": "(cfg, reward_fn=None, train_dataset=None, val_dataset=None, *, val_reward_fn=None, tokenizer=None, "
    "sinks=(), callbacks=(), group_filter=None, environment=None, console=None, backend=None)",
    "advantage_estimator": "(name, *, options=())",
    "callback": "(name)",
    "dataset": "(name)",
    "engine": "(name)",
    "environment": "(name)",
    "group_filter": "(name)",
    "load_config": "(config_path=None, overrides=(), flags=(), *, base=None, recipe=None, system=None)",
    "policy_loss": "(name, *, clip_low=0.2, clip_high=0.2, aggregation='token-mean', "
    "levels=('token', 'sequence', 'sequence_token', 'turn'))",
    "reward": "(name, *, sources=(), cheap=False, preload=())",
    "sink": "(name)",
    "train": "(config=None, overrides=(), **options)",
}
FIELDS = {
    "Prompt": ("uid", "messages", "token_ids", "data_source", "ground_truth", "extra", "opening"),
    "Reward": ("score", "acc", "extra", "kl_penalty", "kl_by_token", "turns", "noise", "notes"),
    "Rollout": (
        *("token_ids", "log_probs", "loss_mask", "versions", "finish_reason", "text", "reward", "failure", "turns"),
        *("context", "branches"),
    ),
    "Group": ("prompt", "rollouts", "submission", "version", "failed"),
    "TrainerConfig": (
        *("algorithm", "data", "actor_rollout_ref", "critic", "reward_model", "reward"),
        *("custom_reward_function", "environment", "trainer"),
    ),
}
CALLBACK = (
    *("on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end"),
    *("state_dict", "load_state_dict"),
)


def signature(thing) -> str:
    """Names, kinds and defaults; annotations may become more exact."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(thing).parameters.values()]
    return str(inspect.Signature(parameters))


def test_the_names_are_these():
    assert set(gspo.__all__) == {*SIGNATURES, *FIELDS, "Callback"}
    assert set(gspo.__all__) <= set(dir(gspo))
    with pytest.raises(AttributeError, match="nosuchname"):
        gspo.nosuchname  # noqa: B018


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_stays(name):
    assert signature(getattr(gspo, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_stay(name):
    cls = getattr(gspo, name)
    assert tuple(f.name for f in dataclasses.fields(cls)) == FIELDS[name]


def test_the_points_of_a_callback_stay():
    assert tuple(n for n in vars(gspo.Callback) if not n.startswith("__")) == CALLBACK


def test_every_name_is_the_one_of_its_home():
    from gspo.config import TrainerConfig, load
    from gspo.loop.trainer import Trainer
    from gspo.types import Prompt

    assert (gspo.Trainer, gspo.TrainerConfig, gspo.load_config, gspo.Prompt) == (
        *(Trainer, TrainerConfig, load, Prompt),
    )


def test_types_ship_with_the_package():
    assert (Path(gspo.__file__).parent / "py.typed").is_file()


OLD_PATHS = (
    "gspo.algo:compute_policy_loss",
    "gspo.algo:compute_advantage",
    "gspo.algo:kl_penalty",
    "gspo.algo.losses:policy_loss",
    "gspo.algo.ratios:importance_ratio",
    "gspo.config:load",
    "gspo.data.datasets:dataset",
    "gspo.data.rows:Row",
    "gspo.loop.trainer:Trainer",
    "gspo.rewards:grade_code",
    "gspo.rewards:grade_math",
    "gspo.rewards:reward",
    "gspo.trainer.config:TrainerConfig",
    "gspo.trainer.ppo:PPOTrainerWithSampling",
)


@pytest.mark.parametrize("path", OLD_PATHS)
def test_documented_paths_of_the_first_release_stay(path):
    from gspo.registry import import_name

    assert import_name(path) is not None


@pytest.mark.parametrize(
    "name", ["RayPPOTrainer", "RayPPOTrainerWithSampling", "ResourcePoolManager", "Role", "RayTeam"]
)
def test_paths_of_a_cluster_stay(name):
    pytest.importorskip("ray")
    import gspo.cluster

    assert getattr(gspo.cluster, name) is not None
