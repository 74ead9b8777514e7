"""Whole runs on Ray against the same run in one process: the embedded model on arithmetic, with and without deaths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.cluster import RayPPOTrainerWithSampling, ResourcePoolManager, Role
from gspo.config import load
from gspo.distributed.rank_group import RankFailed
from gspo.loop.trainer import Trainer
from gspo.runs.group_log import read_groups
from tests.distributed.ray.fragile import fragile_rank, fragile_rollout, mark
from tests.distributed.ray.waiting import wait_until
from tests.support.small_run import make_reward_model

COMPARED = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean", "response_length/mean")
ASYNC_0 = ("actor_rollout_ref.rollout.mode=async", "actor_rollout_ref.rollout.max_head_offpolicyness=0")


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("gspo.loop.ending.write_report", lambda console, run: None)  # has tests of its own


def small(folder: Path, *overrides: str):
    """Three steps of the embedded task, a checkpoint each."""
    return load(
        overrides=[
            f"trainer.default_local_dir={folder}",
            "trainer.experiment_name=run",
            "trainer.total_training_steps=3",
            "trainer.save_freq=1",
            "trainer.num_threads=1",
            "trainer.log_val_generations=0",
            "data.train_batch_size=4",
            "data.gen_batch_size=4",
            "data.num_train_samples=64",
            "data.num_val_samples=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=4",
            "reward.num_workers=1",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",  # the default of verl's door is vanilla
            *overrides,
        ]
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    last = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    return load_file(last / "model.safetensors")


def assert_same(folder: Path, other: Path, num_steps: int = 3) -> None:
    """The same losses, lengths and weights, within float32 rounding; every step once."""
    ours, theirs = rows(folder), rows(other)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, num_steps + 1))
    for a, b in zip(ours, theirs, strict=True):
        shared = [name for name in COMPARED if name in a]
        assert len(shared) >= 3
        for name in shared:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), (a["step"], name)
    mine, yours = weights(folder), weights(other)
    assert mine.keys() == yours.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], yours[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in_process")
    assert Trainer(small(folder)).fit()["steps"] == 3
    return folder


def test_one_rank_on_ray_computes_what_one_process_does(cluster, in_process, tmp_path):
    trainer = RayPPOTrainerWithSampling(small(tmp_path), None, None, None)
    trainer.init_workers()
    assert trainer.fit()["steps"] == 3
    assert_same(tmp_path, in_process)
    assert cluster.is_initialized()  # a connection that was there before is left
    assert wait_until(lambda: cluster.available_resources()["CPU"] == 8)  # and every place was given back


@pytest.mark.slow
def test_async_without_staleness_does_too_though_its_rollout_actor_is_killed(cluster, in_process, tmp_path):
    marks = mark(tmp_path / "marks", "version-1")
    trainer = RayPPOTrainerWithSampling(small(tmp_path, *ASYNC_0), None, {Role.Rollout: fragile_rollout(marks)}, None)
    assert trainer.fit()["steps"] == 3
    assert_same(tmp_path, in_process)
    assert not list(marks.iterdir())
    assert rows(tmp_path)[-1]["rollout/worker_restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("apart", [(), ASYNC_0])
def test_rollouts_with_turns_on_ray_are_those_of_one_process(cluster, tmp_path, apart):
    turns = (
        "environment.name=guess",
        "data.train_files=guess",
        "data.max_response_length=40",
        "data.max_prompt_length=16",
    )
    free = ("algorithm.filter_groups.enable=false", "environment.num_workers=1")
    assert Trainer(small(tmp_path / "one", *turns, *free)).fit()["steps"] == 3
    assert RayPPOTrainerWithSampling(small(tmp_path / "ray", *turns, *free, *apart)).fit()["steps"] == 3
    assert_same(tmp_path / "ray", tmp_path / "one")
    assert max(row["num_turns/max"] for row in rows(tmp_path / "ray")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("apart", [(), ASYNC_0])
def test_agents_on_ray_write_what_they_write_in_one_process(cluster, tmp_path, apart):
    agent = (
        "environment.agent=tests.serving.agents.programs:guess",
        "environment.timeout=600",
        "data.train_files=guess",
        "data.max_response_length=40",
        "data.max_prompt_length=16",
        "algorithm.filter_groups.enable=false",
    )
    assert Trainer(small(tmp_path / "one", *agent)).fit()["steps"] == 3
    assert RayPPOTrainerWithSampling(small(tmp_path / "ray", *agent, *apart)).fit()["steps"] == 3
    assert_same(tmp_path / "ray", tmp_path / "one")
    assert max(row["num_turns/max"] for row in rows(tmp_path / "ray")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_rank_is_replaced_and_the_run_goes_on_from_its_checkpoint(
    cluster, in_process, tmp_path, capsys, num_ranks
):
    marks = mark(tmp_path / "marks", "update-1")
    pools = ResourcePoolManager({"mine": [num_ranks]}, {Role.ActorRollout: "mine", Role.Critic: "mine"})
    trainer = RayPPOTrainerWithSampling(small(tmp_path), None, {Role.ActorRollout: fragile_rank(marks)}, pools)
    assert trainer.fit()["steps"] == 3
    assert_same(tmp_path, in_process)
    assert not list(marks.iterdir())
    out = capsys.readouterr()
    assert f"trainer rank {num_ranks - 1} of {num_ranks} died" in out.out + out.err


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_adapters_on_two_ranks_train_as_in_one_process_and_reach_rollout_workers(cluster, tmp_path, workers):
    pytest.importorskip("peft")
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-3")
    assert Trainer(small(tmp_path / "one", *lora)).fit()["steps"] == 3
    apart = (*lora, "trainer.n_gpus_per_node=2", f"actor_rollout_ref.rollout.num_workers={workers}")
    assert RayPPOTrainerWithSampling(small(tmp_path / "ray", *apart)).fit()["steps"] == 3
    assert_same(tmp_path / "ray", tmp_path / "one")


@pytest.mark.slow
def test_ten_deaths_of_rollout_actors_lose_nothing(cluster, tmp_path):
    """Two workers in step; every death is at another moment, and the groups are those of an undisturbed run."""
    long = ("trainer.total_training_steps=12", "trainer.save_freq=-1", "actor_rollout_ref.rollout.num_workers=2")
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    assert Trainer(small(plain, *long[:2])).fit()["steps"] == 12
    marks = mark(tmp_path / "marks", *(f"version-{n}" for n in range(1, 11)))
    classes = {Role.Rollout: fragile_rollout(marks)}
    assert RayPPOTrainerWithSampling(small(killed, *long), None, classes, None).fit()["steps"] == 12
    assert not list(marks.iterdir())
    assert rows(killed)[-1]["rollout/worker_restarts"] >= 10
    assert_same(killed, plain, 12)


@pytest.mark.slow
def test_ten_deaths_of_trainer_ranks_lose_nothing(cluster, tmp_path):
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    long = ("trainer.total_training_steps=12",)
    assert Trainer(small(plain, *long)).fit()["steps"] == 12
    marks = mark(tmp_path / "marks", *(f"update-{n}" for n in range(1, 11)))
    classes = {Role.ActorRollout: fragile_rank(marks)}
    assert RayPPOTrainerWithSampling(small(killed, *long), None, classes, None).fit()["steps"] == 12
    assert not list(marks.iterdir())
    assert_same(killed, plain, 12)


@pytest.mark.slow
def test_without_a_checkpoint_a_dead_rank_stops_the_run_with_the_cause(cluster, tmp_path):
    marks = mark(tmp_path / "marks", "update-0")
    trainer = RayPPOTrainerWithSampling(small(tmp_path), None, {Role.Actor: fragile_rank(marks)}, None)
    with pytest.raises(RankFailed, match=r"^trainer rank 0 of 1 died: "):
        trainer.fit()
    assert wait_until(lambda: cluster.available_resources()["CPU"] == 8)


@pytest.mark.slow
def test_the_reward_model_scores_on_ray_as_in_one_process(cluster, tmp_path):
    scores = make_reward_model(tmp_path / "scores", "embedded")
    words = ("reward_model.enable=true", f"reward_model.path={scores}", "reward_model.max_tokens_per_batch=64")
    assert Trainer(small(tmp_path / "one", *words)).fit()["steps"] == 3
    on_ray = small(tmp_path / "ray", *words, "trainer.n_gpus_per_node=2")
    assert RayPPOTrainerWithSampling(on_ray).fit()["steps"] == 3
    assert_same(tmp_path / "ray", tmp_path / "one")
    for step in (1, 2, 3):
        one, ray = (model_scores(tmp_path / name, step) for name in ("one", "ray"))
        assert one.keys() == ray.keys() and len(set(one.values())) > 8
        assert ray == pytest.approx(one, rel=1e-4, abs=1e-5)


def model_scores(folder: Path, step: int) -> dict[tuple[str, str], float]:
    """The reward model's score of each different response of a step."""
    groups = read_groups(folder / "run" / "groups" / f"step-{step:06d}.jsonl.gz")
    return {(g["uid"], r["text"]): r["extra"]["reward/model"] for g in groups for r in g["responses"]}
