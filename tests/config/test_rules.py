"""Cross-field rules: what each says, about which key, and that it is silent otherwise."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gspo.config import ConfigErrors, load, resolved_loss
from gspo.config.checks import rules
from gspo.config.loading import tree
from gspo.config.problems import Problem
from gspo.registry import Registry

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
F = "algorithm.filter_groups"
O = "reward_model.reward_kwargs.overlong_buffer_cfg"
PLAIN = ["actor_rollout_ref.model.path=org/model"]  # no recipe


def problems(*overrides: str) -> list[Problem]:
    """Everything said about a config without a recipe."""
    try:
        return list(load(overrides=[*PLAIN, *overrides]).warnings)
    except ConfigErrors as errors:
        return list(errors.problems)


def only(found: list[Problem], key: str, level: str, text: str) -> Problem:
    """The one problem about a key; it must be of this level and contain the text."""
    about = [p for p in found if p.key == key and text in p.message]
    assert len(about) == 1, [str(p) for p in found]
    assert about[0].level == level and about[0].remedy and about[0].origin
    return about[0]


JUDGE = ("reward.judge.base_url=http://host/v1", "reward.judge.model=m", "reward.judge.eval.model=n")


@pytest.mark.parametrize(
    ("overrides", "key", "level", "text"),
    [
        ([f"{A}.ppo_mini_batch_size=300", "data.train_batch_size=1000"], f"{A}.ppo_mini_batch_size", "error", "divide"),
        ([f"{A}.ppo_mini_batch_size=64", "data.train_batch_size=32"], f"{A}.ppo_mini_batch_size", "error", "divide"),
        ([f"{A}.ppo_micro_batch_size_per_gpu=9999"], f"{A}.ppo_micro_batch_size_per_gpu", "error", "larger than"),
        ([f"{A}.use_dynamic_bsz=false"], f"{A}.use_dynamic_bsz", "error", "micro-batch size"),
        (["critic.ppo_mini_batch_size=300", "adv_estimator=gae"], "critic.ppo_mini_batch_size", "error", "divide"),
        (["data.num_train_samples=10", "data.train_batch_size=16"], "data.num_train_samples", "error", "fewer prompts"),
        (
            [f"{A}.strategy=fsdp2", "trainer.n_gpus_per_node=3", f"{A}.ppo_mini_batch_size=1", f"{R}.n=2"],
            f"{A}.ppo_mini_batch_size",
            "warning",
            "3 devices",
        ),
        ([f"{R}.response_length=7"], f"{R}.response_length", "error", "differs"),
        ([f"{R}.prompt_length=7"], f"{R}.prompt_length", "error", "differs"),
        ([f"{R}.max_model_len=100"], f"{R}.max_model_len", "error", "shorter than"),
        ([f"{A}.ppo_max_token_len_per_gpu=100"], f"{A}.ppo_max_token_len_per_gpu", "warning", "longest sequence"),
        ([f"{F}.enable=true", f"{R}.n=1"], f"{R}.n", "error", "needs groups"),
        (
            [f"{F}.enable=true", "reward_model.reward_manager=dapo", f"{O}.enable=true", f"{O}.len=9"],
            f"{F}.metric",
            "warning",
            "includes the overlong penalty",
        ),
        ([f"{F}.enable=true", "reward.format_weight=0.1"], f"{F}.metric", "warning", "includes reward.format_weight"),
        (
            [f"{F}.enable=true", f"{F}.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
            f"{F}.metric",
            "warning",
            "includes the KL",
        ),
        ([f"{F}.enable=true", f"{F}.metric=seq_final_reward"], f"{F}.metric", "warning", "equals seq_reward"),
        (
            [f"{F}.enable=true", f"{F}.strategy=rounds", f"{F}.max_num_gen_batches=2", "data.gen_batch_size=8"],
            f"{F}.max_num_gen_batches",
            "error",
            "never fill",
        ),
        ([f"{A}.clip_ratio_high=0.02"], f"{A}.clip_ratio_high", "warning", "wide for a sequence ratio"),
        ([f"{A}.clip_ratio=0.2"], f"{A}.clip_ratio", "warning", "wide for a sequence ratio"),
        (
            [f"{A}.policy_loss.loss_mode=vanilla", f"{A}.clip_ratio_low=1.5"],
            f"{A}.clip_ratio_low",
            "warning",
            "cannot clip",
        ),
        ([f"{A}.ppo_mini_batch_size=1024"], f"{A}.ppo_mini_batch_size", "warning", "always 1"),
        ([f"{A}.loss_agg_mode=token-mean"], f"{A}.loss_agg_mode", "warning", "length"),
        ([f"{A}.clip_target_bounds=[2, 3]"], f"{A}.clip_target_bounds", "error", "two factors"),
        (
            [f"{R}.calculate_log_probs=false", f"{A}.use_decoupled_loss=true"],
            f"{R}.calculate_log_probs",
            "error",
            "decoupled",
        ),
        (
            [f"{R}.calculate_log_probs=false", f"{A}.old_log_prob_source=rollout"],
            f"{R}.calculate_log_probs",
            "error",
            "old_log_prob_source",
        ),
        ([f"{R}.mode=async"], f"{R}.max_head_offpolicyness", "warning", "same as sync"),
        ([f"{A}.use_decoupled_loss=true"], f"{A}.use_decoupled_loss", "warning", "current weights"),
        ([f"{R}.n=1"], "algorithm.adv_estimator", "warning", "one response per prompt"),
        (["algorithm.turn_rewards=return_to_go"], "algorithm.turn_rewards", "error", "mix the advantages of its turns"),
        (
            ["algorithm.turn_rewards=return_to_go", f"{A}.policy_loss.loss_mode=gspo_token", "adv_estimator=gae"],
            "algorithm.turn_rewards",
            "error",
            "no critic",
        ),
        (
            [f"{R}.multi_turn.enable=true", "data.max_response_length=256"],
            f"{R}.multi_turn.max_tool_response_length",
            "warning",
            "fill the whole response",
        ),
        (["algorithm.adv_estimator=gae", "critic.enable=false"], "critic.enable", "error", "needs a critic"),
        (
            ["algorithm.adv_estimator=gae", "trainer.critic_warmup=5", "trainer.total_training_steps=5"],
            "trainer.critic_warmup",
            "error",
            "never be trained",
        ),
        ([f"{A}.use_kl_loss=true", f"{A}.kl_loss_coef=0"], f"{A}.kl_loss_coef", "warning", "weight 0"),
        ([f"{A}.optim.betas=[0.9]"], f"{A}.optim.betas", "error", "two numbers"),
        (["reward_model.enable=true"], "reward_model.path", "error", "has no path"),
        (["reward.functions=[{model: a}, {model: b}]"], "reward.functions", "error", "one reward model"),
        (["reward.functions=[{name: math, weigth: 1}]"], "reward.functions", "error", "weigth"),
        (["reward.functions=[{name: math, weight: 0}]"], "reward.functions", "error", "every weight is 0"),
        (["reward.functions=[{judge: {kindd: rank}}]"], "reward.functions", "error", "kindd"),
        ([*JUDGE, "reward.judge.kind=rubric"], "reward.judge.rubric", "error", "criteria"),
        ([*JUDGE, "reward.judge.api_key_env=sk-123"], "reward.judge.api_key_env", "error", "never the key"),
        ([*JUDGE, "reward.judge.samples=3"], "reward.judge.temperature", "warning", "equal"),
        (
            ["reward.judge.base_url=http://me:pass@host/v1", JUDGE[1], JUDGE[2]],
            "reward.judge.base_url",
            "error",
            "password",
        ),
        *[
            ([f"reward.judge.base_url={url}", JUDGE[1], JUDGE[2]], "reward.judge.base_url", "error", said)
            for url, said in (
                ("127.0.0.1:8000/v1", "expected http://"),
                ("http://host:abc/v1", "is no address"),
                ("http://host:99999/v1", "is no address"),
                ("http://[::1/v1", "is no address"),
                ("http:///v1", "and a host"),
                ("'http://ho st/v1'", "and a host"),
                ("http://host/v1?key=sk-123", "or query"),
                ("https://host/v1/chat/completions", "adds /chat/completions itself"),
            )
        ],
        ([*JUDGE, "reward.judge.eval.base_url=http://me:pass@host"], "reward.judge.eval.base_url", "error", "password"),
        ([*JUDGE, "reward.judge.eval.base_url=policy"], "reward.judge.eval.base_url", "error", "and a host"),
        ([*JUDGE, "reward.judge.eval.api_key_env=sk-123"], "reward.judge.eval.api_key_env", "error", "never the key"),
        ([*JUDGE, "reward.functions=[{judge: {base_url: policy}}]"], "reward.functions", "error", "starts from"),
        ([*JUDGE, "reward.functions=[{judge: {kind: best}}]"], "reward.functions", "error", "one of reference"),
        ([*JUDGE, "reward.functions=[{judge: {max_concurrent: 0}}]"], "reward.functions", "error", "max_concurrent=0"),
        ([JUDGE[0], JUDGE[2]], "reward.judge.model", "error", "name of its model"),
        ([JUDGE[0], JUDGE[1], "trainer.test_freq=5"], "reward.judge.eval.model", "warning", "pleases"),
        (["algorithm.adv_estimator=opd"], "actor_rollout_ref.ref.path", "error", "teacher"),
        (
            ["algorithm.distill_weight=0.1", "actor_rollout_ref.ref.path=org/teacher"],
            "algorithm.distill_weight",
            "error",
            "mix them",
        ),
        (["reward_model.reward_manager=dapo", f"{O}.enable=true"], f"{O}.len", "error", "penalty grows"),
        ([f"{O}.enable=true", f"{O}.len=9"], "reward_model.reward_manager", "warning", "no overlong penalty"),
        (["custom_reward_function.path=nowhere.py"], "custom_reward_function.path", "error", "no such file"),
        (["data.train_files=[gsm8k, nowhere.jsonl]"], "data.train_files", "error", "nowhere.jsonl"),
        (["data.val_files=nowhere.parquet"], "data.val_files", "error", "no such file"),
        (["actor_rollout_ref.model.path=./nowhere"], "actor_rollout_ref.model.path", "error", "no such folder"),
        (["trainer.save_freq=often"], "trainer.save_freq", "error", "or auto"),
        (["trainer.resume_mode=nowhere"], "trainer.resume_mode", "error", "path of a checkpoint"),
        (["trainer.device=gpu"], "trainer.device", "error", "cuda"),
        (["trainer.experiment_name=a/b"], "trainer.experiment_name", "error", "folder"),
        ([f"{A}.optim.lr=.inf"], f"{A}.optim.lr", "error", "finite"),
        (["trainer.nnodes=2"], "trainer.nnodes", "error", "one machine"),
        (["trainer.n_gpus_per_node=8"], "trainer.n_gpus_per_node", "warning", ""),
        ([f"{R}.tensor_model_parallel_size=2"], f"{R}.tensor_model_parallel_size", "error", "one device"),
        ([f"{A}.ulysses_sequence_parallel_size=2"], f"{A}.ulysses_sequence_parallel_size", "warning", "in one process"),
        (
            [f"{A}.ulysses_sequence_parallel_size=3", f"{A}.strategy=fsdp2", "trainer.n_gpus_per_node=4"],
            f"{A}.ulysses_sequence_parallel_size",
            "error",
            "does not divide the 4 trainer ranks",
        ),
        (
            [
                f"{A}.ulysses_sequence_parallel_size=2",
                f"{A}.strategy=fsdp2",
                "actor_rollout_ref.model.use_remove_padding=false",
                "actor_rollout_ref.model.use_shared_prefix=false",
            ],
            f"{A}.ulysses_sequence_parallel_size",
            "error",
            "needs packed rows",
        ),
        (
            [f"{A}.importance_sampling_level=token", f"{A}.policy_loss.loss_mode=gspo"],
            f"{A}.importance_sampling_level",
            "error",
            "contradicts",
        ),
    ],
)
def test_a_rule_names_its_key(overrides, key, level, text):
    only(problems(*overrides), key, level, text)


@pytest.mark.parametrize(
    "override",
    [
        f"{F}.max_num_gen_batches=5",
        f"{F}.metric=acc",
        f"{F}.function=package.module:keep",
        f"{F}.predict_weight=true {F}.predict=skip",
        "data.gen_batch_size=64",
        f"{F}.predict_weight=true",
        f"{A}.behav_imp_weight_cap=5.0",
        f"{A}.kl_loss_coef=0.1",
        "algorithm.norm_adv_by_std_in_grpo=false algorithm.adv_estimator=rloo",
        f"{A}.policy_loss.tau_pos=2",
        f"{A}.clip_ratio_c=4",
        f"{A}.clip_ratio=0.2 {A}.policy_loss.loss_mode=sapo",
        f"{A}.clip_ratio=0.002 {A}.clip_ratio_low=0.001 {A}.clip_ratio_high=0.001",
        f"{A}.clip_target=0.2 {A}.ppo_mini_batch_size=1024",
        f"{A}.shuffle=true {A}.ppo_mini_batch_size=1024",
        f"{A}.clip_target_bounds=[0.5,2]",
        f"{A}.loss_scale_factor=100",
        f"{A}.optim.min_lr_ratio=0.1",
        f"{A}.optim.lr_warmup_steps_ratio=0.1 {A}.optim.lr_warmup_steps=3",
        f"{A}.ppo_micro_batch_size_per_gpu=4 {A}.use_dynamic_bsz=true",
        f"{A}.ppo_max_token_len_per_gpu=9000 {A}.ppo_micro_batch_size_per_gpu=4",
        f"{R}.engine_kwargs={{block_size:32}}",
        f"{R}.enable_prefix_caching=false",
        f"{R}.enable_prefix_caching=false {R}.name=package.module:engine",
        f"{R}.gpu_memory_utilization=0.7 {R}.name=package.module:engine",
        f"{R}.tensor_model_parallel_size=2 {R}.name=package.module:engine",
        f"{R}.val_kwargs.temperature=0.6",
        f"{R}.val_kwargs.n=4",
        f"{O}.len=9",
        "custom_reward_function.name=f",
        "custom_reward_function.path=json reward.functions=[{'name':'math'}]",
        "data.seed=3 data.shuffle=false",
        "data.truncation=left",
        "trainer.total_epochs=2 trainer.total_training_steps=5",
        "algorithm.gamma=0.9",
        f"{F}.max_staleness=1 {F}.enable=true {F}.strategy=rounds",
        f"{A}.fsdp_config.param_offload=true",
        f"actor_rollout_ref.ref.fsdp_config.param_offload=true {A}.use_kl_loss=true",
        f"actor_rollout_ref.ref.fsdp_config.optimizer_offload=true {A}.use_kl_loss=true {A}.strategy=fsdp2",
        "critic.fsdp_config.fsdp_size=2 algorithm.adv_estimator=gae",
        "actor_rollout_ref.model.lora_dropout=0.1 actor_rollout_ref.model.lora_rank=4",
        "critic.optim.min_lr_ratio=0.1 algorithm.adv_estimator=gae",
        "critic.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps=3 algorithm.adv_estimator=gae",
        "critic.ppo_max_token_len_per_gpu=99 critic.ppo_micro_batch_size_per_gpu=2 algorithm.adv_estimator=gae",
        f"algorithm.std_level=batch algorithm.turn_rewards=return_to_go {A}.policy_loss.loss_mode=gspo_token",
        f"{A}.fsdp_config.optimizer_offload=true trainer.device=cpu",
    ],
)
def test_a_key_without_effect_is_named(override):
    words = override.split()
    key, _, _ = words[0].partition("=")
    found = problems(*words)
    assert any(p.key == key and "has no effect" in p.message for p in found), [str(p) for p in found]


@pytest.mark.parametrize(
    "override",
    [
        f"{F}.function=package.module:keep {F}.enable=true",
        f"{F}.function=package.module:keep {F}.enable=true reward.format_weight=0.1",
        f"{R}.engine_kwargs={{block_size:32}} {R}.name=vllm",
        f"{R}.engine_kwargs={{speed:2}} {R}.name=package.module:engine",
        f"{R}.max_num_seqs=8 {R}.dtype=float32 {R}.name=package.module:engine",
        "algorithm.gamma=0.9 algorithm.lam=0.9 algorithm.adv_estimator=theirs trainer.plugins=[theirs.py]",
    ],
)
def test_a_key_with_an_effect_is_not_reported(override):
    assert problems(*override.split()) == []


def test_defaults_say_nothing():
    assert problems() == []


def test_turns_with_a_ratio_of_their_own_say_nothing():
    for word in (f"{A}.policy_loss.loss_mode=gspo_token", f"{A}.importance_sampling_level=turn"):
        found = problems("algorithm.turn_rewards=return_to_go", word, "environment.name=guess")
        assert [p for p in found if p.key == "algorithm.turn_rewards"] == []


def test_every_rule_for_rollouts_is_checked_there():
    written = {
        rule
        for rule in vars(rules).values()
        if inspect.isfunction(rule) and list(inspect.signature(rule).parameters) == ["c", "report"]
    }
    assert written <= {*rules.RULES}


def test_the_optimiser_is_offloaded_in_one_process_too():
    assert problems(f"{A}.fsdp_config.optimizer_offload=true") == []


@pytest.mark.parametrize("mode", ["gspo", "gspo_token", "vanilla", "dapo", "cispo", "geo_mean", "sapo"])
def test_every_loss_is_quiet_by_itself_with_and_without_the_recipe(mode):
    override = f"{A}.policy_loss.loss_mode={mode}"
    assert problems(override) == []
    assert load(overrides=[override]).warnings == ()


def test_the_recipes_clip_range_is_not_used_for_a_token_ratio():
    for mode, clip in (("vanilla", (0.2, 0.2)), ("dapo", (0.2, 0.28))):
        config = load(overrides=[f"{A}.policy_loss.loss_mode={mode}"]).config
        assert resolved_loss(config.actor_rollout_ref.actor).clip == clip
        assert config.actor_rollout_ref.actor.clip_target is None


def test_all_errors_come_at_once_and_consequences_are_left_out():
    found = problems(
        "data.trian_batch_size=3",
        "data.train_batch_size=abc",
        f"{A}.ppo_mini_batch_size=300",
        "trainer.device=gpu",
        f"{F}.metric=acc",
        "algorithm.gamma=2",
    )
    keys = [p.key for p in found if p.level == "error"]
    assert keys == ["data.trian_batch_size", "data.train_batch_size", "algorithm.gamma", "trainer.device"]


def test_an_error_hides_only_rules_that_name_its_key():
    """`n` is part of many names, and `clip_ratio` of another key's."""
    found = problems("n=3", f"{A}.clip_ratio=x", "trainer.device=gpu", f"{A}.clip_ratio_high=0.02")
    assert [p.key for p in found if p.level == "error"] == ["n", f"{A}.clip_ratio", "trainer.device"]
    only(found, f"{A}.clip_ratio_high", "warning", "wide for a sequence ratio")


