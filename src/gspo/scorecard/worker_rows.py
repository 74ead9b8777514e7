"""Row F6: the process that generates is killed in the middle of a rollout; its groups are generated again, the same.

The native engine lives in the trainer's process, so this process is the rollout worker.
"""

from __future__ import annotations

import random
import signal

from gspo.scorecard import faults
from gspo.scorecard.kill_rows import Bench, with_bench
from gspo.scorecard.row import Check

SETTINGS = (
    "data.gen_batch_size=12",
    "data.max_response_length=12",
    "actor_rollout_ref.rollout.max_num_seqs=8",
)


def rollout_worker_killed(bench: Bench, rng: random.Random, kills: int = 6) -> tuple[bool, str]:
    """Kill between two decode steps with groups half generated; recorded groups and final bits must be equal."""
    bench.reference(*SETTINGS)
    same = landed = 0
    for number in range(kills):
        name, count = f"worker-{number}", rng.randint(3, 30)
        child = bench.start(name, *SETTINGS, prepare=lambda m, c=count: faults.kill_at(m, "rollout", c))
        landed += child.wait() == -signal.SIGKILL
        same += bench.finish(name, *SETTINGS)
    return same == kills and landed == kills, f"{same}/{kills} regenerated identically after {landed} kills"


ROWS: dict[str, Check] = {"F6": with_bench(rollout_worker_killed, "F6", "rollout worker killed")}
