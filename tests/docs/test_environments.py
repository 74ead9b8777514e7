"""The page "Turns, tools, environments": its files and commands work as they are written, at a smaller size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gspo.environments.formats import FORMATS
from gspo.environments.loading import ENVIRONMENTS, EnvironmentSpec, load_environment
from gspo.environments.protocol import Action, ToolCall
from gspo.types import Prompt
from tests.docs.test_extend import gspo

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
TRAIN = [c for c in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if c.startswith("gspo train")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("file", ["doors.py", "corridor.py"])
def test_an_environment_of_the_page_trains(folder: Path, file: str) -> None:
    (command,) = [c for c in TRAIN if file in c]
    gspo(folder, command.strip() + " algorithm.filter_groups.enable=false")
    (run,) = (folder / "runs").iterdir()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["num_turns/mean"] >= 1 and last["environment/failures"] == 0


def test_the_functions_of_the_page_are_tools(folder: Path) -> None:
    environment = load_environment(EnvironmentSpec(function_tool_path=str(folder / "my_tools.py")))()
    (tool,) = environment.tools
    assert tool["function"]["parameters"]["required"] == ["amount"]
    step = environment.step(Action("", [ToolCall("convert", {"amount": 2})]))
    assert step.messages[0]["content"] == "2.20"
    assert environment.reset(Prompt("p", (), ()), 0) == ()


def test_every_built_in_environment_and_format_is_listed() -> None:
    for name in (*ENVIRONMENTS.names(), *FORMATS, "tokenizer", "auto"):
        assert f"| `{name}` |" in PAGE, name
