"""The ranks of a launch, as a program: `python -m tests.distributed.rank PLAN.json`.

Without torchrun, so that one launch can do everything a test session needs: the cases, whole runs, and a fault. Ranks
are forked when the libraries are loaded, which takes longer than anything else here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gspo.distributed import rank_worker, torchrun_ranks
from gspo.distributed.rank_group import RankFailed
from gspo.loop import ending
from tests.distributed.cases import CASES
from tests.distributed.runs import PROGRAMS


class FragileWorker(rank_worker.RankWorker):
    """A rank that fails on request."""

    def fail(self, rank: int, how: str) -> None:
        if dist.get_rank() == rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("the numbers are wrong")
        dist.all_reduce(torch.zeros(1))  # a healthy rank waits here


def run(plan: dict[str, Any], rank: int) -> int:
    """Run one rank to its end. Returns its exit code."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": str(plan["world"]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(plan["world"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(plan["port"]),
    }
    torch.set_num_threads(1)
    torchrun_ranks.RankWorker = FragileWorker
    ending.write_report = lambda console, run: None
    out = Path(plan["out"])
    ranks = torchrun_ranks.TorchrunRanks.join("cpu")
    for name in plan["cases"]:
        torch.save(CASES[name](True), out / f"{name}-{rank}.pt")
    if rank > 0:
        return ranks.follow()
    with torchrun_ranks.launched_rank_group():
        for one in plan["runs"]:
            train = PROGRAMS[one["program"]]
            train(Path(one["folder"]), Path(one["model"]), *one["overrides"], stop_after=one["stop_after"])
        if plan["fault"]:
            try:
                ranks.call(FragileWorker.fail, plan["world"] - 1, plan["fault"])
            except RankFailed as error:
                (out / "fault.txt").write_text(str(error))
    return 0


def start(plan: dict[str, Any], rank: int) -> int:
    """Fork a process for one rank, with its output in a file. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(Path(plan["out"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = run(plan, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    pids = [start(plan, rank) for rank in range(plan["world"])]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (Path(plan["out"]) / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1])
