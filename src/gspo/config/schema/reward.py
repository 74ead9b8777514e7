"""The reward sections. verl's old names (`reward_model`, `custom_reward_function`) are the keys; `reward` has the pool."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.fields import Section, key, section


@section
class OverlongBufferConfig(Section):
    """DAPO's soft punishment of responses that come near the length limit."""

    enable: bool = key(default=False, doc="Lower the score linearly within the last `len` tokens.")
    len: int = key(default=0, doc="Tokens before the limit in which the penalty grows.", ge=0, unit="tokens")
    penalty_factor: float = key(default=1.0, doc="Penalty at the limit.", ge=0)
    log: bool = key(default=False, doc="Log the penalty as metrics of its own.")


@section
class RewardKwargs(Section):
    """Settings of the reward manager."""

    overlong_buffer_cfg: OverlongBufferConfig = key(
        factory=OverlongBufferConfig, doc="Penalty on long responses."
    )
    max_resp_len: int | None = key(
        default=None,
        doc="Length at which the penalty is full; null = data.max_response_length.",
        gt=0,
        unit="tokens",
    )


@section
class RewardModelConfig(Section):
    """Which reward manager turns responses into scores."""

    enable: bool = key(
        default=False, doc="Score with a trained reward model. Not offered: pass a reward function instead."
    )
    reward_manager: Literal["naive", "dapo"] = key(
        default="naive",
        doc="naive takes the score as it is; dapo adds the overlong penalty.",
    )
    reward_kwargs: RewardKwargs = key(factory=RewardKwargs, doc="Settings of the reward manager.")


@section
class RewardConfig(Section):
    """Where rewards run, and what happens when one fails. A failed reward is missing, never 0."""

    functions: list[dict[str, Any]] = key(
        factory=list,
        doc="Reward functions to add up: [{path, name, weight, kwargs}]; empty = custom_reward_function.",
    )
    num_workers: int = key(
        default=0,
        doc="Reward processes; 0 = one a core, and cheap built-in rewards in the trainer.",
        ge=0,
        may_change_on_resume=True,
    )
    timeout: float = key(
        default=10.0, doc="A reward is stopped after this.", gt=0, unit="s", may_change_on_resume=True
    )
    memory: int = key(
        default=1024, doc="Memory of a reward process.", gt=0, unit="MiB", may_change_on_resume=True
    )
    max_failure_rate: float = key(
        default=0.2,
        doc="Failed rewards a step, as a share, above which the run stops.",
        ge=0,
        le=1,
        may_change_on_resume=True,
    )
    retries: int = key(
        default=1, doc="Further tries of a reward that failed.", ge=0, may_change_on_resume=True
    )
    format_weight: float = key(default=0.0, doc="Weight of the format reward, added to the score.")
    repetition_penalty: float = key(default=0.0, doc="Weight of the penalty on repeated phrases.", ge=0)
    sandbox_level: int | None = key(
        default=None, doc="Least isolation of model-written code; null = the best that works.", ge=0, le=3
    )
    allow_unsandboxed_code: bool = key(
        default=False, doc="Run model-written code without isolation. Never on by itself."
    )


@section
class CustomRewardFunctionConfig(Section):
    """The user's reward function."""

    path: str | None = key(
        default=None,
        doc="Python file (or importable module) with the function; null = the data's built-in reward.",
    )
    name: str = key(default="compute_score", doc="Name of the function in it.")
    reward_kwargs: dict[str, Any] = key(factory=dict, doc="Further arguments of the function.")
