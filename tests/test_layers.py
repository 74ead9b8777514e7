"""Imports point one way: types ← algo ← training; types ← sampling, data, rewards, rollout, tracking; all ← loop."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import gspo

SOURCE = Path(gspo.__file__).parent

# package → the gspo packages and modules it may import at load time, beside itself
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "seeding": set(),
    "algo": {"types"},
    "sampling": {"types", "seeding", "rollout", "rewards", "data"},
    "hub": set(),
    "data": {"types", "seeding", "hub"},
    "rewards": {"types", "seeding", "data"},
    "rollout": {"types", "seeding", "models", "cpu"},
    "tracking": {"types", "seeding"},
    "training": {"types", "seeding", "algo", "data", "rollout", "models", "cpu"},
    "models": {"types", "seeding", "hub", "cpu"},
    "cpu": set(),
    "config": {"algo"},  # gspo.algo.settings only: plain data without torch
    "report": {"tracking"},
    "plan": {"types", "config", "models", "sampling", "report"},
}
ALGO_LIBRARIES = {"torch"}


def imports(path: Path) -> set[str]:
    """Full names of the modules a file imports when it runs; imports for type checkers are left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.update(f"{node.module}.{a.name}" for a in node.names)
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


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package):
    known = {p.stem for p in SOURCE.iterdir()}
    for path in files_of(package):
        reached = {part for name in imports(path) if (part := part_of(name)) in known}
        assert reached <= ALLOWED[package] | {package}, (
            f"{path} imports {sorted(reached - ALLOWED[package] - {package})}"
        )


def test_the_table_itself_points_one_way():
    order: list[str] = []
    left = dict(ALLOWED)
    while left:
        free = [p for p, below in left.items() if below <= set(order)]
        assert free, f"a cycle among {sorted(left)}"
        order += free
        left = {p: below for p, below in left.items() if p not in free}


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


def test_only_cluster_imports_ray():
    for path in SOURCE.rglob("*.py"):
        if SOURCE / "cluster" not in path.parents:
            assert "ray" not in {n.partition(".")[0] for n in imports(path)}, path


def test_below_the_loop_nobody_reads_the_config():
    for package in (
        "types",
        "algo",
        "sampling",
        "data",
        "rewards",
        "rollout",
        "training",
        "tracking",
        "models",
    ):
        for path in files_of(package):
            assert not any(n.startswith("gspo.config") for n in imports(path)), path
