"""`gspo plan` from the command line: what it prints, which input it refuses, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from gspo.cli import app
from gspo.config import load

runner = CliRunner()
SMALL = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]


def test_it_prints_the_best_split_and_its_keys():
    done = runner.invoke(app, ["plan", "--model", "7b", "--gpus", "16", *SMALL])
    assert done.exit_code == 0, done.output
    for word in (
        "Predictions, not measurements",
        "one pool, sync",
        "two pools, async, η=2",
        "memory per device",
        "keys for this split:",
    ):
        assert word in done.output
    keys = done.output.split("keys for this split: ")[1].split()
    load(None, ["actor_rollout_ref.model.path=7b", *SMALL, *keys])  # they are a config


def test_json_has_everything_and_a_simulation_its_seed():
    words = ["plan", "--model", "1.5b", "--gpus", "8", "--simulate", "5", "--seed", "3", "--json", *SMALL]
    first, second = (json.loads(runner.invoke(app, words).stdout) for _ in range(2))
    assert first == second
    assert first["gpus"] == 8 and first["simulation"]["steps"] == 5
    best = first["predictions"][0]
    assert best["step_s"] == min(p["step_s"] for p in first["predictions"])
    assert best["limit"] == max(best["parts_s"], key=lambda name: best["parts_s"][name])


def test_lengths_reach_the_plan():
    words = ["plan", "--model", "1.5b", "--gpus", "8", "--json", *SMALL, "--response-length", "4096"]
    short, long = (
        json.loads(runner.invoke(app, [*words, "--mean-response-length", n]).stdout)["predictions"][0]["step_s"]
        for n in ("200", "2000")
    )
    assert long > 2 * short


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpu", "z80"], "--gpu z80"),
        (["--gpus", "0"], "--gpus 0"),
        (["--model", "nine"], "--model 'nine'"),
        (["--keep-rate", "1.5"], "--keep-rate 1.5"),
        (["--model", "7b", "--keep-rate", "0.5"], "algorithm.filter_groups.enable"),
        (["--response-length", "100", "--mean-response-length", "200"], "--mean-response-length"),
        (["--eta", "-1"], "--eta -1"),
        (["--length-spread", "nan"], "--length-spread nan"),
        (["--length-spread", "inf"], "--length-spread inf"),
        (["--simulate", "5", "--seed", "-1"], "--seed"),
        (["--simulate", "0"], "--simulate 0"),
        (["data.max_respons_length=3"], "data.max_respons_length"),
        (["--response-length", "-5"], "--response-length -5"),
        (["--check", "no/such/run"], "no/such/run"),
    ],
)
def test_bad_input_is_refused_by_name(words, named):
    done = runner.invoke(app, ["plan", *words])
    assert done.exit_code == 2
    assert named in done.output


def test_settings_that_the_prediction_does_not_cover_are_named():
    done = runner.invoke(app, ["plan", "--model", "1.5b", "actor_rollout_ref.model.lora_rank=8", *SMALL])
    assert done.exit_code == 0
    assert "lora_rank = 8: predicted as if all weights were trained" in done.output


def test_an_offloaded_optimiser_is_counted():
    words = ["plan", "--model", "1.5b", "--gpus", "1", "--json", *SMALL]
    key = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    done, without = (runner.invoke(app, [*words, *more]) for more in ([key], []))
    assert done.exit_code == without.exit_code == 0
    assert "optimizer_offload: counted for a single trainer rank" in done.stderr and not without.stderr
    assert "float32 masters" in without.stdout and "float32 masters" not in done.stdout


def test_a_model_that_does_not_fit_exits_1_and_names_a_cluster_that_is_large_enough():
    done = runner.invoke(app, ["plan", "--model", "72b", "--gpus", "1", *SMALL])
    assert done.exit_code == 1
    assert "72b does not fit on 1 h200" in done.output and "--gpus" in done.output


def test_constants_have_their_sources():
    done = runner.invoke(app, ["plan", "--constants"])
    assert done.exit_code == 0
    for word in ("measured", "fitted", "data sheet", "assumed", "MTBF_DEVICE_S", "2407.21783"):
        assert word in done.output


def make_run(folder, *, rows: int = 4, device: str = "NVIDIA H200", timing: float = 2.0, more: Sequence[str] = ()):
    overrides = [
        "actor_rollout_ref.model.path=smol",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "data.max_prompt_length=32",
    ]
    overrides += [
        "data.max_response_length=128",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ]
    (folder / "config.yaml").write_text(load(None, [*overrides, *more]).to_yaml())
    (folder / "environment.json").write_text(json.dumps({"device": device}))
    row = {"timing_s/update_actor": 0.5, "timing_s/old_log_prob": 0.1, "response_length/mean": 128.0}
    lines = [{"step": i + 1, "timing_s/gen": 50.0 if i == 0 else timing, **row} for i in range(rows)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_check_divides_the_prediction_by_the_run(tmp_path):
    done = runner.invoke(app, ["plan", "--check", str(make_run(tmp_path)), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    stages = {s["stage"]: s for s in found["stages"]}
    assert found["device"] == "h200" and found["steps"] == 3
    assert stages["gen"]["measured_s"] == 2.0  # the first step is left out
    assert stages["gen"]["predicted_s"] == pytest.approx(0.1948, rel=0.03)  # docs/performance.md
    assert stages["gen"]["ratio"] == pytest.approx(stages["gen"]["predicted_s"] / 2.0)
    assert stages["all of these"]["measured_s"] == pytest.approx(2.6)
    shown = runner.invoke(app, ["plan", "--check", str(tmp_path)])
    assert "smol on h200" in shown.output and "ratio" in shown.output


def test_check_of_an_async_run_compares_how_long_the_loop_waits(tmp_path):
    rollout = "actor_rollout_ref.rollout"
    more = [f"{rollout}.mode=async", f"{rollout}.max_head_offpolicyness=2", f"{rollout}.num_workers=2"]
    done = runner.invoke(app, ["plan", "--check", str(make_run(tmp_path, more=more)), "--json"])
    assert done.exit_code == 0, done.output
    stages = {s["stage"]: s["predicted_s"] for s in json.loads(done.stdout)["stages"]}
    assert 0 <= stages["gen"] < 256 * 128 / 138_000  # two workers beside the trainer
    assert stages["all of these"] >= stages["gen"] + stages["update_actor"]


def test_check_of_an_unknown_device_asks_for_its_name(tmp_path):
    make_run(tmp_path, device="NVIDIA Quadro")
    done = runner.invoke(app, ["plan", "--check", str(tmp_path)])
    assert done.exit_code == 2 and "--gpu" in done.output
    assert runner.invoke(app, ["plan", "--check", str(tmp_path), "--gpu", "a100"]).exit_code == 0


def test_check_of_a_run_without_steps_is_refused(tmp_path):
    done = runner.invoke(app, ["plan", "--check", str(make_run(tmp_path, rows=0))])
    assert done.exit_code == 2 and "timing_s/gen" in done.output


def test_planning_loads_no_model_library():
    code = (
        "import sys; sys.argv = ['gspo', 'plan', '--model', '1.5b', '--simulate', '2', 'data.train_batch_size=64']\n"
        "from gspo.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
