"""How many training prompts a run has and how long they are, before its models are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from gspo.build.data.rows import training_rows
from gspo.build.data.run_pairs import pairs_of_runs
from gspo.build.data.training_data import prompt_columns
from gspo.config import ResolvedConfig, TrainerConfig
from gspo.data.chat_template import encode_rows
from gspo.data.columns import as_rows
from gspo.data.rows import Row
from gspo.models.load import load_tokenizer


class TrainingPrompts:
    """The training rows of a config. `given` rows and tokenizer replace those that the config names."""

    def __init__(self, given: Iterable[Any] | None = None, tokenizer: Any = None) -> None:
        self.given = None if given is None else list(given)
        self._tokenizer = tokenizer

    def count(self, resolved: ResolvedConfig, limit: int) -> int | None:
        """How many rows there are, at most `limit`; None for a dataset class of the user.

        Prompts that are left out because they are too long do not count, where the batch size follows the count.
        """
        config = resolved.config
        if resolved.for_sft and self.given is not None:
            return len(self.given[:limit])
        rows = self._rows(config, limit, needs_truth=not resolved.for_sft)
        is_exact = config.data.filter_overlong_prompts and not resolved.for_sft
        if rows is None or not is_exact or resolved.origins["data.train_batch_size"].explicit:
            return None if rows is None else len(rows)
        kept = sum(length <= config.data.max_prompt_length for length in self._lengths(config, rows))
        if kept == len(rows) or len(rows) < limit:
            return kept
        short = (length for length in self.lengths(config) if length <= config.data.max_prompt_length)
        return len(list(islice(short, limit)))

    def lengths(self, config: TrainerConfig) -> Iterator[int]:
        """Tokens of every training prompt."""
        return self._lengths(config, self._rows(config, None) or [])

    def _rows(self, config: TrainerConfig, limit: int | None, *, needs_truth: bool = True) -> list[Row] | None:
        if self.given is not None:
            return as_rows(self.given[:limit], "train_dataset", prompt_columns(config))
        if config.data.custom_cls.path is not None:
            return None
        if not needs_truth and (pairs := pairs_of_runs(config)[0]) is not None:
            return pairs[:limit]
        return training_rows(config, limit, needs_truth=needs_truth)

    def _lengths(self, config: TrainerConfig, rows: list[Row]) -> Iterator[int]:
        model, options = config.actor_rollout_ref.model, config.data.apply_chat_template_kwargs
        if self._tokenizer is None and rows:
            path = model.tokenizer_path or model.path
            self._tokenizer = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
        return (len(prompt.token_ids) for prompt in encode_rows(rows, self._tokenizer, **options))
