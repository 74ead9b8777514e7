"""The Python and YAML of the documents, as they stand up to sizes, and the examples that come of them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.config import load
from gspo.models.load import load_tokenizer
from gspo.trainer.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgoConfig,
    DataConfig,
    FilterGroupsConfig,
    PPOTrainerConfig,
    RolloutConfig,
    TrainerConfig,
)
from gspo.trainer.ppo import PPOTrainerWithSampling, RayPPOTrainerWithSampling
from tests.doors.worlds import MODELS, load_script, rows
from tests.support.small_run import even_first_byte

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{i}+1="}],
        "data_source": "mine",
        "reward_model": {"ground_truth": str(i + 1)},
    }
    for i in range(48)
]


def shrink(config: TrainerConfig) -> TrainerConfig:
    """The document's config with a small model and a hundredth of its sizes."""
    config.actor_rollout_ref.model.path = MODELS[0]
    config.data.gen_batch_size, config.data.train_batch_size = 8, 4
    config.data.max_prompt_length, config.data.max_response_length = 24, 6
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 2
    config.actor_rollout_ref.rollout.max_num_seqs = 32
    config.trainer.total_training_steps, config.trainer.num_threads = 2, 1
    config.trainer.experiment_name, config.trainer.save_freq = "run", -1
    return config


@pytest.fixture(params=["ray", "in process"])
def trainer_class(request) -> Any:
    """The class of the documents, on a local Ray, and its twin."""
    if request.param == "in process":
        return PPOTrainerWithSampling
    request.getfixturevalue("cluster")
    return RayPPOTrainerWithSampling


def on_a_cluster(trainer_class: Any) -> dict[str, Any]:
    """The two arguments the documents take for granted: one rank in one pool, where there is a cluster."""
    if trainer_class is PPOTrainerWithSampling:
        return {"role_worker_mapping": None, "resource_pool_manager": None}
    import ray

    from gspo.cluster import RankWorker, ResourcePoolManager, Role

    worker, pool = ray.remote(RankWorker), "global_pool"
    return {
        "role_worker_mapping": {Role.ActorRollout: worker, Role.Critic: worker, Role.RefPolicy: worker},
        "resource_pool_manager": ResourcePoolManager(
            resource_pool_spec={pool: [1]}, mapping={Role.ActorRollout: pool, Role.Critic: pool, Role.RefPolicy: pool}
        ),
    }


def test_example_1_grpo_with_dynamic_sampling(here, trainer_class):
    config = TrainerConfig(
        algorithm=AlgoConfig(
            adv_estimator="grpo",
            use_kl_in_reward=False,
            norm_adv_by_std_in_grpo=True,
            filter_groups=FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=10),
        ),
        data=DataConfig(gen_batch_size=1536, train_batch_size=512),
        actor_rollout_ref=ActorRolloutRefConfig(
            rollout=RolloutConfig(n=5), actor=ActorConfig(use_kl_loss=True, kl_loss_coef=0.001)
        ),
        trainer=PPOTrainerConfig(critic_warmup=0),
    )
    trainer = trainer_class(
        config=shrink(config),
        tokenizer=load_tokenizer(MODELS[0]),
        **on_a_cluster(trainer_class),
        reward_fn=even_first_byte,
        train_dataset=ROWS,
    )
    assert trainer.fit()["steps"] == 2
    table = rows(here / "runs" / "run")
    assert all("actor/kl_loss" in row and "train/num_gen_batches" in row for row in table)
    assert not [key for key in table[-1] if key.startswith("val-core")]  # no held-out rows were given


def test_example_2_ppo_with_dynamic_sampling(here, trainer_class):
    config = TrainerConfig(
        algorithm=AlgoConfig(
            adv_estimator="gae",
            use_kl_in_reward=True,
            filter_groups=FilterGroupsConfig(enable=True, metric="seq_reward", max_num_gen_batches=5),
        ),
        data=DataConfig(gen_batch_size=1024, train_batch_size=256),
        actor_rollout_ref=ActorRolloutRefConfig(rollout=RolloutConfig(n=4)),
        trainer=PPOTrainerConfig(critic_warmup=100),
    )
    shrink(config).trainer.critic_warmup = 1
    always = []

    def val_reward_fn(prompt, response):
        always.append(response)
        return 0.25

    trainer = trainer_class(
        config=config,
        tokenizer=load_tokenizer(MODELS[0]),
        **on_a_cluster(trainer_class),
        reward_fn=even_first_byte,
        val_reward_fn=val_reward_fn,
        train_dataset=ROWS,
        val_dataset=ROWS[:4],
    )
    assert trainer.fit()["steps"] == 2
    table = rows(here / "runs" / "run")
    assert len(table) == 1  # the first step warms the critic up and leaves the policy alone
    assert table[0]["val-core/mine/reward/mean@1"] == 0.25 and always


def test_example_3_the_class_under_another_name(here, cluster):
    result = load_script("examples/main_grpo.py").main(
        [
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=acc",
            "algorithm.filter_groups.max_num_gen_batches=10",
            "data.gen_batch_size=12",
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=5",
            "trainer.total_training_steps=1",
            "trainer.num_threads=1",
            "data.num_val_samples=4",
        ]
    )
    assert result["steps"] == 1


