"""Loading: layers of settings → one typed, checked config in which every value knows its origin."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gspo.config.checks import rules, supervised
from gspo.config.compat.aliases import aliases
from gspo.config.compat.defaults import SYSTEM_DEFAULTS
from gspo.config.loading import names, tree
from gspo.config.loading.coerce import WrongType, coerce
from gspo.config.loading.derive import derive, follow_batch_size
from gspo.config.loading.flags import read_flags
from gspo.config.loading.settings import Layer, Origin, Setting, Settings
from gspo.config.loading.sources import (
    EMBEDDED,
    embedded_recipe,
    named_recipe,
    read_overrides,
    read_python,
    read_yaml,
    sft_recipe,
    without_deleted,
)
from gspo.config.loading.tree import Leaf
from gspo.config.problems import ConfigErrors, Problem
from gspo.config.schema import TrainerConfig
from gspo.config.schema.fields import mark_explicit
from gspo.config.text.show import scalar, to_yaml
from gspo.plugins import import_installed

MODEL = "actor_rollout_ref.model.path"
# Key → the registry of its names: module and attribute.
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
    for_sft: bool = False  # made by `load_supervised`
    system: str | None = None  # whose defaults fill in what nobody set

    def origin(self, key: str) -> str:
        """Where the value of a key came from: `default`, `recipe embedded`, `file:line`, `flag --…`."""
        return self.origins[key].text

    def get(self, key: str) -> Any:
        """The value of a dotted key."""
        return tree.get(self.config, key)

    def settings(self) -> list[Setting]:
        """Every key with its value and origin."""
        return [Setting(key, self.get(key), origin) for key, origin in self.origins.items()]

    def to_dict(self) -> dict[str, Any]:
        """The whole tree as nested dictionaries."""
        return dataclasses.asdict(self.config)

    def records(self) -> list[dict[str, Any]]:
        """Every key as `{"key", "value", "origin"}`, in the order of the schema."""
        return [{"key": key, "value": self.get(key), "origin": self.origin(key)} for key in tree.leaves()]

    def auto_keys(self) -> list[str]:
        """The keys that are adapted to the data and the machine because nobody set them."""
        return [key for key, leaf in tree.leaves().items() if leaf.info.auto and not self.origins[key].explicit]

    def keeping_sizes(self, saved: Mapping[str, Any]) -> ResolvedConfig:
        """The config with the saved values (by dotted key) of sizes that nobody set, so that a run goes on as it began."""
        other = {key: saved[key] for key in self.auto_keys() if key in saved and saved[key] != self.get(key)}
        return self.adapted(other, "as in the checkpoint") if other else self

    def adapted(self, values: Mapping[str, Any], reason: str) -> ResolvedConfig:
        """The config with other values of keys that nobody set, and of those that follow from them; checked again."""
        table = Settings((s.name, s) for s in self.settings())
        for key, value in values.items():
            table.derive(key, value, reason)
        follow_batch_size(table)
        config = _build(table)
        found = rules.check(config, table, rules.SUPERVISED_RULES if self.for_sft else rules.RULES)
        if any(p.level == "error" for p in found):
            raise ConfigErrors(found)
        known = {str(warning) for warning in self.warnings}
        warnings = (*self.warnings, *(p for p in found if str(p) not in known))
        return ResolvedConfig(config, {k: s.origin for k, s in table.items()}, warnings, self.for_sft, self.system)

    def to_yaml(self, with_origins: bool = True) -> str:
        """The whole tree as YAML that loads again; origins are comments."""
        return to_yaml(self, with_origins)


def load(
    config_path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Sequence[str] = (),
    *,
    base: TrainerConfig | ResolvedConfig | Mapping[str, Any] | None = None,
    recipe: str | Path | None = None,
    system: str | None = None,
) -> ResolvedConfig:
    """Resolve defaults < recipe < file < Python (`base`) < flags < overrides. ConfigErrors lists everything wrong.

    `config_path` may also name a recipe of this package, such as `calculator`. `recipe` is a YAML file of defaults. The
    recipe of the embedded model takes precedence over it, but not over a named recipe. `system` is whose program this
    replaces: values that nobody sets are then that system's, where it has others (SYSTEM_DEFAULTS).
    """
    problems: list[Problem] = []
    defaults: list[Setting] = []
    chosen: list[Setting] = []
    if recipe is not None:
        settings = read_yaml(Path(recipe), Layer.RECIPE, problems, f"recipe {Path(recipe).name}")
        defaults = _full_keys(settings, problems)
    if (named := named_recipe(config_path)) is not None:
        chosen = _full_keys(read_yaml(named, Layer.RECIPE, problems, f"recipe {config_path}"), problems)
        config_path = None
    if isinstance(base, ResolvedConfig):
        # Not the embedded model's recipe: whether it applies depends on the model.
        chosen += [s for s in base.settings() if s.origin.layer == Layer.RECIPE and s.origin.text != EMBEDDED]
        system = system or base.system
    written = _read(config_path, overrides, flags, base, problems)
    return _resolve(written, problems, defaults, system or _system_of(written), chosen=chosen)


def resolve_settings(written: list[Setting], system: str | None = None) -> ResolvedConfig:
    """The config of these settings, as `load` resolves those of a file."""
    return _resolve(written, [], [], system or _system_of(written))


def _system_of(written: list[Setting]) -> str | None:
    """AReaL for a file with its sections: its loss has a ratio per token unless the file says otherwise."""
    files = [s.name for s in written if s.origin.layer == Layer.FILE]
    return "AReaL" if any(name == "actor.path" or name.startswith("gconfig.") for name in files) else None


def load_supervised(
    config_path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Sequence[str] = (),
    *,
    base: TrainerConfig | ResolvedConfig | Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """The config of `gspo sft`: as `load`, with that command's defaults. Keys that it does not use keep their defaults."""
    problems: list[Problem] = []
    written = _read(config_path, overrides, flags, base, problems)
    return _resolve(written, problems, sft_recipe(), None, for_sft=True)


