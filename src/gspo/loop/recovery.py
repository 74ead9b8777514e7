"""Going back to a checkpoint: after an alarm, after the loss of trainer ranks, and at a start that finds a bad one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.contents import CheckpointError
from gspo.checkpoint.resume import Resume, refuse_differences
from gspo.distributed.rank_group import RankFailed
from gspo.loop.guards.alarms import LR_FACTOR, checkpoint_before
from gspo.models import ModelError
from gspo.untrusted import Unreadable

if TYPE_CHECKING:
    from gspo.loop.training_run import TrainingRun

RANK_RESTARTS = 3  # trainer ranks replaced without a step in between


def assemble_newest(trainer: TrainingRun[Any], resume: Resume) -> None:
    """Build the parts from the chosen checkpoint, or from the newest older one whose content fits this run."""
    loaded = resume.checkpoint
    while True:
        try:
            trainer.assemble(loaded)
            return
        except (CheckpointError, ModelError, Unreadable) as error:
            if loaded is None or str(loaded.path) not in str(error):
                raise
            loaded = resume.older(loaded, error)
            refuse_differences(loaded.state["config"], trainer.resolved.to_dict(), loaded.path)
            trainer.drop_parts()
            trainer.console.say(f"DAMAGED checkpoint {error}; it is not used\ngoing on from {loaded.path}")


def roll_back(trainer: TrainingRun[Any]) -> None:
    """Go back to the last checkpoint before this step, with a lower learning rate."""
    path = checkpoint_before(trainer.run.checkpoints, trainer.step)
    assert path is not None  # an alarm asks for a rollback only when there is one
    step = trainer.step
    trainer.rebuild(path)
    trainer.console.say(
        f"rolled back from step {step} to {path}; the learning rate is now {LR_FACTOR:g} of what it was"
    )


def replace_ranks(trainer: TrainingRun[Any], failure: RankFailed) -> None:
    """Continue from the last checkpoint with new ranks. Raises `failure` where the backend cannot start any."""
    trainer.num_rank_failures += 1
    trainer.writer.wait()
    path, _ = checkpoint.latest(trainer.run.checkpoints)
    if trainer.backend is None or path is None or trainer.num_rank_failures > RANK_RESTARTS:
        raise failure
    trainer.console.warn(f"{failure}\nnew trainer ranks continue from {path}")
    failure.with_traceback(None)  # its frames hold the parts
    trainer.rebuild(path)
