"""Keys of other systems: every one is known, and none is taken for a key of ours that means something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.config import ConfigErrors, load
from gspo.config.compat.aliases import aliases
from gspo.config.compat.unneeded import FIXED, NO_EFFECT, fixed_values, why_unneeded
from gspo.config.loading import names, tree
from gspo.config.loading.flags import split_arguments, take_hydra_config

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
FACTS = Path(__file__).parent / "facts"
OTHER_MODEL = f"{M}.path=org/model"


def facts(name: str) -> list[str]:
    """Names of keys of another system, as its own configuration lists them."""
    return (FACTS / f"{name}.txt").read_text().split()


def is_known(name: str) -> bool:
    return bool(tree.leaf_of(name) or name in aliases() or fixed_values(name) or why_unneeded(name))


@pytest.mark.parametrize("name", facts("verl_keys"))
def test_every_key_of_verl_is_known(name):
    assert is_known(name)


@pytest.mark.parametrize("name", facts("areal_keys"))
def test_every_key_of_areals_files_is_known(name):
    assert is_known(name)


SAME_IN_TRL = {"trust_remote_code"}  # a short form of ours that means the same there


@pytest.mark.parametrize("name", facts("trl_fields"))
def test_every_field_of_trl_is_known_and_never_a_short_form_of_ours(name):
    assert is_known(name) or name in SAME_IN_TRL


OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
AREAL = """
experiment_name: try
seed: 1
tokenizer_path: ${{actor.path}}
cluster: {{n_nodes: 1, n_gpus_per_node: 1, name_resolve: {{type: nfs}}}}
scheduler: {{type: null}}
rollout: {{max_concurrent_rollouts: 8, max_head_offpolicyness: 0, queue_size: null, dump_to_file: true}}
gconfig: {{n_samples: 4, max_new_tokens: 64, min_new_tokens: 0, greedy: false, temperature: 1.0}}
actor:
  backend: "fsdp:d1p1t1"
  path: org/model
  dtype: bfloat16
  optimizer: {{type: adam, lr: 1.0e-5, beta1: 0.8, beta2: 0.99, eps: 1.0e-8}}
  eps_clip: 0.4
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 4
  {more}
train_dataset: {{path: gsm8k, batch_size: 8, type: rl, max_length: 128}}
valid_dataset: {{path: gsm8k, batch_size: 8}}
stats_logger: {{wandb: {{mode: disabled}}}}
perf_tracer: {{enabled: false}}
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {f"{A}.policy_loss.loss_mode": "vanilla", f"{A}.clip_ratio": 0.4, f"{A}.optim.betas": [0.8, 0.99]}),
        ("importance_sampling_level: sequence", {f"{A}.policy_loss.loss_mode": "gspo"}),
        ("reward_clip: 20.0", {"reward.scale": 10.0, "reward.bias": -0.5, "reward.clip": 20.0}),
        ("reward_norm: {mean_level: group, std_level: group}", {"algorithm.adv_estimator": "grpo"}),
        ("reward_norm: {mean_level: group, std_level: null}", {"algorithm.norm_adv_by_std_in_grpo": False}),
        ("reward_norm: {mean_level: group, std_level: batch}", {"algorithm.std_level": "batch"}),
        (
            "reward_norm: {mean_level: group, std_level: null, mean_leave1out: true}",
            {"algorithm.adv_estimator": "rloo"},
        ),
        ("reward_norm: {mean_leave1out: true, mean_level: group}", {"algorithm.adv_estimator": "rloo"}),
        ("reward_norm: {mean_leave1out: false, mean_level: group}", {"algorithm.adv_estimator": "grpo"}),
        ("adv_norm: {mean_level: batch, std_level: batch}", {"algorithm.normalize_advantages": True}),
        ("rejection_sampling: {metric: ratio, upper: 5.0}", {f"{A}.behav_imp_weight_cap": 5.0}),
        ("use_sapo_loss: true", {f"{A}.policy_loss.loss_mode": "sapo"}),
        ("use_lora: true\n  lora_rank: 16\n  target_modules: [all-linear]", {f"{M}.lora_rank": 16}),
        ("use_lora: false\n  lora_rank: 16\n  lora_alpha: 8", {f"{M}.lora_rank": 0, f"{M}.lora_alpha": 16}),
        ("lora_rank: 16", {f"{M}.lora_rank": 16}),
        (
            "overlong_reward_penalty: true\n  overlong_tokens: 16\n  overlong_penalty_factor: 0.5",
            {
                "reward_model.reward_manager": "dapo",
                f"{OVERLONG}.enable": True,
                f"{OVERLONG}.len": 16,
                f"{OVERLONG}.penalty_factor": 0.5,
            },
        ),
        ("overlong_reward_penalty: false", {"reward_model.reward_manager": "naive", f"{OVERLONG}.enable": False}),
    ],
)
def test_an_areal_file_means_what_it_means_there(tmp_path, more, expected):
    path = tmp_path / "areal.yaml"
    path.write_text(AREAL.format(more=more))
    resolved = load(path)
    assert {key: resolved.get(key) for key in expected} == expected


