"""A program as the reader of config keys sees it: its modules, the functions and classes in them, and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Thing = tuple[str, str]  # ("section", path), ("instance" | "class", class), ("function", function), ("module", name)


@dataclass
class Module:
    """A module: what its names mean."""

    name: str
    is_package: bool
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # name → (module, name in it)
    own: dict[str, Thing] = field(default_factory=dict)  # classes and functions made here


@dataclass(eq=False)
class Scope:
    """The body of a module, class or function. Names are looked up here, then in `outer`."""

    name: str
    module: Module
    body: list[ast.stmt]
    outer: Scope | None = None
    owner: str | None = None  # the class whose body this is, or whose method
    node: Function | None = None

    @property
    def parameters(self) -> list[ast.arg]:
        """Parameters that can be named, in order."""
        a = self.node.args if self.node is not None else ast.arguments([], [], None, [], [], None, [])
        return [*a.posonlyargs, *a.args, *a.kwonlyargs]

    @property
    def is_method(self) -> bool:
        """Whether the first parameter is the instance or the class."""
        return self.owner is not None and self.node is not None and not self._decorated("staticmethod")

    @property
    def is_property(self) -> bool:
        return self._decorated("property") or self._decorated("cached_property")

    def _decorated(self, name: str) -> bool:
        decorators = getattr(self.node, "decorator_list", ())
        return any(ast.unparse(d).rpartition(".")[2] == name for d in decorators)


class Program:
    """The modules of a program, given as name → source, and every body in them by its full name."""

    def __init__(self, sources: dict[str, str], packages: Iterable[str] = ()) -> None:
        self.modules = {name: Module(name, name in packages) for name in sources}
        self.scopes: dict[str, Scope] = {}
        self.bases: dict[str, list[ast.expr]] = {}
        for name, source in sources.items():
            self._declare(Scope(name, self.modules[name], ast.parse(source).body))

    def _declare(self, scope: Scope) -> None:
        """Note a body, the functions and classes in it, and what it imports."""
        self.scopes[scope.name] = scope
        around = scope.outer if scope.owner is not None and scope.node is None else scope  # not a class's names
        for node in statements(scope.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                scope.module.imports.update(_imported(scope.module, node))
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{scope.name}.{node.name}"
                is_class = isinstance(node, ast.ClassDef)
                if scope.name == scope.module.name:
                    scope.module.own[node.name] = ("class" if is_class else "function", name)
                if is_class:
                    self.bases[name] = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
                owner = name if is_class else scope.owner if scope.node is None else None
                self._declare(Scope(name, scope.module, node.body, around, owner, None if is_class else node))

    def global_name(self, module: Module, name: str) -> Thing | None:
        """What a name of a module is: made there, or imported from where it was made."""
        seen: set[tuple[str, str]] = set()
        while (module.name, name) not in seen:
            seen.add((module.name, name))
            if name in module.own:
                return module.own[name]
            if name not in module.imports:
                return ("variable", f"{module.name}:{name}")
            source, inner = module.imports[name]
            if inner is None or f"{source}.{inner}" in self.modules:
                return ("module", source if inner is None else f"{source}.{inner}")
            if source not in self.modules:
                return None
            module, name = self.modules[source], inner
        return None

    def fields(self, cls: str) -> list[str]:
        """Names that a class declares with an annotation: the fields of a dataclass."""
        body = self.scopes[cls].body
        return [n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the blocks in it, not of the functions and classes in it."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from statements([child])
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from statements(child.body)


def _imported(module: Module, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, tuple[str, str | None]]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, (_source(module, node), alias.name)
        else:
            top = alias.name.partition(".")[0]
            yield (alias.asname, (alias.name, None)) if alias.asname else (top, (top, None))


def _source(module: Module, node: ast.ImportFrom) -> str:
    """The full name of the module that `from … import` names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def sources_of(package: Path) -> tuple[dict[str, str], set[str]]:
    """The modules of a package by name with their source, and which of them are packages."""
    sources, packages = {}, set()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        sources[name] = path.read_text(encoding="utf-8")
        packages |= {name} if is_package else set()
    return sources, packages
