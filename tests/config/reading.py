"""Which keys a program reads: attribute chains followed by type from the config's classes, through every module.

A value is the set of things that an expression may be: a section of the config (by its path in the tree), an instance
or the class itself, a function, a module. Values flow through annotations, assignments, attributes that methods assign,
fields of dataclasses, arguments and returns, until nothing new is found. Reading an attribute of a section is a read of
that key. A section class that stands at several paths (`OptimConfig`) is followed from where it is passed, never by its
annotation: `critic.optim.lr` is not read because `actor.optim.lr` is.
"""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator

from gspo.config.schema.fields import Section
from tests.config.program import Program, Scope, Thing

Value = frozenset[Thing]
Cell = tuple[str, str]  # a variable: (module, class or function, name)
NOTHING: Value = frozenset()
RETURN = "return"  # no variable can have this name


class Reader:
    """Finds `read`, the keys and sections that `program` reads of a config. Reads in modules below `ignored` are none."""

    def __init__(self, program: Program, config: type, ignored: Iterable[str] = ()) -> None:
        self.read: set[str] = set()
        self._program = program
        self._ignored = tuple(f"{name}." for name in ignored)
        self._sections = dict(sections_of(config))
        self._paths: dict[str, set[str]] = defaultdict(set)  # of a section class
        for path, cls in self._sections.items():
            self._paths[f"{cls.__module__}.{cls.__qualname__}"].add(path)
        self._values: dict[Cell, Value] = {}
        self._readers: dict[Cell, set[str]] = defaultdict(set)
        self._waiting = dict.fromkeys(program.scopes)  # in order, once each
        while self._waiting:
            self._scope = program.scopes[next(iter(self._waiting))]
            del self._waiting[self._scope.name]
            self._run(self._scope)

    def _look(self, owner: str, name: str) -> Value:
        self._readers[owner, name].add(self._scope.name)
        return self._values.get((owner, name), NOTHING)

    def _add(self, owner: str, name: str, value: Iterable[Thing]) -> None:
        before = self._values.get((owner, name), NOTHING)
        merged = before | frozenset(value)
        if merged != before:
            self._values[owner, name] = merged
            self._waiting.update(dict.fromkeys(self._readers[owner, name]))

    def _run(self, scope: Scope) -> None:
        """Let values flow through one body."""
        for parameter in scope.parameters:
            self._add(scope.name, parameter.arg, self._annotated(parameter.annotation))
        if scope.is_method and scope.parameters and scope.owner is not None:
            self._add(scope.name, scope.parameters[0].arg, {("instance", scope.owner)})
        self._add(scope.name, RETURN, self._annotated(getattr(scope.node, "returns", None)))
        for node in scope.body:
            self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if self._scope.node is not None:  # within a function it is a variable
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                self._add(self._scope.name, node.name, {(kind, f"{self._scope.name}.{node.name}")})
        elif isinstance(node, ast.AnnAssign):
            value = NOTHING if node.value is None else self._of(node.value)
            self._assign(node.target, value | self._annotated(node.annotation))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.Return):
            self._add(self._scope.name, RETURN, NOTHING if node.value is None else self._of(node.value))
        else:
            self._block(node)

    def _block(self, node: ast.AST) -> None:
        """A statement of several parts, in the order of the text."""
        if isinstance(node, ast.For | ast.AsyncFor):
            self._iterate(node.target, node.iter)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child)
            elif isinstance(child, ast.expr):
                self._of(child)
            elif isinstance(child, ast.withitem) and child.optional_vars is not None:
                self._bind(child.optional_vars, child.context_expr)
            elif isinstance(child, ast.ExceptHandler | ast.match_case | ast.withitem):
                self._block(child)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        """`a, b = x, y` one by one, anything else as a whole."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts):
                self._bind(one, other)
        else:
            self._assign(target, self._of(value))

    def _iterate(self, target: ast.expr, over: ast.expr) -> None:
        if isinstance(over, ast.Tuple | ast.List):
            for element in over.elts:
                self._bind(target, element)
        else:
            self._assign(target, self._of(over))

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._add(self._scope.name, target.id, value)
        elif isinstance(target, ast.Attribute):
            for kind, name in self._of(target.value):
                if kind == "instance":
                    self._add(name, target.attr, value)

    def _of(self, node: ast.expr) -> Value:
        """What an expression may be. Of `a or b`, `a if c else b`, a tuple, `a[0]`: any of the parts."""
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._of(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Lambda):
            return self._lambda(node)
        if isinstance(node, ast.NamedExpr):
            self._assign(node.target, self._of(node.value))
        for part in getattr(node, "generators", ()):  # a comprehension
            self._iterate(part.target, part.iter)
            for condition in part.ifs:
                self._of(condition)
        parts = [self._of(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return frozenset().union(*parts)

    def _lambda(self, node: ast.Lambda) -> Value:
        name = f"{self._scope.name}.{node.lineno}:{node.col_offset}"
        if name not in self._program.scopes:
            body: list[ast.stmt] = [ast.Return(node.body)]
            self._program.scopes[name] = Scope(name, self._scope.module, body, self._scope, None, node)
            self._waiting[name] = None
        return frozenset({("function", name)})

    def _named(self, name: str) -> Value:
        scope: Scope | None = self._scope
        while scope is not None:
            if found := self._look(scope.name, name):
                return found
            scope = scope.outer
        return self._global(self._scope.module.name, name)

    def _global(self, module: str, name: str) -> Value:
        found = self._program.global_name(self._program.modules[module], name)
        if found is None:
            return NOTHING
        kind, where = found
        return self._look(*where.split(":")) if kind == "variable" else frozenset({found})

    def _attribute(self, value: Value, name: str) -> Value:
        found: Value = NOTHING
        for kind, of in value:
            if kind == "section":
                path = f"{of}.{name}".strip(".")
                if not f"{self._scope.module.name}.".startswith(self._ignored):
                    self.read.add(path)
                found |= {("section", path)} if path in self._sections else NOTHING
            elif kind == "module" and f"{of}.{name}" in self._program.modules:
                found |= {("module", f"{of}.{name}")}
            elif kind == "module" and of in self._program.modules:
                found |= self._global(of, name)
            elif kind in ("instance", "class"):
                found |= self._member(of, name)
        return found

    def _member(self, cls: str, name: str) -> Value:
        """An attribute of an instance: assigned, declared, a method, or what a property returns."""
        found: Value = NOTHING
        for owner in self._ancestors(cls):
            found |= self._look(owner, name)
            method = self._program.scopes.get(f"{owner}.{name}")
            if method is not None and method.node is not None:
                found |= self._look(method.name, RETURN) if method.is_property else {("function", method.name)}
        return found

    def _ancestors(self, cls: str) -> Iterator[str]:
        yield cls
        for base in self._program.bases.get(cls, ()):
            module = self._program.scopes[cls].module
            found = self._program.global_name(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and found[0] == "class":
                yield from self._ancestors(found[1])

    def _call(self, node: ast.Call) -> Value:
        callee = self._of(node.func)
        given = [self._of(a) for a in node.args]
        named = {k.arg: self._of(k.value) for k in node.keywords}
        word = ast.unparse(node.func)
        if word == "getattr" and isinstance(node.args[1], ast.Constant):
            return self._attribute(given[0], str(node.args[1].value))
        if word in ("partial", "functools.partial"):
            callee, given = given[0], given[1:]
        result: Value = NOTHING
        for kind, name in callee:
            if kind == "function":
                self._pass(name, given, named)
                result |= self._look(name, RETURN)
            elif kind == "class" and name not in self._paths:
                self._construct(name, given, named)
                result |= {("instance", name)}
        return result

    def _construct(self, cls: str, given: list[Value], named: dict[str | None, Value]) -> None:
        makers = [thing for thing in self._member(cls, "__init__") if thing[0] == "function"]
        for _, function in makers:
            self._pass(function, given, named)
        if not makers:  # a dataclass
            names = [f for owner in reversed(list(self._ancestors(cls))) for f in self._program.fields(owner)]
            for name, value in [*zip(names, given), *named.items()]:
                self._add(cls, name or "", value)

    def _pass(self, function: str, given: list[Value], named: dict[str | None, Value]) -> None:
        scope = self._program.scopes[function]
        names = [p.arg for p in scope.parameters][scope.is_method :]
        for name, value in [*zip(names, given), *named.items()]:
            self._add(function, name or "", value)

    def _annotated(self, annotation: ast.expr | None) -> Value:
        """Instances of the classes that an annotation names; of a section class only when it stands at one path."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if annotation is None or ast.unparse(annotation).startswith(("Callable", "Literal")):
            return NOTHING  # calls of unknown functions are not followed
        if isinstance(annotation, ast.Name | ast.Attribute):
            found: Value = NOTHING
            for kind, name in self._of(annotation):
                paths = self._paths.get(name, ())
                if kind == "class":
                    found |= {("section", p) for p in paths if len(paths) == 1} or {("instance", name)}
            return found
        parts = [self._annotated(c) for c in ast.iter_child_nodes(annotation) if isinstance(c, ast.expr)]
        return frozenset().union(*parts)


def sections_of(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Every section of a config with its class, the config itself at ""."""
    yield path, cls
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if isinstance(hints[f.name], type) and issubclass(hints[f.name], Section):
            yield from sections_of(hints[f.name], f"{path}.{f.name}".strip("."))
