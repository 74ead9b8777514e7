"""Loading: layers of settings → one typed, checked config in which every value knows its origin."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gspo.config.checks import rules
from gspo.config.loading import derive, names, tree
from gspo.config.loading.coerce import WrongType, coerce
from gspo.config.loading.flags import read_flags
from gspo.config.loading.settings_table import Setting, Settings
from gspo.config.loading.sources import RECIPE, Entry, Layer, Origin, read_overrides, read_python, read_yaml
from gspo.config.loading.tree import Leaf
from gspo.config.problems import ConfigErrors, Problem
from gspo.config.schema import TrainerConfig
from gspo.config.schema.fields import as_default
from gspo.plugins import import_installed

MODEL = "actor_rollout_ref.model.path"
# Keys that are open to names that users register, and where those names are kept.
REGISTRIES = {
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("gspo.algo.losses", "POLICY_LOSSES"),
    "algorithm.adv_estimator": ("gspo.algo.advantages", "ADVANTAGE_ESTIMATORS"),
    "actor_rollout_ref.rollout.name": ("gspo.rollout.workers.worker", "ENGINES"),
    "trainer.logger": ("gspo.runs.sinks", "SINKS"),
}
REFERENCES = ("actor_rollout_ref.rollout.name", "trainer.logger")  # keys that also accept module:function


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked configuration. `config` is the typed tree; `origin(key)` says where a value came from."""

    config: TrainerConfig
    origins: dict[str, Origin]
    warnings: tuple[Problem, ...] = field(default=())

    def origin(self, key: str) -> str:
        """Where the value of a key came from, in words: `default`, `recipe embedded`, `file:line`, `flag --…`."""
        return self.origins[key].text

    def get(self, key: str) -> Any:
        """The value of a dotted key."""
        return tree.get(self.config, key)

    def to_dict(self) -> dict[str, Any]:
        """The whole tree as plain nested dictionaries."""
        from gspo.config.text.show import nested

        return nested(self.config)

    def to_yaml(self, with_origins: bool = True) -> str:
        """The whole tree as YAML that loads again; origins are comments."""
        from gspo.config.text.show import to_yaml

        return to_yaml(self, with_origins)


def load(
    config_path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Sequence[str] = (),
    *,
    base: TrainerConfig | Mapping[str, Any] | None = None,
    recipe: str | Path | None = None,
) -> ResolvedConfig:
    """Resolve defaults < recipe < file < Python (`base`) < flags < overrides; ConfigErrors lists all that is wrong.

    `recipe` is a YAML file of defaults that give way like the embedded model's, which lies above it.
    """
    problems: list[Problem] = []
    written: list[Entry] = []
    defaults: list[Entry] = []
    if recipe is not None:
        defaults, bad = read_yaml(Path(recipe), Layer.RECIPE, f"recipe {Path(recipe).name}")
        problems += bad
    if config_path is not None:
        entries, bad = read_yaml(Path(config_path), Layer.FILE)
        written += entries
        problems += bad
    if base is not None:
        written += read_python(base)
    for reader, tokens in ((read_flags, flags), (read_overrides, overrides)):
        entries, bad = reader(tokens)
        written += entries
        problems += bad
    return _resolve(written, problems, defaults)


def resolve(config: TrainerConfig | Mapping[str, Any]) -> ResolvedConfig:
    """Check a config that was built in Python, as TrainerConfig or a mapping; the recipe fills in what was not given."""
    return load(base=config)


def _resolve(written: list[Entry], problems: list[Problem], defaults: Sequence[Entry] = ()) -> ResolvedConfig:
    settings = Settings()
    for key, leaf in tree.leaves().items():
        settings[key] = Setting(leaf.default, Origin(Layer.DEFAULT, "default"))
    asked, deferred = names.translate(_interpolate(written, problems), problems)
    named = [e.value for e in (*defaults, *asked) if e.name == MODEL]
    model = named[-1] if named else settings[MODEL].value
    recipe = read_yaml(RECIPE, Layer.RECIPE, "recipe embedded")[0] if model == "embedded" else []
    for entry in [*defaults, *recipe] + sorted(asked, key=lambda e: e.name != "trainer.plugins"):
        _set(settings, entry, problems)
    derive.derive(settings, deferred, problems)
    config = _build(settings)
    problems += _cross_field(config, settings, problems)
    if any(p.level == "error" for p in problems):
        raise ConfigErrors(problems)
    return ResolvedConfig(config, {k: s.origin for k, s in settings.items()}, tuple(problems))


