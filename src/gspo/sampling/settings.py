"""The settings of the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gspo.rollout.engine import SamplingParams
from gspo.sampling.staleness import StalenessBudget

Strategy = Literal["stream", "rounds"]
OnLimit = Literal["raise", "train_partial", "keep_unfiltered"]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How groups are drawn and filtered. Names are those of `data`, `rollout` and `algorithm.filter_groups`."""

    train_batch_size: int
    n: int
    params: SamplingParams
    gen_batch_size: int | None = None  # None: train_batch_size
    enable: bool = True
    metric: str = "seq_reward"
    min_spread: float = 0.0
    strategy: Strategy = "stream"
    max_num_gen_batches: int = 0  # <= 0: unlimited, with the no-progress guard
    on_limit: OnLimit = "raise"
    max_staleness: int = 2
    max_in_flight: int | None = None  # None: the larger of gen_batch_size and train_batch_size
    predict: Literal["off", "skip"] = "off"
    predict_weight: bool = False
    predict_min_prob: float = 0.1
    predict_discount: float = 0.9
    max_failure_rate: float = 0.2
    reward_lag: int = 1  # engine steps between the end of a group and the collection of its rewards

    def __post_init__(self) -> None:
        checks = (
            ("train_batch_size", self.train_batch_size >= 1, "at least 1"),
            ("n", self.n >= 1, "at least 1"),
            ("gen_batch_size", self.gen_batch_size is None or self.gen_batch_size >= 1, "at least 1"),
            ("strategy", self.strategy in ("stream", "rounds"), "stream or rounds"),
            (
                "on_limit",
                self.on_limit in ("raise", "train_partial", "keep_unfiltered"),
                "raise, train_partial or keep_unfiltered",
            ),
            ("max_staleness", self.max_staleness >= 0, "at least 0"),
            ("max_in_flight", self.max_in_flight is None or self.max_in_flight >= 1, "at least 1"),
            ("predict", self.predict in ("off", "skip"), "off or skip"),
            ("predict_min_prob", 0 < self.predict_min_prob <= 1, "in (0, 1]"),
            ("predict_discount", 0 < self.predict_discount <= 1, "in (0, 1]"),
            ("reward_lag", self.reward_lag >= 1, "at least 1"),
            ("min_spread", self.min_spread >= 0, "at least 0"),
            ("max_failure_rate", 0 <= self.max_failure_rate <= 1, "in [0, 1]"),
        )
        for name, good, expected in checks:
            if not good:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

    @property
    def generation_batch(self) -> int:
        """Prompts in one generation batch."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def budget(self) -> StalenessBudget:
        """The admission budget of the stream."""
        return StalenessBudget(self.train_batch_size, self.max_staleness)

    @property
    def concurrency(self) -> int:
        """Groups a stream keeps in flight: `max_in_flight` or its default, within the staleness budget."""
        wanted = self.max_in_flight or max(self.generation_batch, self.train_batch_size)
        return min(wanted, self.budget.capacity)

    @property
    def starts_surplus(self) -> bool:
        """Whether a step starts more groups than it needs and drops the surplus: a stream that may carry none over.

        Without a filter every group is kept, so none more are started; `max_in_flight` limits what is started.
        """
        no_carrying = self.strategy == "stream" and self.max_staleness == 0
        return no_carrying and self.enable and self.max_in_flight is None

    @property
    def submission_limit(self) -> int | None:
        """Groups a step may submit; None is unlimited."""
        return self.max_num_gen_batches * self.generation_batch if self.max_num_gen_batches > 0 else None
