"""A resolved config as YAML and as differences from the defaults."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from gspo.config.loading import tree

if TYPE_CHECKING:
    from gspo.config.loading.resolve import ResolvedConfig

ESCAPED = re.compile("[^\\x20-\\x7e\\xa0-\\u2027\\u202a-\\ud7ff\\ue000-\\ufefe\\uff00-\\ufffd\\U00010000-\\U0010ffff]")


def scalar(value: Any) -> str:
    """A value as one line of YAML that reads back as the same value and type."""
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, list):
        return f"[{', '.join(scalar(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_quoted(str(k))}: {scalar(v)}' for k, v in value.items())}}}"
    return _quoted(value)


def _quoted(value: Any) -> str:
    """A string, number, boolean or None as YAML reads it back; characters that YAML refuses or folds are escaped."""
    return ESCAPED.sub(lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))


def to_yaml(resolved: ResolvedConfig, with_origins: bool = True, only: set[str] | None = None) -> str:
    """The config as YAML, each value with its origin as a comment; `only` limits it to some keys."""
    lines: list[str] = []
    opened: tuple[str, ...] = ()
    for key in tree.leaves():
        if only is not None and key not in only:
            continue
        *path, name = key.split(".")
        shared = 0
        while shared < min(len(path), len(opened)) and path[shared] == opened[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{path[depth]}:" for depth in range(shared, len(path))]
        opened = tuple(path)
        line = f"{'  ' * len(path)}{name}: {scalar(resolved.get(key))}"
        lines.append(f"{line}  # {resolved.origin(key)}" if with_origins else line)
    return "\n".join(lines) + "\n"


def changed(resolved: ResolvedConfig) -> set[str]:
    """The keys whose value is not the default."""
    return {key for key, leaf in tree.leaves().items() if resolved.get(key) != leaf.default}
