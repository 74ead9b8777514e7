"""Answers that try to run code, to hang a grader, or to be graded right when they are wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostileAnswer:
    """A response, the truth, and the score it deserves."""

    name: str
    response: str
    truth: str
    score: float = 0.0


def hostile_answers(canary: str) -> list[HostileAnswer]:
    """22 answers; those that are code would create the file `canary`."""
    touch = f"__import__('os').system('touch {canary}')"
    nested = "\\frac{1}{" * 5000 + "2" + "}" * 5000
    return [
        HostileAnswer("import_os", f"\\boxed{{{touch}}}", "42"),
        HostileAnswer("eval_after_hashes", f"#### eval({touch!r}) or 42", "42"),
        HostileAnswer("subclass_walk", "\\boxed{().__class__.__bases__[0].__subclasses__()}", "x+1"),
        HostileAnswer("code_as_text", f"The answer is \\text{{{touch}}}", "x+1"),
        HostileAnswer("code_and_answer", f"{touch}\n#### 42", "42", 1.0),
        HostileAnswer("power_tower", "\\boxed{9**9**9**9}", "42"),
        HostileAnswer("latex_tower", "\\boxed{9^{9^{9^{9}}}}", "x+1"),
        HostileAnswer("huge_exponent", "\\boxed{1.0e999999999}", "42"),
        HostileAnswer("factorial", "\\boxed{99999999!}", "x+1"),
        HostileAnswer("wide_power", "\\boxed{(a+b+c+d)^{99}}", "a+b"),
        HostileAnswer("nested_fractions", f"\\boxed{{{nested}}}", "42"),
        HostileAnswer("million_digits", "#### " + "7" * 1_000_000, "7"),
        HostileAnswer("million_digits_boxed", f"\\boxed{{{'1' * 1_000_000}}}", "\\sqrt{2}"),
        HostileAnswer("superscript", "\\boxed{4²}", "42"),
        HostileAnswer("other_digits", "\\boxed{٤٢}", "42"),
        HostileAnswer("full_width_digits", "\\boxed{４２}", "42", 1.0),
        HostileAnswer("nan", "\\boxed{nan}", "42"),
        HostileAnswer("infinity", "\\boxed{-inf}", "42"),
        HostileAnswer("division_by_zero", "\\boxed{\\frac{1}{0}}", "42"),
        HostileAnswer("open_boxes", "\\boxed{" * 100_000 + "42", "41"),
        HostileAnswer("phrases_and_spaces", ("answer" + " " * 500) * 1000 + "answer is 42", "42", 1.0),
        HostileAnswer("hedging", "\\boxed{42} or \\boxed{43} or \\boxed{44}", "42"),
    ]
