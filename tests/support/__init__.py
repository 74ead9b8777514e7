"""Helpers of several test folders: a run that takes seconds, pairs of math answers."""