@pytest.mark.parametrize("name", ["grpo_dynamic_sampling", "ppo_dynamic_sampling"])
def test_the_examples_run(here, name):
    module = load_script(f"examples/{name}.py")
    config = module.make_config()
    config.data.gen_batch_size, config.data.train_batch_size = 8, 4
    config.trainer.total_training_steps, config.trainer.num_threads = 2, 1
    config.trainer.critic_warmup = min(config.trainer.critic_warmup, 1)
    assert module.main(config)["steps"] == 2


def test_filter_groups_can_be_assigned_later(here):
    """`config.algorithm.filter_groups = FilterGroupsConfig(…)` on an existing recipe."""
    config = shrink(TrainerConfig())
    config.algorithm.filter_groups = FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=10)
    trainer = PPOTrainerWithSampling(config=config, reward_fn=even_first_byte, train_dataset=ROWS).build()
    assert trainer.parts.sampler._settings.enable and trainer.parts.sampler._settings.metric == "acc"
    trainer.close()


def test_cluster_arguments_are_told_to_have_no_effect_in_one_process():
    with pytest.warns(UserWarning, match="role_worker_mapping has no effect"):
        PPOTrainerWithSampling(config=TrainerConfig(), role_worker_mapping={"actor": object})


def test_the_class_in_one_process_takes_every_argument_of_the_one_on_a_cluster(here):
    ours, theirs = (list(inspect.signature(c).parameters) for c in (PPOTrainerWithSampling, RayPPOTrainerWithSampling))
    assert ours == theirs
    with pytest.warns(UserWarning, match="ray_worker_group_cls has no effect: PPOTrainerWithSampling trains in this"):
        trainer = PPOTrainerWithSampling(
            shrink(TrainerConfig()),
            ray_worker_group_cls=object,
            reward_fn=even_first_byte,
            train_dataset=ROWS,
            device_name="cpu",
        )
    trainer.init_workers()
    assert trainer.config.config.trainer.device == "cpu"  # pyright: ignore
    assert trainer.fit()["steps"] == 2


def test_without_ray_the_documents_class_is_the_in_process_one(monkeypatch):
    from gspo.trainer import ppo

    monkeypatch.setattr(ppo, "find_spec", lambda name: None)
    for name in ("RayPPOTrainerWithSampling", "RayPPOTrainer"):
        with pytest.warns(UserWarning, match=rf"{name} needs Ray.*pip install 'gspo\[ray\]'"):
            assert getattr(ppo, name) is PPOTrainerWithSampling


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (
            "actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, clip_ratio_low: 0.0003,\n"
            '  clip_ratio_high: 0.0004, loss_agg_mode: "seq-mean-token-mean"}}',
            "actor_rollout_ref.actor.clip_ratio_high",
            0.0004,
        ),
        (
            'algorithm: {filter_groups: {enable: true, metric: "seq_reward", max_num_gen_batches: 5}}',
            "algorithm.filter_groups.max_num_gen_batches",
            5,
        ),
        ("actor:\n  importance_sampling_level: sequence", "actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"),
        (
            "algorithm: {filter_groups: {enable: true, metric: acc, max_num_gen_batches: 10}}\n"
            "data: {gen_batch_size: 1536, train_batch_size: 512}\nactor_rollout_ref: {rollout: {n: 5}}",
            "data.gen_batch_size",
            1536,
        ),
        ("algorithm: {filter_groups: {enable: false}}\ndata: {train_batch_size: 512}", "data.train_batch_size", 512),
        ("algorithm: {filter_groups: {enable: true, max_num_gen_batches: 0}}", "algorithm.filter_groups.enable", True),
    ],
)
def test_the_yaml_of_the_documents_loads(tmp_path: Path, text, key, value):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert load(path, ["actor_rollout_ref.model.path=org/model"]).get(key) == value


def test_the_loss_of_the_documents_is_gspo_token():
    """seq_importance_ratio = exp(log_prob - log_prob.detach() + kl_seq.detach()), then the maximum of both losses."""
    from gspo.algo import compute_policy_loss

    torch.manual_seed(0)
    log_prob = (-torch.rand(3, 5, dtype=torch.float64)).requires_grad_()
    old, mask = log_prob.detach() + 0.001 * torch.randn(3, 5), torch.ones(3, 5)
    advantages = torch.randn(3, dtype=torch.float64)[:, None].expand(3, 5)
    kl_seq = (log_prob - old).mean(-1, keepdim=True)
    ratio = torch.exp(log_prob - log_prob.detach() + kl_seq.detach())
    losses = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - 3e-4, 1 + 4e-4))
    (expected,) = torch.autograd.grad(losses.mean(), log_prob)
    for mode in ("gspo", "gspo_token"):
        ours = compute_policy_loss(mode, log_prob, old, advantages, mask)[0]
        assert torch.allclose(torch.autograd.grad(ours, log_prob)[0], expected, rtol=1e-9, atol=0)