def _read(
    config_path: str | Path | None,
    overrides: Sequence[str],
    flags: Sequence[str],
    base: TrainerConfig | ResolvedConfig | Mapping[str, Any] | None,
    problems: list[Problem],
) -> list[Setting]:
    """What a person set: in a file, in Python, by flags and by overrides, in this order."""
    written = [] if config_path is None else read_yaml(Path(config_path), Layer.FILE, problems)
    if isinstance(base, ResolvedConfig):
        written += _read_resolved(base, problems)
    elif base is not None:
        written += read_python(base, problems)
    typed = [*read_flags(flags, problems), *read_overrides(overrides, problems)]
    return [*without_deleted(written, overrides), *typed]


def _read_resolved(base: ResolvedConfig, problems: list[Problem]) -> list[Setting]:
    """What a person set in a resolved config, before it was resolved or by assignment since."""
    found = read_python(base.config, problems)
    before = {key: origin for key, origin in base.origins.items() if origin.explicit}
    return [Setting(s.name, s.value, before.get(s.name, s.origin)) for s in found]


def _full_keys(settings: list[Setting], problems: list[Problem]) -> list[Setting]:
    """The settings of a recipe, which must be under full keys; others go to `problems`."""
    good = []
    for setting in settings:
        name = setting.name
        if tree.leaf_of(name) is not None:
            good.append(setting)
            continue
        alias = aliases().get(name)
        near = alias.target if alias else names.canonical(name) or names.nearest(name)
        problems.append(setting.problem("unknown key; a recipe needs full keys", names.suggestion(near)))
    return good


def _resolve(
    written: list[Setting],
    problems: list[Problem],
    recipe: list[Setting],
    system: str | None,
    *,
    chosen: Sequence[Setting] = (),
    for_sft: bool = False,
) -> ResolvedConfig:
    """The config of what a person wrote, over the recipe `chosen` by name, the embedded model's and `recipe`."""
    table = Settings()
    for key, leaf in tree.leaves().items():
        table.put(key, leaf.default, Origin(Layer.DEFAULT, "default"))
    if not for_sft and _model(written, [*recipe, *chosen]) == "embedded":
        recipe = [*recipe, *embedded_recipe()]
    recipe = [*recipe, *chosen]
    translated, deferred = names.translate(_interpolate(written, recipe, problems), problems)
    usual = SYSTEM_DEFAULTS[system] if system else {}
    others = [Setting(key, value, Origin(Layer.DERIVED, f"default of {system}")) for key, value in usual.items()]
    # Plugins come first: they may bring the names that other keys use.
    for setting in [*recipe, *others, *sorted(translated, key=lambda s: s.name != "trainer.plugins")]:
        _set(table, setting, problems)
    if for_sft:
        problems += supervised.drop_unused(table)
    derive(table, deferred, problems, system)
    if for_sft:  # what was derived for keys that have no effect
        supervised.drop_unused(table)
    config = _build(table)
    problems += _cross_field(config, table, problems, rules.SUPERVISED_RULES if for_sft else rules.RULES)
    if any(p.level == "error" for p in problems):
        raise ConfigErrors(problems)
    return ResolvedConfig(config, {k: s.origin for k, s in table.items()}, tuple(problems), for_sft, system)


def _model(written: list[Setting], recipe: list[Setting]) -> Any:
    """The model path that is set last."""
    settings = [*recipe, *names.translate(_interpolate(written, recipe, []), [])[0]]
    values = [s.value for s in settings if s.name == MODEL]
    return values[-1] if values else tree.leaves()[MODEL].default


