"""`gspo train` behind the command line: errors become one message and an exit code (`gspo.exit_codes`)."""

from __future__ import annotations

import json
import sys
from typing import Any

from gspo.checkpoint.folder import CheckpointError
from gspo.checkpoint.resume import ResumeRefused
from gspo.config import ConfigErrors, ResolvedConfig
from gspo.data.rows import DataError
from gspo.distributed.backend import ClusterError
from gspo.distributed.launch import check_launch, launched_ranks, tell_code
from gspo.distributed.rank_group import RankFailed
from gspo.distributed.torchrun_ranks import TorchrunRanks, launched_rank_group
from gspo.exit_codes import (
    EXIT_BAD_NUMBERS,
    EXIT_DONE,
    EXIT_FILE,
    EXIT_REFUSED,
    EXIT_REWARDS_FAILED,
    EXIT_STARVED,
    EXIT_WORKERS_LOST,
)
from gspo.loop.trainer import BadNumbers, Trainer
from gspo.models.load import ModelError
from gspo.rewards.protocol import RewardError
from gspo.rollout.engine import EngineError
from gspo.rollout.workers.connection import WorkersLost
from gspo.runs.folder import RunLocked
from gspo.runs.sinks import MissingExtra
from gspo.sampling.errors import GenerationLimit, RewardFailures, StarvedSampling
from gspo.training.log_probs import UnsupportedModel
from gspo.training.lora import MissingPeft
from gspo.training.parallel.fsdp import ShardError

EXIT_CODES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int], ...] = (
    (
        (
            DataError,
            RewardError,
            ResumeRefused,
            RunLocked,
            MissingExtra,
            MissingPeft,
            UnsupportedModel,
            ModelError,
            EngineError,
            ClusterError,
            ConfigErrors,
            ShardError,
        ),
        EXIT_REFUSED,
    ),
    ((StarvedSampling, GenerationLimit), EXIT_STARVED),
    # The engine raises the second on log-probs that are not finite.
    ((BadNumbers, FloatingPointError), EXIT_BAD_NUMBERS),
    (RewardFailures, EXIT_REWARDS_FAILED),
    (CheckpointError, EXIT_FILE),
    ((WorkersLost, RankFailed), EXIT_WORKERS_LOST),
)


def train(resolved: ResolvedConfig, **given: Any) -> int:
    """Train as the config says, print the result line, return the exit code. `given` goes to the Trainer.

    Of the processes that torchrun starts all but the first follow that one's calls until it ends.
    """
    code = _train(resolved, **given)
    tell_code(code)
    return code


def _train(resolved: ResolvedConfig, **given: Any) -> int:
    try:
        if launched_ranks() > 1:
            check_launch(resolved.config)
            ranks = TorchrunRanks.join(resolved.config.trainer.device)
            if ranks.rank > 0:
                return ranks.follow()
        with launched_rank_group():
            result = Trainer(resolved, **given).fit()
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return code
    if stopped := result.pop("stopped", 0):
        return stopped
    print("result: " + json.dumps(result))
    return EXIT_DONE


def exit_code(error: Exception) -> int | None:
    """The documented code of an error that has a message for the user; None for a defect, which keeps its traceback."""
    for kinds, code in EXIT_CODES:
        if isinstance(error, kinds):
            return code
    # A full disk or a closed folder has a number; a model that is not there has none.
    if isinstance(error, OSError):
        return EXIT_FILE if error.errno is not None else EXIT_REFUSED
    return None
