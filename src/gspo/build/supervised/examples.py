"""From a config to the objects of a supervised run: the examples, the policy and, for accuracy, an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from gspo.build.data.given import NOTHING, Inputs
from gspo.build.data.rows import given_datasets, held_out_share
from gspo.build.data.training_data import check_code_tests, example_columns, load_examples, load_prompts, prompt_columns
from gspo.build.fingerprint import check_fingerprint, example_rows, fingerprint
from gspo.build.parts import layout_note, model_size, where
from gspo.build.rewards import build_scorer, names_reward
from gspo.build.run import build_models, load_run_tokenizer, prepare_process
from gspo.build.sampling import build_evaluator
from gspo.build.settings import total_steps
from gspo.config import TrainerConfig
from gspo.data.examples import Example, ExampleOrder
from gspo.data.rows import DataError
from gspo.distributed.backend import Backend
from gspo.evaluation.evaluator import Evaluator
from gspo.models.load import load_config
from gspo.plugins import import_plugins
from gspo.rewards import Scorer
from gspo.rollout.engine import RolloutEngine
from gspo.training.roles import Roles

T = TypeVar("T")


@dataclass
class SupervisedParts:
    """The objects of one supervised run. Without `trainer.val_accuracy` there is no engine."""

    config: TrainerConfig
    tokenizer: Any
    roles: Roles
    order: ExampleOrder[Any]
    held_out: list[Example]
    total_steps: int
    fingerprint: dict[str, Any]
    engine: RolloutEngine | None = None
    scorer: Scorer | None = None
    evaluator: Evaluator | None = None
    notes: list[str] = field(default_factory=list)  # for the user, about the data
    rows_name: ClassVar[str] = "examples"

    def publish(self, version: int) -> None:
        if self.engine is not None:
            self.engine.load_weights(None, version=version)

    def state_dict(self) -> dict[str, Any]:
        """What a reader may want to know. Nothing has to be restored: the step determines which examples come next."""
        return {"examples": {"count": len(self.order.examples), "batch_size": self.order.batch_size}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def check_fingerprint(self, saved: Mapping[str, Any]) -> list[str]:
        return check_fingerprint(saved, self.fingerprint)

    def summary(self, path: Path, total_steps: int) -> str:
        c, facts = self.config, self.roles.facts()
        lines = [
            f"{self._task(f'{c.actor_rollout_ref.model.path} ({model_size(facts)})')} of {c.data.train_files}, "
            f"{where(facts)}",
            f"{total_steps} step{'s' * (total_steps != 1)} of {c.data.train_batch_size} out of "
            f"{len(self.order.examples):,} {self.rows_name}, {len(self.held_out):,} held out; files in {path}",
            *self.notes,
        ]
        return "\n".join(lines) + layout_note(facts)

    def _task(self, model: str) -> str:
        """What is trained on what, for the summary."""
        return f"{model} on the answers"

    def stacks(self) -> str:
        return self.roles.stacks()

    def kill(self) -> None:
        """Nothing to end: ranks of torchrun end with their launcher."""

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.roles.close)
            for part in (self.scorer, self.engine):
                if part is not None:
                    stack.callback(part.close)


def build_supervised(
    config: TrainerConfig,
    inputs: Inputs = NOTHING,
    *,
    weights_from: Path | None = None,
    backend: Backend | None = None,
    progress: Callable[[str | None], None] = lambda what: None,
) -> SupervisedParts:
    """Everything a supervised run needs. The data is read before the weights are loaded; `progress` gets what is being done."""
    progress("reading the data")
    import_plugins(config.trainer.plugins)
    device = prepare_process(config)
    tokenizer = inputs.tokenizer or load_run_tokenizer(config)
    notes: list[str] = []
    train, val = given_datasets(
        config, example_columns(config), inputs.train_dataset, inputs.val_dataset, say=notes.append
    )
    examples, num_left_out = load_examples(config, tokenizer, "train", train, say=notes.append)
    held_out = held_out_rows(
        config, val, lambda: load_examples(config, tokenizer, "val", val)[0], notes, SupervisedParts.rows_name
    )
    if num_left_out:
        limit = f"data.max_length={config.data.max_length} tokens"
        notes.insert(0, f"{num_left_out:,} examples are longer than {limit} and are left out")
    _check_positions(config, [*examples, *held_out])
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    order = ExampleOrder(examples, config.data.train_batch_size, seed=seed, shuffle=config.data.shuffle)
    num_steps = total_steps(config, len(examples))
    with_answers = config.trainer.val_accuracy and bool(held_out)
    with ExitStack() as started:  # ends what runs already when a later part cannot be built
        scorer = build_scorer(config, inputs.val_reward_fn or inputs.reward_fn, held_out=True) if with_answers else None
        if scorer is not None:
            started.callback(scorer.close)
        engine_tokenizer = tokenizer if with_answers else None
        progress("loading the model")
        roles, build_engine = build_models(config, engine_tokenizer, device, num_steps, weights_from, backend)
        started.callback(roles.close)
        facts = fingerprint(config, roles.facts(), example_rows(order), num_steps, trained_on="answers")
        parts = SupervisedParts(config, tokenizer, roles, order, held_out, num_steps, facts, notes=notes)
        if scorer is not None:
            parts.scorer, parts.engine = scorer, build_engine()
            parts.evaluator = _evaluator(config, inputs, tokenizer, parts.engine, scorer)
        started.pop_all()
        progress(None)
        return parts


def held_out_rows(
    config: TrainerConfig, given: Iterable[Any] | None, load: Callable[[], list[T]], notes: list[str], name: str
) -> list[T]:
    """The held-out examples or pairs. Only those that the user names must exist; a note says why there are none."""
    try:
        return load()
    except DataError as error:
        if given is not None or config.data.val_files is not None or held_out_share(config) is not None:
            raise
        notes.append(f"no held-out {name}: {error}")
        return []


def _check_positions(config: TrainerConfig, examples: Sequence[Example]) -> None:
    """Refuse examples that are longer than the model's context."""
    c = config.actor_rollout_ref.model
    model = load_config(c.path, c.override_config, trust_remote_code=c.trust_remote_code).get_text_config()
    limit, longest = getattr(model, "max_position_embeddings", None), max(examples, key=lambda e: e.num_tokens)
    if limit is not None and longest.num_tokens > limit:
        raise DataError(
            longest.prompt.uid,
            f"is {longest.num_tokens} tokens with its answer; the model has max_position_embeddings={limit}. Set "
            f"data.max_length to at most {limit}",
        )


def _evaluator(
    config: TrainerConfig, inputs: Inputs, tokenizer: Any, engine: RolloutEngine, scorer: Scorer
) -> Evaluator:
    """Answers the held-out prompts and grades the answers."""
    _, given = given_datasets(config, prompt_columns(config), inputs.train_dataset, inputs.val_dataset, say=None)
    prompts = load_prompts(config, tokenizer, "val", given)
    if not names_reward(config, inputs.val_reward_fn or inputs.reward_fn):
        check_code_tests(prompts)
    return build_evaluator(config, engine, scorer, prompts)
