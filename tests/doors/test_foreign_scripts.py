"""Scripts of verl and files of AReaL with all their settings: the plan, an account of every key, and two steps of some.

Paths and names are ours; everything else is as the script or file has it (tests/config/facts).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from gspo.commands.train import run
from gspo.config import ConfigErrors, load
from gspo.config.compat.unneeded import fixed_values
from gspo.config.loading import names
from gspo.config.loading.resolve import ResolvedConfig
from gspo.config.loading.settings import Layer, Origin, Setting
from gspo.trainer.main_ppo import main as main_ppo
from tests.doors.worlds import MODELS, SMALL, rows
from tests.support.foreign_facts import as_tree, settings_of

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = settings_of("verl_scripts.txt")
AREAL = settings_of("areal_files.txt")
VERL_PLACES = [
    "data.train_files=gsm8k:gsm8k",
    "data.val_files=gsm8k:gsm8k",
    f"actor_rollout_ref.model.path={MODELS[0]}",
    "trainer.experiment_name=run",
]
AREAL_PLACES = [
    "experiment_name=run",
    "trial_name=trial",
    "cluster.fileroot=files",
    f"actor.path={MODELS[0]}",
    "train_dataset.path=gsm8k:gsm8k",
    "valid_dataset.path=gsm8k:gsm8k",
]
REFUSED = {  # name → the keys that it is refused for
    "verl-recipe dapo run_dapo_qwen2.5_32b_rollout_corr": {
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        "algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_rs_threshold",
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "algorithm.rollout_correction.rollout_token_veto_threshold",
    },
    "AReaL examples/math gsm8k_m2po": {"actor.m2_threshold"},
}
# What each script trains: loss and ratio, as the plan says it.
OBJECTIVES = {
    "gspo_trainer": "gspo: sequence ratio",
    "cispo_trainer": "cispo: token ratio",
    "gmpo_trainer": "geo_mean: ",
    "gpg_trainer": "gpg: ",
    "sapo_trainer": "sapo: token ratio, no clip",
    "7b_kl_cov": "kl_cov: token ratio",
    "gsm8k_gspo": "gspo: sequence ratio, clipped to [1 - 0.4, 1 + 0.4]",
    "gsm8k_sapo": "sapo: token ratio, no clip",
}


def unaccounted(settings: list[str], resolved: ResolvedConfig) -> list[str]:
    """The keys that neither set a key of ours, nor are named in a warning, nor ask for what happens anyway."""
    warned = [p.key for p in resolved.warnings]
    missing = []
    for text in settings:
        key, _, value = text.partition("=")
        key = key.lstrip("+")
        setting = Setting(key, yaml.safe_load(value), Origin(Layer.FILE, "test"), value)
        ours, deferred = names.translate([setting], [])
        taken = any(s.name in resolved.origins and resolved.origins[s.name].explicit for s in ours) or bool(deferred)
        same_here = fixed_values(key) is not None or setting.value in (None, {}, False)
        named = any(w == key or w.startswith(f"{key}.") or key.startswith(f"{w}.") for w in warned)
        if not (taken or named or same_here):
            missing.append(text)
    return missing


def flat(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested dictionaries as `a.b=value`."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found += flat(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={json.dumps(value)}")
    return found


def write_file(folder: Path, name: str) -> Path:
    path = folder / "areal.yaml"
    path.write_text(yaml.safe_dump(as_tree([*AREAL[name], *AREAL_PLACES])))
    return path


def test_at_least_fourteen_scripts_and_nine_files_pass():
    assert len(VERL) == 17 and len(AREAL) == 10
    assert sum(name not in REFUSED for name in VERL) >= 14 and sum(name not in REFUSED for name in AREAL) >= 9


@pytest.mark.parametrize("name", [name for name in VERL if name not in REFUSED])
def test_the_plan_of_a_script_of_verl(here, capsys, name):
    assert main_ppo([*VERL[name], *VERL_PLACES, "--dry-run"]) == 0
    objective = next((o for part, o in OBJECTIVES.items() if part in name), "vanilla: token ratio")
    assert objective in capsys.readouterr().out
    assert not unaccounted(VERL[name], load(overrides=[*VERL[name], *VERL_PLACES], system="verl"))


@pytest.mark.parametrize("name", [name for name in AREAL if name not in REFUSED])
def test_the_plan_of_a_file_of_areal(here, capsys, name):
    path = write_file(here, name)
    assert run([], path, dry_run=True) == 0
    objective = next((o for part, o in OBJECTIVES.items() if part in name), "vanilla: token ratio")
    assert objective in capsys.readouterr().out
    whole = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    resolved = load(path)
    assert not unaccounted(flat(whole), resolved)
    assert resolved.get("algorithm.adv_estimator") == {"ppo": "gae", "rloo": "rloo"}.get(
        name.rpartition("_")[2], "grpo"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_is_not_supported_is_refused_by_its_keys(here, name):
    with pytest.raises(ConfigErrors) as refused:
        if name in VERL:
            load(overrides=[*VERL[name], *VERL_PLACES], system="verl")
        else:
            load(write_file(here, name))
    assert {p.key for p in refused.value.errors} == REFUSED[name]
    assert all(p.remedy for p in refused.value.errors)


# One device, a small batch, short sequences and the test's reward. What a script trains stays its own.
SMALLER = [
    *(word for word in SMALL if "save_freq" not in word),
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.logger=console",
    "data.train_batch_size=4",
    f"{A}.ppo_mini_batch_size=2",
    f"{R}.n=4",
    f"{R}.name=native",
    f"{R}.tensor_model_parallel_size=1",
    f"{R}.max_model_len=null",
    f"{R}.max_num_batched_tokens=null",
    "actor_rollout_ref.model.dtype=float32",
]
TRAINED = {  # script → settings that the sizes above need, and a metric that shows the method
    "verl grpo_trainer run_qwen3_8b_fsdp": ([], "actor/kl_loss"),
    "verl ppo_trainer run_qwen3_8b_fsdp": ([f"critic.model.path={MODELS[0]}"], "critic/vf_loss"),
    "verl gspo_trainer run_qwen3_8b_fsdp": ([], "actor/seq_importance_ratio"),
    "verl sapo_trainer run_qwen3_8b_fsdp": ([], "actor/pg_loss"),
    "verl-recipe dapo run_dapo_qwen2.5_32b": (
        ["data.gen_batch_size=4", "reward_model.overlong_buffer.len=2"],
        "train/filtered_prompts_ratio",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_script_of_verl_trains_two_steps(here, name):
    more, metric = TRAINED[name]
    own = [setting for setting in VERL[name] if "ulysses" not in setting]  # one process has whole sequences
    assert main_ppo([*own, *VERL_PLACES, *SMALLER, *more]) == 0
    table = rows(here / "runs" / "run")
    assert len(table) == 2 and all(metric in row and row["actor/grad_norm"] > 0 for row in table)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["grpo", "dapo_dynamic_bs", "gspo", "ppo", "rloo"])
def test_a_file_of_areal_trains_two_steps(here, part):
    path = write_file(here, f"AReaL examples/math gsm8k_{part}")
    small = [w for w in SMALLER if "ppo_mini" not in w]
    small += ["overlong_tokens=2"] if "dapo" in part else []
    assert run([str(path), *small], None, dry_run=False) == 0
    table = rows(here / "files" / "run")
    assert len(table) == 2 and all(row["actor/grad_norm"] > 0 for row in table)
