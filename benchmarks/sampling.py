"""What dynamic sampling costs: groups generated per trained group, by strategy, on data of three difficulties.

A simulation with the real sampler. A prompt's success rate is drawn from a Beta distribution; its answers are right
or wrong by that rate, and wrong answers are longer. The engine has a fixed number of group slots and a group takes
as long as its longest answer. The policy does not move, so what differs between rows is the sampler alone.

The three Beta distributions were chosen so that rounds of 3N cost about 3.0, 4.5 and 4.1 groups per trained group;
the other rows follow from them. "answer" is the mean length of trained answers and "time" the time a step generates,
both against rounds of 3N on the same slots; "age" is the mean staleness of trained groups in versions, "stale" the
groups dropped for it per trained group.

    python benchmarks/sampling.py [--steps S] [--batch N] [--seeds K] [--in-flight C]
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.sampling.dynamic import DynamicSampler
from gspo.sampling.prompt_ledger import mixed_probability
from gspo.sampling.settings import SamplingSettings
from gspo.seeding import derive_seed
from gspo.types import Group, Prompt, Reward, Rollout

DATA = {"mixed": (0.32, 0.32), "hard": (0.166, 1.0), "easy": (0.76, 0.16)}
GROUP_SIZE = 8
EMPTY = Rollout((), (), (), (), "stop")


class BetaPrompts:
    """An endless source of fresh prompts whose success rates are Beta distributed."""

    epoch_size = 10**9

    def __init__(self, a: float, b: float, seed: int) -> None:
        self._draw, self._shape = random.Random(derive_seed(seed, "prompts")), (a, b)
        self._count = 0

    def next(self) -> Prompt:
        self._count += 1
        return Prompt(str(self._count), (), (), ground_truth=self._draw.betavariate(*self._shape))

    def put_back(self, prompt: Prompt) -> None:
        """Fresh prompts never run out, so a discarded one is not needed again."""

    def by_uid(self, uid: str) -> Prompt:
        raise NotImplementedError("the simulation is not resumed")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TimedEngine:
    """Groups take the time of their longest answer in one of `slots` slots; `step` goes to the next end."""

    def __init__(self, slots: int) -> None:
        self.clock = 0.0
        self._slots = slots
        self._running: list[tuple[float, int, Group]] = []
        self._waiting: list[tuple[int, Group, float]] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    def submit(self, request: GroupRequest) -> None:
        group, duration = _answer(request)
        heapq.heappush(self._waiting, (request.submission, group, duration))
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            submission, group, duration = heapq.heappop(self._waiting)
            heapq.heappush(self._running, (self.clock + duration, submission, group))

    def step(self) -> list[Group]:
        if not self._running:
            return []
        self.clock, _, group = heapq.heappop(self._running)
        self._start()
        return [group]

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        raise NotImplementedError("the sampler never calls it")

    def load_weights(self, weights: Any, version: int) -> None: ...

    def unfinished(self) -> list[GroupRequest]:
        raise NotImplementedError("the simulation is not resumed")

    def close(self) -> None: ...


def _answer(request: GroupRequest) -> tuple[Group, float]:
    """Right or wrong by the prompt's rate; lengths are log-normal, wrong answers half as long again."""
    draw = random.Random(derive_seed(request.seed, "answer", request.submission))
    rate, rollouts, longest = float(request.prompt.ground_truth), [], 0.0
    effort = draw.lognormvariate(0.0, 0.5)  # what the responses of a prompt share
    for _ in range(request.n):
        right = draw.random() < rate
        length = 300 * effort * draw.lognormvariate(0.0, 0.4) * (1.0 if right else 1.5)
        rollouts.append(EMPTY.with_reward(Reward(float(right), acc=float(right), extra={"length": length})))
        longest = max(longest, length)
    return Group(request.prompt, tuple(rollouts), request.submission, request.version), longest


class GivenRewards:
    """The rewards are drawn with the answers; scoring hands them on."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def submit(self, group: Group) -> None:
        self._groups.append(group)

    def collect(self) -> list[Group]:
        groups, self._groups = self._groups, []
        return groups

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table."""

    name: str
    settings: SamplingSettings
    discards: bool = False  # start every step with nothing in flight or queued


@dataclass(slots=True)
class Cost:
    submitted: int = 0
    trained: int = 0
    time: float = 0.0
    trained_length: float = 0.0
    stale: int = 0
    age: int = 0

    def add(self, other: Cost) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def variants(batch: int, in_flight: int) -> list[Variant]:
    base = SamplingSettings(batch, GROUP_SIZE, SamplingParams(max_tokens=1), max_in_flight=in_flight)
    unbounded = replace(base, max_staleness=10**6)
    return [
        Variant("rounds of 3N", replace(base, strategy="rounds", gen_batch_size=3 * batch)),
        Variant("rounds of N", replace(base, strategy="rounds", gen_batch_size=batch)),
        Variant("stream, discard, completion order", unbounded, discards=True),
        Variant("stream, S=0", replace(base, max_staleness=0)),
        Variant("stream + carry, S=1", replace(base, max_staleness=1)),
        Variant("stream + carry, S=2", base),
        Variant("stream + carry, S=4", replace(base, max_staleness=4)),
    ]


