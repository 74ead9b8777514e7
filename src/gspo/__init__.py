"""GSPO: post-train language models on verifiable rewards. Importing this is cheap; torch loads on first use."""

import os

__version__ = "0.1.0"

# OpenMP threads spin while they wait for each other. When the machine does anything else beside training, a spinning
# thread keeps its partner from running and a step takes ten times as long; a thread that sleeps at once is slow when
# the machine is idle. A short spin is good at both (docs/performance.md). libgomp reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
