"""A checkpoint as a model's folder for others: without training state, with a model card."""

from __future__ import annotations

from pathlib import Path

from gspo.checkpoint import folder as checkpoint
from gspo.report.model_card import model_card
from gspo.runs.files import write_atomic
from gspo.runs.folder import step_of
from gspo.runs.run import read_run

CARD = "README.md"


def export_model(saved: Path, out: Path, name: str | None = None) -> None:
    """Copy the model and tokenizer of a run's checkpoint to `out`, a new folder, with a model card.

    `name` is where the card says that the model is loaded from; by default the folder.
    """
    checkpoint.export(saved, out)
    card = model_card(read_run(saved.parent.parent), name or out.name, step_of(saved.name))
    write_atomic(out / CARD, card.encode("utf-8", "replace"))
