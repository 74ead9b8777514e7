"""Imports point one way. The table below is the whole order; the same graph is drawn in docs/architecture.md."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

import gspo

SOURCE = Path(gspo.__file__).parent
MAX_MODULES = 15  # of one folder, beside its __init__.py

BASE = ("types", "metrics", "seeding", "registry", "plugins", "processes", "openmp", "exit_codes", "untrusted", "paths")
# Package or module → what it may import beside itself and BASE, lazily or at load time.
ALLOWED: dict[str, set[str]] = {
    **{name: set() for name in BASE},
    "hub": set(),
    "algo": set(),
    "config": {"algo"},  # gspo.algo.settings only: plain data without torch
    "kernels": set(),
    "sandbox": set(),
    "runs": set(),
    "data": {"hub"},
    "models": {"hub", "kernels"},
    "rewards": {"data", "sandbox"},
    "environments": {"rewards", "sandbox"},
    "rollout": {"models", "kernels", "data", "environments", "rewards"},
    "serving": {"data", "environments", "rewards", "rollout"},
    "sampling": {"rollout", "rewards"},
    "evaluation": {"rollout", "rewards", "runs"},
    "checkpoint": {"config", "runs"},
    "training": {"algo", "data", "models", "kernels", "checkpoint", "rewards"},
    "plan": {"config", "models", "kernels", "runs", "sampling"},
    "report": {"runs"},
    "distributed": {"algo", "config", "models", "rollout", "training", "checkpoint"},
    "build": {
        *(
            "algo",
            "config",
            "data",
            "environments",
            "models",
            "kernels",
            "rewards",
            "rollout",
            "sampling",
            "evaluation",
        ),
        *("training", "checkpoint", "distributed", "plan", "serving", "runs"),
    },
    "loop": {
        *("config", "data", "environments", "models", "rewards", "rollout", "sampling", "evaluation", "training"),
        *("checkpoint", "distributed", "build", "runs", "report"),
    },
}
ALGO_LIBRARIES = {"torch"}
TOP = {"checks", "compat", "cluster", "trainer", "commands", "cli", "__main__", "__init__"}


@functools.cache
def imports(path: Path, *, for_type_checkers: bool = False) -> set[str]:
    """Full names of the modules a file imports, lazily or at load time."""
    found: set[str] = set()
    package = ["gspo", *path.relative_to(SOURCE).parts[:-1]]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_type_checkers:
            return
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{origin}.{a.name}" for a in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def files_of(package: str) -> list[Path]:
    single = SOURCE / f"{package}.py"
    return [single] if single.is_file() else sorted((SOURCE / package).rglob("*.py"))


def part_of(name: str) -> str | None:
    """The first part of a gspo module below the package, e.g. `algo`."""
    top, _, rest = name.partition(".")
    return rest.partition(".")[0] if top == "gspo" and rest else None


@functools.cache
def rooms() -> set[str]:
    """Every package and module directly below `gspo`."""
    folders = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").is_file()}
    return folders | {p.stem for p in SOURCE.glob("*.py")}


@functools.cache
def reached(package: str) -> dict[str, set[Path]]:
    """The other packages that a package imports, each with the files that do; type checkers' imports count too."""
    found: dict[str, set[Path]] = {}
    for path in files_of(package):
        for name in imports(path, for_type_checkers=True):
            part = part_of(name)
            if part in rooms() and part != package:
                found.setdefault(part, set()).add(path)
    return found


def test_every_package_has_a_place():
    assert rooms() - TOP == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package):
    wrong = {p: files for p, files in reached(package).items() if p not in ALLOWED[package] | {*BASE}}
    assert not wrong, f"{package} must not import {wrong}"


@pytest.mark.parametrize("package", ALLOWED)
def test_the_table_grants_nothing_that_nobody_uses(package):
    assert ALLOWED[package] <= set(reached(package))


def test_no_cycle_between_packages():
    order: list[str] = []
    left = {package: set(reached(package)) - {"__init__"} for package in rooms() - {"__init__"}}
    while left:
        free = [p for p, below in left.items() if below <= set(order)]
        assert free, f"a cycle among {sorted(left)}"
        order += free
        left = {p: below for p, below in left.items() if p not in free}


def test_no_folder_is_crowded():
    for folder in {p.parent for p in SOURCE.rglob("*.py")}:
        modules = [p.name for p in folder.glob("*.py") if p.name != "__init__.py"]
        assert len(modules) <= MAX_MODULES, f"{folder} holds {len(modules)} modules"


def test_algo_knows_torch_and_types_only():
    for path in files_of("algo"):
        outside = {name.partition(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert outside <= ALGO_LIBRARIES | {"gspo"}, f"{path} imports {sorted(outside)}"


def test_config_takes_only_plain_data_from_algo_and_loads_no_model_library():
    for path in files_of("config"):
        found = imports(path)
        from_algo = {n for n in found if part_of(n) == "algo"}
        assert all(n.startswith("gspo.algo.settings") for n in from_algo), path
        assert not {n.partition(".")[0] for n in found} & {"torch", "transformers", "numpy"}, path


def test_only_distributed_ray_imports_ray():
    for path in SOURCE.rglob("*.py"):
        if SOURCE / "distributed" / "ray" not in path.parents:
            assert "ray" not in {n.partition(".")[0] for n in imports(path)}, path
