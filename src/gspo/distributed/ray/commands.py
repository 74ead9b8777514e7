"""Commands as Ray tasks: each runs where the cluster has room, with its output in a file."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import ray

from gspo.distributed.ray.session import RaySession
from gspo.processes import die_with_parent, python_environment


def run_commands(
    commands: Mapping[str, tuple[Sequence[str], str]], *, num_cpus: float, num_gpus: float
) -> Iterator[tuple[str, int]]:
    """Run each command, words and the path of its log, and yield its name and exit code when it ends.

    The working folder and the logs must be reachable on every node. Ending the iteration early ends the commands.
    """
    with closing(RaySession()):
        task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=0)(_run)
        folder = os.getcwd()
        pending = {task.remote(list(words), log, folder): name for name, (words, log) in commands.items()}
        try:
            while pending:
                (done,), _ = ray.wait(list(pending), num_returns=1)
                yield pending.pop(done), ray.get(done)
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)


def _run(words: Sequence[str], log: str, folder: str) -> int:
    with Path(log).open("w") as file:
        done = subprocess.run(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=python_environment(),
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # a cancelled task ends its command
            check=False,
        )
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
