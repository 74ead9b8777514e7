"""Layers and origins, YAML, interpolation, Python construction, saving and loading again."""

from __future__ import annotations

import copy
import pickle

import pytest

from gspo.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgoConfig,
    ConfigErrors,
    DataConfig,
    FilterGroupsConfig,
    PPOTrainerConfig,
    RolloutConfig,
    TrainerConfig,
    load,
)
from gspo.config.loading import tree
from gspo.config.loading.settings import Layer, Origin
from gspo.config.loading.sources import parse_value
from gspo.config.text.show import changed, scalar, to_yaml

N = "actor_rollout_ref.rollout.n"
LR = "actor_rollout_ref.actor.optim.lr"


def write(tmp_path, text: str):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_each_layer_wins_over_the_one_before(tmp_path):
    path = write(tmp_path, "actor_rollout_ref:\n  rollout:\n    n: 3\n  actor:\n    optim:\n      lr: 1e-3\n")
    assert load().origin(N) == "recipe embedded"
    from_file = load(path)
    assert (from_file.get(N), from_file.origin(N)) == (3, f"{path}:3")
    from_flag = load(path, flags=["--group_size", "5"])
    assert (from_flag.get(N), from_flag.origin(N)) == (5, "flag --group_size")
    last = load(path, overrides=[f"{N}=6"], flags=["--group_size=5"])
    assert (last.get(N), last.origin(N)) == (6, f"override {N}=6")
    assert last.get(LR) == 1e-3 and last.origin(LR) == f"{path}:6"
    assert last.origin("algorithm.gamma") == "default"


def test_the_recipe_applies_only_to_the_embedded_model():
    other = load(overrides=["actor_rollout_ref.model.path=org/model"])
    assert changed(other) == {"actor_rollout_ref.model.path", "actor_rollout_ref.actor.importance_sampling_level"}
    assert all("recipe" not in o.text for o in other.origins.values())


@pytest.mark.parametrize("content", [None, "", "data: [", "- a\n"])
def test_a_packaged_recipe_that_cannot_be_read_is_an_error(tmp_path, monkeypatch, content):
    """Otherwise the embedded model would be trained with the defaults for large models."""
    path = tmp_path / "embedded.yaml"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("gspo.config.loading.sources.RECIPE", path)
    with pytest.raises(RuntimeError, match=r"reinstall gspo\n.*embedded\.yaml"):
        load()
    assert load(overrides=["actor_rollout_ref.model.path=org/model"]).get(N) == 8


def test_the_embedded_recipe_warns_of_nothing():
    assert load().warnings == ()


def test_a_named_recipe_wins_over_the_embedded_models():
    words = ["actor_rollout_ref.model.path=embedded"]
    resolved = load("gsm8k", words)
    assert (resolved.get("data.train_files"), resolved.origin("data.train_files")) == ("gsm8k", "recipe gsm8k")
    assert (resolved.get(LR), resolved.get("trainer.total_training_steps")) == (1e-6, 100)
    key = "actor_rollout_ref.rollout.max_num_seqs"  # only the embedded model's recipe sets it
    assert (resolved.get(key), resolved.origin(key)) == (256, "recipe embedded")
    assert load("gsm8k", [*words, f"{LR}=2e-6"]).get(LR) == 2e-6
    again = load(base=resolved)
    assert again.config == resolved.config and again.origins == resolved.origins


