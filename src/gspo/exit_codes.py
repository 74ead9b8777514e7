"""The exit codes of `gspo train`. The other commands end with those of the same cause, or with EXIT_PROBLEM.

Imports nothing but the standard library, so that a command line may use it.
"""

from __future__ import annotations

import signal

EXIT_DONE = 0
EXIT_DEFECT = 1
EXIT_REFUSED = 2
EXIT_STARVED = 3
EXIT_BAD_NUMBERS = 4
EXIT_REWARDS_FAILED = 5
EXIT_FILE = 6
EXIT_PAUSED = 7
EXIT_WORKERS_LOST = 8
EXIT_STALLED = 9

EXIT_PROBLEM = (
    1  # of a command that answers a question (doctor, validate, plan, rewards try): the answer is no
)

MEANINGS: dict[int, str] = {
    EXIT_DONE: "done",
    EXIT_DEFECT: "a defect: the traceback is shown",
    EXIT_REFUSED: "config, data, reward function or resume refused: the message names the key, file or row",
    EXIT_STARVED: "sampling starved or over `max_num_gen_batches`, saved",
    EXIT_BAD_NUMBERS: "non-finite updates `trainer.max_skipped_steps` steps in a row, or a sequence ratio above 100, "
    "saved; or a model whose log-probs are not finite",
    EXIT_REWARDS_FAILED: "more rewards failed than `reward.max_failure_rate`, saved",
    EXIT_FILE: "a file could not be written or read: the last good checkpoint stands",
    EXIT_PAUSED: "paused by an alarm (`trainer.on_alarm`), saved",
    EXIT_WORKERS_LOST: "no rollout worker or trainer rank is left; the message begins with the root cause, "
    "the last checkpoint stands",
    EXIT_STALLED: "no progress for `trainer.watchdog_stop_seconds`; `stalls.log` in the run folder says who was doing what",
    128 + signal.SIGINT: "Ctrl-C, saved",
    128 + signal.SIGTERM: "SIGTERM, saved",
}
