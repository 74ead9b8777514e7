"""`python -m tests.config.frozen [WORDS …]`: reads each key as its default, and looks whether its test notices.

The tests are those of facts/key_tests.txt, of keys whose name contains one of the words. Reads by modules that only
check, describe or predict a run are left as they are. Exits with 1 when a test passes although its key has no effect.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from gspo.config import TrainerConfig
from gspo.config.loading import tree
from gspo.config.schema.fields import Section
from tests.config.reading import sections_of
from tests.config.test_key_tests import TABLE, TESTS
from tests.config.test_reading import WITHOUT_EFFECT

PATH = "_path"  # in the dictionary of a section: where it stands in the config
WATCHED = tuple(f"{name}." for name in WITHOUT_EFFECT)


class Frozen:
    """While `key` is set, the program reads it as its default, in whichever section object it stands."""

    def __init__(self) -> None:
        self.key: str | None = None
        get, read = object.__getattribute__, self._read
        classes = list(sections_of(TrainerConfig))
        self._alone = {cls: path for path, cls in classes if [c for _, c in classes].count(cls) == 1}

        def getattribute(section: Section, name: str) -> Any:
            value = get(section, name)
            reader = sys._getframe(1).f_globals.get("__name__", "")
            return value if name.startswith("_") else read(section, name, value, f"{reader}.")

        Section.__getattribute__ = getattribute  # type: ignore[method-assign]

    def _read(self, section: Section, name: str, value: Any, reader: str) -> Any:
        path = vars(section).get(PATH, self._alone.get(type(section)))
        if path is None:
            return value
        full = f"{path}.{name}".strip(".")
        if isinstance(value, Section):
            vars(value)[PATH] = full
        acts = reader.startswith("gspo.") and not reader.startswith(WATCHED)
        return tree.leaves()[full].default if full == self.key and acts else value


class EachKey:
    """A plugin of pytest that runs a test as it is, and then once for each of its keys."""

    def __init__(self, keys: dict[str, list[str]]) -> None:
        self.keys, self.frozen = keys, Frozen()
        self.noticed: Counter[str] = Counter()  # key → how many cases of its test failed without it
        self.broken: list[str] = []

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        test = item.nodeid.partition("[")[0].removeprefix(f"{TESTS.name}/")
        keys = [None, *self.keys[test]]
        for key in keys:
            self.frozen.key = key
            item._initrequest()
            following = nextitem if key == keys[-1] else item
            failed = any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))
            self.frozen.key = None
            if key is not None:
                self.noticed[key] += failed
                print(f"{'noticed' if failed else 'passed'}  {key}  [{item.name}]", file=sys.__stdout__, flush=True)
            elif failed:
                self.broken.append(item.nodeid)
        return True


def main(words: list[str]) -> int:
    found = {test: [k for k in keys if not words or any(w in k for w in words)] for test, keys in TABLE.items()}
    chosen = {test: keys for test, keys in found.items() if keys and not test.startswith("config/")}
    plugin = EachKey(chosen)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu and not vllm"]
    os.chdir(TESTS.parent)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        code = pytest.main([*options, *(f"{TESTS.name}/{test}" for test in chosen)], plugins=[plugin])
    assert code == pytest.ExitCode.OK, f"pytest ended with {code!r}"
    missed = [(key, test) for test, keys in chosen.items() for key in keys if not plugin.noticed[key]]
    for test in plugin.broken:
        print(f"fails by itself: {test}")
    for key, test in missed:
        print(f"not noticed: {key} by {test}")
    print(f"{sum(map(len, chosen.values())) - len(missed)} of {sum(map(len, chosen.values()))} keys noticed")
    return int(bool(missed or plugin.broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
