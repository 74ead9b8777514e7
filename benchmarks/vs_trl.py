"""The same GSPO step by TRL and by gspo, in turns in one run, and how many times faster ours is.

    make bench-trl ARGS="tiny --prompts 16 --group 8 --plen 32 --new 64 --minibatches 4"

Each turn is a process of its own, so that neither finds the other's memory or threads. TRL runs in .venv-trl, which
`make bench-trl` makes. Prints one JSON line per turn and one with the ratios of the medians (TRL / gspo).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from shapes import add_work

HERE = Path(__file__).parent
RATIOS = ("s_per_step", "rollout_s", "peak_gib")


def run(python: str, script: str, options: list[str]) -> dict[str, Any]:
    """The JSON line that a benchmark prints last."""
    done = subprocess.run([python, str(HERE / script), *options], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{script} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(args: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for turn in range(args.turns):
        for name, python, script, figures in (
            ("trl", args.trl_python, "trl_step.py", theirs),
            ("gspo", sys.executable, "step.py", ours),
        ):
            figures.append(run(python, script, options))
            print(json.dumps({"turn": turn, "by": name, **figures[-1]}), flush=True)

    def median(figures: list[dict[str, Any]], key: str) -> float:
        return statistics.median(f[key] for f in figures)

    return {f"{key}_ratio": round(median(theirs, key) / median(ours, key), 2) for key in RATIOS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    add_work(parser)
    parser.add_argument("--turns", type=int, default=2, help="times each is run")
    parser.add_argument("--trl-python", default=str(HERE.parent / ".venv-trl/bin/python"))
    args = parser.parse_args()
    if not Path(args.trl_python).exists():
        sys.exit(f"{args.trl_python} is not there: run `make bench-trl`, or give --trl-python")
    names = ("prompts", "group", "plen", "new", "steps", "minibatches", "device", "dtype")
    given = {name: getattr(args, name) for name in names}
    options = [args.model]
    for name, value in given.items():
        options += [] if value is None else [f"--{name}", str(value)]
    print(json.dumps({"model": args.model, **compare(args, options)}))


if __name__ == "__main__":
    main()
