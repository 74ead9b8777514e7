"""What a built wheel holds: the package with its data, and nothing of the tests. setuptools lists it; nothing is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.programs.hostile import ATTACKS

ROOT = Path(__file__).parents[1]
NEEDED = (
    "gspo/py.typed",
    "gspo/kernels/cpu_kernels.cpp",
    "gspo/models/embedded/model.safetensors",
    "gspo/models/embedded/tokenizer.json",
    "gspo/config/embedded.yaml",
    "gspo/data/problems/code.jsonl",
    "gspo/report/static/app.js",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files that `pip install .` would copy, relative to the folder of installed packages."""
    dist = pytest.importorskip("setuptools.dist")
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        distribution = dist.Distribution({"script_name": "setup.py"})
        distribution.parse_config_files()
        distribution.get_command_obj("egg_info").egg_base = str(folder)
        command = distribution.get_command_obj("build_py")
        command.build_lib = str(folder)
        command.ensure_finalized()
        return {str(Path(file).relative_to(folder)) for file in command.get_outputs(include_bytecode=False)}


def texts(wheel: set[str]) -> dict[str, str]:
    """The shipped files that are text, by name."""
    binary = (".safetensors", ".png", ".woff2")
    return {file: (ROOT / "src" / file).read_text() for file in wheel if not file.endswith(binary)}


def test_every_file_of_the_package_is_in_it_and_no_other(wheel: set[str]) -> None:
    source = ROOT / "src"
    files = {str(f.relative_to(source)) for f in source.rglob("*") if f.is_file()}
    assert wheel == {f for f in files if "__pycache__" not in f and ".egg-info" not in f}
    assert set(NEEDED) <= wheel


def test_nothing_of_the_tests_is_in_it(wheel: set[str]) -> None:
    folders = {part for file in wheel for part in Path(file).parts[:-1]}
    assert not folders & {"tests", "faults", "programs", "benchmarks", "scripts"}
    of_tests = {file.read_bytes() for file in (ROOT / "tests").rglob("*.py") if file.stat().st_size > 200}
    assert not [file for file in wheel if (ROOT / "src" / file).read_bytes() in of_tests]
    imports = re.compile(r"^\s*(?:from|import)\s+tests\b|[\"']tests\.\w", re.MULTILINE)
    assert not [file for file, text in texts(wheel).items() if file.endswith(".py") and imports.search(text)]


def test_no_attack_program_is_in_it(wheel: set[str]) -> None:
    """Each attack is recognised by its longest line, unless that is a common one."""
    longest = [max(map(str.strip, attack.source.splitlines()), key=len) for attack in ATTACKS.values()]
    marks = [line for line in longest if len(line) >= 30]
    programs = "".join(file.read_text() for file in (ROOT / "tests" / "faults" / "programs").glob("*.py"))
    assert sum(mark in programs for mark in marks) > 30, "the attacks are no longer recognised by their text"
    shipped = texts(wheel)
    assert not [(file, mark) for mark in marks for file, text in shipped.items() if mark in text]
