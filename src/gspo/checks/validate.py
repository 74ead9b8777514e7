"""`gspo validate`: runs the checks part by part, prints their lines, and returns the exit code."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from gspo.checks.check import Check, run_checks
from gspo.exit_codes import EXIT_DONE, EXIT_PROBLEM

EARNED = {
    "technical": "✅ All technical tests PASSED!",
    "dynamics": "✅ Training dynamics look good!",
    "improvement": "✅ Performance test: PASS - Clear improvement",
    "clip ranges": "✅ Clip ranges compared: a narrower one clips more",
}
ALL_EARNED = "🎉 GSPO implementation looks GOOD!"
Log = Callable[[str], None]


def validate(*, quick: bool = False, log: Log = print) -> list[Check]:
    """Run the checks and log a line for each of them and for each part that passes; `quick` skips the trainings."""
    done: list[Check] = []
    for part, checks in _parts(quick, log, done):
        log(f"{part}:")
        for check in checks:
            done.append(check)
            log(check.line())
        if all(c.passed for c in done if c.part == part):
            log(EARNED[part])
    failed = [c for c in done if not c.passed]
    if failed:
        log(f"FAILED: {', '.join(f'{c.name} ({c.part})' for c in failed)}; do not train with this build")
    elif quick:
        log("the technical part passes; without --quick the model is trained too")
    else:
        log(ALL_EARNED)
    return done


def _parts(quick: bool, log: Log, done: list[Check]) -> Iterator[tuple[str, Iterator[Check]]]:
    """The parts with their checks. Trainings are skipped when a technical check failed: they would show nothing."""
    from gspo.checks import sampler, technical

    yield "technical", run_checks("technical", {**technical.CHECKS, **sampler.CHECKS})
    if quick or not all(check.passed for check in done):
        return
    from gspo.checks import training

    with tempfile.TemporaryDirectory(prefix="gspo-validate-") as name:
        run = training.train(Path(name), "training", training.NUM_STEPS, log=log)
        yield "dynamics", run_checks("dynamics", training.DYNAMICS, run)
        yield "improvement", run_checks("improvement", training.IMPROVEMENT, run)
        runs = {factor: training.train_clipped(Path(name), factor, log=log) for factor in training.CLIP_FACTORS}
        yield "clip ranges", run_checks("clip ranges", training.CLIP_RANGES, runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """`gspo validate` for scripts that call it by another name; 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="validate", description="Check the installed program. About two minutes.")
    parser.add_argument("--quick", action="store_true", help="only the technical part, a few seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    options = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
    return report(quick=options.quick, as_json=options.json)


def report(*, quick: bool, as_json: bool) -> int:
    """Run, print and return the exit code. With `as_json` progress goes to standard error."""
    start = time.monotonic()

    def log(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    checks = validate(quick=quick, log=log)
    passed = all(c.passed for c in checks)
    if as_json:
        facts = {"passed": passed, "seconds": round(time.monotonic() - start, 1), "checks": [asdict(c) for c in checks]}
        print(json.dumps(facts, ensure_ascii=False))
    return EXIT_DONE if passed else EXIT_PROBLEM
