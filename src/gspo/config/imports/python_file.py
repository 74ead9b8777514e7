"""Python files with TRL's `GRPOConfig(…)`: its literal arguments are collected, without running anything."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from gspo.config.imports.found import Found
from gspo.config.loading.settings import Layer, Origin, Setting

MODEL = "actor_rollout_ref.model.path"


def read_python_file(path: Path) -> Found:
    """The fields of every `GRPOConfig(…)` and the model of `GRPOTrainer(…)` in a file."""
    found = Found(system="TRL")
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        name = _name(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name == "GRPOConfig":
            given = [("output_dir", node.args[0])] if node.args else []
            given += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
            for field, value in given:
                _take(found, field, value, constants, path.name)
        elif isinstance(node, ast.Call) and name == "GRPOTrainer":
            models = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "model")]
            for value in models:
                _take(found, MODEL, value, constants, path.name)
    return found


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _take(found: Found, name: str, value: ast.expr, constants: dict[str, ast.expr], file: str) -> None:
    where = f"{file}:{value.lineno}"
    try:
        found.settings.append(Setting(name, _literal(value, constants), Origin(Layer.FILE, where)))
    except ValueError:
        found.unknown.append(f"{where}: {name}: its value is known only when the script runs")


def _literal(value: ast.expr, constants: dict[str, ast.expr]) -> Any:
    if isinstance(value, ast.Name) and value.id in constants:
        value = constants[value.id]
    return ast.literal_eval(value)
