"""`gspo sweep`: the runs that a file names, how an interrupted sweep goes on, and the comparison at its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gspo.cli import app
from gspo.commands.sweep.ledger import Ledger
from gspo.commands.sweep.spec import SweepError, read_sweep
from gspo.commands.sweep.standings import standings, write_page
from gspo.commands.sweep.trials import program
from tests.report.synthetic import Plan, make_run
from tests.support.small_run import make_model

cli = CliRunner()
LR = "actor_rollout_ref.actor.optim.lr"


def write(where: Path, **content: object) -> Path:
    file = where / "sweep.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def test_a_grid_is_every_combination_and_names_say_the_settings(tmp_path: Path) -> None:
    file = write(tmp_path, grid={LR: ["1e-6", 0.001], "trainer.seed": [0, 1]}, set={"trainer.total_training_steps": 3})
    sweep = read_sweep(file)
    assert [t.name for t in sweep.trials] == ["lr=1e-6,seed=0", "lr=1e-6,seed=1", "lr=0.001,seed=0", "lr=0.001,seed=1"]
    assert sweep.folder == Path("runs/sweep")
    assert sweep.overrides(sweep.trials[2]) == [
        "trainer.total_training_steps=3",
        f"{LR}=0.001",
        "trainer.seed=0",
        "trainer.default_local_dir=runs/sweep",
        "trainer.experiment_name=lr=0.001,seed=0",
    ]


def test_random_draws_lie_in_their_range_and_more_samples_keep_the_first(tmp_path: Path) -> None:
    keys = {LR: {"min": "1e-7", "max": 1e-4, "log": True}, "actor_rollout_ref.rollout.n": {"min": 2, "max": 9}}
    draws = [read_sweep(write(tmp_path, random={"samples": n, "keys": keys})).trials for n in (5, 40)]
    assert draws[1][:5] == draws[0]
    rates = [t.settings[LR] for t in draws[1]]
    counts = [t.settings["actor_rollout_ref.rollout.n"] for t in draws[1]]
    assert all(1e-7 <= rate <= 1e-4 for rate in rates) and len(set(rates)) > 35
    assert 5 < sum(rate < 10**-5.5 for rate in rates) < 35  # half of them: the draw is even in the logarithm
    assert set(counts) <= set(range(2, 10)) and len(set(counts)) > 4
    other = read_sweep(write(tmp_path, random={"samples": 5, "seed": 1, "keys": keys})).trials
    assert not {t.name for t in other} & {t.name for t in draws[0]}


def test_a_grid_and_draws_multiply_and_equal_ends_of_keys_are_told_apart(tmp_path: Path) -> None:
    choice = {"samples": 2, "keys": {"data.system_prompt": ["Think, then answer: {x}"]}}
    sweep = read_sweep(write(tmp_path, grid={LR: [1, 2], "critic.optim.lr": [3]}, random=choice))
    names = [t.name for t in sweep.trials]
    assert len(names) == 2  # both draws are the same choice
    assert all(
        re.fullmatch(r"actor\.optim\.lr=[12],critic\.optim\.lr=3,system_prompt=Think,-then.*-[0-9a-f]{8}", n)
        for n in names
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "nothing to sweep"),
        ({"grid": {LR: 3}}, f"grid.{LR} is 3; expected a list"),
        ({"grids": {LR: [3]}}, "unknown key 'grids'"),
        ({"random": {"samples": 0, "keys": {LR: [1]}}}, "random.samples is 0"),
        ({"random": {"samples": 2, "keys": {LR: {"min": 2, "max": 1}}}}, "min < max"),
        ({"random": {"samples": 2, "keys": {LR: {"min": 0, "max": 1, "log": True}}}}, "min > 0"),
        ({"grid": {LR: [1]}, "base": "none.yaml"}, "no such file"),
        ({"grid": {LR: [1]}, "backend": "slurm"}, "expected local or ray"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: dict, message: str) -> None:
    with pytest.raises(SweepError, match=re.escape(message)):
        read_sweep(write(tmp_path, **content))


def test_a_wrong_setting_is_refused_before_the_first_run(tmp_path: Path) -> None:
    file = write(tmp_path, grid={"trainer.sead": [1]}, folder=str(tmp_path / "runs"))
    done = cli.invoke(app, ["sweep", str(file)])
    assert done.exit_code == 2 and "did you mean trainer.seed" in done.output and not (tmp_path / "runs").exists()
    done = cli.invoke(app, ["sweep", str(write(tmp_path, grid={"trainer.seed": [1, 2]})), "--dry-run"])
    assert done.exit_code == 0 and done.output.splitlines()[1:] == ["seed=1", "seed=2"]


def test_a_trial_is_done_while_its_settings_and_the_base_file_stay(tmp_path: Path) -> None:
    base, folder = tmp_path / "base.yaml", tmp_path / "runs"
    base.write_text("trainer: {total_training_steps: 3}\n")

    def plan(**more: object):
        return read_sweep(write(tmp_path, base="base.yaml", folder=str(folder), grid={"trainer.seed": [1, 2]}, **more))

    first, second = plan().trials
    ledger = Ledger(plan())
    assert not ledger.is_done(first)
    make_run(folder / first.name, Plan(steps=2, groups=1))
    ledger.record(first, 0)
    ledger.record(second, 3)
    again = Ledger(plan())
    assert again.is_done(first) and not again.is_done(second)
    assert again.failed([first, second]) == [(second.name, 3)]
    assert not Ledger(plan(set={"data.seed": 5})).is_done(first)
    base.write_text("trainer: {total_training_steps: 4}\n")
    assert not Ledger(plan()).is_done(first)
    (folder / "sweep.json").write_text("{")  # half a file counts as none
    assert not Ledger(plan()).is_done(first)


def test_the_standings_pair_every_run_with_the_best(tmp_path: Path) -> None:
    gains = {"low": 0.1, "best": 0.68, "same": 0.1}
    for name, gain in gains.items():
        make_run(tmp_path / name, Plan(steps=4, groups=2, gain=gain))
    written = write_page(tmp_path, [*gains, "absent"])
    assert written is not None
    page, comparison = written
    assert [run["name"] for run in comparison["runs"]] == ["best", "low", "same"]
    assert [d["a"] for d in comparison["differences"]] == ["best", "best"]
    lines = standings(comparison).splitlines()
    assert lines[1].startswith("best ") and re.search(r"low .* -\d+\.\d points \(-\d+\.\d to -\d+\.\d\)$", lines[2])
    assert page.read_text().count('id="data-overview-') == 3
    assert write_page(tmp_path, ["absent"]) is None


def small_sweep(folder: Path, **more: object) -> Path:
    model = make_model(folder / "model")
    settings = {
        "actor_rollout_ref.model.path": str(model),
        "trainer.total_training_steps": 2,
        "trainer.num_threads": 1,
        "data.train_files": "arithmetic",
        "data.num_train_samples": 64,
        "data.num_val_samples": 16,
        "data.max_prompt_length": 24,
        "data.max_response_length": 6,
        "data.train_batch_size": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.rollout.n": 4,
        "algorithm.filter_groups.enable": False,
    }
    return write(folder, folder=str(folder / "runs"), set=settings, grid={LR: [1e-3, 1e-2]}, **more)


def run(file: Path, **options: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "gspo", "sweep", str(file)]
    return subprocess.run(words, capture_output=True, text=True, timeout=400, **options)  # pyright: ignore


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_signal_and_does_not_repeat_finished_runs(tmp_path: Path) -> None:
    file = small_sweep(tmp_path)
    child = subprocess.Popen([sys.executable, "-m", "gspo", "sweep", str(file)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if "step 1/2" in line:
            child.send_signal(signal.SIGTERM)
            break
    rest = child.stdout.read()
    assert child.wait(timeout=200) == 128 + signal.SIGTERM
    assert "run 2/2" not in rest and not (tmp_path / "runs" / "lr=0.01").exists()
    done = run(file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run 2/2  lr=0.01" in done.stdout and "page: " in done.stdout
    trials = json.loads((tmp_path / "runs" / "sweep.json").read_text())["trials"]
    assert {name: t["code"] for name, t in trials.items()} == {"lr=0.001": 0, "lr=0.01": 0}
    assert (tmp_path / "runs" / "sweep.html").is_file()
    again = run(file)
    assert again.returncode == 0 and "2 of 2 runs are finished already" in again.stdout and "run 1/" not in again.stdout


@pytest.mark.slow
def test_a_sweep_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    file = small_sweep(tmp_path, backend="ray")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = run(file, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ended with exit code 0") == 2
    for name in ("lr=0.001", "lr=0.01"):
        result = json.loads((tmp_path / "runs" / name / "result.json").read_text())
        assert result["steps"] == 2 and (tmp_path / "runs" / f"{name}.log").read_text()


def test_a_trial_is_one_command(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("trainer: {seed: 1}\n")
    sweep = read_sweep(write(tmp_path, base="base.yaml", folder="there", grid={"trainer.seed": [7]}))
    words = program(sweep, sweep.trials[0])
    assert words[1:] == [
        *("-m", "gspo", "train", str(tmp_path / "base.yaml"), "trainer.seed=7"),
        *("trainer.default_local_dir=there", "trainer.experiment_name=seed=7"),
    ]


@pytest.mark.parametrize(("key", "value"), [("base", 3), ("folder", ["runs"]), ("base", {"a": 1})])
def test_a_path_of_another_type_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(SweepError, match=f"{key} is .*; expected a path"):
        read_sweep(write(tmp_path, grid={"trainer.seed": [0]}, **{key: value}))


def test_paths_of_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "base.yaml").write_text("trainer: {seed: 1}\n")
    sweep = read_sweep(write(tmp_path, grid={"trainer.seed": [0]}, base="~/base.yaml", folder="~/runs"))
    assert (sweep.base, sweep.folder) == (tmp_path / "home" / "base.yaml", tmp_path / "home" / "runs")


def test_runs_without_an_accuracy_are_ordered_by_their_last_held_out_reward(tmp_path: Path) -> None:
    name = "val-core/mine/reward/mean@1"
    rewards = {"a": [-3.0, -2.0], "b": [5.0, -4.0], "c": [-1.5], "d": []}
    for run, values in rewards.items():
        (tmp_path / run).mkdir()
        lines = [json.dumps({"step": step, name: value}) for step, value in enumerate(values)]
        (tmp_path / run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines or ['{"step": 0}']))
        (tmp_path / run / "config.yaml").write_text("trainer: {seed: 0}\n")
    written = write_page(tmp_path, list(rewards))
    assert written is not None
    lines = standings(written[1]).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["c", "a", "b", "d"]
    assert ["reward -1.500" in lines[1], "reward -2.000" in lines[2], "–" in lines[4]] == [True] * 3
