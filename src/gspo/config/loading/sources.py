"""Where settings come from: the embedded recipe, a YAML file, flags, `key=value` overrides, Python objects."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gspo.config.loading import tree
from gspo.config.problems import Problem
from gspo.config.schema.fields import Section, given

RECIPE = Path(__file__).parents[1] / "embedded.yaml"
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


class Layer(IntEnum):
    """Who wins: a later layer replaces an earlier one."""

    DEFAULT = 0
    RECIPE = 1
    DERIVED = 2
    FILE = 3
    PYTHON = 4
    FLAG = 5
    OVERRIDE = 6


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from, in words."""

    layer: Layer
    text: str

    @property
    def explicit(self) -> bool:
        """Someone typed it, as opposed to a default, a recipe or a consequence of other keys."""
        return self.layer >= Layer.FILE


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting as written: the name used, the value, where, and the text when it was typed on a command line."""

    name: str
    value: Any
    origin: Origin
    text: str | None = None


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    leaf = tree.leaves().get(prefix.rstrip("."))
    if isinstance(node, dict) and not (leaf and leaf.is_mapping):
        for name, value in node.items():
            yield from _flatten(value, f"{prefix}{name}.")
    else:
        yield prefix.rstrip("."), node


def _lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = f"{prefix}{name.value}"
            yield key, name.start_mark.line + 1
            yield from _lines(value, f"{key}.")


def read_yaml(path: Path, layer: Layer, label: str | None = None) -> tuple[list[Entry], list[Problem]]:
    """The settings of a YAML file with their lines, or the problem that kept it from being read."""

    def failed(message: str, remedy: str) -> tuple[list[Entry], list[Problem]]:
        return [], [Problem("error", str(path), None, "config file", message, remedy)]

    if not path.is_file():
        others = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, others, n=1)
        hint = (
            f"did you mean {path.parent / near[0]}?"
            if near
            else "check the path; overrides are written key=value"
        )
        return failed("no such file", hint)
    try:
        text = path.read_text(encoding="utf-8")
        loaded = OmegaConf.create(text) if text.strip() else OmegaConf.create({})
        content = OmegaConf.to_container(loaded, resolve=False)
        lines = dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader)))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, ValueError) as error:
        reason = " ".join(str(error).split())
        return failed(
            f"not readable as YAML: {reason}",
            "fix the line named; only plain YAML is loaded, no Python objects",
        )
    if not isinstance(content, dict):
        return failed(
            f"expected a mapping of keys, found a {type(content).__name__}", "write `section: {key: value}`"
        )
    entries = []
    for name, value in _flatten(content):
        where = label or (f"{path}:{lines[name]}" if name in lines else str(path))
        entries.append(Entry(name, value, Origin(layer, where)))
    return entries, []


def parse_value(text: str) -> Any:
    """A value as typed on a command line: YAML, with `${…}` left as it is. ValueError when it is no YAML."""
    if "${" in text:
        return text
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"v={text}"]), resolve=False)["v"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"not readable as YAML: {' '.join(str(error).split())}") from None


def read_overrides(overrides: Sequence[str]) -> tuple[list[Entry], list[Problem]]:
    """Settings from `key=value` and `+key=value`."""
    entries, problems = [], []
    for text in overrides:
        origin = Origin(Layer.OVERRIDE, f"override {text}")
        match = OVERRIDE.fullmatch(text)
        if match is None:
            remedy = (
                "remove it; a key cannot be deleted"
                if text.startswith("~")
                else "write key=value, or --flag value"
            )
            problems.append(Problem("error", text, None, "command line", "not an override", remedy))
            continue
        try:
            entries.append(Entry(match[1], parse_value(match[2]), origin, match[2]))
        except ValueError as error:
            problems.append(Problem("error", match[1], match[2], origin.text, str(error), "quote it"))
    return entries, problems


def read_python(config: Section | Mapping[str, Any]) -> list[Entry]:
    """The fields that were given when the config was built in Python, or assigned since; or a mapping's items."""
    origin = Origin(Layer.PYTHON, "Python")
    if not isinstance(config, Section):
        content = OmegaConf.to_container(OmegaConf.create(config), resolve=False)  # type: ignore[call-overload]
        return [Entry(name, value, origin) for name, value in _flatten(content)]

    def walk(part: Section, prefix: str) -> Iterator[Entry]:
        own = given(part)
        for name in part.__dict__:
            value = part.__dict__[name]
            if isinstance(value, Section):
                yield from walk(value, f"{prefix}{name}.")
            elif name in own and isinstance(value, dict) and f"{prefix}{name}" in tree.sections():
                yield from (Entry(key, inner, origin) for key, inner in _flatten(value, f"{prefix}{name}."))
            elif name in own:
                yield Entry(f"{prefix}{name}", value, origin)

    return list(walk(config, ""))