def test_overrides_of_a_resolved_config_act_as_if_they_had_been_written_at_once(tmp_path):
    model, more = f"actor_rollout_ref.model.path={tmp_path}", "trainer.total_epochs=2"
    areal = write(tmp_path, "gconfig: {n_samples: 4}\nactor: {path: org/model, eps_clip: 0.3}\n")
    for first, then in (
        (("gsm8k", [LR + "=2e-6"]), [more]),
        (("gsm8k", ["actor_rollout_ref.model.path=embedded"]), [model]),
        ((None, []), [model]),  # the embedded model's recipe is not for another model
        ((None, [model]), ["actor_rollout_ref.model.path=embedded"]),
        ((areal, []), [more]),
    ):
        file, words = first
        again, at_once = load(base=load(file, words), overrides=then), load(file, [*words, *then])
        assert again.to_dict() == at_once.to_dict() and again.origins == at_once.origins and again == at_once
    adapted = load(areal).adapted({"data.train_batch_size": 6}, "as a test wants it")
    assert load(base=adapted, overrides=[more]).system == adapted.system == "AReaL"


def test_what_is_assigned_to_a_resolved_config_counts_when_it_is_resolved_again():
    resolved = load("gsm8k", ["trainer.seed=3"])
    resolved.config.data.train_batch_size = 12
    resolved.config.trainer.seed = 4
    again = load(base=resolved, overrides=["trainer.total_epochs=2"])
    assert (again.get("data.train_batch_size"), again.get("trainer.seed")) == (12, 4)
    assert again.origins["data.train_batch_size"] == Origin(Layer.PYTHON, "Python")
    assert again.origin("data.train_files") == "recipe gsm8k"


def test_the_embedded_models_recipe_wins_over_the_defaults_of_a_program(tmp_path):
    path = write(tmp_path, "data: {train_files: gsm8k, val_split: dev}\n")
    resolved = load(recipe=path)
    assert (resolved.get("data.train_files"), resolved.get("data.val_split")) == ("arithmetic", "dev")


def test_interpolation_sees_overrides_and_other_names(tmp_path):
    path = write(
        tmp_path,
        """
gconfig: {n_samples: 4}
actor:
  group_size: ${gconfig.n_samples}
data:
  train_batch_size: 16
  gen_batch_size: ${data.train_batch_size}
trainer:
  experiment_name: run-${actor_rollout_ref.rollout.n}-${data.train_batch_size}
critic:
  optim:
    lr: ${actor_rollout_ref.actor.optim.lr}
""",
    )
    config = load(path, overrides=["data.train_batch_size=24"], flags=["--learning_rate", "3e-6"]).config
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.data.gen_batch_size == 24
    assert config.trainer.experiment_name == "run-4-24"
    assert config.critic.optim.lr == 3e-6


def test_interpolation_on_the_command_line_and_a_dangling_one():
    assert (
        load(overrides=["data.gen_batch_size=${data.train_batch_size}", "data.train_batch_size=40"]).get(
            "data.gen_batch_size"
        )
        == 40
    )
    with pytest.raises(ConfigErrors, match=r"data\.gen_batch_size.*\n.*refer to a key"):
        load(overrides=["data.gen_batch_size=${data.no_such_key}"])


def test_interpolation_sees_the_recipe(tmp_path):
    size = "data.train_batch_size"
    same = [f"data.gen_batch_size=${{{size}}}"]
    assert load(overrides=same).get("data.gen_batch_size") == load().get(size) == 32
    path = write(tmp_path, "actor_rollout_ref: {model: {path: org/model}}\ndata: {train_batch_size: 96}\n")
    assert load(overrides=same, recipe=path).get("data.gen_batch_size") == 96
    by_reference = ["trainer.project_name=org/model", "model_name=${trainer.project_name}"]
    assert load(overrides=[*same, *by_reference]).get("data.gen_batch_size") == 1024


def test_an_unknown_key_in_a_recipe_file_is_reported(tmp_path):
    path = write(tmp_path, "data: {trian_batch_size: 96}\ngroup_size: 4\n")
    with pytest.raises(ConfigErrors) as caught:
        load(recipe=path)
    assert [(p.key, p.origin, p.remedy) for p in caught.value.problems] == [
        ("data.trian_batch_size", "recipe run.yaml", "did you mean data.train_batch_size?"),
        ("group_size", "recipe run.yaml", "did you mean actor_rollout_ref.rollout.n?"),
    ]


