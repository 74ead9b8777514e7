"""`gspo validate`: the parts in turn, the lines they earn, and the exit code."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
    """Run the checks, with a line for each and for each part that held; `quick` leaves the trainings out."""
    done: list[Check] = []
    for part, checks in _parts(quick, log):
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
        log("the technical part holds; without --quick the model is trained too")
    else:
        log(ALL_EARNED)
    return done


def _parts(quick: bool, log: Log) -> Iterator[tuple[str, Iterator[Check]]]:
    """The parts with their checks. Trainings are skipped when the technical part failed: they would show nothing."""
    from gspo.checks import sampler, technical

    held: list[bool] = []

    def watched(checks: Iterator[Check]) -> Iterator[Check]:
        for check in checks:
            held.append(check.passed)
            yield check

    yield "technical", watched(run_checks("technical", {**technical.CHECKS, **sampler.CHECKS}))
    if quick or not all(held):
        return
    yield from _trainings(log)


def _trainings(log: Log) -> Iterator[tuple[str, Iterator[Check]]]:
    from gspo.checks import training

    actor = training.ACTOR
    with tempfile.TemporaryDirectory(prefix="gspo-validate-") as name:
        folder = Path(name)
        run = training.train(folder, "training", training.NUM_STEPS, log=log)
        yield "dynamics", run_checks("dynamics", training.dynamics_checks(run))
        yield "improvement", run_checks("improvement", training.improvement_checks(run))
        runs = {}
        for factor in training.CLIP_FACTORS:
            overrides = [f"{actor}.clip_ratio_{side}={0.01 * factor}" for side in ("low", "high")]
            overrides += [
                f"{actor}.clip_target=null",
                "trainer.val_before_train=false",
                "trainer.val_after_train=false",
            ]
            runs[factor] = training.train(folder, f"clip-{factor:g}", training.CLIP_STEPS, *overrides, log=log)
        yield "clip ranges", run_checks("clip ranges", training.clip_range_checks(runs))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command behind `gspo validate` and the scripts that stand for it; 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="validate", description="Check the installed program. About two minutes.")
    parser.add_argument("--quick", action="store_true", help="technical part only, some seconds")
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
        facts = {
            "passed": passed,
            "seconds": round(time.monotonic() - start, 1),
            "checks": [c.to_dict() for c in checks],
        }
        print(json.dumps(facts, ensure_ascii=False))
    return EXIT_DONE if passed else EXIT_PROBLEM