def test_a_critic_section_of_areal_is_ppo(tmp_path):
    path = tmp_path / "areal.yaml"
    critic = "critic:\n  path: ${actor.path}\n  is_critic: true\n  eps_clip: 0.3\n  optimizer: ${actor.optimizer}\n"
    path.write_text(AREAL.format(more="") + critic)
    resolved = load(path)
    assert (resolved.get("algorithm.adv_estimator"), resolved.get("critic.cliprange_value")) == ("gae", 0.3)
    assert resolved.get("critic.optim.lr") == 1e-5 and resolved.get("critic.model.path") == "org/model"
    assert resolved.get("critic.optim.betas") == resolved.get(f"{A}.optim.betas") == [0.8, 0.99]


def test_the_critics_own_decay_rates_are_not_the_actors(tmp_path):
    path = tmp_path / "areal.yaml"
    path.write_text(AREAL.format(more="") + "critic: {path: org/model, optimizer: {beta1: 0.7, beta2: 0.9}}\n")
    resolved = load(path)
    assert (resolved.get("critic.optim.betas"), resolved.get(f"{A}.optim.betas")) == ([0.7, 0.9], [0.8, 0.99])


def test_lora_that_a_file_of_areal_switches_off_is_said_to_be_off(tmp_path):
    path = tmp_path / "areal.yaml"
    path.write_text(AREAL.format(more="use_lora: false\n  lora_rank: 16"))
    assert any(w.key == "actor.lora_rank" and "use_lora is false" in w.message for w in load(path).warnings)


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_key_accepts_its_values_and_says_what_to_do_about_others(name):
    fixed = FIXED[name]
    for value in (*fixed.values, None):
        assert load(base={**nested(name, value), **nested(f"{M}.path", "org/model", name, value)})
    with pytest.raises(ConfigErrors, match="is supported here") as caught:
        load(base=nested(name, "something else"))
    assert fixed.remedy in str(caught.value)


