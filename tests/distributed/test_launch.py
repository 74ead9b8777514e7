"""A launcher that receives a signal returns the exit code that rank 0 reported."""

from __future__ import annotations

import importlib.util
import signal
import sys

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException

from gspo.config import load
from gspo.distributed.launch import launch, report_exit_code
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
