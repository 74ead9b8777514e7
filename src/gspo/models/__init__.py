"""The embedded model and how a model's name becomes a folder."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "embedded"


class ModelError(ValueError):
    """A model that cannot or must not be loaded. The message names the file or key, what was found and the remedy."""


def embedded_path() -> Path:
    """The packaged folder of the embedded model: an ordinary Hugging Face folder."""
    return Path(__file__).parent / "embedded"


def resolve(path: str | Path) -> str:
    """The argument for `from_pretrained`: the packaged folder for "embedded", a local folder, or a hub name."""
    if str(path) == EMBEDDED:
        return str(embedded_path())
    local = Path(path).expanduser()
    return str(local) if local.is_dir() else str(path)
