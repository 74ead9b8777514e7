"""Checkpoints: the format on disk, saving and resuming."""
