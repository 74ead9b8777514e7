"""What comes into a run: its prompts and its rewards, both tried before any weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspo.build.data.rows import rows_of_split
from gspo.config import TrainerConfig
from gspo.config.schema.fields import explicit_fields
from gspo.data.chat_template import encode_prompts
from gspo.data.columns import Columns, Say
from gspo.data.examples import Example, encode_examples
from gspo.data.rows import DataError
from gspo.rewards import Overlong, RewardError, RewardSpec, Scorer, dry_run, make_scorer
from gspo.rewards.builtin import by_source
from gspo.rewards.compose import RewardScale
from gspo.rewards.functions import CUSTOM
from gspo.rewards.graders.code import read_tests
from gspo.rewards.scoring import PoolScorer
from gspo.types import Prompt

POOL_LAG = 4  # engine steps on a GPU, where rewards are computed in other processes or threads


def prompt_columns(config: TrainerConfig) -> Columns:
    """The columns of rows whose answers are generated."""
    c = config.data
    return Columns(c.prompt_key, c.ground_truth_key, c.data_source_key)


def example_columns(config: TrainerConfig) -> Columns:
    """The columns of rows whose answers are imitated. A correct answer is not needed."""
    c = config.data
    return Columns(c.prompt_key, None, c.data_source_key, c.response_key)


def load_prompts(
    config: TrainerConfig,
    tokenizer: Any,
    split: str,
    given: Iterable[Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
    say: Say | None = None,
) -> list[Prompt]:
    """The encoded prompts of a split ("train" or "val"): those the config names, or the rows that are given.

    `template_options` replace those of the config, where an environment adds its tools. `say` gets a sentence for each
    dataset whose columns were guessed.
    """
    c = config.data
    rows = rows_of_split(config, tokenizer, split, prompt_columns(config), given, say)
    if not rows and split == "train":
        raise DataError("data.train_files" if given is None else "train_dataset", "has no rows; expected at least one")
    return encode_prompts(
        rows,
        tokenizer,
        max_prompt_length=c.max_prompt_length,
        truncation=c.truncation,
        filter_overlong_prompts=c.filter_overlong_prompts,
        **(c.apply_chat_template_kwargs if template_options is None else template_options),
    )


def load_examples(
    config: TrainerConfig, tokenizer: Any, split: str, given: Iterable[Any] | None = None, say: Say | None = None
) -> tuple[list[Example], int]:
    """The examples of a split ("train" or "val") and how many rows were left out because they are too long.

    Rows need a text to imitate, but no ground truth.
    """
    c = config.data
    rows = rows_of_split(config, tokenizer, split, example_columns(config), given, say)
    if not rows and split == "train":
        raise DataError("data.train_files" if given is None else "train_dataset", "has no rows; expected at least one")
    examples = encode_examples(
        rows,
        tokenizer,
        max_length=c.max_length,
        truncation=c.truncation,
        filter_overlong=c.filter_overlong_prompts,
        **c.apply_chat_template_kwargs,
    )
    return examples, len(rows) - len(examples)


def reward_lag(config: TrainerConfig, scorer: Scorer, prompts: Sequence[Prompt], *, on_gpu: bool) -> int:
    """Engine steps after which rewards are collected: by key, else 1 on a CPU, whose steps are long, or for cheap rewards."""
    if config.reward.lag is not None:
        return config.reward.lag
    if not on_gpu:
        return 1
    here = isinstance(scorer, PoolScorer) and all(map(scorer.grades_here, {p.data_source for p in prompts}))
    return 1 if here else POOL_LAG


def build_scorer(config: TrainerConfig, reward_fn: Any = None) -> Scorer:
    """The scorer that the config asks for, of `reward_fn` when one is given."""
    custom, pool, manager = config.custom_reward_function, config.reward, config.reward_model
    reward = reward_fn
    if reward is None and pool.functions:
        reward = pool.functions
    elif reward is None and custom.path is not None:
        reward = RewardSpec(custom.name, path=custom.path, kwargs=dict(custom.reward_kwargs), key=CUSTOM)
    buffer = manager.reward_kwargs.overlong_buffer_cfg
    overlong = None
    if buffer.enable:
        limit = manager.reward_kwargs.max_resp_len or config.data.max_response_length
        overlong = Overlong(limit, buffer.len, buffer.penalty_factor, buffer.log)
    scale = RewardScale(pool.scale, pool.bias, pool.clip)
    return make_scorer(
        reward,
        manager=manager.reward_manager,
        num_workers=pool.num_workers,
        timeout=pool.timeout,
        memory=pool.memory,
        retries=pool.retries,
        overlong=overlong,
        scale=scale if scale != RewardScale() else None,
        format_weight=pool.format_weight,
        repetition_penalty=pool.repetition_penalty,
        sandbox_level=pool.sandbox_level,
        allow_unsandboxed_code=pool.allow_unsandboxed_code,
    )


def grades(config: TrainerConfig, prompt: Prompt, reward_fn: Any = None) -> bool:
    """Whether a reward function grades a row: one that is set, or the built-in of its data source."""
    if reward_fn is not None or config.custom_reward_function.path is not None or config.reward.functions:
        return True
    try:
        by_source(prompt.data_source)
    except RewardError:
        return False
    return True


def try_reward(config: TrainerConfig, scorer: Scorer, prompt: Prompt, *, uses_metric: bool = True) -> str:
    """Score one row now, so that a broken function, or a filter metric that it does not return, is found at the start.

    A group filter of the user replaces the rule that reads the metric (`uses_metric=False`). Returns the metric to filter
    by: that of the config, or the score where a recipe's metric is not returned.
    """
    reward = dry_run(scorer, prompt)
    filters = config.algorithm.filter_groups
    known = {"seq_reward", "seq_final_reward", "score", *reward.extra} | ({"acc"} if reward.acc is not None else set())
    if not filters.enable or not uses_metric or filters.metric in known:
        return filters.metric
    if "metric" not in explicit_fields(filters):
        return "seq_reward"
    raise RewardError(
        f"algorithm.filter_groups.metric={filters.metric!r} is not returned by the reward function; "
        f"it returns {', '.join(sorted(known))}. Set the metric to one of these, or return "
        f"{{'score': …, {filters.metric!r}: …}}"
    )


def check_code_tests(prompts: Iterable[Prompt]) -> None:
    """Refuse tests that no program could be graded by, naming their row."""
    for prompt in prompts:
        if prompt.data_source == "code":
            try:
                read_tests(prompt.ground_truth)
            except ValueError as error:
                raise DataError(prompt.uid, f"cannot be graded: {error}", field="ground_truth") from None
