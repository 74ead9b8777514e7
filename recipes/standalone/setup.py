"""Check the environment: `python setup.py`. Installs nothing; says what is there and what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import checkout  # noqa: F401 - first, for a program that is not installed


def main() -> int:
    """Run `gspo doctor --environment` where all that it needs is installed; else say what to install."""
    missing = [name for name in ("torch", "transformers", "omegaconf", "typer") if find_spec(name) is None]
    if missing:
        file = Path(__file__).with_name("requirements.txt")
        print(f"not installed: {', '.join(missing)}; run: {sys.executable} -m pip install -r {file}")
        return 1
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))
    command = [sys.executable, "-m", "gspo", "doctor", "--environment"]
    return subprocess.call(command, env={**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    sys.exit(main())
