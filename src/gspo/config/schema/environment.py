"""The `environment` and `actor_rollout_ref.rollout.multi_turn` sections: what the model talks to between its turns."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.fields import Section, key


class EnvironmentConfig(Section):
    """The environment of a run and the processes in which its episodes run. A failed environment gives no reward, never 0."""

    name: str | None = key(
        default=None,
        doc="The environment: calculator, gridworld, gsm8k, guess or python, a registered name, textarena:ID, "
        "mcp:COMMAND or mcp:URL, openenv:URL, or with `path` a name in that file; null = none, unless `path` is set.",
        example="calculator",
    )
    path: str | None = key(
        default=None,
        doc="Python file or importable module with the environment. Without `name` it is the file's only environment, "
        "or its functions are the tools.",
        example="my_environment.py",
    )
    agent: str | None = key(
        default=None,
        doc="An agent instead of an environment: a function `path.py:name` that talks to the model with an OpenAI client "
        "and returns the reward.",
        example="my_agent.py:run",
    )
    kwargs: dict[str, Any] = key(factory=dict, doc="Arguments of the environment.", example="{high: 64}")
    timeout: float = key(
        default=60.0,
        doc="Longest time that an environment may take for one answer. A slower one is stopped and counts as failed.",
        gt=0,
        unit="seconds",
        may_change_on_resume=True,
    )
    tool_timeout: float = key(
        default=10.0,
        doc="Longest time of one tool call. A slower one is interrupted, and the model sees an error.",
        gt=0,
        unit="seconds",
    )
    memory: int = key(
        default=1024, doc="Memory limit of each environment process.", gt=0, unit="MiB", may_change_on_resume=True
    )
    retries: int = key(
        default=1,
        doc="How often an answer is tried again after its environment process died.",
        ge=0,
        may_change_on_resume=True,
    )
    num_workers: int = key(
        default=0,
        doc="Environment processes per rollout engine; 0 = one per core. Each holds many episodes.",
        ge=0,
        may_change_on_resume=True,
    )
    lag: int = key(
        default=1,
        doc="Engine steps between the end of a turn and the reading of its answer, during which the environment works.",
        ge=0,
        unit="steps",
    )
    max_failure_rate: float = key(
        default=0.2,
        doc="Share of rollouts per step whose environment or reward failed, above which the run stops.",
        ge=0,
        le=1,
        may_change_on_resume=True,
    )


class MultiTurnConfig(Section):
    """Conversations with tools and environments: limits and the format of tool calls."""

    enable: bool | None = key(
        default=None,
        doc="Whether rollouts have turns; null = when an environment or tools are set. false switches them off.",
    )
    max_assistant_turns: int | None = key(
        default=None, doc="Most turns of the model per rollout; null = no limit but the length.", ge=1, unit="turns"
    )
    max_user_turns: int | None = key(
        default=None, doc="Most observations per rollout; null = no limit but the length.", ge=1, unit="turns"
    )
    max_parallel_calls: int = key(
        default=1, doc="Most tool calls per turn. The model sees an error for those above.", ge=1, unit="calls"
    )
    max_tool_response_length: int = key(
        default=1024, doc="Longest message of an environment or tool. A longer one is cut.", gt=0, unit="tokens"
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        default="middle",
        doc="What is kept of a message that is cut: its left part, its right part, or both ends (middle).",
    )
    function_tool_path: str | None = key(
        default=None,
        doc="Python file whose functions are tools: their docstrings and annotations describe them to the model.",
        example="my_tools.py",
    )
    tool_config_path: str | None = key(
        default=None,
        doc="YAML file that lists tools as verl does: classes with create, execute and release.",
        example="tools.yaml",
    )
    format: Literal["auto", "tokenizer", "hermes", "python", "tag"] = key(
        default="auto",
        doc="How the model writes tool calls: the tokenizer's own format, hermes (<tool_call>), python (a fenced block) "
        "or tag (<tool>…</tool>); auto = the environment's, else the tokenizer's own, else hermes.",
    )
