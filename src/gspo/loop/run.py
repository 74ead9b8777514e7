"""Training as one call: from Python (`gspo.train`) and as the program, whose errors become an exit code."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.build.device import DeviceError
from gspo.build.sizes import NotEnoughMemory
from gspo.checkpoint.folder import CheckpointError
from gspo.checkpoint.resume import ResumeRefused
from gspo.config import ConfigErrors, ResolvedConfig, TrainerConfig, load
from gspo.data.rows import DataError
from gspo.distributed.backend import ClusterError
from gspo.distributed.launch import check_launch, launched_ranks, report_exit_code
from gspo.distributed.rank_group import RankFailed
from gspo.distributed.torchrun_ranks import TorchrunRanks, launched_rank_group
from gspo.environments.protocol import EnvironmentProblem
from gspo.exit_codes import (
    EXIT_BAD_NUMBERS,
    EXIT_DONE,
    EXIT_FILE,
    EXIT_REFUSED,
    EXIT_REWARDS_FAILED,
    EXIT_STARVED,
    EXIT_WORKERS_LOST,
)
from gspo.loop.guards.bad_numbers import BadNumbers
from gspo.loop.trainer import Trainer
from gspo.loop.training_run import TrainingRun
from gspo.models.load import ModelError
from gspo.models.output_head import UnsupportedModel
from gspo.registry import PluginError
from gspo.rewards.protocol import RewardError
from gspo.rollout.engine import EngineError
from gspo.rollout.workers.connection import WorkersLost
from gspo.runs.folder import RunLocked
from gspo.runs.sinks import MissingExtra
from gspo.sampling.errors import GenerationLimit, RewardFailures, StarvedSampling
from gspo.training.lora import MissingPeft
from gspo.training.parallel import ShardError

MakeTrainer = Callable[..., TrainingRun[Any]]
AnyConfig = TrainerConfig | ResolvedConfig | Mapping[str, Any]
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
            EnvironmentProblem,
            ClusterError,
            ConfigErrors,
            ShardError,
            PluginError,
            NotEnoughMemory,
            DeviceError,
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


def train(
    config: AnyConfig | str | Path | None = None, overrides: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    """Train and return the result: `gspo.train("my.yaml", ["trainer.total_training_steps=20"], reward_fn=f)`.

    `config` is a YAML file, a TrainerConfig, what `gspo.load_config` returns, or a mapping of keys; None is the
    default, which trains the embedded model. `options` are the keyword arguments of Trainer. Errors are raised as they
    are.
    """
    if isinstance(config, str | Path):
        resolved = load(config, overrides)
    elif isinstance(config, ResolvedConfig) and not overrides:
        resolved = config
    else:
        resolved = load(base=config, overrides=overrides)
    return Trainer(resolved, **options).fit()


def run_program(resolved: ResolvedConfig, trainer: MakeTrainer = Trainer, **options: Any) -> int:
    """Train as `gspo train` does: print the result line and return the exit code. `options` go to the trainer.

    Of the processes that torchrun starts, all but rank 0 follow the calls of rank 0 until it ends.
    """
    code = _run_program(resolved, trainer, **options)
    report_exit_code(code)
    return code


def _run_program(resolved: ResolvedConfig, trainer: MakeTrainer, **options: Any) -> int:
    try:
        if launched_ranks() > 1:
            check_launch(resolved.config)
            ranks = TorchrunRanks.join(resolved.config.trainer.device)
            if ranks.rank > 0:
                return ranks.follow()
        with launched_rank_group():
            result = trainer(resolved, **options).fit()
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return code
    except KeyboardInterrupt:  # before the first step, or the second one
        print("stopped at once; the same command goes on from the last checkpoint, if there is one", file=sys.stderr)
        return 128 + signal.SIGINT
    if stopped := result.pop("stopped", 0):
        return stopped
    # A line for programs; a person at a terminal has read the same in sentences.
    where = f"{result['run']}/result.json" if sys.stdout.isatty() and "run" in result else json.dumps(result)
    print(f"result: {where}")
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