def test_the_names_that_the_config_offers_are_those_that_are_registered():
    from gspo.algo.advantages import ADVANTAGE_ESTIMATORS
    from gspo.algo.losses import POLICY_LOSSES

    def own(registry: Registry[Any]) -> list[str]:
        """Without those that other tests registered."""
        return [n for n in registry.names() if registry.get(n).formula.__module__.startswith("gspo.")]

    loss, estimator = f"{A}.policy_loss.loss_mode", "algorithm.adv_estimator"
    assert list(tree.leaves()[loss].info.choices) == own(POLICY_LOSSES)
    assert set(tree.leaves()[estimator].info.choices) == set(own(ADVANTAGE_ESTIMATORS))


@pytest.mark.parametrize("mode", ["gspo", "gspo_token", "vanilla", "dapo", "cispo", "geo_mean", "sapo"])
def test_what_the_config_says_of_a_loss_is_what_the_loss_uses(mode):
    from gspo.algo import LossSettings, get_policy_loss

    config = load(overrides=[*PLAIN, f"{A}.policy_loss.loss_mode={mode}"]).config
    said, used = resolved_loss(config.actor_rollout_ref.actor), get_policy_loss(mode).resolve(LossSettings())
    assert (said.clip, said.level) == ((used.clip_low, used.clip_high), used.level)
    assert said.aggregation == used.aggregation


def test_a_registered_loss_is_accepted_by_name_and_a_plugin_may_bring_one():
    from gspo.algo.losses import POLICY_LOSSES, policy_loss

    name = "loss_of_the_config_test"
    with pytest.raises(ConfigErrors, match="expected one of gspo"):
        load(overrides=[f"{A}.policy_loss.loss_mode={name}"])
    policy_loss(name)(lambda x, s: None)  # pyright: ignore
    try:
        assert load(overrides=[f"loss_mode={name}"]).config.actor_rollout_ref.actor.policy_loss.loss_mode == name
    finally:
        POLICY_LOSSES._items.pop(name)
    plugged = load(overrides=["loss_mode=theirs", "trainer.plugins=[my_losses.py]"])
    assert plugged.config.actor_rollout_ref.actor.policy_loss.loss_mode == "theirs"
