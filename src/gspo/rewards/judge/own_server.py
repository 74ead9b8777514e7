"""The model that a run starts from, frozen and served on this machine: the judge `policy`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque

from gspo.processes import describe_exit, die_with_parent, python_environment
from gspo.rewards.protocol import RewardError

NAME = "policy"  # of the served model
_READY = re.compile(r"^serving \S+ at (\S+)")


class OwnServer:
    """A process of `gspo serve` on a free port. It ends with `close`, or when this process ends."""

    def __init__(self, model: str, device: str) -> None:
        parent = os.getpid()
        command = [sys.executable, "-m", "gspo", "serve", model, "--port", "0", "--served-model-name", NAME]
        self._process = subprocess.Popen(
            [*command, "--device", device],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=python_environment(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")),
            preexec_fn=lambda: die_with_parent(parent),
        )
        try:
            self.url = self._wait()
        finally:
            threading.Thread(target=self._drain, name="judge server", daemon=True).start()

    def _wait(self) -> str:
        """The address, when the server is ready; RewardError with its last words when it ends before."""
        said: deque[str] = deque(maxlen=5)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if match := _READY.match(line):
                return match[1]
            said.append(line.strip())
        ended = describe_exit(self._process.wait())
        raise RewardError(f"reward.judge.base_url=policy: gspo serve {ended}: {' '.join(said)}")

    def _drain(self) -> None:
        """Read what the server says, such as its errors: one that cannot write would wait forever."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for _ in lines:
                pass

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
