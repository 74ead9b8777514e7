"""A launcher that receives a signal returns the exit code that rank 0 reported."""

from __future__ import annotations

import signal

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException

from gspo.config import load
from gspo.distributed.launch import launch, report_exit_code
from gspo.exit_codes import EXIT_WORKERS_LOST

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
    assert launch(load(None, RANKS).config, ["train"]) == code
    assert ("before they had saved" in capsys.readouterr().err) == (reported is None)


def test_without_a_launch_nothing_is_reported(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    report_exit_code(0)
    assert list(tmp_path.iterdir()) == []
