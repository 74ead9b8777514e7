"""Compare our grading of math answers with math-verify's, on generated pairs; list every difference.

    python scripts/compare_math_verify.py [--pairs 1000] [--seed 0]

math-verify gets the extracted answer, as LaTeX when it was boxed and as text when not, so that only the reading and
comparing of values differs.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter

from math_verify import parse, verify

from gspo.rewards.graders.answers import extract_answer
from gspo.rewards.graders.math import compare_values, grade_math
from gspo.rewards.graders.values import clean, read_value
from tests.support.math_pairs import make_pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    counts: Counter[str] = Counter()
    differences: list[str] = []
    for pair in make_pairs(options.pairs, options.seed):
        for response, expected in ((pair.right, True), (pair.wrong, False)):
            answer = extract_answer(response) or ""
            ours = grade_math(response, pair.truth).score == 1.0
            counts["ours wrong"] += ours != expected
            theirs = parsed_verdict(answer, pair.truth, is_latex=pair.kind.startswith("latex"))
            read_here = compare_values(read_value(clean(answer)), read_value(clean(pair.truth))) is not None
            counts["answers"] += 1
            counts["read by our own reader"] += read_here
            if theirs is None:
                counts["not read by math-verify"] += 1
                continue
            counts["theirs wrong"] += theirs != expected
            counts["read by both"] += 1
            counts["agree"] += ours == theirs
            if ours != theirs:
                differences.append(f"{pair.kind}: {answer!r} against {pair.truth!r}: ours {ours}, math-verify {theirs}")
            if ours != expected:
                print(f"unexpected: {pair.kind} {answer!r} against {pair.truth!r}: ours {ours}, expected {expected}")
    for name, count in counts.items():
        print(f"{name}: {count}")
    print(f"agreement: {100 * counts['agree'] / counts['read by both']:.2f} %")
    print("\n".join(differences))


def parsed_verdict(answer: str, truth: str, *, is_latex: bool) -> bool | None:
    """math-verify's verdict; None when it cannot read one of the two."""
    gold, guess = (parse(f"${t}$" if is_latex else t, parsing_timeout=0) for t in (truth, answer))
    if len(gold) < 2 or len(guess) < 2:  # it returns the expression and its text; the text alone is not a reading
        return None
    return bool(verify(gold, guess, timeout_seconds=0))


if __name__ == "__main__":
    main()
