"""The reward sections. `reward_model` and `custom_reward_function` are verl's older names; `reward` has the worker pool."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.fields import Section, key


class OverlongBufferConfig(Section):
    """DAPO's soft punishment of responses near the length limit."""

    enable: bool = key(default=False, doc="Lower the score linearly over the last `len` tokens before the limit.")
    len: int = key(
        default=0, doc="Number of tokens before the limit over which the penalty grows.", ge=0, unit="tokens"
    )
    penalty_factor: float = key(default=1.0, doc="Penalty at the limit.", ge=0)
    log: bool = key(default=False, doc="Log the penalty as a separate metric.")


class RewardKwargs(Section):
    """Settings of the reward manager."""

    overlong_buffer_cfg: OverlongBufferConfig = key(factory=OverlongBufferConfig, doc="Penalty on long responses.")
    max_resp_len: int | None = key(
        default=None, doc="Length at which the penalty is full; null = data.max_response_length.", gt=0, unit="tokens"
    )


class RewardModelConfig(Section):
    """The reward manager, which turns the result of the reward function into a score."""

    enable: bool = key(
        default=False, doc="Score with a trained reward model. Not supported: use a reward function instead."
    )
    reward_manager: Literal["naive", "dapo", "batch", "prime"] = key(
        default="naive",
        doc="naive, batch and prime use the score unchanged; dapo adds the overlong penalty. Whether a function scores one "
        "response or a batch is seen from its signature, and all run in parallel.",
    )
    reward_kwargs: RewardKwargs = key(factory=RewardKwargs, doc="Settings of the reward manager.")


class RewardConfig(Section):
    """Reward functions and the processes that run them. A reward that failed is missing, never 0."""

    functions: list[dict[str, Any]] = key(
        factory=list,
        doc="Reward functions whose weighted scores are added. Each has a `name` (a built-in reward, or a function in "
        "the Python file `path`), and optionally `weight` and `kwargs`. Empty = custom_reward_function.",
        example="[{name: math}, {name: score, path: my_rewards.py, weight: 0.5}]",
    )
    num_workers: int = key(
        default=0,
        doc="Reward processes; 0 = one per core. Cheap built-in rewards run in the trainer and need none.",
        ge=0,
        may_change_on_resume=True,
    )
    timeout: float = key(
        default=10.0,
        doc="Longest time that one reward may take. A slower one is stopped and counts as failed.",
        gt=0,
        unit="seconds",
        may_change_on_resume=True,
    )
    lag: int | None = key(
        default=None,
        doc="Engine steps that a finished group waits for its rewards; generation then waits for those that are not "
        "ready. A larger lag hides slower rewards. null = 1; on a GPU 4, except for cheap built-in rewards.",
        ge=1,
        unit="engine steps",
    )
    memory: int = key(
        default=1024, doc="Memory limit of each reward process.", gt=0, unit="MiB", may_change_on_resume=True
    )
    max_failure_rate: float = key(
        default=0.2,
        doc="Share of failed rewards per step above which the run stops.",
        ge=0,
        le=1,
        may_change_on_resume=True,
    )
    retries: int = key(
        default=1,
        doc="How often a response is tried again after its reward process died.",
        ge=0,
        may_change_on_resume=True,
    )
    scale: float = key(default=1.0, doc="Factor of the score, after `bias` is added to it.")
    bias: float = key(default=0.0, doc="Number that is added to the score.")
    clip: float | None = key(
        default=None, doc="Largest size of a score, positive or negative, after bias and scale; null = no limit.", gt=0
    )
    format_weight: float = key(default=0.0, doc="Weight of the format reward, which is added to the score; 0 = none.")
    repetition_penalty: float = key(default=0.0, doc="Weight of the penalty on repeated phrases; 0 = none.", ge=0)
    sandbox_level: int | None = key(
        default=None,
        doc="Isolation level of model-written code. It must be available on this machine; null = 2, or 1 where 2 is "
        "not. 0 is no isolation and needs allow_unsandboxed_code.",
        ge=0,
        le=3,
    )
    allow_unsandboxed_code: bool = key(
        default=False, doc="Allow model-written code to run without isolation. Nothing else switches this on."
    )


class CustomRewardFunctionConfig(Section):
    """Your own reward function."""

    path: str | None = key(
        default=None,
        doc="Python file or importable module with the function; null = the built-in reward of each row's data source. "
        "Not used when reward.functions is set.",
    )
    name: str = key(default="compute_score", doc="Name of the function in that file.")
    reward_kwargs: dict[str, Any] = key(
        factory=dict, doc="Extra keyword arguments of the function.", example="{scale: 2}"
    )
