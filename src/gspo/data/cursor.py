"""The order in which prompts are drawn, resumable from a position."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo.data.rows import DataError
from gspo.seeding import derive_seed, permutation
from gspo.types import Prompt


class PromptCursor:
    """Returns every prompt once per epoch. The order of an epoch depends only on (seed, epoch).

    The state is a position and the uids that were put back, so it does not grow with the data.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True, total_epochs: int | None = None
    ) -> None:
        if not prompts:
            raise DataError("dataset", "has no prompts; expected at least one")
        self._prompts = list(prompts)
        self._by_uid = {p.uid: p for p in self._prompts}
        if len(self._by_uid) != len(self._prompts):
            (uid, _), *_ = Counter(p.uid for p in self._prompts).most_common(1)
            raise DataError(uid, "is used by two rows; expected unique uids", field="uid")
        self._seed = seed
        self._shuffle = shuffle
        self._total_epochs = total_epochs
        self._position = 0
        self._put_back: deque[str] = deque()
        self._order_epoch = -1
        self._order: np.ndarray = np.empty(0, dtype=np.int64)

    @property
    def epoch_size(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """The epoch of the next fresh prompt, from 0."""
        return self._position // len(self._prompts)

    def next(self) -> Prompt | None:
        """The next prompt: those put back first, in that order, then fresh ones; None after `total_epochs`."""
        if self._put_back:
            return self._by_uid[self._put_back.popleft()]
        epoch, offset = divmod(self._position, len(self._prompts))
        if self._total_epochs is not None and epoch >= self._total_epochs:
            return None
        self._position += 1
        return self._prompts[int(self._epoch_order(epoch)[offset])]

    def put_back(self, prompt: Prompt) -> None:
        """Return `prompt` again before any fresh one."""
        self._put_back.append(self.by_uid(prompt.uid).uid)

    def by_uid(self, uid: str) -> Prompt:
        """The prompt of that uid; a DataError when the data does not have it."""
        try:
            return self._by_uid[uid]
        except KeyError:
            raise DataError(
                "dataset", f"has no prompt {uid!r}; expected the data with which the run was started", field="uid"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as plain JSON."""
        return {
            "position": self._position,
            "put_back": list(self._put_back),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch_size": len(self._prompts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a DataError when it belongs to other data, another seed or another order."""
        here = self.state_dict()
        for key in ("seed", "shuffle", "epoch_size"):
            if state[key] != here[key]:
                raise DataError("checkpoint", f"is {state[key]!r}; this run has {here[key]!r}", field=key)
        for uid in state["put_back"]:
            self.by_uid(uid)
        self._position = int(state["position"])
        self._put_back = deque(state["put_back"])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order_epoch != epoch:
            size, seed = len(self._prompts), derive_seed(self._seed, "shuffle", epoch)
            self._order = permutation(seed, size) if self._shuffle else np.arange(size)
            self._order_epoch = epoch
        return self._order