@pytest.mark.parametrize("text", ["+{}=5", "++{}=5", "{}=5"])
def test_plus_is_accepted(text):
    key = "reward_model.reward_kwargs.max_resp_len"
    assert load(overrides=[text.format(key)]).get(key) == 5


def test_mappings_take_new_keys():
    resolved = load(
        overrides=["+actor_rollout_ref.model.override_config.rope.theta=5", "override_config.layers=[1, 2]"]
    )
    assert resolved.get("actor_rollout_ref.model.override_config") == {"rope": {"theta": 5}, "layers": [1, 2]}


def test_numbers_as_people_write_them(tmp_path):
    path = write(tmp_path, "actor_rollout_ref: {actor: {clip_ratio_low: 3e-4, optim: {lr: 1e-6}}}\n")
    config = load(path, overrides=["data.train_batch_size=64.0"]).config
    assert config.actor_rollout_ref.actor.clip_ratio_low == 3e-4
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert type(config.data.train_batch_size) is int


def test_a_short_name_means_the_policy_before_the_critic():
    resolved = load(overrides=["grad_clip=0.3", "filter_groups.metric=score"])
    assert resolved.get("actor_rollout_ref.actor.grad_clip") == 0.3
    assert resolved.get("critic.grad_clip") == 1.0
    assert resolved.get("algorithm.filter_groups.metric") == "score"


def test_seed_examples_are_built_in_python():
    """The first two examples of the usage guide for the sampling trainer."""
    grpo = TrainerConfig(
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
    resolved = load(base=grpo)
    assert resolved.get(N) == 5 and resolved.origin(N) == "Python"
    assert resolved.get("data.gen_batch_size") == 1536
    assert resolved.origin(LR) == "recipe embedded"
    ppo = TrainerConfig(
        algorithm=AlgoConfig(
            adv_estimator="gae",
            use_kl_in_reward=True,
            filter_groups=FilterGroupsConfig(enable=True, metric="seq_reward", max_num_gen_batches=5),
        ),
        data=DataConfig(gen_batch_size=1024, train_batch_size=256),
        actor_rollout_ref=ActorRolloutRefConfig(rollout=RolloutConfig(n=4)),
        trainer=PPOTrainerConfig(critic_warmup=20),
    )
    assert load(base=ppo).config.trainer.critic_warmup == 20


def test_python_assignment_counts_as_given():
    config = TrainerConfig()
    config.algorithm.filter_groups = FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=10)
    config.data.train_batch_size = 1024
    resolved = load(base=config)
    assert resolved.get("data.train_batch_size") == 1024 and resolved.origins["data.train_batch_size"].explicit
    assert resolved.get("algorithm.filter_groups.max_num_gen_batches") == 10


def test_a_given_value_equal_to_the_default_beats_the_recipe():
    default = tree.leaves()["data.max_response_length"].default
    assert load().get("data.max_response_length") != default
    assert (
        load(base=TrainerConfig(data=DataConfig(max_response_length=default))).get("data.max_response_length")
        == default
    )


def test_python_names_are_checked_with_the_nearest():
    with pytest.raises(TypeError, match="did you mean 'train_batch_size'"):
        DataConfig(trian_batch_size=3)  # pyright: ignore
    with pytest.raises(AttributeError, match="did you mean 'metric'"):
        TrainerConfig().algorithm.filter_groups.metrik = "acc"  # pyright: ignore


def test_resolving_twice_changes_nothing():
    once = load(overrides=["data.train_batch_size=6", "actor_rollout_ref.rollout.n=4"], flags=["--num_epochs", "2"])
    twice = load(base=once.config)
    assert twice.to_dict() == once.to_dict()
    assert {k: o.explicit for k, o in twice.origins.items()} == {k: o.explicit for k, o in once.origins.items()}


