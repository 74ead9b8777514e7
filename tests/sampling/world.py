"""A small deterministic world for the sampler: an engine that writes tokens, a scorer, prompts with scripted rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gspo.data.cursor import PromptCursor
from gspo.rollout.engine import GroupRequest, RolloutEngine, SamplingParams
from gspo.sampling.dynamic import DynamicSampler
from gspo.sampling.settings import SamplingSettings
from gspo.seeding import derive_seed
from gspo.types import Group, Prompt, Reward, Rollout

PARAMS = SamplingParams(max_tokens=64)
Lengths = Callable[[GroupRequest, int], int]
Rewards = Callable[[Group, int], "Reward | None"]


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", ({"role": "user", "content": str(i)},), (i,)) for i in range(count)]


class TokenEngine(RolloutEngine):
    """Writes one token a step into every response of the first `slots` groups; a token is a hash of its address.

    The log-prob depends on the weights version, so a response continued under other weights is told apart.
    """

    def __init__(self, lengths: Lengths, slots: int = 10**9) -> None:
        self.version = 0
        self.num_steps = 0
        self.max_in_flight = 0
        self.loses: set[int] = set()
        self._lengths, self._slots = lengths, slots
        self._requests: dict[int, GroupRequest] = {}
        self._tokens: dict[int, list[list[tuple[int, float, int]]]] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    def submit(self, request: GroupRequest) -> None:
        assert request.submission not in self._requests, "submitted twice"
        self._requests[request.submission] = request
        partial = [list(zip(r.token_ids, r.log_probs, r.versions)) for r in request.partial]
        self._tokens[request.submission] = partial or [[] for _ in range(request.n)]
        self.max_in_flight = max(self.max_in_flight, len(self._requests))

    def step(self) -> list[Group]:
        self.num_steps += 1
        done = []
        for submission in sorted(self._requests)[: self._slots]:
            request, responses = self._requests[submission], self._tokens[submission]
            for i, tokens in enumerate(responses):
                if len(tokens) < self._lengths(request, i):
                    tokens.append(self._token(request, i, len(tokens)))
            if all(len(t) >= self._lengths(request, i) for i, t in enumerate(responses)):
                done.append(submission)
        groups = [self._finish(s) for s in done]
        return [g for g in groups if g.submission not in self.loses]

    def _token(self, request: GroupRequest, response: int, position: int) -> tuple[int, float, int]:
        draw = derive_seed(request.seed, "token", request.submission, response, position)
        return draw % 1000, -((draw % 997) + self.version) / 1024.0, self.version

    def _rollouts(self, submission: int, finish: Any) -> tuple[Rollout, ...]:
        return tuple(
            Rollout(
                tuple(t[0] for t in tokens),
                tuple(t[1] for t in tokens),
                (1,) * len(tokens),
                tuple(t[2] for t in tokens),
                finish,
            )
            for tokens in self._tokens[submission]
        )

    def _finish(self, submission: int) -> Group:
        rollouts = self._rollouts(submission, "stop")
        request = self._requests.pop(submission)
        del self._tokens[submission]
        return Group(request.prompt, rollouts, submission, request.version)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        raise AssertionError("the sampler must not run groups apart from its own")

    def load_weights(self, weights: Any, version: int) -> None:
        self.version = version

    def unfinished(self) -> list[GroupRequest]:
        return [
            GroupRequest(r.prompt, s, r.n, r.version, r.params, r.seed, self._rollouts(s, "aborted"))
            for s, r in sorted(self._requests.items())
        ]

    def clear(self) -> None:
        self._requests, self._tokens = {}, {}

    def close(self) -> None: ...


class ScriptedScorer:
    """Scores by a rule; a missing reward is a failure."""

    def __init__(self, rule: Rewards) -> None:
        self._rule = rule
        self._groups: list[Group] = []

    def submit(self, group: Group) -> None:
        self._groups.append(group)

    def collect(self, num: int | None = None) -> list[Group]:
        groups = self._groups[:num]
        self._groups = self._groups[len(groups) :]
        return [self.score(g) for g in groups]

    def score(self, group: Group) -> Group:
        rewards = [self._rule(group, i) for i in range(len(group.rollouts))]
        return group.with_rollouts(
            tuple(r.with_reward(w, None if w else "scripted failure") for r, w in zip(group.rollouts, rewards))
        )

    def close(self) -> None:
        self._groups = []


class SlowScorer(ScriptedScorer):
    """The same rewards from threads, each after a delay of its own."""

    def __init__(self, rule: Rewards, delay: Callable[[Group], float]) -> None:
        super().__init__(rule)
        self._delay = delay
        self._pool = ThreadPoolExecutor(4)
        self._futures: list[Future[Group]] = []

    def submit(self, group: Group) -> None:
        self._futures.append(self._pool.submit(self._late, group))

    def _late(self, group: Group) -> Group:
        time.sleep(self._delay(group))
        return self.score(group)

    def collect(self, num: int | None = None) -> list[Group]:
        futures = self._futures[:num]
        self._futures = self._futures[len(futures) :]
        return [f.result() for f in futures]

    def close(self) -> None:
        self._pool.shutdown()
        self._futures = []


class World:
    """A sampler with everything around it, and the log of fates."""

    def __init__(
        self,
        rule: Rewards,
        *,
        prompts: int = 64,
        epochs: int | None = None,
        lengths: Lengths = lambda request, i: 1,
        slots: int = 10**9,
        seed: int = 0,
        shuffle: bool = False,
        delay: Callable[[Group], float] | None = None,
        state: dict[str, Any] | None = None,
        num_held: Callable[[], int] | None = None,
        engine: type[TokenEngine] = TokenEngine,
        **settings: Any,
    ) -> None:
        self.source = PromptCursor(make_prompts(prompts), seed=seed, shuffle=shuffle, total_epochs=epochs)
        self.engine = engine(lengths, slots)
        self.scorer = ScriptedScorer(rule) if delay is None else SlowScorer(rule, delay)
        self.records: list[tuple[int, str, str, int]] = []  # submission, uid, fate, version
        values = {"train_batch_size": 4, "n": 2, "params": PARAMS, **settings}
        self.sampler = DynamicSampler(
            self.source,
            self.engine,
            self.scorer,
            SamplingSettings(**values),
            seed=seed,
            record=self._note,
            num_held=num_held,
        )
        if state is not None:
            self.engine.load_weights(None, state["version"])
            self.sampler.load_state_dict(state)

    def _note(self, group: Group, fate: str, version: int) -> None:
        self.records.append((group.submission, group.prompt.uid, fate, version))

    def fates(self, fate: str) -> list[str]:
        return [uid for _, uid, f, _ in self.records if f == fate]

    def step(self) -> tuple[list[Group], Any]:
        """A training step: a batch, new weights, release."""
        groups, report = self.sampler.next_batch()
        self.engine.load_weights(None, self.sampler.version + 1)
        self.sampler.release(groups)
        return groups, report


def number(group: Group) -> int:
    """The prompt's number."""
    return int(group.prompt.uid[1:])


def scores(*values: float) -> tuple[Reward, ...]:
    return tuple(Reward(v) for v in values)


def always_mixed(group: Group, i: int) -> Reward:
    return Reward(float(i == 0), acc=float(i == 0))


def all_right(group: Group, i: int) -> Reward:
    return Reward(1.0, acc=1.0)


def all_wrong(group: Group, i: int) -> Reward:
    return Reward(0.0, acc=0.0)


def mixed_when(keep: Callable[[int], bool], otherwise: float = 0.0) -> Rewards:
    """Mixed for the prompt numbers for which `keep` holds; all `otherwise` elsewhere."""

    def rule(group: Group, i: int) -> Reward:
        value = float(i == 0) if keep(number(group)) else otherwise
        return Reward(value, acc=value)

    return rule
