"""The function of an agent: found in a file, refused where it cannot be called, called with what it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.environments.protocol import EnvironmentProblem
from gspo.serving.agents.loading import arguments_of, load_agent

OFFERED = {"base_url": "u", "http_client": None, "api_key": "k"}


def place(folder: Path, source: str, name: str = "") -> str:
    path = folder / "agent.py"
    path.write_text(source)
    return f"{path}{name}"


@pytest.mark.parametrize(
    ("signature", "named"),
    [
        ("row", {}),
        ("row, /, base_url", {"base_url": "u"}),
        ("data, **others", OFFERED),
        ("*rows, api_key=None", {"api_key": "k"}),
        ("data, tries=3, *, http_client", {"http_client": None}),
    ],
)
def test_an_agent_gets_the_row_and_what_it_has_parameters_for(tmp_path: Path, signature: str, named: dict) -> None:
    run = load_agent(place(tmp_path, f"def run({signature}):\n    return 'ran'\n"), {})
    positional, found = arguments_of(run, {"x": 1}, OFFERED)
    assert (positional, found) == ([{"x": 1}], named) and run(*positional, **found) == "ran"


@pytest.mark.parametrize("signature", ["", "*, data", "**others", "data, tools", "data, base_url, /", "data, *, tries"])
def test_a_function_that_cannot_be_called_is_refused_before_the_run(tmp_path: Path, signature: str) -> None:
    with pytest.raises(EnvironmentProblem, match="expected a function of data, base_url, http_client, api_key"):
        load_agent(place(tmp_path, f"def run({signature}):\n    pass\n"), {})


def test_a_class_is_made_with_its_arguments_and_names_are_looked_up(tmp_path: Path) -> None:
    source = "class Solver:\n    def __init__(self, tries):\n        self.tries = tries\n    def run(self, row):\n        return self.tries\n"
    assert load_agent(place(tmp_path, source, ":Solver"), {"tries": 3})({}) == 3
    with pytest.raises(EnvironmentProblem, match="has no function 'run'"):
        load_agent(place(tmp_path, source), {})
