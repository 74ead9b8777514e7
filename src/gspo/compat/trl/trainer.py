"""TRL's GRPOTrainer: its arguments, its defaults, and `train()`."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.compat.trl.config import OF_TRAINER, fields_of
from gspo.config import load
from gspo.config.compat.trl_values import reward_entry
from gspo.paths import user_path
from gspo.rewards.functions import RewardFunction, RewardSpec, wrap_function

if TYPE_CHECKING:
    from gspo.loop.trainer import Trainer

RewardFunc = Callable[..., Any] | str

# Arguments of TRL's class that are refused, and what to do instead.
REFUSED = {
    "rollout_func": "register an engine (gspo.engine) and name it in rollout.name",
    "tools": "a response is one turn; remove it",
    "environment_factory": "a response is one turn; remove it",
    "quantization_config": "models are trained in bfloat16 or float32; remove it",
}
WITHOUT_EFFECT = {
    "reward_processing_classes": "reward functions get texts, and a reward model has its own tokenizer",
    "callbacks": "callbacks of transformers do not apply; pass gspo.Callback objects to gspo.Trainer",
    "optimizers": "the optimiser is AdamW with the schedule of lr_scheduler_type",
}


class GRPOTrainer:
    """Trains with TRL's arguments: `GRPOTrainer(model=…, reward_funcs=…, args=…, train_dataset=…).train()`.

    `model` is a folder, a hub name or a transformers model. `args` is a GRPOConfig; what it does not set has TRL's
    default. Rows have a `prompt` and any other columns, which reward functions get by name. Nothing is loaded before
    `train`. The run folder is below `output_dir`.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: Any = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Iterable[Any] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        given = {
            "rollout_func": rollout_func,
            "tools": tools,
            "environment_factory": environment_factory,
            "quantization_config": quantization_config,
        }
        for name, value in given.items():
            if value is not None:
                raise TypeError(f"{name} is not supported: {REFUSED[name]}")
        unused = {"reward_processing_classes": reward_processing_classes, "callbacks": callbacks}
        unused["optimizers"] = None if optimizers in (None, (None, None)) else optimizers
        for name, value in unused.items():
            if value:
                warnings.warn(f"{name} has no effect: {WITHOUT_EFFECT[name]}", stacklevel=2)
        if train_dataset is None:
            raise ValueError("train_dataset is None: expected rows with a `prompt`")
        fields = fields_of(args)
        weights = fields.pop("reward_weights", None)
        settings = {name: value for name, value in fields.items() if value is not None and name not in OF_TRAINER}
        settings |= _adapter_settings(peft_config)
        settings["actor_rollout_ref.model.path"] = _model_path(model, settings.get("output_dir") or "trainer_output")
        functions, models = _rewards(reward_funcs, weights)
        if models:
            settings["reward.functions"] = models
        self.args = args
        self.config = load(base=settings, system="TRL")
        self._arguments = {
            "reward_fn": functions or None,
            "train_dataset": [dict(row) for row in train_dataset],
            "val_dataset": None if eval_dataset is None else [dict(row) for row in eval_dataset],
            "tokenizer": processing_class,
        }
        self._trainer: Trainer | None = None
        self._run: Path | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None) -> dict[str, Any]:
        """Train to the end. Returns the result that `gspo train` prints."""
        from gspo.loop.trainer import Trainer

        config = self.config
        if resume_from_checkpoint:
            mode = "auto" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            config = load(base=config, overrides=[f"trainer.resume_mode={mode}"], system="TRL")
        trainer = Trainer(config, **self._arguments)
        self._run = trainer.run.path
        return trainer.fit()

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the last checkpoint's model, an ordinary transformers folder, to `output_dir`."""
        if self._run is None:
            raise RuntimeError("save_model comes after train")
        newest = max((self._run / "checkpoints").glob("step-*"))
        target = user_path(output_dir or self.config.config.trainer.default_local_dir)
        target.mkdir(parents=True, exist_ok=True)
        for file in newest.iterdir():
            if file.is_file():
                shutil.copy2(file, target / file.name)


def _rewards(
    functions: Any, weights: Sequence[float] | None
) -> tuple[list[RewardFunction | RewardSpec], list[dict[str, Any]]]:
    """Reward functions with their weights, and reward models as entries of `reward.functions`.

    A text is the name of a built-in reward, `file.py:function`, or the hub name or folder of a reward model.
    """
    if functions is None:
        raise ValueError("reward_funcs is None: expected a function or a list of functions")
    items = list(functions) if isinstance(functions, list | tuple) else [functions]
    factors = [1.0] * len(items) if weights is None else list(weights)
    if len(factors) != len(items):
        raise ValueError(f"reward_weights has {len(factors)} numbers, reward_funcs {len(items)} functions")
    found = [_reward(item, float(weight)) for item, weight in zip(items, factors)]
    models = [item for item in found if isinstance(item, dict)]
    return [item for item in found if not isinstance(item, dict)], models


def _reward(item: Any, weight: float) -> RewardFunction | RewardSpec | dict[str, Any]:
    if isinstance(item, str):
        entry = reward_entry(item)
        if "model" in entry:
            return {**entry, "weight": weight}
        return RewardSpec(entry["name"], path=entry.get("path"), weight=weight)
    if not callable(item) or hasattr(item, "state_dict"):
        raise TypeError(f"reward_funcs: {type(item).__name__} is not a function; give a reward model by its path")
    return wrap_function(item, weight=weight)


def _model_path(model: Any, output_dir: str) -> str:
    """The folder or hub name of a model; a model in memory is written below `output_dir` first."""
    if isinstance(model, str | Path):
        return str(model)
    if not hasattr(model, "save_pretrained"):
        raise TypeError(f"model={model!r}: expected a folder, a hub name or a transformers model")
    folder = user_path(output_dir) / "initial_model"
    model.save_pretrained(folder)
    return str(folder)


def _adapter_settings(peft: Any) -> dict[str, Any]:
    """peft's LoraConfig as keys; {} without one."""
    if peft is None:
        return {}
    if not hasattr(peft, "r") or not hasattr(peft, "lora_alpha"):
        raise TypeError(f"peft_config={type(peft).__name__}: only LoraConfig is supported")
    model = "actor_rollout_ref.model"
    modules = peft.target_modules
    settings = {f"{model}.lora_rank": peft.r, f"{model}.lora_alpha": float(peft.lora_alpha)}
    if modules is not None:
        settings[f"{model}.target_modules"] = modules if isinstance(modules, str) else sorted(modules)
    return settings
