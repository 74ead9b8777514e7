"""A judge whose calls are answered by a function instead of a server."""

from __future__ import annotations

from typing import Any

from gspo.rewards.judge.cache import Reply, VerdictCache
from gspo.rewards.judge.scorer import JudgeScorer
from gspo.rewards.judge.settings import JudgeSettings
from gspo.types import Group, Prompt, Rollout


class Answering(JudgeScorer):
    """A judge whose calls are answered by a function of the question and the sampling."""

    def __init__(self, answer: Any, scope: str = "train", cache: VerdictCache | None = None, **settings: Any) -> None:
        super().__init__(JudgeSettings("http://h", "m", **settings), cache or VerdictCache(), scope)
        self.asked: list[dict[str, Any]] = []

        async def ask(messages: Any, sampling: Any) -> Reply:
            self._client.num_calls += 1
            self.asked.append(dict(sampling))
            found = answer(messages[-1]["content"], sampling)
            if isinstance(found, Exception):
                raise found
            return Reply(found, 10, 0.5)

        self._client.ask = ask  # type: ignore[method-assign]


def groups(*texts: tuple[str, ...], version: int = 0) -> list[Group]:
    prompt = Prompt("row", ({"role": "user", "content": "q"},), (), "s", "5")
    rollouts = [tuple(Rollout((), (), (), (), "stop", text=text) for text in each) for each in texts]
    return [Group(prompt, each, submission, version) for submission, each in enumerate(rollouts)]


def scores_of(scorer: JudgeScorer, *texts: tuple[str, ...]) -> list[float | None]:
    for group in groups(*texts):
        scorer.submit(group)
    return [r.reward.score if r.reward else None for group in scorer.collect() for r in group.rollouts]
