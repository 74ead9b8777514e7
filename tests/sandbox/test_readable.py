"""What a program can read and list at level 2: exactly what docs/sandbox.md says."""

from __future__ import annotations

import importlib.util
import json
import os
import sysconfig
from pathlib import Path

import pytest

from gspo.sandbox import Sandbox
from gspo.sandbox.inside import preload

STDLIB = Path(sysconfig.get_path("stdlib"))
NUMPY = Path(str(importlib.util.find_spec("numpy").origin)).parent  # type: ignore[union-attr]
READABLE = [
    STDLIB / "os.py",
    STDLIB / "json" / "decoder.py",
    NUMPY / "__init__.py",
    "/dev/urandom",
    "/dev/zero",
    "/dev/null",
]
READABLE += [path for path in ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo/UTC") if os.path.exists(path)]
REFUSED = ["/etc/passwd", "/etc/hosts", "/proc/self/status", "/proc/self/environ", "/proc/cpuinfo", "/usr/bin/env"]
REFUSED += [
    "/sys/kernel/mm/transparent_hugepage/enabled",
    __file__,
    preload.__file__,
    "/dev/tty",
    "/usr/lib/os-release",
]
LISTABLE = [STDLIB, STDLIB / "json", NUMPY]
UNLISTABLE = ["/", "/tmp", "/etc", "/proc", "/dev", "/usr/include", NUMPY.parent, Path(__file__).parent, Path.home()]
PROGRAM = """
import json, os
def attempt(action, path):
    try:
        action(path)
    except OSError as error:
        return type(error).__name__
    return "ok"
def read(path):
    with open(path, "rb") as file:
        file.read(1)
reads, lists = json.loads(input())
print(json.dumps([[attempt(read, p) for p in reads], [attempt(os.listdir, p) for p in lists]]))
"""


@pytest.fixture(scope="module")
def answers() -> tuple[dict[str, str], dict[str, str]]:
    reads = [str(p) for p in (*READABLE, *REFUSED, *_outside())]
    lists = [str(p) for p in (*LISTABLE, *UNLISTABLE)]
    with Sandbox(level=2) as box:
        result = box.run(PROGRAM, json.dumps([reads, lists]).encode() + b"\n", wall=60.0)
    found = json.loads(result.stdout)
    return dict(zip(reads, found[0])), dict(zip(lists, found[1]))


def _outside() -> list[Path]:
    """Files of packages beside the standard library's modules, where there are any."""
    return [p for name in ("site-packages", "dist-packages", "test") for p in sorted((STDLIB / name).rglob("*.py"))[:3]]


def test_files_that_the_page_lists_can_be_read_and_no_others(answers) -> None:
    reads, _ = answers
    assert {p: reads[str(p)] for p in READABLE} == dict.fromkeys(READABLE, "ok")
    for path in (*REFUSED, *_outside()):
        assert reads[str(path)] != "ok", path


def test_folders_that_the_page_lists_can_be_listed_and_no_others(answers) -> None:
    _, lists = answers
    assert {p: lists[str(p)] for p in LISTABLE} == dict.fromkeys(LISTABLE, "ok")
    for path in UNLISTABLE:
        assert lists[str(path)] != "ok", path


def test_the_page_names_every_rule() -> None:
    """The rules beside the standard library and the shared libraries, word by word."""
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
    for path in preload.readable_paths(str(NUMPY.parent)):
        if path.startswith(("/etc/", "/usr/share/", "/dev/")):
            assert f"`{path}`" in page
