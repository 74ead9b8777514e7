"""The sources of settings: the embedded recipe, a YAML file, `key=value` overrides, Python objects."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gspo import untrusted
from gspo.config.compat.aliases import aliases
from gspo.config.loading import tree
from gspo.config.loading.settings import Layer, Origin, Setting
from gspo.config.problems import Problem
from gspo.config.schema.fields import Section, explicit_fields

RECIPE = Path(__file__).parents[1] / "embedded.yaml"
SFT_RECIPE = Path(__file__).parents[1] / "sft.yaml"
NAMED_RECIPES = Path(__file__).parents[1] / "recipes"
WHOLE = ("model_init_kwargs",)  # mappings of other systems that one function converts
EMBEDDED = "recipe embedded"  # the origin of the embedded model's defaults
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings; a key whose value is itself a mapping is kept whole."""
    name = prefix.rstrip(".")
    leaf = tree.leaves().get(aliases()[name].target if name in aliases() else name)
    if isinstance(node, dict) and not (leaf and leaf.is_mapping) and name not in WHOLE:
        for name, value in node.items():
            yield from _flatten(value, f"{prefix}{name}.")
    else:
        yield prefix.rstrip("."), node


def _lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Dotted keys of a YAML document with their line numbers."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = f"{prefix}{name.value}"
            yield key, name.start_mark.line + 1
            yield from _lines(value, f"{key}.")


def read_yaml(path: Path, layer: Layer, problems: list[Problem], label: str | None = None) -> list[Setting]:
    """The settings of a YAML file, with their lines unless they have a `label`."""

    def failed(message: str, remedy: str) -> list[Setting]:
        problems.append(Problem("error", str(path), None, "config file", message, remedy))
        return []

    if not path.exists() and not path.is_symlink():
        others = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, [*others, *named_recipes()], n=1)
        hint = f"check the path, write key=value to set a key, or name a recipe: {', '.join(named_recipes())}"
        return failed("no such file", f"did you mean {path.parent / near[0]}?" if near else hint)
    if path.suffix == ".py":
        return failed("is a Python file; expected YAML", f"for a reward, set custom_reward_function.path={path}")
    try:
        text = untrusted.read_bytes(path, untrusted.MAX_YAML).decode("utf-8")
        untrusted.check_yaml(text, path)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.ScalarNode):  # OmegaConf reads a text as a key without a value
            return failed("expected a mapping of keys, found a single value", "write `section: {key: value}`")
        content = OmegaConf.to_container(OmegaConf.create(text if node is not None else {}), resolve=False)
        lines = dict(_lines(node))
    except untrusted.Unreadable as error:
        has_tab = "cannot start any token" in error.reason and "\t" in path.read_text(errors="replace")
        plain = "give a plain YAML file of keys and values"
        return failed(error.reason, "indent with spaces, not with tabs" if has_tab else plain)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, ValueError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())
        remedy = "fix the line named above; only plain YAML is accepted, no Python objects"
        return failed(f"cannot be read as YAML: {reason}", remedy)
    if not isinstance(content, dict):
        return failed(f"expected a mapping of keys, found a {type(content).__name__}", "write `section: {key: value}`")
    settings = []
    for name, value in _flatten(content):
        where = label or (f"{path}:{lines[name]}" if name in lines else str(path))
        settings.append(Setting(name, value, Origin(layer, where)))
    return settings


def named_recipes() -> dict[str, Path]:
    """The recipes in this package that `gspo train NAME` runs, and their files."""
    return {"arithmetic": RECIPE} | {path.stem: path for path in sorted(NAMED_RECIPES.glob("*.yaml"))}


def named_recipe(name: str | Path | None) -> Path | None:
    """The file of a named recipe; None for anything else. A file of that name in the working directory comes first."""
    return None if name is None or Path(name).exists() else named_recipes().get(str(name))


def embedded_recipe() -> list[Setting]:
    """The defaults of a run with the embedded model."""
    return _package_recipe(RECIPE, EMBEDDED)