def simulate(variant: Variant, shape: tuple[float, float], *, steps: int, seed: int, slots: int) -> Cost:
    """The cost of `steps` training steps."""
    cost, source, clock = Cost(), BetaPrompts(*shape, seed), 0.0
    engine, sampler = TimedEngine(slots), None
    for step in range(steps):
        if sampler is None or variant.discards:
            engine = TimedEngine(slots)
            sampler = DynamicSampler(
                source, engine, GivenRewards(), variant.settings, seed=derive_seed(seed, "run", step)
            )
            clock = 0.0
        groups, report = sampler.next_batch()
        sampler.release(groups)
        lengths = [r.reward.extra["length"] for g in groups for r in g.rollouts if r.reward]
        cost.add(
            Cost(
                submitted=report.num_submitted,
                trained=len(groups),
                time=engine.clock - clock,
                trained_length=sum(lengths) / GROUP_SIZE,
                stale=report.discarded["stale_dropped"],
                age=report.staleness_sum,
            )
        )
        clock = engine.clock
        if step == steps - 1 and not variant.discards:
            cost.submitted -= report.num_carried  # under way for later steps, so neither trained on nor wasted
    return cost


def measure_bookkeeping(num_in_flight: int, steps: int = 8) -> dict[str, float]:
    """Seconds a training step spends in the sampler itself, with `num_in_flight` groups in flight."""
    batch = num_in_flight // 2
    settings = SamplingSettings(batch, GROUP_SIZE, SamplingParams(max_tokens=1), max_in_flight=num_in_flight)
    engine = TimedEngine(num_in_flight)
    source = BetaPrompts(*DATA["mixed"], 0)
    sampler = DynamicSampler(source, engine, GivenRewards(), settings, seed=0)
    simulated = 0.0

    def outside(call):
        def timed(*args):
            nonlocal simulated
            start = time.process_time()
            result = call(*args)
            simulated += time.process_time() - start
            return result

        return timed

    for simulation, name in ((engine, "submit"), (engine, "step"), (source, "next")):
        setattr(simulation, name, outside(getattr(simulation, name)))
    start, submitted = time.process_time(), 0
    for _ in range(steps):
        groups, report = sampler.next_batch()
        submitted += report.num_submitted
        sampler.release(groups)
    seconds = time.process_time() - start - simulated
    return {"groups_in_flight": num_in_flight, "s_per_step": seconds / steps, "us_per_group": 1e6 * seconds / submitted}


def main() -> None:
    parser = argparse.ArgumentParser(description="Groups generated per trained group, by strategy.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=None, help="group slots; 1.5 batches unless told")
    args = parser.parse_args()
    slots = args.in_flight or 3 * args.batch // 2
    kept = ", ".join(f"{name} {mixed_probability(*shape, GROUP_SIZE):.3f}" for name, shape in DATA.items())
    print(
        f"N={args.batch}, {GROUP_SIZE} answers a group, {slots} slots, {args.steps} steps, {args.seeds} seeds; kept: {kept}"
    )
    print(
        f"{'groups generated per trained group':40s}"
        + "".join(f"{name:>8s}" for name in DATA)
        + "   answer    time   age  stale"
    )
    base_time, lengths, table = {}, {}, {}
    for variant in variants(args.batch, slots):
        costs = {name: Cost() for name in DATA}
        for name, shape in DATA.items():
            for seed in range(args.seeds):
                costs[name].add(simulate(variant, shape, steps=args.steps, seed=seed, slots=slots))
            base_time.setdefault(name, costs[name].time)
            lengths.setdefault(name, costs[name].trained_length / costs[name].trained)
        row = {name: c.submitted / c.trained for name, c in costs.items()}
        table[variant.name] = {name: round(value, 3) for name, value in row.items()}
        print(_line(variant.name, row, costs, base_time, lengths))
    print(json.dumps({"groups_per_trained": table, "bookkeeping": measure_bookkeeping(10_000)}))


def _line(
    name: str, row: dict[str, float], costs: dict[str, Cost], base_time: dict[str, float], lengths: dict[str, float]
) -> str:
    count = len(costs)
    length = sum(c.trained_length / c.trained / lengths[d] for d, c in costs.items()) / count
    duration = sum(c.time / base_time[d] for d, c in costs.items()) / count
    trained = sum(c.trained for c in costs.values())
    age, stale = (sum(getattr(c, key) for c in costs.values()) / trained for key in ("age", "stale"))
    cells = "".join(f"{value:8.2f}" for value in row.values())
    return f"{name:40s}{cells}{length:9.2f}{duration:8.2f}{age:6.2f}{stale:7.3f}"


if __name__ == "__main__":
    main()
