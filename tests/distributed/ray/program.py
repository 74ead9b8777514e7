"""`gspo train trainer.backend=ray` as a program with all its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from tests.distributed.ray.waiting import wait_until

SMALL = (
    "trainer.backend=ray",
    "trainer.experiment_name=run",
    "trainer.num_threads=1",
    "trainer.val_before_train=false",
    "trainer.val_after_train=false",
    "data.train_batch_size=4",
    "data.gen_batch_size=4",
    "data.num_train_samples=64",
    "data.num_val_samples=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "reward.num_workers=1",
)
MARK = "GSPO_TEST_RUN"


class Program:
    """`gspo train` in a new process group; its processes are found by an environment variable."""

    def __init__(self, folder: Path, *overrides: str, **environment: str) -> None:
        self.name = uuid.uuid4().hex
        self.out = folder / "out.txt"
        outside = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gspo", "train", *SMALL, f"trainer.default_local_dir={folder}", *overrides],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**outside, MARK: self.name, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.out.read_text()

    def pids(self, title: str = "") -> list[int]:
        """The ids of its processes, itself included, whose command line contains `title`."""
        found = []
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdigit() and f"{MARK}={self.name}".encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes()
                    if command and title.encode() in command:
                        found.append(int(path.name))
            except OSError:
                continue
        return found

    def reaches(self, step: int) -> bool:
        return wait_until(lambda: f"step {step}/" in self.text or self.process.poll() is not None, 240)

    def end(self, seconds: float = 240) -> int:
        """Wait until all its processes are gone. Returns its exit code."""
        code = self.process.wait(seconds)
        assert wait_until(lambda: not self.pids()), [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:300] for pid in self.pids()
        ]
        return code
