"""Rollout workers beside the trainer: in step and free-running, with the numbers of one process and within the bound."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.config import ConfigErrors, load
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.runs.group_log import read_groups
from gspo.sampling.errors import RewardFailures
from gspo.sampling.producer import Producer
from gspo.types import Reward
from tests.faults import audit
from tests.loop.runs import rows, token_lags, train, trainer
from tests.loop.workers import use_threads
from tests.support.small_run import make_model

ROLLOUT = "actor_rollout_ref.rollout."
ON_POLICY = "algorithm.filter_groups.max_staleness=0"
ASYNC = (f"{ROLLOUT}mode=async", f"{ROLLOUT}max_head_offpolicyness=2")
IN_STEP = (f"{ROLLOUT}mode=async", f"{ROLLOUT}max_head_offpolicyness=0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_process(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(folder, model, ON_POLICY)
    return folder


@pytest.fixture
def in_threads(monkeypatch):
    use_threads(monkeypatch)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((folder / "run" / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-5, atol=1e-6)
    for a, b in zip(rows(one), rows(other), strict=True):
        assert b["actor/pg_loss"] == pytest.approx(a["actor/pg_loss"], abs=1e-6)
        for name in ("train/generated_tokens", "train/groups_generated", "critic/score/mean"):
            assert a[name] == b[name]
    for step in range(1, 5):
        assert texts(one, step) == texts(other, step)


def texts(folder: Path, step: int) -> list[Any]:
    file = folder / "run" / "groups" / f"step-{step:06d}.jsonl.gz"
    return [(g["submission"], g["version"], g["fate"], [r["text"] for r in g["responses"]]) for g in read_groups(file)]


@pytest.mark.parametrize(
    "settings", [(f"{ROLLOUT}num_workers=2", ON_POLICY), IN_STEP, (*IN_STEP, f"{ROLLOUT}num_workers=2")]
)
def test_workers_in_step_train_what_one_process_trains(settings, model, one_process, tmp_path, in_threads):
    train(tmp_path, model, *settings)
    assert_same_run(one_process, tmp_path)


def test_adapters_reach_the_workers_merged(model, tmp_path, in_threads):
    pytest.importorskip("peft")
    settings = (ON_POLICY, "actor_rollout_ref.model.lora_rank=4", "trainer.total_training_steps=2")
    train(tmp_path / "one", model, *settings)
    train(tmp_path / "workers", model, *settings, f"{ROLLOUT}num_workers=2")
    for step in (1, 2):
        assert texts(tmp_path / "one", step) == texts(tmp_path / "workers", step)
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "workers")[name], tensor, rtol=1e-4, atol=1e-5)


def test_carried_groups_continue_in_a_fleet_as_in_one_process(model, tmp_path, in_threads):
    settings = ("data.gen_batch_size=12", "data.max_response_length=12", f"{ROLLOUT}max_num_seqs=64")
    train(tmp_path / "one", model, *settings)
    train(tmp_path / "fleet", model, *settings, f"{ROLLOUT}num_workers=2")
    assert_same_run(tmp_path / "one", tmp_path / "fleet")


def test_a_stopped_fleet_goes_on_to_the_same_bits(model, tmp_path, in_threads):
    settings = ("data.gen_batch_size=12", "data.max_response_length=12", f"{ROLLOUT}num_workers=2")
    train(tmp_path / "whole", model, *settings)
    train(tmp_path / "halved", model, *settings, stop_after=2)
    train(tmp_path / "halved", model, *settings)
    ours, theirs = weights(tmp_path / "whole"), weights(tmp_path / "halved")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_staleness_stays_within_the_bound_and_responses_cross_versions(model, tmp_path, in_threads):
    settings = (*ASYNC, "trainer.total_training_steps=8", "data.max_response_length=16")
    train(tmp_path, model, *settings)
    run = tmp_path / "run"
    ages = audit.staleness(run)
    assert len(ages) == 32 and min(ages) >= 0 and max(ages) <= 2
    assert max(ages) > 0, "nothing was generated ahead"
    assert set(token_lags(run)) <= {0, 1, 2}
    assert audit.problems(run) == []
    assert max(row["train/staleness/max"] for row in rows(tmp_path)) == max(ages)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 3])
def test_other_bounds_hold_too(bound, model, tmp_path, in_threads):
    settings = (f"{ROLLOUT}mode=async", f"{ROLLOUT}max_head_offpolicyness={bound}", f"{ROLLOUT}num_workers=2")
    train(tmp_path, model, *settings)
    assert max(audit.staleness(tmp_path / "run")) <= bound
    assert audit.problems(tmp_path / "run") == []


def test_an_async_run_resumes_with_every_group_accounted_for(model, tmp_path, in_threads):
    settings = (*ASYNC, "trainer.total_training_steps=6", "data.max_response_length=16")
    for stop in (2, 4, None):
        train(tmp_path, model, *settings, stop_after=stop)
        assert audit.problems(tmp_path / "run") == []
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 7))
    assert len(audit.staleness(tmp_path / "run")) == 24 and max(audit.staleness(tmp_path / "run")) <= 2


def test_rewards_that_fail_in_the_background_stop_the_run_when_it_asks(model, tmp_path, in_threads):
    def failing(prompt: Any, response: str) -> Reward:
        raise RuntimeError("the reward server is gone")

    with pytest.raises(RewardFailures, match="the reward server is gone"):
        train(tmp_path, model, *ASYNC, reward=flaky(failing))
    assert not [t.name for t in threading.enumerate() if t.name == "gspo-producer"]


def flaky(then: Any) -> Any:
    """A reward that works for a batch and a half."""
    calls = [0]

    def reward(prompt: Any, response: str) -> Reward:
        calls[0] += 1
        if calls[0] > 64:
            return then(prompt, response)
        right = float(calls[0] % 2)
        return Reward(right, acc=right)

    return reward


def test_evaluation_and_checkpoints_in_the_middle_of_an_async_run(model, tmp_path, in_threads):
    train(tmp_path, model, *ASYNC, "trainer.test_freq=1", "trainer.save_freq=1")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(any(k.startswith("val-core/") for k in json.loads(line)) for line in lines)


def test_a_producer_says_at_the_next_batch_what_went_wrong_while_working_ahead():
    class Sampler:
        version = 0

        def next_batch(self):
            return [], None

        def work_ahead(self) -> bool:
            tried.set()
            raise OSError("disk on fire")

    tried = threading.Event()
    producer = Producer(lambda record: Sampler())  # pyright: ignore
    assert producer.next_batch() == ([], None)
    assert tried.wait(10)
    with pytest.raises(OSError, match="disk on fire"):
        producer.next_batch()
    producer.close()


def test_what_async_asks_for_is_checked():
    ahead = list(ASYNC)
    warned = {w.key for w in load(overrides=ahead).warnings}
    assert "actor_rollout_ref.actor.use_decoupled_loss" in warned
    decoupled = [*ahead, "actor_rollout_ref.actor.use_decoupled_loss=true"]
    assert "actor_rollout_ref.actor.use_decoupled_loss" not in {w.key for w in load(overrides=decoupled).warnings}
    for other, key in (
        ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward"),
        ("algorithm.filter_groups.strategy=rounds", "algorithm.filter_groups.strategy"),
    ):
        with pytest.raises(ConfigErrors, match=key.replace(".", r"\.")):
            load(overrides=[*ahead, other])
    settings = [*ahead, "algorithm.filter_groups.max_staleness=1"]
    assert "algorithm.filter_groups.max_staleness" in {w.key for w in load(overrides=settings).warnings}


def test_the_fleet_of_a_run_can_grow_and_shrink_while_it_trains(model, tmp_path, in_threads):
    t = trainer(tmp_path, model, *ASYNC, "trainer.total_training_steps=5")
    fleet: Any = t.parts.engine
    step = t.train_step

    def changing() -> None:
        step()
        if t.step in (1, 2):
            fleet.add_worker()
        if t.step == 3:
            fleet.remove_worker(0)

    t.train_step = changing
    t.fit()
    assert [int(row["rollout/num_workers"]) for row in rows(tmp_path)][-1] == 2
    assert audit.problems(tmp_path / "run") == []


def test_groups_in_flight_follow_the_workers_there_are(model, tmp_path, in_threads):
    settings = (*ASYNC, f"{ROLLOUT}num_workers=2", f"{ROLLOUT}max_num_seqs=8", f"{ROLLOUT}n=4")
    t = trainer(tmp_path, model, *settings)
    fleet, sampler = t.parts.engine, t.parts.sampler
    assert isinstance(fleet, AsyncFleet) and isinstance(sampler, Producer)
    admission, report = sampler._sampler._admission, sampler._sampler._report
    seen = [admission.room(report, 0, 0, 0, 0)]
    fleet.add_worker()
    seen.append(admission.room(report, 0, 0, 0, 0))
    fleet.remove_worker()
    fleet.remove_worker()
    seen.append(admission.room(report, 0, 0, 0, 0))
    t.close()
    assert seen == [4, 6, 2]
