"""docs/commands.md is what the command line program says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_command_docs.py"


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("make_command_docs", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(docs):
    current = docs.PAGE.read_text(encoding="utf-8")
    assert current == docs.make_page(), "run: python scripts/make_command_docs.py"


def test_every_command_and_option_is_on_the_page(docs):
    page = docs.make_page()
    for words, command in docs.commands():
        assert f"## gspo {words}\n" in page
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or f"`{parameter.opts[0]}" in page


def test_every_example_is_of_its_command(docs):
    names = [words for words, _ in docs.commands()]
    assert sorted(docs.EXAMPLES) == sorted(names)
    assert all(f"gspo {words}" in example for words, (example, _) in docs.EXAMPLES.items())
