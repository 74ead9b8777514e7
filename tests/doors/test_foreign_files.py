"""Configurations of verl and AReaL, rebuilt from facts about their scripts and files, trained for two steps."""

from __future__ import annotations

import pytest

from gspo.config import load
from gspo.loop.run import run_program
from gspo.trainer.main_ppo import main as main_ppo
from tests.doors.worlds import MODELS, SMALL, rows

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
# What nearly every script of verl passes, with the sizes of this test.
COMMON = [
    "data.train_files=gsm8k:gsm8k",
    "data.val_files=gsm8k:gsm8k",
    "data.train_batch_size=4",
    "data.train_max_samples=-1",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    f"{M}.path={MODELS[0]}",
    f"{M}.use_remove_padding=True",
    f"{M}.enable_gradient_checkpointing=True",
    f"{A}.optim.lr=1e-3",
    f"{A}.ppo_mini_batch_size=2",
    f"{A}.ppo_micro_batch_size_per_gpu=4",
    f"{A}.fsdp_config.param_offload=False",
    f"{A}.fsdp_config.optimizer_offload=False",
    f"{R}.log_prob_micro_batch_size_per_gpu=4",
    f"{R}.tensor_model_parallel_size=1",
    f"{R}.gpu_memory_utilization=0.6",
    f"{R}.n=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    "trainer.logger=console",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.resume_mode=auto",
    "trainer.experiment_name=run",
]
VERL = {
    "grpo": ["algorithm.adv_estimator=grpo", f"{A}.use_kl_loss=True", f"{A}.kl_loss_type=low_var_kl"],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "critic.model.use_remove_padding=True",
        f"critic.model.path={MODELS[0]}",
        "critic.model.enable_gradient_checkpointing=True",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.model.fsdp_config.param_offload=False",
    ],
    "gspo": [
        "algorithm.adv_estimator=grpo",
        f"{A}.policy_loss.loss_mode=gspo",
        f"{A}.clip_ratio_low=0.0003",
        f"{A}.clip_ratio_high=0.0004",
        f"{A}.loss_agg_mode=seq-mean-token-mean",
        f"{A}.ulysses_sequence_parallel_size=1",
    ],
    "dapo": [
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "data.gen_batch_size=8",
        f"{A}.clip_ratio_low=0.2",
        f"{A}.clip_ratio_high=0.28",
        f"{A}.clip_ratio_c=10.0",
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=2",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        "+reward_model.reward_kwargs.max_resp_len=6",
    ],
    "gpg": ["algorithm.adv_estimator=gpg", f"{A}.policy_loss.loss_mode=gpg"],
    "clip_cov": [
        "algorithm.adv_estimator=grpo",
        f"{A}.policy_loss.loss_mode=clip_cov",
        f"{A}.policy_loss.clip_cov_ratio=0.1",
    ],
    "kl_cov": [
        "algorithm.adv_estimator=grpo",
        f"{A}.policy_loss.loss_mode=kl_cov",
        f"{A}.policy_loss.kl_cov_ratio=0.1",
    ],
    "rollout correction": [
        "algorithm.adv_estimator=rloo",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
        "algorithm.rollout_correction.rollout_rs=null",
    ],
}
SHOWN = {
    "grpo": "actor/kl_loss",
    "ppo": "critic/vf_loss",
    "dapo": "train/filtered_prompts_ratio",
    "rollout correction": "actor/behav_imp_weight",
}


@pytest.mark.parametrize("name", VERL)
def test_a_script_of_verl_trains(here, name):
    words = [w for w in SMALL if not w.startswith("trainer.save_freq")]
    assert main_ppo([*COMMON, *VERL[name], *words]) == 0
    table = rows(here / "runs" / "run")
    assert len(table) == 2 and SHOWN.get(name, "actor/pg_loss") in table[0]
    high = {"gspo": 4e-4, "dapo": 0.28}.get(name, 0.2)
    assert table[0]["actor/clip_ratio_high"] == high


AREAL = """
experiment_name: run
seed: 1
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 1}
rollout: {max_concurrent_rollouts: 8, max_head_offpolicyness: 0, queue_size: null}
gconfig: {n_samples: 4, max_new_tokens: 6, greedy: false, temperature: 1.0}
actor:
  backend: "fsdp:d1p1t1"
  path: MODEL
  dtype: float32
  optimizer: {type: adam, lr: 1.0e-3, beta1: 0.9, beta2: 0.999, eps: 1.0e-8, weight_decay: 0.01}
  eps_clip: 0.4
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  MORE
train_dataset: {path: "gsm8k:gsm8k", batch_size: 4, type: rl, max_length: 400}
valid_dataset: {path: "gsm8k:gsm8k", batch_size: 4}
"""
FILES = {
    "grpo": "reward_norm: {mean_level: group, std_level: group}",
    "drgrpo": "reward_norm: {mean_level: group, std_level: null}",
    "liteppo": "reward_norm: {mean_level: group, std_level: batch}",
    "rloo": "reward_norm: {mean_level: group, std_level: null, mean_leave1out: true}",
    "gspo": "importance_sampling_level: sequence\n  adv_norm: {mean_level: batch, std_level: batch}",
    "sapo": "use_sapo_loss: true\n  sapo_tau_pos: 1.0",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_areal_trains(here, name):
    text = AREAL.replace("MODEL", MODELS[0]).replace("MORE", FILES[name])
    (here / "areal.yaml").write_text(text)
    small = [w for w in SMALL if "max_prompt" not in w]
    assert run_program(load(here / "areal.yaml", small)) == 0
    table = rows(here / "runs" / "run")
    assert len(table) == 2
    assert {table[0]["critic/score/max"], table[0]["critic/score/min"]} <= {-5.0, 5.0}  # (score - 0.5) · 10
    clip = {"gspo": 0.4, "sapo": 0.2}.get(name, 0.4)
    assert table[0]["actor/clip_ratio_high"] in (clip, 0.4)
