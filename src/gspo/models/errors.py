"""What is raised when a model cannot be loaded."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot or must not be loaded. The message names the file or key, what was found and the remedy."""
