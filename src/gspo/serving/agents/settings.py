"""How agents are set up, as plain values that can be sent to a rollout worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.environments.formats import find_format
from gspo.environments.protocol import EnvironmentProblem
from gspo.rollout.engine import RolloutEngine
from gspo.serving.agents.loading import load_agent
from gspo.serving.prompts import PromptReader


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The agent of a run (`path.py:run`), the arguments of its class, and its deadlines."""

    place: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str = "auto"
    timeout: float = 60.0
    lag: int = 1
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Load the agent once; EnvironmentProblem when that, or a server, is not possible."""
        load_agent(self.place, self.kwargs)
        try:
            import gspo.serving.server  # noqa: F401
        except ImportError as error:
            raise EnvironmentProblem(
                f"environment.agent needs the extra `serve` ({error.name} is missing): pip install 'gspo[serve]'"
            ) from error

    def prompt_options(self, tokenizer: Any) -> dict[str, Any]:
        """Options of the chat template with which prompts are rendered."""
        return dict(self.template_options)

    def wrap(
        self, engine: RolloutEngine, tokenizer: Any, *, eos_token_ids: Sequence[int], max_length: int, pool: Any = None
    ) -> RolloutEngine:
        """An engine of agents around `engine`."""
        from gspo.serving.agents.engine import AgentEpisodes

        found = find_format(self.tool_format, tokenizer)
        reader = PromptReader(tokenizer, len(tokenizer), found, self.template_options)
        function = load_agent(self.place, self.kwargs)
        options = {"max_length": max_length, "timeout": self.timeout, "lag": self.lag}
        return AgentEpisodes(engine, function, reader, **options)
