"""A launcher that receives a signal returns the exit code that rank 0 reported."""

from __future__ import annotations

import importlib.util
import signal
import sys

import pytest
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException

from gspo.config import ConfigErrors, TrainerConfig, load
from gspo.distributed import launch as module
from gspo.distributed.launch import (
    check_launch,
    launch,
    launched_place,
    launched_ranks,
    local_ranks,
    report_exit_code,
    trainer_gpus,
)
from gspo.distributed.rank_group import RankPlace
from gspo.distributed.run_layout import num_rollout_workers, rollout_dtype, runs_ahead
from gspo.exit_codes import EXIT_WORKERS_LOST
from gspo.trainer.main_ppo import main as main_ppo

RANKS = ["actor_rollout_ref.actor.strategy=fsdp2", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]


@pytest.mark.parametrize(("reported", "code"), [(143, 143), (6, 6), (0, 0), (None, EXIT_WORKERS_LOST)])
def test_a_signalled_launch_ends_with_the_code_of_rank_0(monkeypatch, capsys, reported, code):
    def torchrun(arguments):
        for rank in ("1", "0"):
            monkeypatch.setenv("RANK", rank)
            if reported is not None:
                report_exit_code(reported if rank == "0" else 99)
        raise SignalException("signalled", signal.SIGTERM)

    monkeypatch.setattr(torch.distributed.run, "main", torchrun)
    assert launch(load(None, RANKS).config, ["-m", "gspo", "train"]) == code
    assert ("before they had saved" in capsys.readouterr().err) == (reported is None)


def test_without_a_launch_nothing_is_reported(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    report_exit_code(0)
    assert list(tmp_path.iterdir()) == []


def test_a_script_starts_itself_again_on_the_ranks(monkeypatch, tmp_path):
    """Not `gspo` with the arguments of a script, which has no command."""
    started = []
    monkeypatch.setattr(torch.distributed.run, "main", started.append)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "main_gspo_dynamic.py"), *RANKS])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert main_ppo() == 0
    assert started == [["--standalone", "--nproc-per-node", "2", *sys.argv]]
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", importlib.util.find_spec("gspo.trainer.main_ppo"))
    assert main_ppo() == 0
    assert started[1][3:5] == ["-m", "gspo.trainer.main_ppo"] and started[1][5:] == RANKS


def settings(**values) -> TrainerConfig:
    """A config with these values of `trainer`, and the strategy of the actor."""
    config = TrainerConfig()
    config.actor_rollout_ref.actor.strategy = values.pop("strategy", "fsdp2")
    config.trainer.device = "cpu"
    for name, value in values.items():
        setattr(config.trainer, name, value)
    return config


def launched(monkeypatch, world: int, local: int, rank: int = 0) -> None:
    words = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "RANK": rank, "LOCAL_RANK": rank % local}
    words |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "host", "MASTER_PORT": 29500}
    for name, value in words.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("values", "num_gpus", "num_ranks"),
    [
        ({"n_gpus_per_node": 3}, 0, 3),
        ({"n_gpus_per_node": 1}, 8, None),
        ({"n_gpus_per_node": 0}, 8, None),
        ({"n_gpus_per_node": 3, "strategy": "none"}, 8, None),
        ({"n_gpus_per_node": 3, "backend": "ray"}, 8, None),
        ({"n_gpus_per_node": None, "device": "auto"}, 4, 4),
        ({"n_gpus_per_node": None, "device": "cuda"}, 4, 4),
        ({"n_gpus_per_node": None, "device": "auto"}, 1, None),
        ({"n_gpus_per_node": None, "device": "cuda:1"}, 4, None),
        ({"n_gpus_per_node": None, "device": "cpu"}, 4, None),
    ],
)
def test_ranks_are_started_where_several_train_on_this_machine(monkeypatch, values, num_gpus, num_ranks):
    started = []
    monkeypatch.setattr(torch.distributed.run, "main", started.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    code = launch(settings(**values), ["-m", "x"])
    assert started == ([] if num_ranks is None else [["--standalone", "--nproc-per-node", str(num_ranks), "-m", "x"]])
    assert code == (None if num_ranks is None else 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "already")
    assert launch(settings(**values), ["-m", "x"]) is None and len(started) <= 1


def test_the_place_of_a_process(monkeypatch):
    monkeypatch.setattr(module, "free_port", lambda: 77)
    monkeypatch.setenv("WORLD_SIZE", "8")  # of something else than torchrun
    assert (launched_ranks(), local_ranks(), trainer_gpus(torch.device("cuda:2"))) == (1, 1, {2})
    for device, where in (("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3"), ("auto", "cpu")):
        assert launched_place(device) == RankPlace(0, 1, 0, "127.0.0.1", 77, where)
    launched(monkeypatch, world=8, local=4, rank=5)
    assert (launched_ranks(), local_ranks(), trainer_gpus(torch.device("cuda:2"))) == (8, 4, {0, 1, 2, 3})
    assert launched_place("cuda") == RankPlace(5, 8, 1, "host", 29500, "cuda:1")
    assert launched_place("auto").device == "cpu"


@pytest.mark.parametrize(
    ("processes", "strategy", "requested", "key"),
    [
        (2, "none", None, "actor_rollout_ref.actor.strategy"),
        (2, "fsdp2", 4, "trainer.n_gpus_per_node"),
        (2, "fsdp2", 2, None),
        (2, "fsdp2", None, None),
        (1, "fsdp2", 0, None),
        (1, "fsdp2", 2, "trainer.n_gpus_per_node"),
        (1, "none", 2, None),
    ],
)
def test_the_processes_of_a_launch_match_the_config(monkeypatch, processes, strategy, requested, key):
    if processes > 1:
        launched(monkeypatch, world=2 * processes, local=processes)
    config = settings(strategy=strategy, n_gpus_per_node=requested)
    if key is None:
        check_launch(config)
        return
    with pytest.raises(ConfigErrors, match=key):
        check_launch(config)


@pytest.mark.parametrize(
    ("mode", "num", "name", "bound", "workers", "ahead"),
    [
        ("sync", 1, "native", 2, 0, False),
        ("sync", 2, "native", 2, 2, False),
        ("sync", 1, "vllm", 2, 1, False),
        ("async", 1, "native", 0, 1, False),
        ("async", 3, "native", 1, 3, True),
    ],
)
def test_rollout_workers_and_whether_they_run_ahead(mode, num, name, bound, workers, ahead):
    config = TrainerConfig()
    rollout = config.actor_rollout_ref.rollout
    rollout.mode, rollout.num_workers, rollout.name, rollout.max_head_offpolicyness = mode, num, name, bound
    assert (num_rollout_workers(config), runs_ahead(config)) == (workers, ahead)
    rollout.dtype, config.actor_rollout_ref.model.dtype = "auto", "bfloat16"
    assert rollout_dtype(config, torch.device("cpu")) == "bfloat16"
    rollout.dtype = "float16"
    assert rollout_dtype(config, torch.device("cpu")) == "float16"