def test_a_config_survives_copy_and_pickle():
    config = load(overrides=["data.train_batch_size=64"]).config
    assert copy.deepcopy(config) == config
    assert load(base=pickle.loads(pickle.dumps(config))).to_dict() == load(base=config).to_dict()


@pytest.mark.parametrize("with_origins", [True, False])
def test_a_saved_config_loads_to_the_same_values(tmp_path, with_origins):
    first = load(
        overrides=[
            "actor_rollout_ref.model.override_config.x={a: [1, 2.5, null], b: 'y: z'}",
            "trainer.project_name='12'",
        ],
        flags=["--learning_rate", "1e-6", "--group_size", "4", "--seed", "3"],
    )
    again = load(write(tmp_path, first.to_yaml(with_origins)))
    assert again.to_dict() == first.to_dict()
    assert again.warnings == first.warnings == ()
    assert (f"{LR.rpartition('.')[2]}: 1.0e-06  # flag --learning_rate" in first.to_yaml()) and (
        "# recipe embedded" in first.to_yaml()
    )


@pytest.mark.parametrize(
    "value", [1e-6, 1e22, 0.1, -3, True, None, "yes", "1e-3", "a: b # c", "ε\n", [1, "x"], {"k": [None]}]
)
def test_scalars_read_back_as_they_were(value):
    import yaml

    read = parse_value(scalar(value)) if not isinstance(value, str) else yaml.safe_load(scalar(value))
    assert read == value and type(read) is type(value)


def test_diff_shows_only_what_differs():
    resolved = load(overrides=["actor_rollout_ref.model.path=org/model", "algorithm.gamma=0.5", "data.shuffle=true"])
    text = to_yaml(resolved, only=changed(resolved))
    assert "gamma: 0.5  # override algorithm.gamma=0.5" in text and "shuffle" not in text


def test_an_areal_file_loads(tmp_path):
    """Keys of the GSM8K example of the AReaL documents, in that system's layout."""
    path = write(
        tmp_path,
        """
experiment_name: gsm8k-gspo
trial_name: trial0
seed: 1
total_train_epochs: 10
tokenizer_path: ${actor.path}
async_training: true
cluster: {n_nodes: 1, n_gpus_per_node: 1, fileroot: /tmp/areal, name_resolve: {type: nfs}}
allocation_mode: vllm:d1p1t1+d1p1t1
rollout: {max_concurrent_rollouts: 256, max_head_offpolicyness: 2, experiment_name: '${experiment_name}'}
gconfig: {n_samples: 4, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  path: Qwen/Qwen2-1.5B-Instruct
  dtype: bfloat16
  gradient_checkpointing: true
  optimizer: {lr: 1.70e-5, weight_decay: 0.017, warmup_steps_proportion: 0.001, gradient_clipping: 1.0}
  group_size: ${gconfig.n_samples}
  eps_clip: 0.4
  importance_sampling_level: sequence
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  dynamic_sampling: true
train_dataset: {path: gsm8k, batch_size: 256, shuffle: true, type: rl}
valid_dataset: {path: gsm8k, batch_size: 256}
saver: {freq_epochs: 1, freq_steps: null}
""",
    )
    resolved = load(path)
    config = resolved.config
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.model.tokenizer_path == "Qwen/Qwen2-1.5B-Instruct"
    assert (actor.policy_loss.loss_mode, actor.importance_sampling_level) == ("gspo", "sequence")
    assert (actor.use_decoupled_loss, actor.behav_imp_weight_cap, actor.clip_ratio) == (True, 5.0, 0.4)
    assert (rollout.n, rollout.mode, rollout.max_head_offpolicyness) == (4, "async", 2)
    assert config.algorithm.filter_groups.enable and not config.algorithm.use_kl_in_reward
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (256, 256)
    said = {w.key: w.message for w in resolved.warnings}
    assert "always 1" in said["actor_rollout_ref.actor.ppo_mini_batch_size"]
    assert "wide" in said["actor_rollout_ref.actor.clip_ratio"]
    assert "trial_name" in said and "cluster.name_resolve.type" in said


