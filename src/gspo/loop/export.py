"""A checkpoint as a model's folder for others: with a model card, and where it is exported without training state."""

from __future__ import annotations

from pathlib import Path

from gspo.checkpoint import folder as checkpoint
from gspo.report.model_card import model_card
from gspo.report.words import portable
from gspo.runs.files import write_atomic
from gspo.runs.folder import RunFolder, step_of
from gspo.runs.run import Run, read_run

CARD = "README.md"


def export_model(saved: Path, out: Path, name: str | None = None) -> None:
    """Copy the model and tokenizer of a run's checkpoint to `out`, a new folder, with a model card.

    `name` is where the card says that the model is loaded from; by default the folder.
    """
    checkpoint.export(saved, out)
    _write_card(out, read_run(saved.parent.parent), name or out.name, step_of(saved.name))


def write_cards(folder: RunFolder) -> None:
    """Write a model card into every checkpoint of a run that has ended. No manifest lists it."""
    run = read_run(folder.path)
    for saved in checkpoint.all_steps(folder.checkpoints):
        _write_card(saved, run, portable(str(saved)), step_of(saved.name))


def _write_card(folder: Path, run: Run, name: str, step: int) -> None:
    write_atomic(folder / CARD, model_card(run, name, step).encode("utf-8", "replace"))
