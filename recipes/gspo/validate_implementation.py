"""Check this folder's recipe and the program behind it: the config resolves, and `gspo validate --quick` passes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gspo.checks.validate import main as validate
from gspo.config import ConfigErrors, load

HERE = Path(__file__).parent
FILES = (
    "gspo_dynamic_sampling_3b_math.sh",
    "main_gspo_dynamic.py",
    "config/gspo_dynamic_sampling.yaml",
    "README_dynamic_sampling.md",
    "test_gspo_dynamic_sampling.py",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when the files are there, the config resolves and the technical checks pass."""
    missing = [name for name in FILES if not (HERE / name).is_file()]
    print(f"missing: {', '.join(missing)}" if missing else f"{len(FILES)} files found in {HERE}")
    try:
        load(HERE / "config" / "gspo_dynamic_sampling.yaml")
        print("config/gspo_dynamic_sampling.yaml resolves")
    except ConfigErrors as errors:
        print(errors)
        missing.append("a config that resolves")
    code = validate([*(sys.argv[1:] if arguments is None else arguments), "--quick"])
    return 1 if missing else code


if __name__ == "__main__":
    sys.exit(main())
