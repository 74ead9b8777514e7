"""The exit codes of `gspo train`. Other commands use the same code for the same cause, or EXIT_PROBLEM.

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

# Of a command that answers a question (doctor, validate, plan, rewards try): the answer is no.
EXIT_PROBLEM = 1

MEANINGS: dict[int, str] = {
    EXIT_DONE: "done, saved",
    EXIT_DEFECT: "a defect in the program: the traceback is shown, the last checkpoint is intact",
    EXIT_REFUSED: "config, data, model, reward function, plugin or resume refused: the message names the key, file or row; "
    "also a missing extra, or a run folder in use by another process",
    EXIT_STARVED: "sampling starved, or over `algorithm.filter_groups.max_num_gen_batches`; saved",
    EXIT_BAD_NUMBERS: "non-finite updates in `trainer.max_skipped_steps` steps in a row, or a sequence ratio above 100, "
    "saved; or a model whose log-probs are not finite",
    EXIT_REWARDS_FAILED: "more rewards failed than `reward.max_failure_rate`; saved",
    EXIT_FILE: "a file or checkpoint could not be written or read; the last good checkpoint is intact",
    EXIT_PAUSED: "paused by an alarm (`trainer.on_alarm`); saved",
    EXIT_WORKERS_LOST: "no rollout worker or trainer rank is left: the message starts with the root cause, the last "
    "checkpoint is intact",
    EXIT_STALLED: "no progress for `trainer.watchdog_stop_seconds`: `stalls.log` in the run folder says what every thread "
    "was doing, the last checkpoint is intact",
    128 + signal.SIGINT: "stopped by Ctrl-C; saved. With a second Ctrl-C, or before the first step: stopped at once, "
    "nothing more is saved",
    128 + signal.SIGTERM: "stopped by SIGTERM; saved",
    128 + signal.SIGHUP: "stopped by SIGHUP (the terminal was closed); saved",
}
