"""Worker classes that kill their process at marked moments, once each."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gspo.cluster import RankWorker, RolloutWorker


def mark(folder: Path, *moments: str) -> Path:
    """A folder with a file for each moment at which a worker shall die."""
    folder.mkdir()
    for moment in moments:
        (folder / moment).touch()
    return folder


def die_if_marked(folder: Path, moment: str) -> None:
    try:
        os.unlink(folder / moment)
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def fragile_rank(folder: Path) -> type[RankWorker]:
    """A rank class whose last rank dies at `update-<step>`, trained, while the others wait for it."""

    class FragileRank(RankWorker):
        def update(self, batch, loss, step, *rest):
            assert self.place is not None
            result = super().update(batch, loss, step, *rest)
            if self.place.rank == self.place.world_size - 1:
                die_if_marked(folder, f"update-{step}")
            return result

    return FragileRank


def fragile_rollout(folder: Path) -> type[RolloutWorker]:
    """A rollout class that dies at `version-<n>`, with groups in flight under those weights."""

    class FragileRollout(RolloutWorker):
        version = 0

        def load_weights(self, ref, version):
            super().load_weights(ref, version)
            self.version = version

        def step(self):
            if self.engine.num_in_flight:
                die_if_marked(folder, f"version-{self.version}")
            return super().step()

    return FragileRollout
