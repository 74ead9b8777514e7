"""Which prompt to submit next: the order of the source, minus what prediction skips."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gspo.sampling.filters import is_right
from gspo.sampling.prompt_ledger import PromptLedger
from gspo.sampling.settings import SamplingSettings
from gspo.types import Group, Prompt


class PromptSource(Protocol):
    """Hands out each prompt of an epoch once. All calls come from one thread."""

    @property
    def epoch_size(self) -> int:
        """Prompts in one pass over the data."""
        ...

    def next(self) -> Prompt | None:
        """The next prompt: first those put back, in that order; None when every epoch is done."""
        ...

    def put_back(self, prompt: Prompt) -> None:
        """Hand `prompt` out again before any fresh one: its group was discarded without being trained on."""
        ...

    def by_uid(self, uid: str) -> Prompt:
        """The prompt of that uid, for a resumed run."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PromptDraw:
    """Draws prompts from a source and, with `predict: skip`, passes over those expected to give equal rewards.

    A prompt submitted with probability q < 1 is remembered under its submission number until its group is trained on
    or dropped, so that the group can be weighted by 1/q.
    """

    def __init__(self, source: PromptSource, settings: SamplingSettings, *, seed: int) -> None:
        self.num_skipped = 0  # set to 0 by the sampler at the start of a step
        self._source = source
        self._predicts = settings.predict == "skip"
        self._ledger = PromptLedger(
            group_size=settings.n, seed=seed, min_prob=settings.predict_min_prob, discount=settings.predict_discount
        )
        self._num_drawn = 0
        self._probabilities: dict[int, float] = {}

    @property
    def epoch_size(self) -> int:
        return self._source.epoch_size

    def next(self, submission: int) -> Prompt | None:
        """The prompt to submit under this number; None at the end of the data."""
        while (prompt := self._source.next()) is not None:
            self._num_drawn += 1
            if not self._predicts:
                return prompt
            probability = self._ledger.submit_probability(prompt.uid)
            if self._ledger.admits(probability, self._num_drawn):
                if probability < 1:
                    self._probabilities[submission] = probability
                return prompt
            self.num_skipped += 1
        return None

    def put_back(self, prompt: Prompt) -> None:
        """Draw this prompt again before any fresh one."""
        self._source.put_back(prompt)

    def find(self, uid: str) -> Prompt:
        """The prompt of that uid."""
        return self._source.by_uid(uid)

    def learn(self, group: Group) -> float | None:
        """Note a scored group; returns what was predicted for it, P(mixed), or None when nothing was."""
        if not self._predicts:
            return None
        rewards = [r.reward for r in group.rollouts if r.reward]
        predicted = self._ledger.predict(group.prompt.uid)
        num_right = sum(map(is_right, rewards))
        self._ledger.observe(group.prompt.uid, num_right, len(rewards) - num_right)
        return predicted

    def weight(self, submission: int) -> float:
        """1/q of a submission."""
        return 1.0 / self._probabilities.get(submission, 1.0)

    def forget(self, submission: int) -> None:
        """Forget a submission whose group has been trained on or dropped."""
        self._probabilities.pop(submission, None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self._source.state_dict(),
            "ledger": self._ledger.state_dict(),
            "num_drawn": self._num_drawn,
            "probabilities": {str(submission): q for submission, q in self._probabilities.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state["source"])
        self._ledger.load_state_dict(state["ledger"])
        self._num_drawn = state["num_drawn"]
        self._probabilities = {int(submission): q for submission, q in state["probabilities"].items()}
