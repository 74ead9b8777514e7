"""The judge as a Scorer: questions are asked while generation goes on, and each different text is asked about once.

sampler ── submit(group) ──▶ JudgeScorer ── one question per different text ──▶ event loop in a thread of its own
                                                                                 │ cache, or ChatClient
sampler ── collect() ──────▶ JudgeScorer ── waits for the verdicts ◀─────────────┘
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gspo.metrics import Metric, Metrics
from gspo.rewards.judge.cache import Reply, VerdictCache, question_key
from gspo.rewards.judge.client import ChatClient, JudgeFailure
from gspo.rewards.judge.questions import MAX_REPLY, Question, UnreadableVerdict, Verdict, viewed
from gspo.rewards.judge.settings import JudgeSettings
from gspo.types import Group, Reward, Rollout

_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Opinion:
    """The verdicts of all samples of one question, and what they cost."""

    verdicts: tuple[Verdict, ...]
    tokens: int
    seconds: float


Outcome = Opinion | str  # or the text of a failure


class JudgeScorer:
    """Scores in [0, 1] by a judge, the median of its samples. Equal texts get equal scores and cost one call.

    A call that failed, and a reply without a verdict, is a missing reward with its text. `scope` tells the groups of
    training from those of evaluation, whose numbers may be the same.
    """

    def __init__(self, settings: JudgeSettings, cache: VerdictCache, scope: str = "train") -> None:
        self.settings, self.cache, self._scope = settings, cache, scope
        self._client = ChatClient(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._asking: dict[str, asyncio.Task[Reply]] = {}  # calls under way, by question
        self._pending: list[tuple[Group, list[list[int]], list[Future[Outcome]]]] = []
        self._counts = dict.fromkeys(("cache_hits", "failures", "tokens", "seconds"), 0.0)
        self._seen_calls = 0

    def submit(self, group: Group) -> None:
        texts = [viewed(rollout, self.settings.view) for rollout in group.rollouts]
        places: dict[str, list[int]] = {}
        for index, text in enumerate(texts):
            places.setdefault(text, []).append(index)
        # Sorted, so that the order in which responses ended does not change what a ranking is asked about.
        unique = sorted(places) if self.settings.kind == "rank" else list(places)
        if self.settings.kind == "rank":
            asked = [tuple(unique)] if len(unique) > 1 or len(texts) == 1 else []
        else:
            asked = [(text,) for text in unique]
        futures = [self._run(self._judge(Question(self.settings, group.prompt, answers), group)) for answers in asked]
        self._pending.append((group, [places[text] for text in unique], futures))

    def collect(self, num: int | None = None) -> list[Group]:
        pending = self._pending[:num]
        self._pending = self._pending[len(pending) :]
        return [self._finish(*item) for item in pending]

    def observe(self) -> Metrics:
        """`judge/*`: what the calls since the last time were, and cost."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        calls, self._seen_calls = self._client.num_calls - self._seen_calls, self._client.num_calls
        return {f"judge/{name}": Metric("sum", value) for name, value in {"calls": calls, **counts}.items()}

    def over_budget(self) -> str | None:
        limit, spent = self.settings.max_tokens_spent, self.cache.spent()
        if not limit or spent < limit:
            return None
        return f"the judge has used {spent:,} tokens (reward.judge.max_tokens_spent={limit:,}); raise it to go on"

    def close(self) -> None:
        self._pending = []
        if self._loop.is_closed():
            return
        self._run(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.cache.close(f"{self._scope}/")

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        """Cancel what is under way and close the connections."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()

    async def _judge(self, question: Question, group: Group) -> Outcome:
        """The verdicts of every sample, or the first failure."""
        if (problem := question.problem()) is not None:
            self._counts["failures"] += 1
            return f"{self.settings.model}: {problem}"
        place = f"{self._scope}/{group.version}/{group.submission}"
        found = await asyncio.gather(*(self._sample(question, index, place) for index in range(self.settings.samples)))
        failure = next((item for item in found if isinstance(item, str)), None)
        if failure is not None:
            self._counts["failures"] += 1
            return failure
        pairs = [item for item in found if not isinstance(item, str)]
        replies = [reply for _, reply in pairs]
        verdicts = tuple(verdict for verdict, _ in pairs)
        return Opinion(verdicts, sum(r.tokens for r in replies), sum(r.seconds for r in replies))

    async def _sample(self, question: Question, index: int, place: str) -> tuple[Verdict, Reply] | str:
        s = self.settings
        sampling: dict[str, Any] = {"temperature": s.temperature, "max_tokens": s.max_tokens}
        if s.temperature > 0:
            sampling["seed"] = index
        key = question_key(s.model, question.messages(), sampling)
        known = self.cache.find_failure(key, place)
        if known is not None:
            return known
        try:
            reply = await self._reply(key, question, sampling)
            return question.read(reply.text), reply
        except JudgeFailure as error:
            text = f"{s.model}: {error}"
        except UnreadableVerdict as error:
            text = f"{s.model}: the reply has no verdict, {error}"
        self.cache.add_failure(key, place, text)
        return text

    async def _reply(self, key: str, question: Question, sampling: dict[str, Any]) -> Reply:
        """The reply from the cache, from a call under way, or from a new call."""
        if (known := self._kept(key, question)) is not None:
            self._counts["cache_hits"] += 1
            return known
        if key in self._asking:
            self._counts["cache_hits"] += 1
            return await self._asking[key]
        task = self._asking[key] = asyncio.ensure_future(self._call(key, question, sampling))
        try:
            return await task
        finally:
            del self._asking[key]

    async def _call(self, key: str, question: Question, sampling: dict[str, Any]) -> Reply:
        """Ask, and keep the reply if it has a verdict. Where another run was faster, its reply counts, as after a resume."""
        try:
            reply = await self._client.ask(question.messages(), sampling)
        except JudgeFailure as failure:
            self._spend(failure.tokens)
            raise
        self._spend(reply.tokens)
        self._counts["seconds"] += reply.seconds
        reply = dataclasses.replace(reply, text=reply.text[:MAX_REPLY])
        try:
            question.read(reply.text)
        except UnreadableVerdict as error:
            raise UnreadableVerdict(f"{error}; it was {reply.text[:_SHOWN]!r}") from None
        self.cache.add(key, self.settings.model, reply)
        if (kept := self._kept(key, question)) is not None:
            return kept
        self.cache.add(key, self.settings.model, reply, replace=True)
        return reply

    def _kept(self, key: str, question: Question) -> Reply | None:
        """The reply in the cache, if it has a verdict. It may be that of another kind, to a question of one's own."""
        reply = self.cache.find(key)
        if reply is not None:
            try:
                question.read(reply.text)
            except UnreadableVerdict:
                return None
        return reply

    def _spend(self, tokens: int) -> None:
        self._counts["tokens"] += tokens
        if tokens:
            self.cache.spend(tokens)

    def _finish(self, group: Group, places: list[list[int]], futures: list[Future[Outcome]]) -> Group:
        outcomes = [future.result() for future in futures]
        rollouts: list[Rollout] = list(group.rollouts)
        for number, indices in enumerate(places):
            if self.settings.kind == "rank":
                outcome, answer = (outcomes[0] if outcomes else EQUAL), number if outcomes else 0
            else:
                outcome, answer = outcomes[number], 0
            for index in indices:
                rollouts[index] = self._scored(rollouts[index], outcome, answer)
        return group.with_rollouts(tuple(rollouts))

    def _scored(self, rollout: Rollout, outcome: Outcome, answer: int) -> Rollout:
        if isinstance(outcome, str):
            return rollout.with_reward(None, outcome)
        scores = [verdict.scores[answer] for verdict in outcome.verdicts]
        score = statistics.median(scores)
        names = outcome.verdicts[0].values
        extra = {f"judge/{name}": statistics.median(v.values[name] for v in outcome.verdicts) for name in names}
        notes = {
            "verdict": [v.said for v in outcome.verdicts] if len(scores) > 1 else outcome.verdicts[0].said,
            "reason": outcome.verdicts[0].reason,
            "model": self.settings.model,
            "tokens": outcome.tokens,
            "seconds": round(outcome.seconds, 3),
        }
        acc = score if self.settings.kind == "reference" else None
        return rollout.with_reward(Reward(score, acc, extra, noise=max(scores) - min(scores), notes=notes))


EQUAL = Opinion((Verdict((0.5,), "all answers are equal"),), 0, 0.0)  # nothing to rank, so nothing is asked