def test_the_overrides_of_the_verl_script_load():
    """The keys that the bash door of the dynamic-sampling documents passes."""
    words = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "data.train_files=gsm8k",
        "data.val_files=gsm8k",
        "data.shuffle=true",
        "data.prompt_key=prompt",
        "data.truncation=error",
        "data.filter_overlong_prompts=true",
        "data.train_batch_size=512",
        "data.max_prompt_length=2048",
        "data.max_response_length=8192",
        "data.gen_batch_size=1536",
        "actor_rollout_ref.rollout.n=16",
        "algorithm.use_kl_in_reward=false",
        "algorithm.kl_ctrl.kl_coef=0.0",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.kl_loss_coef=0.0",
        "actor_rollout_ref.actor.clip_ratio_low=0.0003",
        "actor_rollout_ref.actor.clip_ratio_high=0.0004",
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=20480",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=20480",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.mode=sync",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05",
        "actor_rollout_ref.actor.optim.weight_decay=0.1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=128",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.fsdp_config.param_offload=false",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "actor_rollout_ref.actor.grad_clip=1.0",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.enable_chunked_prefill=true",
        "actor_rollout_ref.rollout.max_num_batched_tokens=10240",
        "actor_rollout_ref.rollout.temperature=1.0",
        "actor_rollout_ref.rollout.top_p=1.0",
        "actor_rollout_ref.rollout.top_k=-1",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
        "actor_rollout_ref.rollout.val_kwargs.top_k=-1",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
        "actor_rollout_ref.ref.fsdp_config.param_offload=false",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.actor.entropy_checkpointing=true",
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=false",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.log=false",
        "+reward_model.reward_kwargs.max_resp_len=8192",
        'trainer.logger=["console","wandb"]',
        "trainer.project_name=gspo",
        "trainer.experiment_name=3b",
        "trainer.n_gpus_per_node=8",
        "trainer.nnodes=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=10",
        "trainer.save_freq=10",
        "trainer.total_epochs=10",
        "trainer.total_training_steps=500",
        "trainer.default_local_dir=ckpts",
        "trainer.resume_mode=auto",
        "trainer.log_val_generations=2",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_reward",
        "algorithm.filter_groups.max_num_gen_batches=5",
    ]
    resolved = load(overrides=words)
    for word in words:
        key, _, value = word.removeprefix("+").partition("=")
        if key in tree.leaves():
            assert resolved.get(key) == parse_value(value), key
            assert resolved.origins[key].explicit
    assert resolved.config.actor_rollout_ref.actor.use_dynamic_bsz is True


def test_words_that_yaml_takes_for_something_else():
    key = "algorithm.filter_groups.predict"
    assert load(overrides=[f"{key}=off"]).get(key) == "off"
    assert (
        load(overrides=["actor_rollout_ref.actor.clip_target=off"]).get("actor_rollout_ref.actor.clip_target") is None
    )
    names = [load(flags=["--run_name", text]).get("trainer.experiment_name") for text in ("007", "on", "1e-3", "null")]
    assert names == ["007", "on", "1e-3", None]


def test_off_in_a_file(tmp_path):
    path = write(
        tmp_path, "algorithm: {filter_groups: {predict: off}}\nactor_rollout_ref: {actor: {clip_target: off}}\n"
    )
    config = load(path).config
    assert config.algorithm.filter_groups.predict == "off"
    assert config.actor_rollout_ref.actor.clip_target is None


def test_a_mapping_resolves_like_a_file():
    from omegaconf import OmegaConf

    plain = {"data": {"train_batch_size": 64}, "trainer": {"seed": 3}, "group_size": 4}
    for mapping in (plain, OmegaConf.create(plain)):
        resolved = load(base=mapping)  # pyright: ignore
        assert (resolved.get("data.train_batch_size"), resolved.get("trainer.seed"), resolved.get(N)) == (64, 3, 4)
    mixed = TrainerConfig(data={"train_batch_size": 64})  # pyright: ignore
    assert load(base=mixed).get("data.train_batch_size") == 64


