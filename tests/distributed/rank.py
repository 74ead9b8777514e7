"""One rank of a launch, as a program: `python -m tests.distributed.rank PLAN.json RANK`.

Without torchrun, so that one launch can do everything a test session needs: the cases, whole runs, and a fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gspo.loop import closing, rank_worker, team_torchrun
from gspo.loop.team import RankFailed
from tests.distributed.cases import CASES
from tests.distributed.runs import train


class FragileWorker(rank_worker.RankWorker):
    """A rank that can be told to fail."""

    def fail(self, rank: int, how: str) -> None:
        if dist.get_rank() == rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("the numbers are wrong")
        dist.all_reduce(torch.zeros(1))  # what a rank that is well would wait in


def main(plan_file: str, rank: int) -> int:
    plan: dict[str, Any] = json.loads(Path(plan_file).read_text())
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": str(plan["world"]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(plan["port"]),
    }
    torch.set_num_threads(1)
    team_torchrun.RankWorker = FragileWorker
    closing.write_report = lambda console, run: None
    out = Path(plan["out"])
    team = team_torchrun.TorchrunTeam.join("cpu")
    for name in plan["cases"]:
        numbers = CASES[name](True)
        torch.save(numbers, out / f"{name}-{rank}.pt")
    if rank > 0:
        return team.follow()
    with team_torchrun.team_of_launch():
        for run in plan["runs"]:
            train(Path(run["folder"]), Path(run["model"]), *run["overrides"], stop_after=run["stop_after"])
        if plan["fault"]:
            try:
                team.call("fail", plan["world"] - 1, plan["fault"])
            except RankFailed as error:
                (out / "fault.txt").write_text(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
