"""`python -m tests.mutants [--room ROOM] [--only WORDS] [-j N]`: tests every mutant and prints who lived.

Exits with 1 when a mutant lived without a reason in its list, or when its tests could not be run.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.catalogue import Mutant, read_mutants
from tests.mutants.workshop import Trial, Workshop, start_fork_server


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--room", action="append", help="only this room; may be repeated")
    parser.add_argument(
        "--only", action="append", help="only mutants whose room, file or name contains this; repeatable"
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, help="mutants tested side by side")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the tests of one mutant")
    parser.add_argument("--no-baseline", action="store_true", help="do not first run the tests without a mutant")
    options = parser.parse_args(argv)
    mutants = [m for m in read_mutants() if _is_chosen(m, options.room, options.only)]
    if not mutants:
        parser.error("no mutant has this room or these words")
    with tempfile.TemporaryDirectory(prefix="gspo-mutants-") as folder:
        shops: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
        context = start_fork_server()
        for index in range(min(options.jobs, len(mutants))):
            shops.put(Workshop(Path(folder) / str(index), context, options.timeout))
        broken = [] if options.no_baseline else _failing(shops, options.jobs, mutants)
        if broken:
            print("these tests fail without a mutant, so they prove nothing: " + "; ".join(broken))
            return 1
        trials = _try_all(shops, options.jobs, mutants)
    print(_summary(trials))
    return 1 if any(_is_unexplained(t) for t in trials) else 0


def _is_chosen(mutant: Mutant, rooms: Sequence[str] | None, words: Sequence[str] | None) -> bool:
    facts = f"{mutant.room} {mutant.file} {mutant.name}"
    return (not rooms or mutant.room in rooms) and (not words or any(word in facts for word in words))


def _failing(shops: queue.SimpleQueue[Workshop], jobs: int, mutants: Sequence[Mutant]) -> list[str]:
    """The tests, each run once, that fail in an unchanged copy."""

    def fails(path: str) -> str | None:
        shop = shops.get()
        try:
            return None if shop.passes((path,)) else path
        finally:
            shops.put(shop)

    with ThreadPoolExecutor(jobs) as pool:
        return [path for path in pool.map(fails, sorted({t for m in mutants for t in m.tests})) if path]


def _try_all(shops: queue.SimpleQueue[Workshop], jobs: int, mutants: Sequence[Mutant]) -> list[Trial]:
    def one(mutant: Mutant) -> Trial:
        shop = shops.get()
        try:
            trial = shop.try_mutant(mutant)
        finally:
            shops.put(shop)
        print(f"{trial.outcome:9s}{trial.seconds:4.0f} s  {mutant.room}: {mutant.name}  [{trial.detail}]", flush=True)
        return trial

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, mutants))


def _is_unexplained(trial: Trial) -> bool:
    return trial.outcome == "error" or (trial.outcome == "survived" and trial.mutant.survives is None)


def _summary(trials: Sequence[Trial]) -> str:
    """A table by room, then every mutant that was not killed."""
    outcomes = ("killed", "timeout", "survived", "error")
    lines = ["", f"{'room':14s}" + "".join(f"{o:>10s}" for o in outcomes)]
    for room in [*dict.fromkeys(t.mutant.room for t in trials), "all"]:
        counts = Counter(t.outcome for t in trials if room in (t.mutant.room, "all"))
        lines.append(f"{room:14s}" + "".join(f"{counts[o]:10d}" for o in outcomes))
    noticed = sum(t.outcome in ("killed", "timeout") for t in trials)
    lines.append(f"{noticed} of {len(trials)} noticed ({noticed / len(trials):.1%})")
    for trial in trials:
        if trial.outcome in ("survived", "error"):
            reason = trial.mutant.survives or trial.detail or "no reason given"
            lines.append(f"{trial.outcome}: {trial.mutant.room}: {trial.mutant.name} ({reason})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
