"""How long OpenMP threads spin while they wait for each other: chosen once by a program, before torch is imported.

A spinning thread is fast on an idle machine. When the machine does anything else beside training, it keeps its partner
from running and a step takes ten times as long; a thread that sleeps soon costs a quarter on an idle machine
(docs/performance.md). libgomp reads GOMP_SPINCOUNT when torch is imported.
"""

from __future__ import annotations

import os
import time

SPIN_COUNT, CHOSEN = "GOMP_SPINCOUNT", "GSPO_CHOSEN_SPINCOUNT"
IDLE, BUSY = "100000", "20000"


def choose_spin_count() -> None:
    """Set GOMP_SPINCOUNT unless the user did, or set OMP_WAIT_POLICY.

    A process that this one starts inherits the choice. It tells it from a user's own by the second variable and
    chooses again.
    """
    if "OMP_WAIT_POLICY" not in os.environ and os.environ.get(SPIN_COUNT) == os.environ.get(CHOSEN):
        os.environ[SPIN_COUNT] = os.environ[CHOSEN] = IDLE if _is_idle() else BUSY


def _is_idle() -> bool:
    """Whether no other process wants to run, as far as Linux reports it. Three looks: one may just be ending."""
    for _ in range(3):
        try:
            with open("/proc/loadavg") as f:
                if int(f.read().split()[3].split("/")[0]) <= 1:
                    return True
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(0.005)
    return False