def test_two_names_for_one_key_in_one_place_must_agree(tmp_path):
    path = write(tmp_path, "group_size: 4\nactor_rollout_ref:\n  rollout:\n    n: 5\n")
    with pytest.raises(ConfigErrors, match=r"group_size = 4 .*run\.yaml:1.* sets the same key"):
        load(path)
    assert load(write(tmp_path, "group_size: 4\n"), overrides=[f"{N}=5"]).get(N) == 5


def test_what_an_alias_sets_beside_gives_way_to_the_key_itself():
    mode = "actor_rollout_ref.rollout.mode"
    assert load(overrides=[f"{mode}=sync", "max_head_offpolicyness=2"]).get(mode) == "sync"
    assert load(overrides=["max_head_offpolicyness=2", f"{mode}=sync"]).get(mode) == "sync"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_low"),
        ("clip_ratio_high", "actor_rollout_ref.actor.clip_ratio_high"),
        ("filter_groups.metric", "algorithm.filter_groups.metric"),
        ("max_num_gen_batches", "algorithm.filter_groups.max_num_gen_batches"),
        ("use_dynamic_bsz", "actor_rollout_ref.actor.use_dynamic_bsz"),
        ("entropy_checkpointing", "actor_rollout_ref.actor.entropy_checkpointing"),
        ("ppo_micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("gen_batch_size", "data.gen_batch_size"),
        ("train_batch_size", "data.train_batch_size"),
        ("adv_estimator", "algorithm.adv_estimator"),
        ("norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo"),
        ("use_kl_in_reward", "algorithm.use_kl_in_reward"),
        ("use_kl_loss", "actor_rollout_ref.actor.use_kl_loss"),
        ("kl_loss_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("critic_warmup", "trainer.critic_warmup"),
        ("loss_agg_mode", "actor_rollout_ref.actor.loss_agg_mode"),
    ],
)
def test_the_short_names_of_the_documents_are_keys(name, key):
    from gspo.config.loading.names import canonical

    assert canonical(name) == key


@pytest.mark.parametrize("key", tree.leaves())
def test_every_key_can_be_set_by_name_to_its_own_default(key):
    """A default, typed as YAML, is accepted as it is, unless it contradicts the recipe."""
    value = scalar(tree.leaves()[key].default)
    try:
        assert load(overrides=["actor_rollout_ref.model.path=org/model", f"{key}={value}"]).get(key) == (
            tree.leaves()[key].default if key != "actor_rollout_ref.actor.importance_sampling_level" else "sequence"
        )
    except ConfigErrors as errors:
        pytest.fail(str(errors))


def test_the_remedy_of_a_wrong_type_is_written_as_it_must_be_typed():
    with pytest.raises(ConfigErrors) as caught:
        load(overrides=["trainer.num_threads=0.5"])
    (problem,) = caught.value.problems
    assert problem.remedy == "e.g. trainer.num_threads=null"
    load(overrides=[problem.remedy.removeprefix("e.g. ")])


@pytest.mark.parametrize("wrong", ["my.yaml", 3, [1], b"x", object()])
def test_a_config_of_another_type_is_named(wrong):
    with pytest.raises(
        TypeError, match=r"config: expected a TrainerConfig, a mapping of keys or what gspo\.load_config"
    ):
        load(base=wrong)


@pytest.mark.parametrize("wrong", ["trainer.seed=1", [1], [("trainer.seed", 1)]])
def test_overrides_of_another_type_are_named(wrong):
    with pytest.raises(TypeError, match=r'overrides: expected a list of texts such as "trainer\.seed=1", found'):
        load(overrides=wrong)
