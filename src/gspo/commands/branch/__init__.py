"""`gspo branch`: start a new run from a checkpoint of another, with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gspo.commands import refuse
from gspo.commands.arguments import PASS_THROUGH, load_arguments
from gspo.exit_codes import EXIT_DONE

if TYPE_CHECKING:
    from gspo.checkpoint.branch import Branch

app = typer.Typer(add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def branch(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="Run folder, and the step of one of its checkpoints.")
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Name of the new run, or the path of its folder.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE …]", help="Settings that differ, as for gspo train.")
    ] = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Train now, or only make the folder.")] = True,
) -> None:
    """Start a new run from a checkpoint of another run, with other settings.

    It begins with the weights, the optimiser and the step of the checkpoint (the newest one without @STEP). The
    position in the data is kept unless a setting of the data, the sampling or the reward differs. ancestry.json records
    the parent.
    """
    raise typer.Exit(_branch(run, new, arguments or [], train))


def _branch(name: str, new: str, arguments: list[str], train: bool) -> int:
    from gspo.checkpoint.branch import find_checkpoint, is_supervised, make_branch
    from gspo.checkpoint.contents import CheckpointError
    from gspo.config import load, load_supervised
    from gspo.runs.folder import RunFolder
    from gspo.runs.run import is_run, read_run

    path, step = _split(name)
    if not is_run(path):
        refuse(f"{path}: is not a run folder; give the folder of a run, such as runs/embedded-arithmetic-001")
    target = Path(new) if "/" in new else path.parent / new
    names = [f"trainer.experiment_name={target.name}", f"trainer.default_local_dir={target.parent}"]
    try:
        parent = RunFolder(path)
        loaded = find_checkpoint(parent, step)
        supervised = is_supervised(loaded)
        words = [*arguments, *names, "trainer.resume_mode=auto"]
        resolved = load_arguments(
            words, parent.config_file, load=load_supervised if supervised else load, show_warnings=False
        )
        made = make_branch(parent, loaded, target, resolved)
    except CheckpointError as error:
        refuse(error)
    _say(path, made)
    given = [argument for argument in ("train_dataset", "reward_fn") if read_run(path).given(argument)]
    if given:
        typer.echo(
            f"{path} was started from Python with {' and '.join(given)}: run that program with "
            f"trainer.experiment_name={target.name} and these settings to train the branch"
        )
        return EXIT_DONE
    return _train(resolved, loaded.state["fingerprint"]) if train else EXIT_DONE


def _train(resolved: Any, fingerprint: Mapping[str, Any]) -> int:
    """Train with the trainer of the parent, by what its checkpoint was trained on."""
    from gspo.build.fingerprint import TRAINED_ON
    from gspo.loop.preferences import RewardModelTrainer
    from gspo.loop.run import run_program
    from gspo.loop.supervised import SupervisedTrainer
    from gspo.loop.trainer import Trainer

    trainers = {"answers": SupervisedTrainer, "pairs": RewardModelTrainer}
    return run_program(resolved, trainers.get(fingerprint.get(TRAINED_ON, "rollouts"), Trainer))


def _split(name: str) -> tuple[Path, int | None]:
    """`runs/a@12` as the folder and the step."""
    path, at, step = name.rpartition("@")
    if not at or Path(name).exists():
        return Path(name), None
    if not step.isdecimal():
        refuse(f"{name}: expected a step after @, such as {path}@20")
    return Path(path), int(step)


def _say(parent: Path, made: Branch) -> None:
    typer.echo(f"{made.run.path}: a branch of {parent} at step {made.step}")
    for key, (old, new) in made.changed.items():
        typer.echo(f"  {key}: {old} → {new}")
    if made.samples_anew:
        typer.echo(
            "  the order of the data starts anew, because settings of the data, the sampling or the reward differ"
        )
