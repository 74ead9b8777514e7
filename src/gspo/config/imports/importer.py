"""From a file of another system to YAML of ours, with a comment for what means something else or nothing here."""

from __future__ import annotations

from pathlib import Path

from gspo.config.imports.found import Found
from gspo.config.imports.python_file import read_python_file
from gspo.config.imports.shell import read_shell
from gspo.config.loading import names
from gspo.config.loading.resolve import ResolvedConfig, resolve_settings
from gspo.config.loading.settings import Layer, Setting
from gspo.config.loading.sources import read_yaml
from gspo.config.problems import ConfigErrors, Problem
from gspo.config.text.show import to_yaml

READERS = {".sh": read_shell, ".py": read_python_file}


def import_file(path: Path) -> str:
    """The YAML of a shell script, a Python file or a YAML file of another system. ConfigErrors if it sets nothing."""
    found = _read(path)
    if not found.settings:
        message = "sets no key that is known without running it"
        raise ConfigErrors([Problem("error", str(path), None, "file", message, "pass its keys to `gspo train`")])
    resolved, dropped = _resolve(found)
    lines = [f"# Imported from {path.name}. Check it with: gspo train THIS_FILE --dry-run"]
    lines += _comments("Not known without running it:", found.unknown)
    lines += _comments("Not supported, and left out:", [_text(p) for p in dropped])
    lines += _comments("Without effect, or with another meaning:", [_text(p) for p in resolved.warnings])
    return "\n".join(lines) + "\n" + to_yaml(resolved, only=_written(resolved))


def _read(path: Path) -> Found:
    if path.suffix in READERS:
        return READERS[path.suffix](path)
    problems: list[Problem] = []
    settings = read_yaml(path, Layer.FILE, problems)
    if problems:
        raise ConfigErrors(problems)
    return Found(settings)


def _resolve(found: Found) -> tuple[ResolvedConfig, list[Problem]]:
    """The config without the settings that are refused, and why each is."""
    settings, dropped = found.settings, []
    while True:
        try:
            return resolve_settings(settings, found.system), dropped
        except ConfigErrors as errors:
            refused = {p.key for p in errors.errors}
            kept = [s for s in settings if refused.isdisjoint({s.name, *_targets(s)})]
            if len(kept) == len(settings):
                raise
            settings, dropped = kept, [*dropped, *errors.errors]


def _targets(setting: Setting) -> set[str]:
    """Our keys that a setting sets."""
    return {s.name for s in names.translate([setting], [])[0]}


def _written(resolved: ResolvedConfig) -> set[str]:
    """The keys that the file sets, and those in which its system's defaults differ from ours."""
    own = {key for key, origin in resolved.origins.items() if origin.explicit}
    return own | {key for key, origin in resolved.origins.items() if origin.text.startswith("default of ")}


def _comments(title: str, texts: list[str]) -> list[str]:
    return [f"# {title}", *(f"#   {text}" for text in texts)] if texts else []


def _text(problem: Problem) -> str:
    remedy = f" ({problem.remedy})" if problem.remedy else ""
    value = "" if problem.value is None else f" = {problem.value}"
    return " ".join(f"{problem.key}{value}: {problem.message}{remedy}".split())
