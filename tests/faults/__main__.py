"""`python -m tests.faults [ROW …] [--seed N] [--json FILE]`: prints one line per row and the count, and writes a JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from tests.faults.row import Check, Row

MODULES = (
    "kill_rows",
    "state_rows",
    "number_rows",
    "config_rows",
    "reward_rows",
    "worker_rows",
    "ray_rows",
    "turn_rows",
    "data_rows",
    "sandbox_rows",
    "folder_rows",
    "checkpoint_rows",
    "large_rows",
    "phase_rows",
    "input_rows",
    "long_rows",
)


def all_rows() -> dict[str, Check]:
    """Every row's check by id, in the order of the table."""
    rows: dict[str, Check] = {}
    for name in MODULES:
        rows |= importlib.import_module(f"tests.faults.{name}").ROWS
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("rows", nargs="*", help="row ids; all when none is given")
    parser.add_argument("--seed", type=int, default=None, help="orders the faults; printed")
    parser.add_argument("--json", type=Path, default=Path("scorecard.json"))
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seed = int(time.time()) % 100000 if options.seed is None else options.seed
    checks = all_rows()
    unknown = [row for row in options.rows if row not in checks]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(checks)}")
    print(f"seed {seed}", flush=True)
    rows = [_run(id, checks[id], seed) for id in options.rows or checks]
    options.json.write_text(json.dumps({"seed": seed, "rows": [dataclasses.asdict(r) for r in rows]}, indent=1))
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _run(id: str, check: Check, seed: int) -> Row:
    start = time.monotonic()
    try:
        row = check(seed)
    except Exception as error:
        row = Row(id, "", False, "".join(traceback.format_exception(error))[-1500:])
    row = dataclasses.replace(row, seconds=round(time.monotonic() - start, 1))
    print(f"{'pass' if row.passed else 'FAIL'}  {row.id:3s}  {row.title}: {row.detail} ({row.seconds} s)", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
