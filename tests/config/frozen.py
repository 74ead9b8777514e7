"""`python -m tests.config.frozen [WORDS …]`: reads each key as its default, and looks whether its test notices.

The tests are those of facts/key_tests.txt, of keys whose name contains one of the words. Reads by modules that only check,
describe or predict a run are left as they are. Exits with 1 when a test passes although its key has no effect.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
from typing import Any

import pytest

from gspo.config import TrainerConfig
from gspo.config.loading import tree
from gspo.config.schema.fields import Section
from tests.config.reading import sections_of
from tests.config.test_key_tests import TABLE, TESTS
from tests.config.test_reading import WITHOUT_EFFECT

PATH = "_path"  # in the dictionary of a section: where it stands in the config


def freeze(key: str) -> None:
    """Let every read of a key give its default in this process, wherever the section was made."""
    get, default = object.__getattribute__, tree.leaves()[key].default
    classes = list(sections_of(TrainerConfig))
    alone = {cls: path for path, cls in classes if [c for _, c in classes].count(cls) == 1}

    def read(self: Section, name: str) -> Any:
        value, own = get(self, name), get(self, "__dict__")
        path = own.get(PATH, alone.get(type(self)))
        if name.startswith("_") or path is None:
            return value
        full = f"{path}.{name}".strip(".")
        if isinstance(value, Section):
            get(value, "__dict__")[PATH] = full
        reader = f"{sys._getframe(1).f_globals.get('__name__', '')}."
        acts = reader.startswith("gspo.") and not reader.startswith(tuple(f"{name}." for name in WITHOUT_EFFECT))
        return default if full == key and acts else value

    Section.__getattribute__ = read  # type: ignore[method-assign]


def run(test: str, key: str | None) -> int:
    """The exit code of pytest on one test, with a key frozen; 0: it passes."""
    if key is not None:
        freeze(key)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not vllm", str(TESTS / test)]))


def code_of(context: Any, test: str, key: str | None) -> int:
    """The same in a process of its own."""
    with context.Pool(1) as pool:
        return pool.apply(run, (test, key))


def main(words: list[str]) -> int:
    context = multiprocessing.get_context("fork")
    importlib.import_module("tests.conftest")  # once, for all processes, as the tests below
    bad = 0
    for test, keys in TABLE.items():
        chosen = [key for key in keys if not words or any(word in key for word in words)]
        if not chosen or test.startswith("config/"):  # keys that nothing may act on
            continue
        importlib.import_module("tests." + test.partition(".py")[0].replace("/", "."))
        if code_of(context, test, None) != 0:
            print(f"broken   {test} fails by itself", flush=True)
            bad += 1
            continue
        for key in chosen:
            start = time.monotonic()
            noticed = code_of(context, test, key) == 1
            bad += not noticed
            print(
                f"{'noticed' if noticed else 'MISSED ':8s} {time.monotonic() - start:4.0f} s  {key}  [{test}]",
                flush=True,
            )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