def sft_recipe() -> list[Setting]:
    """The defaults of `gspo sft`."""
    return _package_recipe(SFT_RECIPE, "recipe sft")


def _package_recipe(path: Path, label: str) -> list[Setting]:
    """The settings of a recipe in this package. Without them a run would silently use other defaults."""
    problems: list[Problem] = []
    settings = read_yaml(path, Layer.RECIPE, problems, label)
    if problems or not settings:
        reason = problems[0] if problems else f"{path} is empty"
        raise RuntimeError(f"the recipe of gspo is missing or broken; reinstall gspo\n{reason}")
    return settings


def parse_value(text: str) -> Any:
    """A value from a command line, read as YAML; `${…}` stays as it is. ValueError when it is not YAML."""
    if "${" in text:
        return text
    try:
        untrusted.check_yaml(text, "the value")
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"v={text}"]), resolve=False)["v"]  # type: ignore[index,call-overload]
    except untrusted.Unreadable as error:
        raise ValueError(error.reason) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"cannot be read as YAML: {' '.join(str(error).split())}") from None


def read_overrides(overrides: Sequence[str], problems: list[Problem]) -> list[Setting]:
    """Settings from `key=value` and `+key=value`. `~key` is for `deleted`."""
    if isinstance(overrides, str) or not all(isinstance(text, str) for text in overrides):
        raise TypeError(f'overrides: expected a list of texts such as "trainer.seed=1", found {overrides!r}')
    settings = []
    for text in overrides:
        origin = Origin(Layer.OVERRIDE, f"override {text}")
        match = OVERRIDE.fullmatch(text)
        if match is None:
            if not text.startswith("~"):
                remedy = "write key=value, or --flag value"
                problems.append(Problem("error", text, None, "command line", "expected key=value", remedy))
            continue
        try:
            settings.append(Setting(match[1], parse_value(match[2]), origin, match[2]))
        except ValueError as error:
            problems.append(Problem("error", match[1], match[2], origin.text, str(error), "put the value in quotes"))
    return settings


def without_deleted(written: list[Setting], overrides: Sequence[str]) -> list[Setting]:
    """The settings without those that Hydra's `~key` or `~key=value` removes, a section with all its keys."""
    names = {text[1:].partition("=")[0] for text in overrides if text.startswith("~")}
    return [s for s in written if not any(s.name == name or s.name.startswith(f"{name}.") for name in names)]


def read_python(config: Section | Mapping[str, Any], problems: list[Problem]) -> list[Setting]:
    """The explicitly set fields of a config built in Python, or the items of a mapping."""
    origin = Origin(Layer.PYTHON, "Python")
    if not isinstance(config, Section):
        if not isinstance(config, Mapping):
            raise TypeError(
                f"config: expected a TrainerConfig, a mapping of keys or what gspo.load_config returns, found {config!r}"
                + ("; gspo.load_config and gspo.train read a file" if isinstance(config, str | Path) else "")
            )
        try:
            content = OmegaConf.to_container(OmegaConf.create(config), resolve=False)  # type: ignore[call-overload]
        except OmegaConfBaseException as error:
            message, remedy = str(error).splitlines()[0], "give plain values: numbers, texts, lists, mappings"
            problems.append(Problem("error", str(error.full_key or "config"), None, origin.text, message, remedy))
            return []
        return [Setting(name, value, origin) for name, value in _flatten(content)]

    def walk(part: Section, prefix: str) -> Iterator[Setting]:
        explicit = explicit_fields(part)
        for name in part.__dict__:
            value = part.__dict__[name]
            if isinstance(value, Section):
                yield from walk(value, f"{prefix}{name}.")
            elif name in explicit and isinstance(value, dict) and f"{prefix}{name}" in tree.sections():
                yield from (Setting(key, inner, origin) for key, inner in _flatten(value, f"{prefix}{name}."))
            elif name in explicit:
                yield Setting(f"{prefix}{name}", value, origin)

    return list(walk(config, ""))
