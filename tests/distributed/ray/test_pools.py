"""Pools, roles and worker classes: which settings have an effect and which are refused by name."""

from __future__ import annotations

import pytest
import ray
import torch

from gspo.build.engines import engine_spec
from gspo.cluster import ClusterError, RankWorker, ResourcePool, ResourcePoolManager, Role, RolloutWorker
from gspo.config import load
from gspo.distributed.ray.backend import _place
from gspo.distributed.ray.placement import default_pools, make_pools, trainer_role, worker_classes
from gspo.models.load import load_tokenizer


def config(*overrides):
    return load(overrides=["trainer.backend=ray", *overrides]).config


def test_default_pools_follow_the_config():
    pools = default_pools(config(), gpus=0)
    assert pools.resource_pool_spec == {"global_pool": [1]}
    assert pools.mapping[Role.ActorRolloutRef] == pools.mapping[Role.Critic] == "global_pool"
    pools = default_pools(config("trainer.nnodes=2", "trainer.n_gpus_per_node=3"), gpus=0)
    assert pools.resource_pool_spec == {"global_pool": [3, 3]} and pools.get_n_gpus() == 6
    pools = default_pools(config("trainer.nnodes=2", "rollout.num_workers=2"), gpus=16)
    assert pools.resource_pool_spec == {"global_pool": [7, 7], "rollout_pool": [1, 1]}
    assert pools.mapping[Role.Rollout] == "rollout_pool"


def test_a_mapping_to_a_missing_pool_is_refused():
    with pytest.raises(ClusterError, match=r"mapping\[Role.Critic\]='b': no such pool; .*\['a'\]"):
        ResourcePoolManager({"a": [1]}, {Role.Critic: "b"})
    with pytest.raises(ClusterError, match=r"process_on_nodes=\[0\]"):
        ResourcePool([0])
    with pytest.raises(ClusterError, match=r"no pool for the trainer's ranks"):
        trainer_role(ResourcePoolManager({"a": [1]}, {Role.Rollout: "a"}))


def test_a_worker_sleeps_only_where_it_shares_its_gpu_with_a_rank():
    c = config("rollout.name=vllm")
    spec = engine_spec(c, load_tokenizer("embedded"), torch.device("cpu"))
    alone, beside = (ResourcePool([1], use_gpu=True, max_colocate_count=n) for n in (1, 2))
    on_cpu = ResourcePool([1], use_gpu=False, max_colocate_count=2)
    placed = [_place(spec, pool, c) for pool in (alone, beside, on_cpu)]
    assert [(p.device, p.options["sleep"]) for p in placed] == [("cuda:0", False), ("cuda:0", True), ("cpu", False)]


def test_pools_are_reserved_and_released(cluster):
    free = ray.available_resources().get("CPU", 0)
    manager = ResourcePoolManager({"a": [2], "b": [1, 1]}, {Role.ActorRollout: "a", Role.Rollout: "b"})
    with pytest.raises(ClusterError, match="call create_resource_pool"):
        manager.get_resource_pool(Role.ActorRollout)
    manager.create_resource_pool()
    pool = manager.get_resource_pool(Role.Rollout)
    assert pool.world_size == 2 and not pool.use_gpu and len(pool.get_placement_groups()) == 2
    pool.grow()
    assert pool.world_size == 3 and pool.options(2)["num_cpus"] == 1
    with pytest.raises(ClusterError, match=r"Role.RewardModel has no pool"):
        manager.get_resource_pool(Role.RewardModel)
    manager.release()
    assert ray.available_resources().get("CPU", 0) <= free


def test_missing_resources_are_named_at_once(cluster):
    with pytest.raises(ClusterError, match=r"need 99 CPUs, the cluster has 8; lower trainer.nnodes"):
        ResourcePoolManager({"a": [99]}, {Role.Actor: "a"}).create_resource_pool()
    with pytest.raises(ClusterError, match=r"need 1 GPUs, the cluster has 0"):
        ResourcePoolManager({"a": [1]}, {Role.Actor: "a"}).create_resource_pool(use_gpu=True)


def test_roles_of_one_pool_share_its_devices(cluster):
    manager = ResourcePoolManager({"a": [1]}, {Role.ActorRollout: "a", Role.Critic: "a", Role.Rollout: "a"})
    manager.create_resource_pool()
    assert manager.get_resource_pool(Role.Rollout).max_colocate_count == 2
    manager.release()


def test_custom_pools_override_counts_in_the_config(cluster):
    manager = ResourcePoolManager({"mine": [2]}, {Role.ActorRollout: "mine"})
    with pytest.warns(UserWarning, match=r"trainer.nnodes=1 and trainer.n_gpus_per_node=1 have no effect"):
        made = make_pools(config("trainer.n_gpus_per_node=1"), manager)
    assert made.get_resource_pool(Role.ActorRollout).world_size == 2
    made.release()


def test_a_pool_for_the_critic_alone_has_no_effect():
    manager = ResourcePoolManager({"a": [1], "b": [1]}, {Role.ActorRollout: "a", Role.Critic: "b"})
    with pytest.warns(UserWarning, match=r"mapping\[Role.Critic\]='b' has no effect"):
        assert trainer_role(manager) is Role.ActorRollout


class MyRank(RankWorker):
    pass


class MyRollout(RolloutWorker):
    pass


def test_custom_worker_classes_are_used_plain_or_remote():
    assert worker_classes(None) == (RankWorker, RolloutWorker)
    mapping = {Role.ActorRollout: MyRank, Role.Critic: MyRank, Role.Rollout: MyRollout}
    assert worker_classes(mapping) == (MyRank, MyRollout)
    remote = ray.remote(MyRank)
    assert worker_classes({Role.ActorRollout: remote, Role.RefPolicy: RankWorker})[0] is remote


@pytest.mark.parametrize("worker", [RankWorker, MyRank])
def test_each_role_may_have_its_own_call_of_remote(worker):
    """verl's mapping: every `ray.remote(Worker)` is a new class."""
    actor = ray.remote(worker)
    assert worker_classes({Role.ActorRollout: actor, Role.Critic: ray.remote(worker)})[0] is actor
    with pytest.raises(ClusterError, match=r"\[Role.Critic\]=MyRank has no effect"):
        worker_classes({Role.ActorRollout: ray.remote(RankWorker), Role.Critic: ray.remote(MyRank)})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({Role.ActorRollout: dict}, r"role_worker_mapping\[Role.ActorRollout\]=.*expected gspo.cluster.RankWorker"),
        ({Role.Rollout: MyRank}, r"role_worker_mapping\[Role.Rollout\].*expected gspo.cluster.RolloutWorker"),
        ({Role.ActorRollout: RankWorker, Role.Critic: MyRank}, r"\[Role.Critic\]=MyRank has no effect"),
        ({"actor": MyRank}, r"role_worker_mapping: 'actor' is not a gspo.cluster.Role"),
        ({Role.RewardModel: MyRank}, r"\[Role.RewardModel\] has no effect: rewards are functions"),
    ],
)
def test_classes_without_effect_are_refused(mapping, message):
    with pytest.raises(ClusterError, match=message):
        worker_classes(mapping)
