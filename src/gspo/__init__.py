"""GSPO: post-train language models on verifiable rewards. Importing this is cheap; torch loads on first use."""

import os
import time

__version__ = "0.1.0"


def _is_idle() -> bool:
    """Whether nothing but this process wants to run, as far as Linux tells; a process that is just ending may."""
    for _ in range(3):
        try:
            with open("/proc/loadavg") as f:
                if int(f.read().split()[3].split("/")[0]) <= 1:
                    return True
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(0.005)
    return False


# OpenMP threads spin while they wait for each other. When the machine does anything else beside training, a spinning
# thread keeps its partner from running and a step takes ten times as long; a thread that sleeps soon costs a quarter
# when the machine is idle (docs/performance.md). libgomp reads this when torch is imported. A process that this one
# starts finds what was chosen here, told from a user's own choice by the second name, and chooses again.
_SPIN, _CHOSEN = "GOMP_SPINCOUNT", "GSPO_CHOSEN_SPINCOUNT"
if "OMP_WAIT_POLICY" not in os.environ and os.environ.get(_SPIN) == os.environ.get(_CHOSEN):
    os.environ[_SPIN] = os.environ[_CHOSEN] = "100000" if _is_idle() else "20000"
