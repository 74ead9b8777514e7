"""The embedded models and how a model's name becomes a folder."""

from __future__ import annotations

from pathlib import Path

from gspo.paths import user_path

EMBEDDED = ("embedded", "embedded-turns")


class ModelError(ValueError):
    """A model that cannot or must not be loaded. The message names the file or key, what was found and the remedy."""


def embedded_path(name: str = "embedded") -> Path:
    """The packaged folder of an embedded model: an ordinary Hugging Face folder."""
    return Path(__file__).parent / name.replace("-", "_")


def resolve(path: str | Path) -> str:
    """The argument for `from_pretrained`: the packaged folder of an embedded model, a local folder, or a hub name."""
    if str(path) in EMBEDDED:
        return str(embedded_path(str(path)))
    local = user_path(path)
    return str(local) if local.is_dir() else str(path)
