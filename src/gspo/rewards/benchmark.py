"""How many responses per second the built-in rewards grade on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.rewards.scoring import make_scorer
from gspo.types import Group, Prompt, Rollout

GROUPS_AT_ONCE = 16


# A ground truth, a response that is right and one that is wrong.
Answers = tuple[str, str, str]

ARITHMETIC = (("75", "23+45=68;68+7=75;75", "23+45=68;68+7=74;74"),)
GSM8K = (
    ("12", "She had 3 bags, so 3 x 4 = 12.\n#### 12", "She had 3 bags, so 3 x 4 = 13.\n#### 13"),
    ("1,250", "The answer is $1,250.00.", "The answer is $12,500."),
    ("7.50", "There are 100 in all. **Answer: $7.5**", "There are 100 in all. **Answer: $7.51**"),
    ("40", "After 2 steps the total comes to 40%", "After 2 steps the total comes to 400%"),
)
PLAIN_MATH = (
    (r"\frac{3}{4}", r"We find $\boxed{\dfrac{6}{8}}$.", r"We find $\boxed{\frac{4}{3}}$."),
    ("2.5", r"Thus $$\boxed{\frac{5}{2}}$$", r"Thus $$\boxed{2.51}$$"),
    (r"\frac{23}{7}", r"So $\boxed{3\frac{2}{7}}$.", r"So $\boxed{3}$."),
    ("4200", r"So $\boxed{4.2 \times 10^{3}}$.", r"So $\boxed{4.2 \times 10^{4}}$."),
    ("12", r"It is $\boxed{12\text{ cm}^2}$.", r"It is $\boxed{14\text{ cm}^2}$."),
    ("(3,-4)", r"Thus $\boxed{\left(3,-4\right)}$.", r"Thus $\boxed{(-4,3)}$."),
    (r"\{1,2,5\}", r"Thus $\boxed{\{2, 1, 5\}}$.", r"Thus $\boxed{\{1,2\}}$."),
    ("[-1,4)", r"So $\boxed{[-1, 4)}$.", r"So $\boxed{[-1,5)}$."),
    ("-8", r"So $\boxed{x = -8}$.", r"So $\boxed{x = 8}$."),
    ("B", r"So $\boxed{\text{(B)}}$.", r"So $\boxed{\text{(C)}}$."),
)
SYMBOLIC_MATH = (
    (r"3\sqrt{5}", r"So $\boxed{\sqrt{45}}$.", r"So $\boxed{5\sqrt{3}}$."),
    ("x^2+4x+7", r"So $\boxed{7+4x+x^2}$.", r"So $\boxed{x^2-4x+7}$."),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is graded under one line of the benchmark."""

    name: str
    data_source: str
    answers: tuple[Answers, ...]

    def groups(self) -> list[Group]:
        """A group of four right and four wrong responses for each ground truth."""
        groups = []
        for truth, right, wrong in self.answers:
            prompt = Prompt("bench", ({"role": "user", "content": "?"},), (), self.data_source, truth)
            rollouts = [Rollout((), (), (), (), "stop", text=text) for text in (right, wrong)]
            groups.append(Group(prompt, (*rollouts,) * 4, 0, 0))
        return groups


WORKLOADS = (
    Workload("arithmetic (in process)", "arithmetic", ARITHMETIC),
    Workload("gsm8k (pool)", "gsm8k", GSM8K),
    Workload("math, plain values (pool)", "math", PLAIN_MATH),
    Workload("math, symbolic (pool)", "math", SYMBOLIC_MATH),
)


def responses_per_second(groups: Sequence[Group], seconds: float, num_workers: int) -> tuple[float, int]:
    """Responses per second, and how many failed, after the workers have started."""
    scorer = make_scorer(None, num_workers=num_workers)
    batch = [groups[i % len(groups)] for i in range(GROUPS_AT_ONCE)]
    try:
        scorer.submit(groups[0])
        scorer.collect()
        count = failed = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            for group in batch:
                scorer.submit(group)
            scored = [rollout for group in scorer.collect() for rollout in group.rollouts]
            count += len(scored)
            failed += sum(rollout.reward is None for rollout in scored)
        return count / elapsed, failed
    finally:
        scorer.close()
