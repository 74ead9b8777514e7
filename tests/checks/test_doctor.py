"""`gspo doctor`: the formula, the memory plan against a measured peak, the noise floor, and what it complains about."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gspo.build.device import total_memory
from gspo.build.memory import plan_memory
from gspo.build.model_size import measure_size
from gspo.checks.doctor.doctor import Diagnosis, examine_config, examine_sample
from gspo.checks.doctor.experience import departures
from gspo.checks.doctor.formula import formula_lines
from gspo.checks.doctor.machine import base_memory
from gspo.checks.doctor.noise import compare, noise_problems
from gspo.checks.doctor.probe import expected_clip_fraction
from gspo.cli import app
from gspo.config import load, resolved_loss
from tests.support.small_run import even_first_byte, make_model

ACTOR = "actor_rollout_ref.actor"
QUICK = ["trainer.num_threads=1", "data.num_val_samples=2", "data.num_train_samples=64"]


def words_of(model: Path, folder: Path, *more: str) -> list[str]:
    """A config whose responses all run to their limit, so that sizes are known."""
    return [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        "trainer.experiment_name=run",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.num_threads=1",
        "data.num_train_samples=64",
        "data.num_val_samples=8",
        "data.max_prompt_length=24",
        "data.max_response_length=72",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "actor_rollout_ref.rollout.ignore_eos=true",
        *more,
    ]


def measure_run(words: list[str]) -> dict[str, int]:
    """The peak memory of a process that trains with this config, and what torch reserved on a GPU."""
    child = [sys.executable, "-m", "tests.checks.memory_child", json.dumps(words)]
    done = subprocess.run(child, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


LARGER = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


# What the compiler itself takes depends on what it compiled before: it would hide much of so small a model.
UNCOMPILED = [f"{ACTOR}.use_torch_compile=false", "actor_rollout_ref.rollout.enforce_eager=true"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "more"),
    [
        (LARGER, UNCOMPILED),
        ({**LARGER, "hidden_size": 512, "intermediate_size": 2048}, [f"{ACTOR}.ppo_max_token_len_per_gpu=768"]),
        (
            LARGER,
            [*UNCOMPILED, "actor_rollout_ref.model.enable_gradient_checkpointing=true", f"{ACTOR}.use_kl_loss=true"],
        ),
    ],
)
def test_the_memory_plan_is_within_a_fifth_of_the_measured_peak(tmp_path, shape, more):
    words = words_of(make_model(tmp_path / "model", **shape), tmp_path, *more)
    base = base_memory()
    plan = plan_memory(load(None, words).config, torch.device("cpu"), base=base, available=total_memory(), num_val=8)
    peak = measure_run(words)["peak"]
    assert peak > 1.3 * base  # the run itself must weigh something
    assert abs(plan.peak - peak) < 0.2 * peak, (plan.to_dict(), peak)


def test_the_memory_plan_counts_what_it_can_count_exactly(tmp_path):
    model = make_model(tmp_path / "model")
    config = load(None, words_of(model, tmp_path)).config
    plan = plan_memory(config, torch.device("cpu"), base=0, available=1 << 30, num_val=8)
    from transformers import AutoModelForCausalLM

    num = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters())
    held = plan.memory.held
    assert held["parameters"] == 4 * num and held["optimiser"] == 8 * num
    assert held["gradients"] == 4 * num and plan.memory.peak_stage == "update" and plan.fits
    layers, heads, size = 2, 2, 8
    assert held["KV cache"] == 32 * 96 * 2 * layers * heads * size * 4
    assert held["KV cache of the evaluation"] == held["KV cache"] / 4  # 8 questions
    assert "reference" not in held and "float32 masters" not in held
    more = [f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.model.dtype=bfloat16", "algorithm.adv_estimator=gae"]
    other = plan_memory(
        load(None, words_of(model, tmp_path, *more)).config, torch.device("cpu"), base=0, available=1000, num_val=8
    )
    held = other.memory.held
    assert held["reference"] == 2 * num and held["float32 masters"] == 4 * num
    assert "critic" in held and not other.fits


def test_the_memory_plan_is_that_of_the_overridden_model(tmp_path):
    model = make_model(tmp_path / "model")
    half = "actor_rollout_ref.model.override_config={num_hidden_layers: 1}"
    both, one = (
        plan_memory(load(None, words).config, torch.device("cpu"), base=0, available=1 << 30, num_val=8)
        for words in (words_of(model, tmp_path), words_of(model, tmp_path, half))
    )
    assert one.memory.held["KV cache"] * 2 == both.memory.held["KV cache"]
    assert one.memory.held["parameters"] < both.memory.held["parameters"]


def test_an_offloaded_optimiser_is_counted_in_host_memory(tmp_path):
    model = make_model(tmp_path / "model")
    plans = [
        plan_memory(
            load(None, words_of(model, tmp_path, "actor_rollout_ref.model.dtype=bfloat16", *more)).config,
            torch.device("cuda"),
            base=0,
            available=1 << 30,
            num_val=8,
        )
        for more in ([], [f"{ACTOR}.fsdp_config.optimizer_offload=true"])
    ]
    kept, moved = (plan.memory for plan in plans)
    num = kept.held["parameters"] // 2
    assert moved.on_host == 12 * num and kept.on_host == 0
    assert kept.stages["update"] - moved.stages["update"] == 12 * num
    assert "optimiser" not in moved.held and "float32 masters" not in moved.held


def test_pages_are_for_all_slots_within_their_share_and_evaluation_uses_the_same(tmp_path):
    config = load(None, words_of(make_model(tmp_path / "model"), tmp_path)).config
    large, small = (
        plan_memory(config, torch.device("cuda"), base=0, available=available, num_val=8).memory
        for available in (1 << 30, 1 << 20)
    )
    slots, tokens, bytes_per_token = 32, 96 + 2 * 16, 2 * 2 * 2 * 8 * 2
    assert large.held["KV cache"] == slots * tokens * bytes_per_token
    assert small.held["KV cache"] == config.actor_rollout_ref.rollout.gpu_memory_utilization * (1 << 20)
    assert large.stages["evaluation"] == large.stages["generation"]


def test_ranks_share_a_model(tmp_path):
    model = make_model(tmp_path / "model")
    words = [f"{ACTOR}.strategy=fsdp2", "trainer.n_gpus_per_node=4", "actor_rollout_ref.model.dtype=bfloat16"]
    config = load(None, words_of(model, tmp_path, *words)).config
    held = plan_memory(config, torch.device("cuda"), base=0, available=1 << 30, num_val=8).memory.held
    assert held["optimiser"] == 2 * held["parameters"] == held["engine's weights"]  # 8, 4 and 2 · 4 bytes over 4


def test_adapters_are_counted_as_the_trained_part(tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(make_model(tmp_path / "model"))
    whole, lora = (measure_size(config, torch.float32, "x", lora_rank=rank) for rank in (0, 2))
    per_layer = 2 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 64) * 3)
    assert lora.trained == 2 * per_layer and lora.parameters == whole.parameters + lora.trained


def test_sizes_under_other_names_are_found():
    from transformers import GPT2Config

    config = GPT2Config(n_layer=3, n_head=4, n_embd=64, vocab_size=100)
    shape = measure_size(config, torch.float32, "gpt2").shape
    sizes = (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.hidden, shape.intermediate, shape.vocab)
    assert sizes == (3, 4, 4, 16, 64, 256, 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("noise") / "model")


def diagnose(model, tmp_path, *more: str) -> Diagnosis:
    """A quick sample of a small model, four groups in one micro-batch shape."""
    diagnosis = Diagnosis()
    words = [*words_of(model, tmp_path), f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=3e-4", *more]
    examine_sample(diagnosis, load(None, words), reward_fn=even_first_byte, num_groups=4)
    return diagnosis


def test_the_noise_problem_is_named_in_bf16_and_nothing_is_said_in_float32(model, tmp_path):
    bad = diagnose(model, tmp_path, "actor_rollout_ref.model.dtype=bfloat16")
    noise = [p for p in bad.problems if p.startswith("noise floor")]
    assert noise and all("bfloat16" in p and "ε = 0.0003" in p and "float32 removes the noise" in p for p in noise)
    good = diagnose(model, tmp_path, "actor_rollout_ref.model.dtype=float32")
    assert not [p for p in good.problems if "noise" in p]
    seen = [d.facts["quick sample"]["noises"][1] for d in (bad, good)]
    assert seen[0]["sequence_rms"] > 3e-5 > 1e-6 > seen[1]["sequence_rms"]


def test_the_sample_tells_keep_rate_length_and_time(model, tmp_path):
    facts = diagnose(model, tmp_path).facts["quick sample"]
    assert facts["num_groups"] == 4 and facts["mean_length"] == 72 and facts["cut"] == 1.0
    assert 0 <= facts["keep_rate"] <= 1 and facts["step_seconds"] > 0


def test_a_shift_of_all_log_probs_is_seen_as_noise():
    objective = resolved_loss(load(None, ["actor_rollout_ref.model.path=org/model"]).config.actor_rollout_ref.actor)
    mask = torch.ones(4, 10)
    one = torch.zeros(4, 10)
    other = one.clone()
    other[0] -= 0.01
    noise = compare("x", one, other, mask, objective)
    assert noise.outside == 0.25 and noise.sequence_max == pytest.approx(0.01)
    assert noise.token_rms == pytest.approx(0.005)
    assert noise_problems([noise], objective, "float32", "recompute")
    silent = compare("x", one, one + 1e-7, mask, objective)
    assert not noise_problems([silent], objective, "float32", "recompute")


@pytest.mark.parametrize(("length", "low", "high"), [(16, 7e-3, 9e-3), (64, 3.4e-3, 4.5e-3), (1024, 8.5e-4, 1.1e-3)])
def test_the_clip_fraction_for_a_length_is_that_of_the_table(length, low, high):
    words = [
        "actor_rollout_ref.model.path=org/model",
        f"{ACTOR}.clip_ratio_low={low}",
        f"{ACTOR}.clip_ratio_high={high}",
    ]
    objective = resolved_loss(load(None, words).config.actor_rollout_ref.actor)
    assert expected_clip_fraction(objective, length) == pytest.approx(0.15, abs=0.01)
    longer, shorter = (expected_clip_fraction(objective, length * f) for f in (4, 0.25))
    assert longer is not None and shorter is not None and longer < 0.15 < shorter and math.isfinite(shorter)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["loss_mode=gspo"],
            ["-min( s_i A_i, clip(s_i, 1 - 0.0003, 1 + 0.0004) A_i )", "(1/N) Σ_i (1/|y_i|) Σ_t", "std of the group"],
        ),
        (["loss_mode=vanilla"], ["clip(r_it, 1 - 0.2, 1 + 0.2)", "at most 3|A|", "(1/Σ_i|y_i|)"]),
        (["loss_mode=cispo"], ["-sg(clip(r_it, 1 - 0.2, 1 + 0.28)) A_i log π_θ"]),
        (["loss_mode=sapo"], ["σ(τ(r_it - 1)) · 4/τ"]),
        (["loss_mode=geo_mean"], ["clip(log r_it, -0.4, 0.4)"]),
        (["algorithm.adv_estimator=gae", "algorithm.lam=0.9"], ["λ = 0.9", "A_it"]),
        (["algorithm.norm_adv_by_std_in_grpo=false"], ["A_i = R_i - mean of the group"]),
        (["use_kl_loss=true", "kl_loss_coef=0.002"], ["L += 0.002 · KL"]),
        (["use_decoupled_loss=true", "behav_imp_weight_cap=5"], ["w_it · -min", "token_mask at 5"]),
        (["entropy_coeff=0.01", "clip_target=0.15"], ["L -= 0.01 · entropy", "clip 0.15"]),
    ],
)
def test_the_formula_has_the_configs_numbers(words, parts):
    text = "\n".join(formula_lines(load(None, ["actor_rollout_ref.model.path=org/model", *words]).config))
    assert all(part in text for part in parts), text


def test_what_has_no_effect_is_listed():
    diagnosis = Diagnosis()
    words = ["actor_rollout_ref.model.path=org/model", "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8"]
    examine_config(diagnosis, load(None, [*words, "algorithm.lam=0.5"]))
    text = diagnosis.text()
    assert "clipping: with one optimiser step" in text and "algorithm.lam: has no effect" in text


def test_the_command_reports_everything_as_json(model, tmp_path):
    words = [*words_of(model, tmp_path), "--json", "algorithm.filter_groups.enable=true"]
    result = CliRunner().invoke(app, ["doctor", *words])
    facts = json.loads(result.stdout)
    assert set(facts) >= {"environment", "objective", "batch plan", "memory plan", "quick sample", "no effect"}
    assert facts["environment"]["engines"][0] == "native" and facts["environment"]["sandbox"]["level"] in (0, 1, 2, 3)
    assert facts["memory plan"]["peak"] > facts["memory plan"]["base"] > 0
    # A random model never solves a sum: nothing would be kept, which is a problem and exit code 1.
    assert result.exit_code == 1 and any(p.startswith("keep rate") for p in facts["problems"])


def test_a_broken_config_is_refused_and_a_missing_model_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr("gspo.checks.doctor.machine.base_memory", lambda: 1 << 28)
    monkeypatch.setattr("gspo.checks.doctor.doctor.examine_environment", lambda diagnosis: None)
    assert CliRunner().invoke(app, ["doctor", "rollout.n=0"]).exit_code == 2
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["doctor", f"actor_rollout_ref.model.path={tmp_path / 'empty'}", *QUICK])
    assert result.exit_code == 1 and "could not be examined" in result.output
    assert "objective" in result.output


@pytest.mark.parametrize(
    ("overrides", "parameters", "text"),
    [
        (["actor.optim.lr=1e-6"], 500_000_000, None),
        (["actor.optim.lr=5e-6"], 500_000_000, "actor.optim.lr=5e-06: 3e-06 rose first and fell back"),
        (["actor.optim.lr=2e-5"], 500_000_000, "actor.optim.lr=2e-05: 1e-05 broke the model"),
        (["actor.optim.lr=2e-5"], 1_000_000, None),
        (["actor.optim.lr=2e-5", "model.lora_rank=8"], 500_000_000, None),
    ],
)
def test_what_leaves_the_results_is_named(overrides: list[str], parameters: int, text: str | None) -> None:
    found = list(departures(load(overrides=overrides).config, lambda: parameters))
    assert [line[: len(text or "")] for line in found] == ([text] if text else [])


def test_sizes_are_those_that_a_run_would_choose(tmp_path: Path) -> None:
    model, rows = make_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(8)))
    words = [f"actor_rollout_ref.model.path={model}", f"data.train_files={rows}", "reward.functions=[{name: math}]"]
    words += ["data.max_prompt_length=32", "data.max_response_length=32", "trainer.device=cpu"]
    done = CliRunner().invoke(app, ["doctor", "--no-model", "--json", *words])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["batch plan"]["prompts per step"] == "8"
    assert found["adapted to the data and the machine"] == [
        "data.train_batch_size=8 (mini-batches of 2), not 1024: the training data has 8 rows"
    ]