def nested(name: str, value: object, other: str | None = None, also: object = None) -> dict:
    """`{"a": {"b": value}}` for `a.b`, merged with a second one."""
    out: dict = {}
    for key, one in ((name, value), *([(other, also)] if other else [])):
        node = out
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = one
    return out


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_key_without_effect_is_said_to_have_none(name):
    (found,) = [w for w in load(overrides=[OTHER_MODEL, f"{name}=1"]).warnings if w.key == name]
    assert found.message == f"has no effect: {NO_EFFECT[name]}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainer.logger=wandb"], {"trainer.logger": ["wandb"]}),
        (["trainer.logger=[console,swanlab]"], {"trainer.logger": ["console"]}),
        ([f"{A}.strategy=fsdp"], {f"{A}.strategy": "fsdp2"}),
        (["data.train_max_samples=-1", "data.val_max_samples=-1"], {"data.num_train_samples": None}),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=."], {"trainer.resume_mode": "."}),
        (["trainer.resume_mode=disable", "trainer.resume_from_path=."], {"trainer.resume_mode": "disable"}),
        (["trainer.resume_from_path=null", "trainer.resume_mode=auto"], {"trainer.resume_mode": "auto"}),
        ([f"{R}.name=sglang"], {f"{R}.name": "vllm"}),
        ([f"{R}.name=hf"], {f"{R}.name": "native"}),
        ([f"{R}.max_num_batched_tokens=null"], {f"{R}.max_num_batched_tokens": 8192}),
        ([f"{A}.ppo_micro_batch_size=null", f"{A}.ppo_micro_batch_size_per_gpu=8"], {f"{A}.use_dynamic_bsz": False}),
        ([f"+{M}.override_config.attn_implementation=flash_attention_2"], {f"{M}.attn_implementation": None}),
        ([f"{A}.fsdp_config.dtype=bf16"], {f"{M}.dtype": "bfloat16"}),
        ([f"+{A}.loss_mode=kl_cov"], {f"{A}.policy_loss.loss_mode": "kl_cov"}),
        (
            [f"{R}.name=vllm", f"+{R}.engine_kwargs.vllm.block_size=32", f"+{R}.engine_kwargs.sglang.tp=2"],
            {f"{R}.engine_kwargs": {"block_size": 32}},
        ),
        (
            [f"{R}.name=vllm", f"{R}.engine_kwargs={{vllm: {{block_size: 32}}, sglang: {{tp: 2}}}}"],
            {f"{R}.engine_kwargs": {"block_size": 32}},
        ),
        (
            [f"{A.replace('actor_rollout_ref.actor', 'algorithm')}.rollout_correction.rollout_is=sequence"],
            {f"{A}.behav_imp_weight_mode": "sequence_product_truncate", f"{A}.use_decoupled_loss": True},
        ),
    ],
)
def test_values_that_verl_writes(words, expected):
    resolved = load(overrides=[OTHER_MODEL, *words])
    assert {key: resolved.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ([f"{R}.name=sglang"], "vLLM generates, not sglang"),
        ([f"{A}.strategy=megatron"], "FSDP2 shards the models, not megatron"),
        (["trainer.logger=[console,mlflow]"], "mlflow is not supported; metrics are in metrics.jsonl"),
        (["trainer.resume_mode=auto", "trainer.resume_from_path=."], "has no effect: trainer.resume_mode is auto"),
        ([f"{A}.ulysses_sequence_parallel_size=4"], "trains in one process"),
        ([f"{A}.megatron.tensor_model_parallel_size=4"], "not with Megatron"),
        ([f"+{R}.engine_kwargs.sglang.attention_backend=fa3"], "sglang does not generate"),
        ([f"{R}.engine_kwargs={{trtllm: {{a: 1}}}}"], "trtllm does not generate"),
    ],
)
def test_what_means_something_else_is_said(words, note):
    assert any(note in w.message for w in load(overrides=[OTHER_MODEL, *words]).warnings)


def test_hydra_deletes_keys_and_sections_of_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"data: {{seed: 3, shuffle: false}}\nalgorithm: {{gamma: 0.9, lam: 0.8}}\n{M.replace('.', ': {')}: {{path: org/model}}}}\n"
    )
    resolved = load(path, ["~data.seed", "~algorithm"])
    assert resolved.get("data.seed") is None and resolved.get("data.shuffle") is False
    assert (resolved.get("algorithm.gamma"), resolved.get("algorithm.lam")) == (1.0, 1.0)


def test_hydra_names_the_config_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {seed: 3}\n")
    for words in (
        ["--config-path", str(tmp_path), "--config-name", "mine"],
        [f"--config-path={tmp_path}", "--config-name=mine.yaml"],
    ):
        _, _, flags = split_arguments(words)
        assert take_hydra_config(flags) == (tmp_path / "mine.yaml", [])
    _, _, flags = split_arguments(["--config-name=ppo_trainer", "--seed", "3"])
    assert take_hydra_config(flags) == (None, ["--seed", "3"])


def test_verls_program_uses_the_devices_it_is_given():
    words = [OTHER_MODEL, "trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    assert load(overrides=words, system="verl").get("trainer.backend") == "ray"
    one = load(overrides=[OTHER_MODEL, "trainer.n_gpus_per_node=8"], system="verl")
    assert (one.get("trainer.backend"), one.get(f"{A}.strategy")) == ("local", "fsdp2")
    with pytest.raises(ConfigErrors, match=r"trainer\.backend=ray"):
        load(overrides=words)


def test_no_name_of_another_system_is_a_short_form_of_ours():
    """TRL's repetition_penalty is one of generation; ours is one of the reward."""
    with pytest.raises(ConfigErrors, match=r"reward\.repetition_penalty"):
        load(overrides=["repetition_penalty=1.1"])
    assert load(overrides=["repetition_penalty=1.0"]).get("reward.repetition_penalty") == 0.0
    for name in (*FIXED, *NO_EFFECT):
        assert names.canonical(name) is None, name
