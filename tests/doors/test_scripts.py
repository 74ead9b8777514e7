"""Every command of the documents runs: on a small model under the name the command gives, with sizes overridden."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from gspo.config import load
from tests.doors.worlds import ROOT, SMALL, load_script, rows
from tests.support.preloaded import preloaded_python

TINY = (*SMALL, "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
NAMES = (
    "actor/pg_clipfrac_lower",
    "actor/pg_clipfrac_upper",
    "actor/seq_importance_ratio",
    "train/num_gen_batches",
    "train/filtered_prompts_ratio",
)


def only_run(here: Path) -> Path:
    (run,) = (here / "runs").iterdir()
    return run


def saved(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_the_bash_script_and_its_metrics(here):
    """`bash recipe/gspo/gspo_dynamic_sampling_3b_math.sh`, with the metrics it tells to watch."""
    script = ROOT / "recipes" / "gspo" / "gspo_dynamic_sampling_3b_math.sh"
    environment = {**os.environ, "PYTHON": preloaded_python(), "TRAIN_FILES": "gsm8k:gsm8k", "OMP_NUM_THREADS": "1"}
    words = [*TINY, "data.gen_batch_size=6", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=5"]
    words += ["actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"]
    done = subprocess.run(["bash", str(script), *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("result: "))
    assert result["steps"] == 5 and Path(result["run"]).name == "gspo_dynamic_sampling_3b_math"
    table = rows(here / result["run"])
    for name in NAMES:
        values = [row[name] for row in table if name in row]
        assert (len(values) == 5 or name == "train/filtered_prompts_ratio") and len(set(values)) > 1, (name, values)
    kept = [row.get("train/filtered_prompts_ratio") for row in table]
    assert all((0 < ratio <= 1) if row["train/groups_generated"] else ratio is None for ratio, row in zip(kept, table))
    assert table[0]["train/num_gen_batches"] >= 1  # a later step may live on what was carried over
    assert {r["actor/seq_importance_ratio/mb0"] for r in table} == {1.0}


def test_the_python_script_with_the_overrides_of_the_document(here):
    """`cd recipe/gspo; python main_gspo_dynamic.py algorithm.filter_groups.enable=true …`."""
    main = load_script("recipes/gspo/main_gspo_dynamic.py").main
    words = [
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_reward",
        "algorithm.filter_groups.max_num_gen_batches=5",
        "actor_rollout_ref.actor.clip_ratio_low=0.0003",
        "actor_rollout_ref.actor.clip_ratio_high=0.0004",
    ]
    assert main([*words, *TINY, "data.gen_batch_size=8", "actor_rollout_ref.rollout.n=4"]) == 0
    run = here / "runs" / "gspo_dynamic_sampling_3b_math"
    config = saved(run)
    assert config["actor_rollout_ref"]["model"]["path"] == "Qwen/Qwen2.5-3B-Instruct"
    assert config["data"]["train_files"] == "gsm8k"
    assert (run / "checkpoints" / "step-000002" / "model.safetensors").exists()
    assert [row["actor/clip_ratio_low"] for row in rows(run)] == [0.0003, 0.0003]
    recorded = {record["key"]: record for record in json.loads((run / "config.json").read_text())}
    assert recorded["data.train_files"]["value"] == "gsm8k"
    assert recorded["actor_rollout_ref.actor.clip_ratio_low"] == {
        "key": "actor_rollout_ref.actor.clip_ratio_low",
        "value": 0.0003,
        "origin": "override actor_rollout_ref.actor.clip_ratio_low=0.0003",
    }


def test_main_grpo_with_the_overrides_of_the_document(here):
    """`python main_grpo.py algorithm.filter_groups.enable=True … data.gen_batch_size=1536 …`, sizes a hundredth."""
    main = load_script("recipes/grpo/main_grpo.py").main
    words = [
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "actor_rollout_ref.rollout.n=5",
    ]
    assert main([*words, *TINY, "data.gen_batch_size=12"]) == 0
    table = rows(here / "runs" / "grpo")
    assert all("actor/kl_loss" in row for row in table)  # its config asks for a KL term


def test_the_sizes_of_the_document_resolve():
    words = ["data.gen_batch_size=1536", "data.train_batch_size=512", "actor_rollout_ref.rollout.n=5"]
    words += ["algorithm.filter_groups.enable=True"]
    config = load(ROOT / "recipes/grpo/config/grpo.yaml", words).config
    assert (config.data.gen_batch_size, config.data.train_batch_size) == (1536, 512)


@pytest.mark.parametrize(
    "line",
    [
        "--dataset mixed --num_train_samples 50 --num_epochs 3",
        "--dataset math --num_train_samples 200 --num_epochs 5",
        "--dataset mixed --num_train_samples 20 --num_epochs 2",
        "--model_name Qwen/Qwen2.5-14B-Instruct --dataset math",
        "--dataset gsm8k --num_train_samples 32 --num_epochs 10 --batch_size 4 --learning_rate 1e-6",
        "--dataset code --num_train_samples 32 --num_epochs 8 --group_size 6",
        "--left_clip_range 2e-4 --right_clip_range 5e-4 --update_frequency 3",
        "--max_length 1024 --batch_size 8 --mini_batch_size 2",
        "--model_name microsoft/DialoGPT-medium",
        "--batch_size 2 --group_size 2",
        "--learning_rate 5e-7",
        "--update_frequency 2",
        "--learning_rate 2e-6",
        "--num_train_samples 500",
        "--model_name Qwen/Qwen2.5-7B-Instruct --dataset gsm8k --group_size 4 --left_clip_range 3e-4 "
        "--right_clip_range 4e-4 --learning_rate 1e-6 --num_train_samples 60 --num_epochs 15 --update_frequency 5",
    ],
)
def test_every_command_of_the_standalone_document_trains(here, line):
    """`python train_gspo.py …`: the flags as they stand; only batch sizes nobody named are made small."""
    words = line.split()
    sized = {"--batch_size", "--mini_batch_size", "--update_frequency"} & set(words)
    small = [] if sized else ["--batch_size", "4"]
    if "--update_frequency" in words:
        small = ["--mini_batch_size", "1"]
    limits = [w for w in SMALL if "total_training_steps" not in w]
    steps = ["trainer.total_training_steps=1"]
    if "--num_train_samples" not in words:
        steps.append("data.num_train_samples=64")  # thousands would only be tokenised
    assert load_script("recipes/standalone/train_gspo.py").main([*words, *small, *limits, *steps]) == 0
    run = only_run(here)
    config = saved(run)
    (row,) = rows(run)
    expected = dict(zip(words[::2], words[1::2]))
    assert config["actor_rollout_ref"]["model"]["path"] == expected.get("--model_name", "Qwen/Qwen2.5-7B-Instruct")
    assert config["data"]["train_files"] == expected.get("--dataset", "mixed")
    assert row["actor/clip_ratio_low"] == float(expected.get("--left_clip_range", 3e-4))
    assert row["actor/lr"] == float(expected.get("--learning_rate", 1e-6))
    updates = config["data"]["train_batch_size"] // config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"]
    assert updates == int(expected.get("--update_frequency", updates))


def test_wandb_is_asked_for_by_its_flag(here, capsys):
    """`--use_wandb` on a machine without wandb says what to install before anything is loaded."""
    words = [
        "--dataset",
        "gsm8k",
        "--num_train_samples",
        "32",
        "--num_epochs",
        "10",
        "--use_wandb",
        "--batch_size",
        "4",
    ]
    code = load_script("recipes/standalone/train_gspo.py").main([*words, *SMALL])
    try:
        import wandb  # noqa: F401
    except ImportError:
        assert code == 2 and "gspo[wandb]" in capsys.readouterr().err


def test_the_areal_script_with_its_config(here):
    """`python gsm8k_gspo.py --config gsm8k_gspo.yaml`."""
    config = ROOT / "recipes" / "areal" / "gsm8k_gspo.yaml"
    main = load_script("recipes/areal/gsm8k_gspo.py").main
    sizes = ["data.train_batch_size=4", "actor.ppo_n_minibatches=2"]
    assert main(["--config", str(config), *SMALL, *sizes]) == 0
    run = here / "runs" / "gsm8k-gspo"
    actor = saved(run)["actor_rollout_ref"]["actor"]
    assert (actor["importance_sampling_level"], actor["policy_loss"]["loss_mode"]) == ("sequence", "gspo")
    assert (actor["use_decoupled_loss"], actor["behav_imp_weight_cap"]) == (True, 5.0)
    assert saved(run)["algorithm"]["filter_groups"]["enable"] is True
    assert all("actor/behav_imp_weight" in row for row in rows(run))


def test_token_level_is_ppo(here):
    """`importance_sampling_level: token` is the standard ratio."""
    main = load_script("recipes/areal/gsm8k_gspo.py").main
    words = ["actor.importance_sampling_level=token", "actor.eps_clip=0.2", "--dry-run"]
    assert main(words) == 0


def test_too_many_generation_batches_reads_as_the_document_says(here, capsys):
    """`ValueError: num_gen_batches=10 >= max_num_gen_batches=10. Generated too many batches. …`."""
    (here / "always.py").write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    main = load_script("recipes/gspo/main_gspo_dynamic.py").main
    words = ["data.gen_batch_size=4", "actor_rollout_ref.rollout.n=2", "custom_reward_function.path=always.py"]
    words += ["algorithm.filter_groups.max_num_gen_batches=10", "data.num_train_samples=64"]
    assert main([*TINY[:-3], *TINY[-2:], *words]) == 3
    message = capsys.readouterr().err
    assert "num_gen_batches=10 >= max_num_gen_batches=10. Generated too many batches." in message
    assert "Please check if your data are too difficult." in message


def test_an_unknown_flag_is_refused_before_anything_is_loaded(here, capsys):
    assert load_script("recipes/standalone/train_gspo.py").main(["--learning_rte", "1e-6"]) == 2
    assert "learning_rate" in capsys.readouterr().err and not (here / "runs").exists()


def test_validation_scripts_exit_with_the_verdict(capsys):
    """`python validate_gspo.py` and `python3 recipe/gspo/validate_implementation.py`."""
    assert load_script("recipes/standalone/validate_gspo.py").main(["--quick"]) == 0
    assert load_script("recipes/gspo/validate_implementation.py").main([]) == 0
    printed = capsys.readouterr().out
    assert printed.count("All technical tests PASSED!") == 2
    assert [line for line in printed.splitlines() if line.startswith("PASS  ")] == [
        "PASS  file structure is complete",
        "PASS  YAML config is valid",
        "PASS  shell scripts are configured correctly",
        "PASS  Python scripts have correct syntax",
    ]


@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("main_gspo_dynamic.py", "def main(", "def main((", "FAIL  Python scripts have correct syntax"),
        ("test_gspo_3b_math.sh", "set -euo pipefail", "if true; then", "FAIL  shell scripts are configured correctly"),
        (
            "gspo_dynamic_sampling_3b_math.sh",
            "data.train_files=",
            "data.train_fils=",
            "FAIL  shell scripts are configured correctly",
        ),
        ("config/gspo_dynamic_sampling.yaml", "loss_mode: gspo", "loss_mode: vanilla", "FAIL  YAML config is valid"),
    ],
)
def test_the_validation_of_the_recipe_finds_a_broken_file(tmp_path, capsys, monkeypatch, file, old, new, line):
    folder = tmp_path / "gspo"
    shutil.copytree(ROOT / "recipes" / "gspo", folder)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    module = load_script("recipes/gspo/validate_implementation.py")
    monkeypatch.setattr(module, "HERE", folder)
    monkeypatch.setattr(module, "CONFIG", folder / "config" / "gspo_dynamic_sampling.yaml")
    monkeypatch.setattr(module, "validate", lambda arguments: 0)
    monkeypatch.setattr(sys, "executable", preloaded_python())
    assert module.main([]) == 1
    assert any(printed.startswith(line) for printed in capsys.readouterr().out.splitlines())


def test_the_requirements_are_those_of_the_program_and_need_no_folder():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "recipes" / "standalone" / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        *project["dependencies"],
        *extras["data"],
        *extras["wandb"],
    ]


def test_the_standalone_scripts_run_from_any_folder_without_an_installed_program(tmp_path):
    """`python -S` and a path without the editable install: the scripts find the program in their checkout."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'recipes/standalone')!r}]; sys.path.append({site!r}); import checkout, gspo; "
        "print(gspo.__file__)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "src" / "gspo" / "__init__.py"


def test_the_reward_tests_of_the_data_loader(capsys):
    """`python data_loader.py`."""
    assert load_script("recipes/standalone/data_loader.py").main() == 0
    assert "all reward tests passed" in capsys.readouterr().out


def test_the_recipes_own_tests_pass():
    module = load_script("recipes/gspo/test_gspo_dynamic_sampling.py")
    names = [name for name in dir(module) if name.startswith("test_")]
    assert len(names) == 3
    for name in names:
        getattr(module, name)()


def test_every_config_of_the_recipes_resolves_without_a_warning_of_no_effect():
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        is_recipe = path.name == "train_gspo.yaml"
        resolved = load(recipe=path) if is_recipe else load(path)
        assert not [w for w in resolved.warnings if "no effect" in w.message], (path, resolved.warnings)
