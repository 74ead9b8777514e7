"""The constructor of verl's class: which arguments have an effect, which warn and which are refused."""

from __future__ import annotations

import inspect

import pytest
from omegaconf import OmegaConf

import gspo.cluster
from gspo.cluster import ClusterError, RayPPOTrainer, RayPPOTrainerWithSampling, RayRanks, Role
from gspo.config import TrainerConfig, load
from gspo.trainer import ppo
from gspo.trainer.ppo import ray_trainer


def test_the_signature_is_verl_s():
    assert list(inspect.signature(RayPPOTrainerWithSampling).parameters) == [
        "config",
        "tokenizer",
        "role_worker_mapping",
        "resource_pool_manager",
        "ray_worker_group_cls",
        "processor",
        "reward_fn",
        "val_reward_fn",
        "train_dataset",
        "val_dataset",
        "collate_fn",
        "train_sampler",
        "device_name",
    ]


def test_it_is_found_under_every_path():
    assert ppo.RayPPOTrainerWithSampling is ppo.RayPPOTrainer is RayPPOTrainer is RayPPOTrainerWithSampling
    assert ray_trainer.RayPPOTrainer is RayPPOTrainer
    assert ray_trainer.ResourcePoolManager is gspo.cluster.ResourcePoolManager and ray_trainer.Role is Role


@pytest.mark.parametrize("name", ["processor", "collate_fn", "train_sampler"])
def test_arguments_without_effect_warn_by_name(name):
    with pytest.warns(UserWarning, match=f"^{name} has no effect: "):
        RayPPOTrainerWithSampling(TrainerConfig(), None, None, None, **{name: object()})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("ray_worker_group_cls", dict),
        ("resource_pool_manager", {"pool": [1]}),
        ("role_worker_mapping", {"actor": object}),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_by_name(argument, value):
    with pytest.raises(ClusterError, match=f"^{argument}"):
        RayPPOTrainerWithSampling(TrainerConfig(), **{argument: value})


def test_a_custom_worker_group_class_is_used():
    class Watched(RayRanks):
        pass

    trainer = RayPPOTrainerWithSampling(TrainerConfig(), ray_worker_group_cls=Watched)
    assert trainer._backend._rank_group_class is Watched


@pytest.mark.parametrize(
    "config",
    [
        TrainerConfig(),
        load(overrides=["trainer.seed=0"]),
        {"trainer": {"seed": 0}},
        OmegaConf.create({"trainer": {"seed": 0}}),
    ],
)
def test_any_kind_of_config_becomes_one_for_ray(config):
    trainer = RayPPOTrainerWithSampling(config, device_name="cpu")
    assert trainer.config.config.trainer.backend == "ray" and trainer.config.config.trainer.device == "cpu"


def test_the_caller_s_config_is_left_as_it_was():
    config = TrainerConfig()
    RayPPOTrainerWithSampling(config)
    assert config.trainer.backend == "local"


def test_close_without_workers_does_nothing():
    RayPPOTrainerWithSampling(TrainerConfig()).close()
