"""How many responses per second the built-in rewards grade on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.rewards.scoring import make_scorer
from gspo.types import Group, Prompt, Rollout

GROUPS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Answers:
    """A ground truth, with a response that is right and one that is wrong."""

    truth: str
    right: str
    wrong: str


ARITHMETIC = (Answers("75", "23+45=68;68+7=75;75", "23+45=68;68+7=74;74"),)
GSM8K = (
    Answers("12", "She had 3 bags, so 3 x 4 = 12.\n#### 12", "She had 3 bags, so 3 x 4 = 13.\n#### 13"),
    Answers("1,250", "The answer is $1,250.00.", "The answer is $12,500."),
    Answers("7.50", "There are 100 in all. **Answer: $7.5**", "There are 100 in all. **Answer: $7.51**"),
    Answers("40", "After 2 steps the total comes to 40%", "After 2 steps the total comes to 400%"),
)
PLAIN_MATH = (
    Answers(r"\frac{3}{4}", r"We find $\boxed{\dfrac{6}{8}}$.", r"We find $\boxed{\frac{4}{3}}$."),
    Answers("2.5", r"Thus $$\boxed{\frac{5}{2}}$$", r"Thus $$\boxed{2.51}$$"),
    Answers(r"\frac{23}{7}", r"So $\boxed{3\frac{2}{7}}$.", r"So $\boxed{3}$."),
    Answers("4200", r"So $\boxed{4.2 \times 10^{3}}$.", r"So $\boxed{4.2 \times 10^{4}}$."),
    Answers("12", r"It is $\boxed{12\text{ cm}^2}$.", r"It is $\boxed{14\text{ cm}^2}$."),
    Answers("(3,-4)", r"Thus $\boxed{\left(3,-4\right)}$.", r"Thus $\boxed{(-4,3)}$."),
    Answers(r"\{1,2,5\}", r"Thus $\boxed{\{2, 1, 5\}}$.", r"Thus $\boxed{\{1,2\}}$."),
    Answers("[-1,4)", r"So $\boxed{[-1, 4)}$.", r"So $\boxed{[-1,5)}$."),
    Answers("-8", r"So $\boxed{x = -8}$.", r"So $\boxed{x = 8}$."),
    Answers("B", r"So $\boxed{\text{(B)}}$.", r"So $\boxed{\text{(C)}}$."),
)
SYMBOLIC_MATH = (
    Answers(r"3\sqrt{5}", r"So $\boxed{\sqrt{45}}$.", r"So $\boxed{5\sqrt{3}}$."),
    Answers("x^2+4x+7", r"So $\boxed{7+4x+x^2}$.", r"So $\boxed{x^2-4x+7}$."),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is graded under one line of the benchmark."""

    name: str
    data_source: str
    answers: tuple[Answers, ...]

    def groups(self) -> list[Group]:
        """A group of four right and four wrong responses for each ground truth."""
        return [self._group(answers) for answers in self.answers]

    def _group(self, answers: Answers) -> Group:
        prompt = Prompt("bench", ({"role": "user", "content": "?"},), (), self.data_source, answers.truth)
        texts = [answers.right, answers.wrong] * 4
        return Group(prompt, tuple(Rollout((), (), (), (), "stop", text=text) for text in texts), 0, 0)


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