def _cross_field(
    config: TrainerConfig, table: Settings, problems: list[Problem], which: Sequence[rules.Rule]
) -> list[Problem]:
    """Problems between keys, without those that name a key whose value was refused before."""
    refused = {p.key for p in problems if p.level == "error"}  # the config does not have their values
    found = rules.check(config, table, which)
    return [p for p in found if refused.isdisjoint({p.key, *re.findall(r"[\w.]*\w", p.message)})]


def _interpolate(written: list[Setting], recipe: list[Setting], problems: list[Problem]) -> list[Setting]:
    """Replace `${…}` by the value it refers to, which may be set in any layer and under any name."""
    if not any("${" in str(s.value) for s in written):
        return written
    scope = OmegaConf.create({})
    for key, leaf in tree.leaves().items():
        OmegaConf.update(scope, key, leaf.default, force_add=True)
    plain = [s for s in written if "${" not in str(s.value)]
    for setting in [*recipe, *written, *names.translate(plain, [])[0]]:
        # A name that cannot be in a config is reported as an unknown key later.
        with contextlib.suppress(OmegaConfBaseException, ValueError):
            OmegaConf.update(scope, setting.name, setting.value, merge=False, force_add=True)
    resolved = []
    for setting in written:
        if "${" not in str(setting.value):
            resolved.append(setting)
            continue
        try:
            OmegaConf.update(scope, setting.name, setting.value, merge=False, force_add=True)
            value = OmegaConf.select(scope, setting.name, throw_on_missing=True)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, ValueError) as error:
            problems.append(setting.problem(str(error).splitlines()[0], "let ${…} refer to a key that is set"))
            continue
        resolved.append(Setting(setting.name, value, setting.origin))
    return resolved


def _set(table: Settings, setting: Setting, problems: list[Problem]) -> None:
    """Put a setting into the table, checked against the key's type, choices and bounds."""
    leaf = tree.leaf_of(setting.name)
    assert leaf is not None, setting.name
    value = setting.value
    if leaf.key != setting.name:  # a key inside a mapping
        value = _put_nested(table[leaf.key].value, setting.name[len(leaf.key) + 1 :], value)

    if leaf.info.auto and value == "auto":
        table.put(leaf.key, leaf.default, Origin(Layer.DEFAULT, "auto"))
        return

    def error(message: str, remedy: str) -> None:
        problems.append(Problem("error", leaf.key, value, setting.origin.text, message, remedy))

    try:
        value = coerce(_as_word(value, setting.text, leaf), leaf.type)
    except WrongType:
        error(f"expected {leaf.type_name}, found {type(value).__name__}", _example(leaf))
        return
    violation = leaf.info.violation(value)
    if violation and not (leaf.info.open and _are_registered(leaf.key, value, leaf.info.choices, table)):
        default = f"remove it to use the default, {scalar(leaf.default)}"
        error(violation, names.nearest_choice(value, leaf.info.choices) or default)
        return
    table.put(leaf.key, value, setting.origin)


def _as_word(value: Any, text: str | None, leaf: Leaf) -> Any:
    """Undo YAML's conversion of a word to another type, such as `off` to false or `007` to 7, where the key is a text."""
    if isinstance(value, bool) and (word := "on" if value else "off") in leaf.info.choices:
        return word
    types = (leaf.type, *get_args(leaf.type))
    is_number = isinstance(value, bool | int | float)
    return text if is_number and text is not None and str in types and not {int, float} & set(types) else value


def _example(leaf: Leaf) -> str:
    """How a value of the right type is written: the key's example or default."""
    return "e.g. " + shlex.quote(f"{leaf.key}={leaf.info.example or scalar(leaf.default)}")


def _are_registered(key: str, value: str | list[str], built_in: Sequence[str], table: Settings) -> bool:
    """Whether names that are not built in exist, or may exist once `trainer.plugins` are imported."""
    if table["trainer.plugins"].value:
        return True
    others = [name for name in (value if isinstance(value, list) else [value]) if name not in built_in]
    unknown = [name for name in others if not (":" in name and key in REFERENCES)]
    if not unknown:
        return True
    import_installed()
    module, registry = REGISTRIES[key]
    return module in sys.modules and set(unknown) <= set(getattr(sys.modules[module], registry).names())


def _put_nested(mapping: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `mapping` with `value` at a dotted path."""
    head, _, rest = path.partition(".")
    inner = mapping.get(head)
    return {**mapping, head: _put_nested(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def _build(table: Settings) -> TrainerConfig:
    """The typed config. Exactly the keys that a person set count as explicit, so that loading it again changes nothing."""
    config = TrainerConfig()
    for key, setting in table.items():
        tree.put(config, key, setting.value)
    for name in tree.sections():
        mark_explicit(tree.get(config, name), ())
    for key, setting in table.items():
        if setting.origin.explicit:
            tree.put(config, key, setting.value)  # assigning marks it
    return config
