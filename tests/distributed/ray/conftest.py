"""One small local Ray for all tests of this folder and of the doors."""

from __future__ import annotations

from tests.distributed.ray.local_ray import cluster

__all__ = ["cluster"]
