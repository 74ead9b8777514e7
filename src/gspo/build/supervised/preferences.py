"""From a config to the objects of a run that trains a reward model: the pairs, the classifier, its optimiser."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from transformers.utils.logging import disable_progress_bar

from gspo.build.data.given import NOTHING, Inputs
from gspo.build.data.rows import given_datasets
from gspo.build.data.run_pairs import pairs_of_runs
from gspo.build.data.training_data import load_preferences, pair_columns
from gspo.build.fingerprint import fingerprint
from gspo.build.models import optimizer_of, schedule_of
from gspo.build.role_settings import layout_kind
from gspo.build.run import load_run_tokenizer, prepare_process
from gspo.build.settings import total_steps
from gspo.build.supervised.examples import SupervisedParts, held_out_rows
from gspo.config import TrainerConfig
from gspo.data.chat_template import encode_answers, encode_rows
from gspo.data.examples import ExampleOrder
from gspo.data.preferences import Preference
from gspo.data.rows import DataError, Row
from gspo.models.load import compute_dtype, load_reward_model
from gspo.plugins import import_plugins
from gspo.training.reward_model import Pair, RewardModelSettings, TrainedRewardModel
from gspo.training.roles import LocalRoles


@dataclass
class PreferenceParts(SupervisedParts):
    """The objects of a run on pairs. The reward model stands where the policy of other runs does."""

    rows_name: ClassVar[str] = "pairs"

    @property
    def model(self) -> TrainedRewardModel:
        return cast(TrainedRewardModel, cast(LocalRoles, self.roles).policy)

    def _task(self, model: str) -> str:
        return f"a reward model from {model} on the pairs"


def build_preferences(
    config: TrainerConfig, inputs: Inputs = NOTHING, *, weights_from: Path | None = None
) -> PreferenceParts:
    """Everything a run on pairs needs. The data is read before the weights are loaded."""
    disable_progress_bar()  # one bar per checkpoint would hide the run's own lines
    import_plugins(config.trainer.plugins)
    device = prepare_process(config)
    tokenizer = inputs.tokenizer or load_run_tokenizer(config)
    notes: list[str] = []
    train, val = _datasets(config, inputs, notes)
    pairs = _pairs(config, tokenizer, load_preferences(config, tokenizer, "train", train, notes.append), "train", notes)
    kept = held_out_rows(
        config, val, lambda: load_preferences(config, tokenizer, "val", val), notes, PreferenceParts.rows_name
    )
    held_out = _pairs(config, tokenizer, kept, "held-out", notes)
    c, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    num_steps = total_steps(config, len(pairs))
    classifier = load_reward_model(
        c.path if weights_from is None else str(weights_from),
        dtype=compute_dtype(c.dtype, device),
        device=str(device),
        trust_remote_code=c.trust_remote_code,
        new_head=weights_from is None,
    )
    classifier.config.pad_token_id = tokenizer.pad_token_id
    classifier.score.float()
    kind = "plain" if layout_kind(config) == "plain" else "packed"
    settings = RewardModelSettings(actor.ppo_max_token_len_per_gpu, kind)
    model = TrainedRewardModel(
        classifier,
        optimizer_of(classifier, actor.optim, actor.grad_clip, offload=False),
        schedule_of(actor.optim, num_steps),
        settings,
    )
    roles = LocalRoles(cast(Any, model))
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    order = ExampleOrder(pairs, config.data.train_batch_size, seed=seed, shuffle=config.data.shuffle)
    rows = [(pair.uid, pair.chosen, pair.rejected) for pair in pairs]
    facts = fingerprint(config, roles.facts(), rows, num_steps, trained_on="pairs")
    return PreferenceParts(config, tokenizer, roles, order, cast(Any, held_out), num_steps, facts, notes=notes)


def _datasets(
    config: TrainerConfig, inputs: Inputs, notes: list[str]
) -> tuple[Iterable[Any] | None, Iterable[Any] | None]:
    """Training and held-out pairs that are passed in Python, or that come from runs; None: those of the config's files."""
    if inputs.train_dataset is None and inputs.val_dataset is None:
        return pairs_of_runs(config)
    return given_datasets(config, pair_columns(config), inputs.train_dataset, inputs.val_dataset, notes.append)


def _pairs(
    config: TrainerConfig, tokenizer: Any, preferences: Iterable[Preference], name: str, notes: list[str]
) -> list[Pair]:
    """Pairs of at most `data.max_length` tokens per answer; a note counts those that were left out."""
    limit, found, left_out, pairs = config.data.max_length, [], 0, list(preferences)
    prompts = encode_rows((Row(one.uid, one.messages) for one in pairs), tokenizer)
    replies = [encode_answers([getattr(one, kind) for one in pairs], tokenizer) for kind in ("chosen", "rejected")]
    for one, prompt, *answers in zip(pairs, prompts, *replies, strict=True):
        texts = [prompt.token_ids + answer for answer in answers]
        if limit is not None and max(map(len, texts)) > limit:
            left_out += 1
        else:
            found.append(Pair(one.uid, *texts))
    if not found and left_out:
        raise DataError("data.max_length", f"is {limit}: all {left_out} {name} pairs are longer; raise it")
    if left_out:
        notes.append(f"{left_out:,} {name} pairs are longer than data.max_length={limit} tokens and are left out")
    return found
