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
    """A trained reward model, and the reward manager, which turns the result of the rewards into a score."""

    enable: bool = key(default=False, doc="Score with the reward model in `path`.")
    path: str | None = key(
        default=None, doc="Folder or hub name of a classifier with one label, such as `gspo rm` writes."
    )
    weight: float = key(default=1.0, doc="Weight of the reward model where reward.functions does not name it.")
    normalize: Literal["none", "sigmoid", "saved"] = key(
        default="none",
        doc="How its score becomes a reward: none as it is, sigmoid σ(score), saved (score - mean) / std with the numbers "
        "that gspo rm saved with the model.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        default="auto", doc="Precision of the reward model; auto = bfloat16 on a GPU, float32 on a CPU."
    )
    max_tokens_per_batch: int = key(
        default=16384, doc="Most tokens per forward pass of the reward model.", gt=0, unit="tokens"
    )
    offload: Literal["auto", "on", "off"] = key(
        default="auto",
        doc="Keep the reward model in host memory while it is not used; auto = on a GPU, if it needs more than a quarter of "
        "the memory that is free when it is loaded.",
        may_change_on_resume=True,
    )
    reward_manager: Literal["naive", "dapo", "batch", "prime"] = key(
        default="naive",
        doc="naive, batch and prime use the score unchanged; dapo adds the overlong penalty. Whether a function scores one "
        "response or a batch is seen from its signature, and all run in parallel.",
    )
    reward_kwargs: RewardKwargs = key(factory=RewardKwargs, doc="Settings of the reward manager.")


class EvalJudgeConfig(Section):
    """The judge of held-out rows. What is null is as for training."""

    model: str | None = key(
        default=None,
        doc="Model that judges held-out rows. Another one than in training shows when the policy only pleases its judge.",
    )
    base_url: str | None = key(default=None, doc="Address of its server.", may_change_on_resume=True)
    api_key_env: str | None = key(default=None, doc="Environment variable with its API key.", may_change_on_resume=True)


class JudgeConfig(Section):
    """A language model that judges responses, behind any OpenAI-compatible server."""

    base_url: str | None = key(
        default=None,
        doc="Address of the server, such as http://127.0.0.1:8000/v1; null = no judge. `policy` serves the model that the "
        "run starts from, frozen, on this machine.",
        may_change_on_resume=True,
    )
    model: str | None = key(default=None, doc="Name of the model on the server.")
    api_key_env: str = key(
        default="OPENAI_API_KEY",
        doc="Name of the environment variable with the API key, never the key itself. A server that needs none works "
        "without it.",
        may_change_on_resume=True,
    )
    kind: Literal["reference", "rubric", "score", "rank"] = key(
        default="score",
        doc="reference: is the response right, given the correct answer. rubric: the criteria of `rubric`. score: a number "
        "from 0 to max_score. rank: the responses of a group in order, in one call. Scores are in [0, 1].",
    )
    rubric: str | None = key(
        default=None, doc="TOML file with tables [[criteria]]: name, text, choices from worst to best, weight."
    )
    prompt: str | None = key(
        default=None,
        doc="File with a question of your own, in which {question}, {response} and {reference} are filled in; null = the "
        "built-in one. Not for rank.",
    )
    view: Literal["last_reply", "full_rollout"] = key(
        default="last_reply", doc="With an environment: what the judge sees, the last turn or all turns."
    )
    weight: float = key(default=1.0, doc="Weight of the judge where reward.functions does not name it.")
    max_score: float = key(default=10.0, doc="Kind score: the best score.", gt=0)
    samples: int = key(
        default=1,
        doc="Calls per response, whose median counts. With several, a group is kept only if its responses differ by more "
        "than the samples do.",
        ge=1,
    )
    temperature: float = key(default=0.0, doc="Sampling temperature of the judge.", ge=0)
    max_tokens: int = key(default=1024, doc="Longest reply of the judge.", gt=0, unit="tokens")
    timeout: float = key(
        default=60.0, doc="Longest time of one attempt of a call.", gt=0, unit="seconds", may_change_on_resume=True
    )
    retries: int = key(
        default=4,
        doc="Further attempts after a timeout, a lost connection, HTTP 429 (Retry-After is honoured) or 5xx. Then the "
        "reward is missing.",
        ge=0,
        may_change_on_resume=True,
    )
    max_concurrent: int = key(default=32, doc="Calls at once.", ge=1, may_change_on_resume=True)
    requests_per_minute: float = key(
        default=0.0, doc="Most calls per minute; 0 = no limit.", ge=0, may_change_on_resume=True
    )
    tokens_per_minute: float = key(
        default=0.0, doc="Most tokens of calls and replies per minute; 0 = no limit.", ge=0, may_change_on_resume=True
    )
    cache: str | None = key(
        default="judge-cache.sqlite",
        doc="File with all verdicts, in the run folder unless the path is absolute: equal questions cost one call, also "
        "after a resume. null = only in memory.",
    )
    max_tokens_spent: int = key(
        default=0,
        doc="Tokens of calls and replies, over all sessions of the run, after which the run ends with a checkpoint, at the "
        "end of a step; 0 = no limit.",
        ge=0,
        may_change_on_resume=True,
    )
    eval: EvalJudgeConfig = key(factory=EvalJudgeConfig, doc="The judge of held-out rows.")


class RewardConfig(Section):
    """Reward functions and the processes that run them. A reward that failed is missing, never 0."""

    functions: list[dict[str, Any]] = key(
        factory=list,
        doc="Rewards whose weighted scores are added. Each entry has a `name` (a built-in reward, or a function in the "
        "Python file `path`, with its `kwargs`), or `judge` (with keys that replace those of reward.judge), or `model` "
        "(the path of the reward model), and optionally a `weight`; 0 only logs it. Empty = custom_reward_function.",
        example="[{name: math}, {name: score, path: my_rewards.py, weight: 0.5}]",
    )
    judge: JudgeConfig = key(factory=JudgeConfig, doc="A language model as a judge.")
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
