"""Checkpoints: the format on disk, saving, resuming."""
