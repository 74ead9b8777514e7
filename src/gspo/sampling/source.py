"""Where prompts come from: the cursor protocol between the sampler and the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gspo.types import Prompt


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
