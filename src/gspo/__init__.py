"""GSPO: post-train language models on verifiable rewards. Importing this is cheap; torch loads on first use."""

import os

__version__ = "0.1.0"

# OpenMP threads spin while they wait. On a machine that does anything else beside training, a spinning thread keeps
# its partner from running and a step takes many times as long. The library reads this when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
