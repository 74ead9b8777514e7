"""The lock, the Dockerfile, the release workflow and the Makefile: true to the project, without building anything."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_LOCKED = {"vllm"}  # it needs its own version of torch
MAX_CORE = 45
CUDA = re.compile(r"nvidia-|cuda-|triton$")  # libraries that torch's wheel for CUDA brings


def locked() -> dict[str, list[Requirement]]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    found: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, filter(None, lines)):
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def test_the_lock_pins_every_dependency_within_its_range() -> None:
    pins = locked()
    extras = {name: r for name, r in PROJECT["optional-dependencies"].items() if name not in NOT_LOCKED}
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(r for some in extras.values() for r in some)]):
        versions = [str(pin.specifier).removeprefix("==") for pin in pins[canonicalize_name(requirement.name)]]
        assert versions and all(requirement.specifier.contains(version) for version in versions), requirement


def test_the_lock_names_no_place_to_download_from() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text and "--" not in text
    assert all(str(pin.specifier).startswith("==") for pins in locked().values() for pin in pins)


def test_the_core_is_small() -> None:
    found: set[str] = set()
    left = list(PROJECT["dependencies"])
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        left += metadata.requires(name) or []
    assert len([name for name in found if not CUDA.match(name)]) < MAX_CORE


def dockerfile() -> list[str]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_dockerfile_copies_what_exists_and_installs_extras_that_exist() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in dockerfile():
        if line.startswith("COPY"):
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists() and f"!{name}" in ignored
    extras = [
        name for line in dockerfile() for group in re.findall(r'"\.\[(.*?)\]"', line) for name in group.split(",")
    ]
    assert {"data", "quant", "ray"} <= set(extras) <= set(PROJECT["optional-dependencies"])
    targets = [line.split()[-1] for line in dockerfile() if line.startswith("FROM")]
    assert targets == ["base", "cpu", "cuda"]
    assert "ENTRYPOINT" in {line.split()[0] for line in dockerfile()}


def test_a_release_needs_its_version_and_its_section(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from check_release import problems  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n")
    assert problems("v1.2.3", tmp_path) == []
    assert len(problems("v1.2.4", tmp_path)) == 1
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    assert "no section '## 1.2.3'" in problems("v1.2.3", tmp_path)[0]


def test_the_release_workflow_builds_tries_and_then_publishes() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    assert jobs["try"]["needs"] == "build" and jobs["publish"]["needs"] == "try"
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert jobs["try"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(low), int(high))]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert "pypa/gh-action-pypi-publish@release/v1" in used
    for job in jobs.values():
        for step in job["steps"]:
            subprocess.run(["bash", "-n"], input=step.get("run", ""), text=True, check=True)


def chosen_python(folder: Path, **programs: int) -> str:
    """The PYTHON of the Makefile when these programs are found, each a Python that ends with a code."""
    for name, code in programs.items():
        file = folder / name.replace("_", ".")
        file.write_text(f"#!/bin/sh\nexit {code}\n")
        file.chmod(0o755)
    done = subprocess.run(
        ["make", "-s", "-f", ROOT / "Makefile", "--eval", "show:;@echo $(PYTHON)", "show"],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ({"python3_11": 0, "python3_12": 0}, "python3.11"),
        ({"python3_11": 127, "python3_12": 0}, "python3.12"),
        ({"python3_11": 1, "python3_12": 1, "python3_13": 1, "python3": 0}, "python3"),
        ({"python3_11": 1, "python3_12": 1, "python3_13": 1, "python3": 1, "python": 1}, ""),
    ],
)
def test_the_makefile_finds_a_python(tmp_path: Path, programs: dict[str, int], chosen: str) -> None:
    assert chosen_python(tmp_path, **programs) == chosen