def _cross_field(config: TrainerConfig, settings: Settings, problems: list[Problem]) -> list[Problem]:
    """What is wrong between keys, leaving out what only follows from an error already found."""
    bad = [p.key for p in problems if p.level == "error"]  # the config does not hold their values
    return [p for p in rules.check(config, settings) if not any(key in f"{p.key} {p.message}" for key in bad)]


def _interpolate(written: list[Entry], problems: list[Problem]) -> list[Entry]:
    """Replace `${…}` by what it points at, which may be set in any layer and under any name."""
    if not any("${" in str(e.value) for e in written):
        return written
    scope = OmegaConf.create({})
    for key, leaf in tree.leaves().items():
        OmegaConf.update(scope, key, leaf.default, force_add=True)
    plain = [e for e in written if "${" not in str(e.value)]
    for entry in written + names.translate(plain, [])[0]:
        OmegaConf.update(scope, entry.name, entry.value, merge=False, force_add=True)
    resolved = []
    for entry in written:
        value = entry.value
        if "${" in str(value):
            OmegaConf.update(scope, entry.name, value, merge=False, force_add=True)
            try:
                value = OmegaConf.select(scope, entry.name, throw_on_missing=True)
                value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0]
                problems.append(
                    Problem(
                        "error",
                        entry.name,
                        entry.value,
                        entry.origin.text,
                        reason,
                        "point ${…} at a key that is set",
                    )
                )
                continue
        resolved.append(Entry(entry.name, value, entry.origin, entry.text if value is entry.value else None))
    return resolved


def _written(value: Any) -> Any:
    """A default as the user would type it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


def _set(settings: Settings, entry: Entry, problems: list[Problem]) -> None:
    """Put one entry under its canonical name, checked against the key's type, choices and bounds."""
    leaf = tree.leaf_of(entry.name)
    assert leaf is not None, entry.name
    value = entry.value
    if leaf.key != entry.name:  # a key inside a mapping
        value = _put_nested(settings[leaf.key].value, entry.name[len(leaf.key) + 1 :], value)
    try:
        value = coerce(_meant(entry, leaf, value), leaf.type)
    except WrongType:
        message = f"expected {leaf.type_name}, found {type(value).__name__}"
        problems.append(
            Problem(
                "error",
                leaf.key,
                value,
                entry.origin.text,
                message,
                f"e.g. {leaf.key}={_written(leaf.default)}",
            )
        )
        return
    complaint = leaf.info.complaint(value)
    if complaint and not (leaf.info.open and _are_registered(leaf.key, value, leaf.info.choices, settings)):
        remedy = names.nearest_choice(value, leaf.info.choices) or f"the default is {leaf.default}"
        problems.append(Problem("error", leaf.key, value, entry.origin.text, complaint, remedy))
        return
    settings[leaf.key] = Setting(value, entry.origin)


def _meant(entry: Entry, leaf: Leaf, value: Any) -> Any:
    """YAML reads `off` as false and `007` as 7; where the key is a word, the word is meant."""
    if isinstance(value, bool) and (word := "on" if value else "off") in leaf.info.choices:
        return word
    takes = (leaf.type, *getattr(leaf.type, "__args__", ()))
    is_number = isinstance(value, bool | int | float)
    return entry.text if is_number and entry.text is not None and str in takes and int not in takes else value


def _are_registered(key: str, value: str | list[str], built_in: Sequence[str], settings: Settings) -> bool:
    """Whether names beyond the built-in ones exist, or may exist: `trainer.plugins` are imported later."""
    if settings["trainer.plugins"].value:
        return True
    others = [name for name in (value if isinstance(value, list) else [value]) if name not in built_in]
    unknown = [name for name in others if not (":" in name and key in REFERENCES)]
    if not unknown:
        return True
    import_installed()
    module, table = REGISTRIES[key]
    return module in sys.modules and set(unknown) <= set(getattr(sys.modules[module], table).names())


def _put_nested(mapping: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    inner = mapping.get(head)
    return {
        **mapping,
        head: _put_nested(inner if isinstance(inner, dict) else {}, rest, value) if rest else value,
    }


def _build(settings: Settings) -> TrainerConfig:
    config = TrainerConfig()
    for key, setting in settings.items():
        tree.put(config, key, setting.value)
    for name in ["", *tree.sections()]:  # a second resolve must see the same keys as given
        part = tree.get(config, name) if name else config
        own = {f"{name}.{f}" if name else f: f for f in part.__dict__}
        as_default(part, {f for k, f in own.items() if k in settings and settings.explicit(k)})
    return config
