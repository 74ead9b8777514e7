"""The same promises when the judge is no root: rows S1 to S4 run by another user, with a copy of Python it can read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import gspo

NOBODY = 65534
FAULTS = Path(__file__).parents[1] / "faults"

ROWS = """
from tests.faults.sandbox_rows import hostile_row, honest_row, mixed_row, naive_row
for row in (hostile_row(1), honest_row(1), naive_row(1), mixed_row(1, 200)):
    print(row.id, row.passed, row.detail)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as an ordinary user")
def test_rows_hold_for_an_ordinary_user():
    home = Path(tempfile.gettempdir()) / f"gspo-ordinary-{os.getpid()}"
    try:
        command, env = _copy_python(home)
        done = subprocess.run(
            [*command, "-c", ROWS],
            env=env,
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[row, "True"] for row in ("S1", "S2", "S3", "S4")], (
        done.stdout + done.stderr
    )


def _copy_python(home: Path) -> tuple[list[str], dict[str, str]]:
    """An interpreter, this package and numpy in a folder that everybody can read."""
    import numpy

    skip = shutil.ignore_patterns("site-packages", "test", "__pycache__", "*.a")
    base = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(base / "lib" / version, home / "py/lib" / version, ignore=skip, symlinks=True)
    for library in (base / "lib").glob("libpython*"):
        shutil.copy(library, home / "py/lib")
    (home / "py/bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), home / "py/bin" / version)
    package, site = Path(gspo.__file__).parent, Path(numpy.__file__).parent.parent
    for room in ("rewards", "sandbox"):
        shutil.copytree(package / room, home / "site/gspo" / room, ignore=skip)
    shutil.copytree(FAULTS, home / "site/tests/faults", ignore=skip)
    for module in package.glob("*.py"):
        shutil.copy(module, home / "site/gspo")
    for name in ("numpy", "numpy.libs"):
        if (site / name).exists():
            shutil.copytree(site / name, home / "site" / name, ignore=skip)
    subprocess.run(["chmod", "-R", "a+rX", str(home)], check=True)
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(home / "site"), "LD_LIBRARY_PATH": str(home / "py/lib")}
    return [str(home / "py/bin" / version)], env
