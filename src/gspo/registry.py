"""Names to implementations: one kind of table for everything that a user may add by name."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from gspo.paths import user_path

Item = TypeVar("Item")
Made = TypeVar("Made")


class PluginError(ValueError):
    """A user's part of the program cannot be used. The message names the key or package that asks for it, and the cause."""


class Registry(Generic[Item]):
    """A table of named implementations of one kind; a name belongs to one of them.

    `key` is what messages call a name: the config key where there is one. `lazy` are built-ins as "module:name", which
    are imported on first use. Errors about names are of the type `error`.
    """

    def __init__(
        self, key: str, lazy: Mapping[str, str] | None = None, *, error: type[Exception] = PluginError
    ) -> None:
        self.key = key
        self._lazy = dict(lazy or {})
        self._items: dict[str, Item] = {}
        self._sources: dict[str, Any] = {}
        self._error = error

    def add(self, name: str, item: Item, source: Any = None) -> None:
        """Register an item; `source` is the user's function where the item is a wrapper around it.

        A name is registered once. The exception is a file that is imported again: its new function replaces the old
        one.
        """
        source = item if source is None else source
        if name in self and not (name in self._sources and _is_same(self._sources[name], source)):
            raise self._error(f"{self.key}={name!r} is already registered{self._where(name)}; choose another name")
        self._items[name], self._sources[name] = item, source

    def register(self, name: str) -> Callable[[Made], Made]:
        """A decorator that adds its function or class under a name."""

        def add(item: Made) -> Made:
            self.add(name, item)  # pyright: ignore[reportArgumentType]
            return item

        return add

    def get(self, name: str) -> Item:
        """The item of that name; an unknown name is an error that suggests the nearest."""
        if name in self._items:
            return self._items[name]
        if name in self._lazy:
            return import_name(self._lazy[name])
        raise self._unknown(name)

    def check(self, name: str) -> None:
        """Refuse a name that is neither registered nor of the form "module:name"; nothing is imported."""
        if ":" not in name and name not in self:
            raise self._unknown(name)

    def find(self, name: str) -> Item:
        """The item of a registered name, or the function or class that "module:name" refers to, which is imported."""
        if ":" not in name or name in self:
            return self.get(name)
        try:
            item = import_name(name)
        except (Exception, SystemExit) as error:
            raise self._error(
                f"{self.key}={name!r} cannot be imported: {type(error).__name__}: {error}; expected a registered name or "
                "module:function, of an installed module or of a file beside those of trainer.plugins"
            ) from error
        if not callable(item):
            raise self._error(f"{self.key}={name!r} is of type {type(item).__name__}; expected a function or a class")
        return cast("Item", item)

    def nearest(self, name: str) -> str | None:
        """The known name that is most like a mistyped one, None when none is."""
        return next(iter(difflib.get_close_matches(name, self.names(), n=1)), None)

    def names(self) -> tuple[str, ...]:
        """All names, built-ins first, in the order of their registration."""
        return (*self._lazy, *self._items)

    def items(self) -> Iterator[Item]:
        """The items that were added, in order; lazy ones are not imported for it."""
        return iter(self._items.values())

    def __contains__(self, name: str) -> bool:
        return name in self._items or name in self._lazy

    def _unknown(self, name: str) -> Exception:
        hint = f"did you mean {near!r}? " if (near := self.nearest(name)) else ""
        known = f"known names are {', '.join(self.names())}" if self.names() else "no name is registered"
        return self._error(f"{self.key}={name!r} is unknown: {hint}{known}")

    def _where(self, name: str) -> str:
        place = _place(self._sources.get(name))
        return f" in {place[0]}, line {place[2]}" if place else ""


def import_name(path: str) -> Any:
    """The object that "module:name" refers to; the module is imported."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def import_file(path: str | Path) -> ModuleType:
    """Import a Python file by its path, once per process. Files of the same name in two folders are two modules.

    The file may import its neighbours: its folder goes to the end of `sys.path`.
    """
    file = user_path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"gspo_file_{file.stem}_{hashlib.blake2b(bytes(file), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into a PluginError that names `what` and the line; errors of gspo pass."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("gspo."):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}, line {frame.lineno}"
        raise PluginError(f"{what} raised {type(error).__name__}: {error} ({place})") from error


def _is_same(one: Any, other: Any) -> bool:
    """Whether two functions or classes are one, or the same lines of one file that was imported twice."""
    place = _place(one)
    return one is other or (place is not None and place == _place(other))


def _place(source: Any) -> tuple[str, str, int] | None:
    """File, name and first line of a function or class; None for what has none, such as code typed at a prompt."""
    if inspect.isclass(source):
        file = getattr(sys.modules.get(source.__module__), "__file__", None)
        try:
            line = inspect.getsourcelines(source)[1]
        except (OSError, TypeError):
            return None
        name = source.__qualname__
    else:
        code = getattr(inspect.unwrap(source) if callable(source) else None, "__code__", None)
        if code is None:
            return None
        file, name, line = code.co_filename, code.co_qualname, code.co_firstlineno
    return (os.path.realpath(file), name, line) if file and os.path.isfile(file) else None
