"""Each condition of each rule between keys: a config that it passes, and the nearest one that it does not."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from gspo.config import load
from gspo.config.checks import ineffective, rules
from gspo.config.loading import tree
from gspo.config.loading.settings import Layer, Origin, Settings
from gspo.config.problems import Problem

A, R, M, F = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "algorithm.filter_groups",
)
O, J, REF = "reward_model.reward_kwargs.overlong_buffer_cfg", "reward.judge", "actor_rollout_ref.ref.path"
MINI, MICRO, DYNAMIC = f"{A}.ppo_mini_batch_size", f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.use_dynamic_bsz"
TRAIN, N, MODE, LEVEL = "data.train_batch_size", f"{R}.n", f"{R}.mode", f"{A}.importance_sampling_level"
LOSS, OLD, DECOUPLED = f"{A}.policy_loss.loss_mode", f"{A}.old_log_prob_source", f"{A}.use_decoupled_loss"
AHEAD, SHARING, GPUS = f"{R}.max_head_offpolicyness", f"{A}.ulysses_sequence_parallel_size", "trainer.n_gpus_per_node"
STRATEGY, ESTIMATOR, DISTILL = f"{A}.strategy", "algorithm.adv_estimator", "algorithm.distill_weight"
KL, KL_LOSS, TOKENS = "algorithm.use_kl_in_reward", f"{A}.use_kl_loss", f"{A}.ppo_max_token_len_per_gpu"
LOW, HIGH, BOUNDS = f"{A}.clip_ratio_low", f"{A}.clip_ratio_high", f"{A}.clip_target_bounds"
FOUR, EIGHT, CRITIC_EIGHT = f"{M}.load_in_4bit", f"{A}.optim.eight_bit", "critic.optim.eight_bit"
RANKS = {STRATEGY: "fsdp2", TRAIN: 3, MINI: 3, N: 2}
ASYNC = {MODE: "async", AHEAD: 1, DECOUPLED: True}
FILTERED = {f"{F}.enable": True}
ROUNDS = {**FILTERED, f"{F}.strategy": "rounds", TRAIN: 8, MINI: 2, "data.gen_batch_size": 4}
DAPO = {"reward_model.reward_manager": "dapo", f"{O}.enable": True, f"{O}.len": 9}
JUDGED = {f"{J}.base_url": "https://host/v1", f"{J}.model": "m", f"{J}.eval.model": "n"}
TEACHER = {ESTIMATOR: "opd", REF: "org/teacher", LOSS: "gspo_token", LEVEL: "sequence_token", OLD: "recompute"}
LENGTHS = {"data.max_prompt_length": 100, "data.max_response_length": 50}
FOUR_BITS = {FOUR: True, f"{M}.lora_rank": 4}

# (what is said, about which key, a config without it, what is changed, how serious it is)
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("must divide data.train", MINI, {TRAIN: 12, MINI: 4}, {MINI: 5}, "error"),
    ("is larger than", MICRO, {TRAIN: 4, MINI: 4, N: 3, DYNAMIC: False, MICRO: 12}, {MICRO: 13}, "error"),
    ("is larger than", MICRO, {TRAIN: 4, MINI: 4, N: 3, DYNAMIC: True, MICRO: 13}, {DYNAMIC: False}, "error"),
    ("must divide", "critic.ppo_mini_batch_size", {TRAIN: 12, MINI: 4, "critic.ppo_mini_batch_size": 3}, {"critic.ppo_mini_batch_size": 5}, "error"),
    ("fewer prompts", "data.num_train_samples", {TRAIN: 8, MINI: 2, "data.num_train_samples": 8}, {"data.num_train_samples": 7}, "error"),
    ("so some have nothing to do", MINI, {**RANKS, GPUS: 6}, {GPUS: 7}, "warning"),
    ("so some have nothing to do", MINI, {**RANKS, GPUS: 7, STRATEGY: "local"}, {STRATEGY: "fsdp2"}, "warning"),
    ("so some have nothing to do", MINI, {**RANKS, GPUS: 13, SHARING: 2}, {GPUS: 14}, "warning"),
    ("so some have nothing to do", MINI, {**RANKS, "trainer.backend": "ray", GPUS: 4}, {"trainer.nnodes": 2}, "warning"),
    ("so some have nothing to do", MINI, {**RANKS, TRAIN: 1, MINI: 1, N: 1}, {GPUS: 2}, "warning"),
    ("a micro-batch size is needed", DYNAMIC, {DYNAMIC: False, MICRO: 1}, {MICRO: None}, "error"),
    ("a micro-batch size is needed", DYNAMIC, {DYNAMIC: True}, {DYNAMIC: False}, "error"),
    ("differs from data.max_prompt_length = 100", f"{R}.prompt_length", {**LENGTHS, f"{R}.prompt_length": 100}, {f"{R}.prompt_length": 50}, "error"),
    ("differs from data.max_response_length = 50", f"{R}.response_length", {**LENGTHS, f"{R}.response_length": 50}, {f"{R}.response_length": 100}, "error"),
    ("= 150", f"{R}.max_model_len", {**LENGTHS, f"{R}.max_model_len": 150}, {f"{R}.max_model_len": 149}, "error"),
    ("longest sequence, 150", TOKENS, {**LENGTHS, TOKENS: 150}, {TOKENS: 149}, "warning"),
    ("longest sequence, 150", TOKENS, {**LENGTHS, TOKENS: 149, DYNAMIC: False, MICRO: 1}, {DYNAMIC: True}, "warning"),
    ("needs groups", N, {**FILTERED, N: 2}, {N: 1}, "error"),
    ("needs groups", N, {N: 1}, FILTERED, "error"),
    ("never fill", f"{F}.max_num_gen_batches", {**ROUNDS, f"{F}.max_num_gen_batches": 2}, {f"{F}.max_num_gen_batches": 1}, "error"),
    ("never fill", f"{F}.max_num_gen_batches", {**ROUNDS, f"{F}.max_num_gen_batches": 0}, {f"{F}.max_num_gen_batches": 1}, "error"),
    ("never fill", f"{F}.max_num_gen_batches", {**ROUNDS, f"{F}.max_num_gen_batches": 1, f"{F}.strategy": "stream"}, {f"{F}.strategy": "rounds"}, "error"),
    ("never fill", f"{F}.max_num_gen_batches", {**ROUNDS, f"{F}.max_num_gen_batches": 1, "data.gen_batch_size": None}, {"data.gen_batch_size": 7}, "error"),
    ("includes the overlong penalty:", f"{F}.metric", {**FILTERED, **DAPO, f"{F}.metric": "acc"}, {f"{F}.metric": "score"}, "warning"),
    ("includes the overlong penalty:", f"{F}.metric", {**FILTERED, **DAPO, "reward_model.reward_manager": "naive"}, DAPO, "warning"),
    ("includes the overlong penalty:", f"{F}.metric", {**FILTERED, **DAPO, f"{O}.enable": False}, DAPO, "warning"),
    ("includes reward.format_weight and reward.repetition_penalty:", f"{F}.metric", {**FILTERED, "reward.format_weight": 0.1}, {"reward.repetition_penalty": -0.1}, "warning"),
    ("includes reward.format_weight:", f"{F}.metric", {**FILTERED, "reward.format_weight": 0.1, f"{F}.function": "a:b"}, {f"{F}.function": None}, "warning"),
    ("includes reward.format_weight:", f"{F}.metric", {"reward.format_weight": -0.1}, {**FILTERED, f"{F}.metric": "seq_final_reward"}, "warning"),
    ("includes the KL penalty", f"{F}.metric", {**FILTERED, KL: True, f"{F}.metric": "seq_reward"}, {f"{F}.metric": "seq_final_reward"}, "warning"),
    ("includes the KL penalty", f"{F}.metric", {**FILTERED, KL: True, f"{F}.metric": "seq_final_reward", "reward.format_weight": 0.1}, {"reward.format_weight": 0.0}, "warning"),
    ("equals seq_reward", f"{F}.metric", {**FILTERED, KL: True, f"{F}.metric": "seq_final_reward"}, {KL: False}, "warning"),
    ("ε = 0.0101 is wide", HIGH, {HIGH: 0.01}, {HIGH: 0.0101}, "warning"),
    ("ε = 0.02 is wide", LOW, {LOW: 0.01}, {LOW: 0.02}, "warning"),
    ("ε = 0.02 is wide", f"{A}.clip_ratio", {f"{A}.clip_ratio": 0.02, LOW: 0.01, HIGH: 0.01}, {LOW: None}, "warning"),
    ("ε = 0.02 is wide", HIGH, {HIGH: 0.02, LEVEL: "turn"}, {LEVEL: "sequence"}, "warning"),
    ("ε = 0.02 is wide", HIGH, {HIGH: 0.02, LEVEL: "token", LOSS: "vanilla"}, {LEVEL: "sequence", LOSS: "gspo"}, "warning"),
    ("cannot clip", LOW, {LOW: 0.99, LOSS: "vanilla", LEVEL: "token"}, {LOW: 1.0}, "warning"),
    ("cannot clip", LOW, {LOW: 1.0, LOSS: "geo_mean", LEVEL: "token"}, {LOSS: "vanilla"}, "warning"),
    ("cannot clip", LOW, {LOW: 1.0, LOSS: "sapo", LEVEL: "token"}, {LOSS: "vanilla"}, "warning"),
    ("cannot clip", f"{A}.clip_ratio", {f"{A}.clip_ratio": 0.9, LOSS: "vanilla", LEVEL: "token"}, {f"{A}.clip_ratio": 1.5}, "warning"),
    ("always 1", MINI, {TRAIN: 8, MINI: 4}, {MINI: 8}, "warning"),
    ("always 1", MINI, {TRAIN: 8, MINI: 8, f"{A}.ppo_epochs": 2}, {f"{A}.ppo_epochs": 1}, "warning"),
    ("always 1", MINI, {TRAIN: 8, MINI: 8, OLD: "rollout"}, {OLD: "first_pass"}, "warning"),
    ("always 1", MINI, {TRAIN: 8, MINI: 8, LOSS: "vanilla", LEVEL: "token"}, {LOSS: "gspo", LEVEL: "turn"}, "warning"),
    ("length", f"{A}.loss_agg_mode", {f"{A}.loss_agg_mode": None}, {f"{A}.loss_agg_mode": "token-mean"}, "warning"),
    *[("two factors", BOUNDS, {BOUNDS: [0.5, 2.0]}, {BOUNDS: bad}, "error") for bad in ([0.5], [0.5, 1.0, 2.0], [0.0, 2.0], [1.1, 2.0], [0.5, 0.9])],
    ("decoupled", f"{R}.calculate_log_probs", {DECOUPLED: True}, {f"{R}.calculate_log_probs": False}, "error"),
    ("decoupled", f"{R}.calculate_log_probs", {f"{R}.calculate_log_probs": False}, {DECOUPLED: True}, "error"),
    ("old_log_prob_source", f"{R}.calculate_log_probs", {OLD: "rollout"}, {f"{R}.calculate_log_probs": False}, "error"),
    ("same as sync", AHEAD, {MODE: "async", AHEAD: 1}, {AHEAD: 0}, "warning"),
    ("same as sync", AHEAD, {MODE: "sync", AHEAD: 0}, {MODE: "async"}, "warning"),
    ("rounds waits", f"{F}.strategy", {**ASYNC, **FILTERED, f"{F}.strategy": "stream"}, {f"{F}.strategy": "rounds"}, "error"),
    ("rounds waits", f"{F}.strategy", {**ASYNC, f"{F}.strategy": "rounds"}, FILTERED, "error"),
    ("rounds waits", f"{F}.strategy", {**ASYNC, **FILTERED, AHEAD: 0, f"{F}.strategy": "rounds"}, {AHEAD: 1}, "error"),
    ("is measured with the policy", KL, {**ASYNC, KL: True, MODE: "sync"}, {MODE: "async"}, "error"),
    ("nothing corrects", DECOUPLED, {**ASYNC, DECOUPLED: True}, {DECOUPLED: False}, "warning"),
    ("nothing corrects", DECOUPLED, {MODE: "async", AHEAD: 0}, {AHEAD: 3}, "warning"),
    ("the current weights", DECOUPLED, ASYNC, {MODE: "sync"}, "warning"),
    ("the current weights", DECOUPLED, {DECOUPLED: True, f"{R}.name": "vllm"}, {f"{R}.name": "native"}, "warning"),
    ("the current weights", DECOUPLED, {DECOUPLED: True, **FILTERED, f"{F}.strategy": "stream", f"{F}.max_staleness": 1}, {f"{F}.max_staleness": 0}, "warning"),
    ("the current weights", DECOUPLED, {DECOUPLED: True, **FILTERED, f"{F}.strategy": "stream", f"{F}.max_staleness": 1}, {f"{F}.strategy": "rounds"}, "warning"),
    ("the current weights", DECOUPLED, {DECOUPLED: True, **FILTERED, f"{F}.strategy": "stream", f"{F}.max_staleness": 1}, {f"{F}.enable": False}, "warning"),
    *[("compares the responses", ESTIMATOR, {ESTIMATOR: name, N: 2}, {N: 1}, "warning") for name in ("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")],
    ("compares the responses", ESTIMATOR, {ESTIMATOR: "reinforce_plus_plus", N: 1}, {ESTIMATOR: "grpo"}, "warning"),
    ("compares the responses", ESTIMATOR, {ESTIMATOR: "grpo", N: 1, **FILTERED}, {f"{F}.enable": False}, "warning"),
    ("needs a critic", "critic.enable", {ESTIMATOR: "gae"}, {"critic.enable": False}, "error"),
    ("needs a critic", "critic.enable", {"critic.enable": False}, {ESTIMATOR: "gae"}, "error"),
    ("does not use the critic's", "critic.enable", {ESTIMATOR: "gae", "critic.enable": True}, {ESTIMATOR: "grpo"}, "warning"),
    ("never be trained", "trainer.critic_warmup", {ESTIMATOR: "gae", "trainer.total_training_steps": 5, "trainer.critic_warmup": 4}, {"trainer.critic_warmup": 5}, "error"),
    ("never be trained", "trainer.critic_warmup", {"trainer.total_training_steps": 5, "trainer.critic_warmup": 5}, {ESTIMATOR: "gae"}, "error"),
    ("never be trained", "trainer.critic_warmup", {ESTIMATOR: "gae", "trainer.critic_warmup": 5}, {"trainer.total_training_steps": 4}, "error"),
    ("penalised twice", KL, {KL: True}, {KL_LOSS: True}, "warning"),
    ("penalised twice", KL, {KL_LOSS: True}, {KL: True}, "warning"),
    ("loses part", "algorithm.kl_penalty", {KL: True, "algorithm.kl_penalty": "k1"}, {"algorithm.kl_penalty": "k3"}, "warning"),
    ("loses part", "algorithm.kl_penalty", {KL: True, "algorithm.kl_penalty": "kl"}, {"algorithm.kl_penalty": "low_var_kl"}, "warning"),
    ("loses part", "algorithm.kl_penalty", {"algorithm.kl_penalty": "k2"}, {KL: True}, "warning"),
    ("weight 0", f"{A}.kl_loss_coef", {KL_LOSS: True, f"{A}.kl_loss_coef": 1e-9}, {f"{A}.kl_loss_coef": 0.0}, "warning"),
    ("weight 0", f"{A}.kl_loss_coef", {f"{A}.kl_loss_coef": 0.0}, {KL_LOSS: True}, "warning"),
    ("the teacher would be", REF, TEACHER, {REF: None}, "error"),
    ("the teacher would be", REF, {DISTILL: 0.0}, {DISTILL: 0.1}, "error"),
    ("advantages differ by token", ESTIMATOR, TEACHER, {LOSS: "gspo", LEVEL: "sequence"}, "error"),
    ("advantages differ by token", DISTILL, {**TEACHER, ESTIMATOR: "grpo", DISTILL: 0.5}, {LOSS: "gspo", LEVEL: "sequence"}, "error"),
    ("before the update", OLD, TEACHER, {OLD: "first_pass"}, "error"),
    ("drops groups", f"{F}.enable", TEACHER, FILTERED, "warning"),
    ("drops groups", f"{F}.enable", {**TEACHER, ESTIMATOR: "grpo", DISTILL: 0.5, **FILTERED}, {ESTIMATOR: "opd"}, "warning"),
    *[("two numbers", f"{part}.optim.betas", {f"{part}.optim.betas": [0.0, 0.99]}, {f"{part}.optim.betas": bad}, "error")
      for part in (A, "critic") for bad in ([0.9], [0.9, 0.9, 0.9], [-0.1, 0.9], [0.9, 1.0])],
    ("expected 1 to 49", f"{O}.len", {**LENGTHS, **DAPO, f"{O}.len": 49}, {f"{O}.len": 50}, "error"),
    ("expected 1 to 49", f"{O}.len", {**LENGTHS, **DAPO, f"{O}.len": 1}, {f"{O}.len": 0}, "error"),
    ("expected 1 to 19", f"{O}.len", {**LENGTHS, **DAPO, f"{O}.len": 20}, {"reward_model.reward_kwargs.max_resp_len": 20}, "error"),
    ("expected 1 to 49", f"{O}.len", {**LENGTHS, f"{O}.len": 0}, {**DAPO, f"{O}.len": 0}, "error"),
    ("naive manager applies no", "reward_model.reward_manager", DAPO, {"reward_model.reward_manager": "naive"}, "warning"),
    ("every weight is 0", "reward.functions", {"reward.functions": [{"name": "math", "weight": 0}, {"name": "format"}]}, {"reward.functions": [{"name": "math", "weight": 0}]}, "error"),
    ("every weight is 0", "reward.functions", {**JUDGED, "reward.functions": [{"name": "math", "weight": 0}]}, {f"{J}.weight": 0.0}, "error"),
    ("every weight is 0", "reward.functions", {"reward_model.enable": True, "reward_model.path": "p", "reward.functions": [{"name": "math", "weight": 0}]}, {"reward_model.weight": 0.0}, "error"),
    ("two entries", "reward.functions", {"reward.functions": [{"model": "a"}]}, {"reward.functions": [{"model": "a"}, {"model": "a"}]}, "error"),
    ("has no path", "reward_model.path", {"reward.functions": [{"model": "a"}]}, {"reward.functions": [{"model": {}}]}, "error"),
    ("cannot score at the same time", "reward_model.enable", {"reward_model.enable": True, "reward_model.path": "p", **ASYNC}, {STRATEGY: "fsdp2"}, "error"),
    ("cannot score at the same time", "reward_model.enable", {"reward_model.enable": True, "reward_model.path": "p", **ASYNC}, {"trainer.backend": "ray"}, "error"),
    ("cannot score at the same time", "reward_model.enable", {**ASYNC, STRATEGY: "fsdp2"}, {"reward_model.enable": True, "reward_model.path": "p"}, "error"),
    ("cannot score at the same time", "reward_model.enable", {"reward_model.enable": True, "reward_model.path": "p", STRATEGY: "fsdp2", **ASYNC, AHEAD: 0}, {AHEAD: 1}, "error"),
    ("no such file", "custom_reward_function.path", {"custom_reward_function.path": "some.module"}, {"custom_reward_function.path": "some/module.py"}, "error"),
    ("no address", f"{J}.base_url", JUDGED, {f"{J}.base_url": ""}, "error"),
    *[("http:// or https://", f"{J}.base_url", JUDGED, {f"{J}.base_url": bad}, "error") for bad in ("host/v1", "ftp://host", "https://", "http://a@b/v1")],
    ("http:// or https://", f"{J}.base_url", {**JUDGED, f"{J}.base_url": "policy"}, {f"{J}.base_url": "polici"}, "error"),
    ("http:// or https://", f"{J}.base_url", {**JUDGED, f"{J}.base_url": "http://127.0.0.1:8000"}, {f"{J}.base_url": "x http://127.0.0.1:8000"}, "error"),
    ("name of its model", f"{J}.model", {**JUDGED, f"{J}.model": None, f"{J}.base_url": "policy"}, {f"{J}.base_url": "http://host"}, "error"),
    ("never the key", f"{J}.api_key_env", {**JUDGED, f"{J}.api_key_env": ""}, {f"{J}.api_key_env": "A-B"}, "error"),
    ("criteria", f"{J}.rubric", {**JUDGED, f"{J}.kind": "rubric", f"{J}.rubric": "r.toml"}, {f"{J}.rubric": None}, "error"),
    ("criteria", f"{J}.rubric", JUDGED, {f"{J}.kind": "rubric"}, "error"),
    ("at least 2", f"{J}.kind", {**JUDGED, f"{J}.kind": "rank", N: 2}, {N: 1}, "error"),
    ("about one response", f"{J}.prompt", {**JUDGED, f"{J}.prompt": "{response}"}, {f"{J}.kind": "rank"}, "error"),
    ("are equal without", f"{J}.temperature", {**JUDGED, f"{J}.samples": 2, f"{J}.temperature": 0.1}, {f"{J}.temperature": 0.0}, "warning"),
    ("are equal without", f"{J}.temperature", {**JUDGED, f"{J}.samples": 1}, {f"{J}.samples": 2}, "warning"),
    ("may rise for nothing", f"{J}.eval.model", {**JUDGED, "trainer.test_freq": 1}, {f"{J}.eval.model": None}, "warning"),
    ("may rise for nothing", f"{J}.eval.model", {**JUDGED, f"{J}.eval.model": None, "trainer.test_freq": -1}, {"trainer.test_freq": 1}, "warning"),
    ("may rise for nothing", f"{J}.eval.model", {**JUDGED, f"{J}.eval.model": None, "trainer.test_freq": 1, f"{J}.weight": 0.0, "reward.functions": [{"name": "math"}]}, {f"{J}.weight": 0.5}, "warning"),
    *[("no such file", f"data.{name}", {f"data.{name}": "math"}, {f"data.{name}": ["math", f"nowhere{end}"]}, "error")
      for name, end in (("train_files", ".jsonl"), ("val_files", ".json"), ("sft_files", ".ndjson"), ("train_files", ".parquet"), ("val_files", ".csv"), ("val_files", ".tsv"))],
    ("no such file", "data.train_files", {"data.train_files": "hf://x/nowhere.jsonl"}, {"data.train_files": "jsonl:nowhere.jsonl"}, "error"),
    ("no such file", "data.train_files", {"data.train_files": __file__.replace(".py", "*.py")}, {"data.train_files": __file__.replace(".py", "*.csv")}, "error"),
    ("no training data", "data.train_files", {"data.train_files": ["math"]}, {"data.train_files": []}, "error"),
    *[("no such folder", f"{M}.path", {f"{M}.path": "nowhere"}, {f"{M}.path": bad}, "error") for bad in ("./nowhere", "../nowhere", "/nowhere", "~/nowhere")],
    ("or auto", "trainer.save_freq", {"trainer.save_freq": "auto"}, {"trainer.save_freq": "never"}, "error"),
    ("path of a checkpoint", "trainer.resume_mode", {"trainer.resume_mode": "disable"}, {"trainer.resume_mode": "./nowhere"}, "error"),
    ("path of a checkpoint", "trainer.resume_mode", {"trainer.resume_mode": "."}, {"trainer.resume_mode": "autos"}, "error"),
    *[("cuda:N", "trainer.device", {"trainer.device": good}, {"trainer.device": bad}, "error") for good, bad in (("cuda:12", "cuda:"), ("cuda", "xcuda"), ("mps", "mps:0"), ("cpu", "cpus"), ("auto", ""))],
    *[("name of a folder", "trainer.experiment_name", {"trainer.experiment_name": "a.b"}, {"trainer.experiment_name": bad}, "error") for bad in ("", " ", "a/b", ".", "..")],
    ("one machine", "trainer.nnodes", {"trainer.nnodes": 1}, {"trainer.nnodes": 2}, "error"),
    ("one machine", "trainer.nnodes", {"trainer.backend": "ray", "trainer.nnodes": 2}, {"trainer.backend": "local"}, "error"),
    ("uses one device", GPUS, {GPUS: 1}, {GPUS: 2}, "warning"),
    ("uses one device", GPUS, {GPUS: 2, STRATEGY: "fsdp2"}, {STRATEGY: "local"}, "warning"),
    ("uses one device", GPUS, {GPUS: 2, "trainer.backend": "ray"}, {"trainer.backend": "local"}, "warning"),
    ("one device", f"{R}.tensor_model_parallel_size", {f"{R}.name": "vllm", f"{R}.tensor_model_parallel_size": 2}, {f"{R}.name": "native"}, "error"),
    ("trains in one process", SHARING, {SHARING: 1}, {SHARING: 2}, "warning"),
    ("does not divide the 6 trainer ranks", SHARING, {STRATEGY: "fsdp2", GPUS: 6, SHARING: 3}, {SHARING: 4}, "error"),
    ("does not divide the 6 trainer ranks", SHARING, {"trainer.backend": "ray", GPUS: 3, "trainer.nnodes": 2, SHARING: 6}, {SHARING: 4}, "error"),
    ("does not divide the 1 trainer rank", SHARING, {STRATEGY: "fsdp2", SHARING: 2}, {GPUS: 1}, "error"),
    ("needs packed rows", SHARING, {STRATEGY: "fsdp2", SHARING: 2, f"{M}.use_remove_padding": False, f"{M}.use_shared_prefix": True}, {f"{M}.use_shared_prefix": False}, "error"),
    ("needs packed rows", SHARING, {STRATEGY: "fsdp2", SHARING: 2, f"{M}.use_remove_padding": True, f"{M}.use_shared_prefix": False}, {f"{M}.use_remove_padding": False}, "error"),
    ("mix the advantages", "algorithm.turn_rewards", {"algorithm.turn_rewards": "return_to_go", LEVEL: "turn"}, {LEVEL: "sequence"}, "error"),
    ("mix the advantages", "algorithm.turn_rewards", {LEVEL: "sequence"}, {"algorithm.turn_rewards": "return_to_go"}, "error"),
    ("no critic", "algorithm.turn_rewards", {"algorithm.turn_rewards": "return_to_go", LEVEL: "turn"}, {ESTIMATOR: "gae"}, "error"),
    ("fill the whole response of 50", f"{R}.multi_turn.max_tool_response_length", {**LENGTHS, f"{R}.multi_turn.enable": True, f"{R}.multi_turn.max_tool_response_length": 49}, {f"{R}.multi_turn.max_tool_response_length": 50}, "warning"),
    ("fill the whole response of 50", f"{R}.multi_turn.max_tool_response_length", {**LENGTHS, f"{R}.multi_turn.max_tool_response_length": 50}, {f"{R}.multi_turn.enable": True}, "warning"),
    ("only gspo sft", "data.max_length", {}, {"data.max_length": 5}, "warning"),
    ("only gspo sft", "data.response_key", {}, {"data.response_key": "x"}, "warning"),
    ("only gspo sft", "trainer.val_accuracy", {}, {"trainer.val_accuracy": True}, "warning"),
    ("cannot be trained", FOUR, FOUR_BITS, {f"{M}.lora_rank": 0}, "error"),
    *[("cannot shard", key, on, {STRATEGY: "fsdp2"}, "error") for key, on in ((FOUR, FOUR_BITS), (EIGHT, {EIGHT: True}), (CRITIC_EIGHT, {CRITIC_EIGHT: True}))],
    *[("no kernels for MPS", key, on, {"trainer.device": "mps"}, "error") for key, on in ((FOUR, FOUR_BITS), (EIGHT, {EIGHT: True}), (CRITIC_EIGHT, {CRITIC_EIGHT: True}))],
    ("stays on the device", f"{A}.fsdp_config.optimizer_offload", {f"{A}.fsdp_config.optimizer_offload": True, CRITIC_EIGHT: True}, {EIGHT: True}, "error"),
    ("stays on the device", "critic.fsdp_config.optimizer_offload", {"critic.fsdp_config.optimizer_offload": True, EIGHT: True}, {CRITIC_EIGHT: True}, "error"),
    ("one device of one process", "trainer.device", {"trainer.device": "mps"}, {STRATEGY: "fsdp2"}, "error"),
    ("one device of one process", "trainer.device", {"trainer.backend": "ray"}, {"trainer.device": "mps"}, "error"),
    ("does not run on MPS", f"{R}.name", {f"{R}.name": "vllm"}, {"trainer.device": "mps"}, "error"),
    ("which MPS does not have", KL, {KL: True}, {"trainer.device": "mps"}, "error"),
    ("which MPS does not have", ESTIMATOR, {"trainer.device": "mps"}, {ESTIMATOR: "gae"}, "error"),
]  # fmt: skip


@functools.cache
def plain() -> Any:
    return load(overrides=[f"{M}.path=org/model", LOSS + "=gspo"]).config


@contextmanager
def configured(values: Mapping[str, Any]) -> Iterator[Any]:
    """The plain config with these values, for a while."""
    config = plain()
    before = {key: tree.get(config, key) for key in values}
    for key, value in values.items():
        tree.put(config, key, value)
    try:
        yield config
    finally:
        for key, value in before.items():
            tree.put(config, key, value)


def problems(values: Mapping[str, Any]) -> list[Problem]:
    """What the rules say about a config with these values."""

    def report(key: str, message: str, remedy: str, level: Any = "error") -> Problem:
        return Problem(level, key, None, "", message, remedy)

    with configured(values) as config:
        return [problem for rule in rules.RULES for problem in rule(config, report)]


def checked(values: Mapping[str, Any], layer: Layer = Layer.FILE) -> list[Problem]:
    """Everything that is said about these values where somebody, or a recipe, set them."""
    settings = Settings()
    with configured(values) as config:
        for key in tree.leaves():
            settings.put(key, tree.get(config, key), Origin(layer if key in values else Layer.DEFAULT, "here"))
        return rules.check(config, settings, rules.RULES)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_rule_speaks_only_where_its_condition_holds(number: int) -> None:
    text, key, quiet, changed, level = CASES[number]

    def said(values: Mapping[str, Any]) -> list[str]:
        return [problem.level for problem in problems(values) if problem.key == key and text in problem.message]

    assert said(quiet) == [] and said({**quiet, **changed}) == [level]


def test_errors_come_first() -> None:
    levels = [problem.level for problem in checked({HIGH: 0.5, "trainer.device": "gpu", KL_LOSS: True, KL: True})]
    assert levels == ["error", "warning", "warning"]


@pytest.mark.parametrize(
    ("values", "key", "remedy"),
    [
        ({TRAIN: 12, MINI: 5}, MINI, f"e.g. {MINI}=4"),
        ({TRAIN: 12, MINI: 24}, MINI, f"e.g. {MINI}=12"),
        ({TRAIN: 12, MINI: 12}, MINI, f"e.g. {MINI}=3 for 4 mini-batches"),
        ({TRAIN: 3, MINI: 3}, MINI, f"e.g. {MINI}=1 for 3 mini-batches"),
        ({TRAIN: 1, MINI: 1}, MINI, "raise data.train_batch_size"),
        ({TRAIN: 4, MINI: 4, N: 3, DYNAMIC: False, MICRO: 13}, MICRO, "set it to at most 12"),
        ({"trainer.device": "GPU0"}, "trainer.device", "did you mean cuda?"),
        ({"trainer.device": "cuds"}, "trainer.device", "did you mean cuda?"),
        ({"trainer.device": "xyz"}, "trainer.device", "e.g. trainer.device=auto"),
        ({"trainer.resume_mode": "disabled"}, "trainer.resume_mode", "did you mean disable?"),
        ({**LENGTHS, **DAPO, f"{O}.len": 50}, f"{O}.len", "e.g. 12"),
    ],
)
def test_a_remedy_names_a_value_that_works(values: dict[str, Any], key: str, remedy: str) -> None:
    assert remedy in [problem.remedy for problem in problems(values) if problem.key == key]


GAE, ON_TURNS = {ESTIMATOR: "gae"}, {"algorithm.turn_rewards": "return_to_go", LEVEL: "turn"}
# (a key, a value, a config in which it has an effect, what is changed so that it has none)
UNUSED: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    (f"{F}.max_num_gen_batches", 5, FILTERED, {f"{F}.enable": False}),
    ("data.gen_batch_size", 64, FILTERED, {f"{F}.enable": False}),
    (f"{F}.max_staleness", 3, FILTERED, {f"{F}.strategy": "rounds"}),
    (f"{F}.max_in_flight", 3, FILTERED, {MODE: "async"}),
    *[(f"{F}.{name}", value, {**FILTERED, f"{F}.predict": "skip"}, {f"{F}.predict": "off"})
      for name, value in (("predict_weight", True), ("predict_min_prob", 0.7), ("predict_discount", 0.5))],
    ("algorithm.kl_penalty", "k3", {KL: True}, {KL: False}),
    ("algorithm.kl_ctrl.kl_coef", 0.5, {KL: True}, {KL: False}),
    ("algorithm.kl_penalty", "k3", {"algorithm.kl_ctrl.kl_coef": 0.0}, {"algorithm.kl_ctrl.kl_coef": 0.1}),
    (f"{A}.kl_loss_type", "k1", {f"{A}.kl_loss_coef": 0.0}, {f"{A}.kl_loss_coef": 0.1}),
    ("algorithm.kl_ctrl.target_kl", 0.5, {KL: True, "algorithm.kl_ctrl.type": "adaptive"}, {"algorithm.kl_ctrl.type": "fixed"}),
    ("algorithm.kl_ctrl.horizon", 5, {KL: True, "algorithm.kl_ctrl.type": "adaptive"}, {"algorithm.kl_ctrl.type": "fixed"}),
    (REF, "org/other", {KL_LOSS: True}, {KL_LOSS: False}),
    (REF, "org/other", {KL: True}, {KL: False}),
    (REF, "org/other", {DISTILL: 0.1}, {DISTILL: 0.0}),
    ("trainer.critic_warmup", 3, GAE, {ESTIMATOR: "grpo"}),
    ("critic.grad_clip", 3.0, GAE, {ESTIMATOR: "grpo"}),
    ("algorithm.lam", 0.5, GAE, {ESTIMATOR: "remax"}),
    *[("algorithm.gamma", 0.5, {ESTIMATOR: name}, {ESTIMATOR: "rloo"}) for name in ("gae", "reinforce_plus_plus", "remax", "mine")],
    ("algorithm.std_level", "batch", {ESTIMATOR: "grpo"}, {ESTIMATOR: "grpo_passk"}),
    ("algorithm.std_level", "batch", {ESTIMATOR: "grpo"}, {"algorithm.norm_adv_by_std_in_grpo": False}),
    (DISTILL, 0.5, {ESTIMATOR: "grpo"}, {ESTIMATOR: "opd"}),
    *[("algorithm.norm_adv_by_std_in_grpo", False, {ESTIMATOR: name}, {ESTIMATOR: "rloo"}) for name in ("grpo", "grpo_passk", "mine")],
    (f"{A}.behav_imp_weight_cap", 3.0, {DECOUPLED: True}, {DECOUPLED: False}),
    (f"{A}.behav_imp_weight_mode", "sequence_mask", {DECOUPLED: True}, {DECOUPLED: False}),
    (f"{A}.kl_loss_coef", 0.5, {KL_LOSS: True}, {KL_LOSS: False}),
    (f"{A}.kl_loss_type", "k1", {KL_LOSS: True}, {KL_LOSS: False}),
    *[(f"{A}.policy_loss.{key}", 0.35, {LOSS: name}, {LOSS: "vanilla"})
      for name, keys in (("sapo", ("tau_pos", "tau_neg")), ("clip_cov", ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")), ("kl_cov", ("kl_cov_ratio", "ppo_kl_coef")))
      for key in keys],
    (f"{A}.policy_loss.tau_pos", 0.25, {LOSS: "mine"}, {LOSS: "kl_cov"}),
    *[(f"{A}.clip_ratio_c", 5.0, {LOSS: name}, {LOSS: "gspo"}) for name in ("vanilla", "dapo", "mine")],
    *[(f"{A}.{key}", 0.005, {LOSS: "vanilla"}, {LOSS: "sapo"}) for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_target")],
    (f"{A}.clip_ratio", 0.005, {LOW: 0.005}, {HIGH: 0.005}),
    (f"{A}.clip_ratio", 0.005, {HIGH: 0.005}, {LOW: 0.005}),
    (f"{A}.clip_target", 0.005, {TRAIN: 4, MINI: 2}, {MINI: 4}),
    (BOUNDS, [0.5, 2.0], {f"{A}.clip_target": 0.1}, {f"{A}.clip_target": None}),
    (f"{A}.loss_scale_factor", 5, {f"{A}.loss_agg_mode": "seq-mean-token-sum-norm"}, {f"{A}.loss_agg_mode": "token-mean"}),
    (f"{A}.entropy_checkpointing", True, {f"{A}.entropy_coeff": 0.1}, {f"{A}.entropy_coeff": 0.0}),
    (f"{A}.shuffle", True, {TRAIN: 4, MINI: 2}, {MINI: 4}),
    (f"{A}.shuffle", True, {TRAIN: 4, MINI: 4, **GAE, "critic.ppo_mini_batch_size": 2}, {"critic.ppo_mini_batch_size": None}),
    *[(f"{part}.optim.min_lr_ratio", 0.5, {**GAE, f"{part}.optim.lr_scheduler_type": "cosine"}, {f"{part}.optim.lr_scheduler_type": "constant"}) for part in (A, "critic")],
    *[(f"{part}.optim.lr_warmup_steps_ratio", 0.5, {**GAE, f"{part}.optim.lr_warmup_steps": -1}, {f"{part}.optim.lr_warmup_steps": 0}) for part in (A, "critic")],
    (MICRO, 2, {DYNAMIC: False}, {DYNAMIC: True}),
    (TOKENS, 50_000, {DYNAMIC: True}, {DYNAMIC: False, MICRO: 2}),
    ("critic.ppo_max_token_len_per_gpu", 50_000, GAE, {"critic.ppo_micro_batch_size_per_gpu": 2}),
    *[(f"{part}.fsdp_config.{key}", value, {**GAE, KL_LOSS: True, STRATEGY: "fsdp2"}, {STRATEGY: "local"})
      for part in (A, "actor_rollout_ref.ref", "critic") for key, value in (("param_offload", True), ("offload_policy", True), ("reshard_after_forward", False), ("fsdp_size", 2))],
    *[(f"{part}.fsdp_config.optimizer_offload", True, {**GAE, "trainer.device": "cuda"}, {"trainer.device": "cpu"}) for part in (A, "critic")],
    *[(f"{M}.{key}", value, {f"{M}.lora_rank": 4}, {f"{M}.lora_rank": 0}) for key, value in (("lora_alpha", 5), ("target_modules", ["a"]), ("exclude_modules", ["a"]))],
    *[(f"{R}.{key}", False, {f"{R}.name": "vllm"}, {f"{R}.name": name}) for key in ("enable_chunked_prefill", "enable_prefix_caching") for name in ("native", "own:engine")],
    (f"{R}.engine_kwargs", {"a": 1}, {f"{R}.name": "own:engine"}, {f"{R}.name": "native"}),
    *[(f"{R}.keep_cache", True, {f"{R}.name": "native"}, {f"{R}.name": name}) for name in ("vllm", "own:engine")],
    *[(f"{R}.{key}", value, {f"{R}.name": name}, {f"{R}.name": "own:engine"})
      for key, value in (("max_num_batched_tokens", 99), ("gpu_memory_utilization", 0.11), ("enforce_eager", True)) for name in ("native", "vllm")],
    (f"{R}.tensor_model_parallel_size", 2, {f"{R}.name": "own:engine", "trainer.backend": "ray"}, {"trainer.backend": "local"}),
    (f"{R}.dtype", "float16", ASYNC, {MODE: "sync"}),
    (f"{R}.dtype", "float16", {f"{R}.num_workers": 2}, {f"{R}.num_workers": 1}),
    (f"{R}.dtype", "float16", {"trainer.backend": "ray"}, {"trainer.backend": "local"}),
    (f"{R}.dtype", "float16", {f"{R}.name": "vllm"}, {f"{R}.name": "native"}),
    (AHEAD, 3, ASYNC, {MODE: "sync"}),
    (f"{R}.max_concurrent_rollouts", 3, ASYNC, {MODE: "sync"}),
    *[(f"{R}.val_kwargs.{key}", value, {f"{R}.val_kwargs.do_sample": True}, {f"{R}.val_kwargs.do_sample": False}) for key, value in (("temperature", 0.5), ("top_k", 5), ("top_p", 0.5), ("n", 3))],
    ("algorithm.turn_discount", 0.5, ON_TURNS, {"algorithm.turn_rewards": "outcome"}),
    *[(key, value, {LEVEL: "turn", ESTIMATOR: name}, ON_TURNS)
      for key, value, name in ((ESTIMATOR, "rloo", "rloo"), ("algorithm.gamma", 0.5, "gae"), ("algorithm.lam", 0.5, "gae"), ("algorithm.norm_adv_by_std_in_grpo", False, "grpo"), ("algorithm.std_level", "batch", "grpo"))],
    ("environment.name", "guess", {}, {f"{R}.multi_turn.enable": False}),
    ("reward.max_failure_rate", 0.9, {"environment.name": "guess", f"{R}.multi_turn.enable": False}, {f"{R}.multi_turn.enable": None}),
    ("environment.name", "guess", {}, {f"{R}.multi_turn.function_tool_path": "tools.py"}),
    ("environment.name", "guess", {}, {f"{R}.multi_turn.tool_config_path": "tools.yaml"}),
    *[("reward.max_failure_rate", 0.9, {}, {key: "x"}) for key in ("environment.name", "environment.path", "environment.agent", f"{R}.multi_turn.function_tool_path", f"{R}.multi_turn.tool_config_path")],
    ("reward_model.reward_kwargs.max_resp_len", 20, DAPO, {"reward_model.reward_manager": "naive"}),
    *[(f"reward_model.{key}", value, {"reward_model.enable": True}, {"reward_model.enable": False}) for key, value in (("path", "p"), ("weight", 0.5), ("dtype", "float16"), ("max_tokens_per_batch", 99))],
    (f"{J}.samples", 2, JUDGED, {f"{J}.base_url": None}),
    (f"{J}.samples", 2, {"reward.functions": [{"judge": {}}]}, {"reward.functions": []}),
    (f"{J}.rubric", "r.toml", {**JUDGED, f"{J}.kind": "rubric"}, {f"{J}.kind": "score"}),
    (f"{J}.max_score", 5.0, {**JUDGED, f"{J}.kind": "score"}, {f"{J}.kind": "rank"}),
    (f"{J}.weight", 0.5, JUDGED, {"reward.functions": [{"judge": {}}]}),
    ("custom_reward_function.path", "json", {"reward.functions": [{"judge": {}}]}, {"reward.functions": [{"name": "math"}]}),
    ("custom_reward_function.name", "f", {"custom_reward_function.path": "json"}, {"custom_reward_function.path": None}),
    ("custom_reward_function.reward_kwargs", {"a": 1}, {"custom_reward_function.path": "json"}, {"custom_reward_function.path": None}),
    ("data.val_split", 0.1, {}, {"data.val_files": "math"}),
    ("data.sft_batch_size", 3, {"data.sft_files": "math", f"{A}.sft_weight": 0.5}, {"data.sft_files": None}),
    ("data.sft_batch_size", 3, {"data.sft_files": "math", f"{A}.sft_weight": 0.5}, {f"{A}.sft_weight": 0.0}),
    (f"{A}.sft_weight", 0.5, {"data.sft_files": "math"}, {"data.sft_files": None}),
    ("data.sft_files", "math", {f"{A}.sft_weight": 0.5}, {f"{A}.sft_weight": 0.0}),
    ("data.seed", 3, {"data.shuffle": True}, {"data.shuffle": False}),
    ("data.truncation", "left", {"data.filter_overlong_prompts": False}, {"data.filter_overlong_prompts": True}),
    ("trainer.total_epochs", 7, {}, {"trainer.total_training_steps": 5}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(UNUSED)))
def test_a_key_is_named_only_where_it_has_no_effect(number: int) -> None:
    key, value, used, changed = UNUSED[number]

    def is_unused(values: Mapping[str, Any]) -> bool:
        with configured({**values, key: value}) as config:
            names = [name for *_, names in ineffective.rules(config) for name in names]
        return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)

    assert not is_unused(used) and is_unused({**used, **changed})


def test_a_key_is_named_once_and_not_at_its_default_or_where_a_recipe_set_it() -> None:
    cap, predict = f"{A}.behav_imp_weight_cap", f"{F}.predict_weight"
    found = checked({cap: 9.0, predict: True, f"{A}.clip_ratio_c": tree.leaves()[f"{A}.clip_ratio_c"].default})
    assert [(problem.key, problem.level, problem.value) for problem in found] == [
        (predict, "warning", True),  # of two reasons the first
        (cap, "warning", 9.0),
    ]
    assert [problem.message.partition(": ")[0] for problem in found] == ["has no effect"] * 2
    assert checked({cap: 9.0}, Layer.RECIPE) == []
