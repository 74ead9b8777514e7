"""Check the environment: `python setup.py`. Installs nothing; says what is there and what to install."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec


def main() -> int:
    """Run `gspo doctor --environment` where the program is installed; else say how to install it."""
    if find_spec("gspo") is None:
        print("gspo is not installed; run: pip install -r requirements.txt")
        return 1
    return subprocess.call([sys.executable, "-m", "gspo", "doctor", "--environment"])


if __name__ == "__main__":
    sys.exit(main())
