"""Check this folder's recipe and the program behind it.

Files, config, shell scripts and Python files are checked one by one, then `gspo validate --quick` runs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gspo.checks.validate import main as validate
from gspo.config import load

HERE = Path(__file__).parent
CONFIG = HERE / "config" / "gspo_dynamic_sampling.yaml"
FILES = (
    "gspo_dynamic_sampling_3b_math.sh",
    "test_gspo_3b_math.sh",
    "main_gspo_dynamic.py",
    "config/gspo_dynamic_sampling.yaml",
    "README_dynamic_sampling.md",
    "test_gspo_dynamic_sampling.py",
    "validate_implementation.py",
)


def files() -> None:
    """Every file of the recipe exists."""
    missing = [name for name in FILES if not (HERE / name).is_file()]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")


def config() -> None:
    """The config resolves to GSPO with dynamic sampling."""
    resolved = load(CONFIG)
    mode, sampling = resolved.get("actor_rollout_ref.actor.policy_loss.loss_mode"), "algorithm.filter_groups.enable"
    if mode != "gspo" or not resolved.get(sampling):
        raise ValueError(
            f"{CONFIG.name}: loss_mode={mode}, {sampling}={resolved.get(sampling)}; expected gspo and true"
        )


def shell_scripts() -> None:
    """bash can parse every script, and the settings that they pass resolve on top of the config."""
    for path in sorted(HERE.glob("*.sh")):
        parsed = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
        if parsed.returncode:
            raise ValueError(parsed.stderr.strip())
        words = ["env", f"PYTHON={sys.executable}", "bash", str(path), "--dry-run"]
        planned = subprocess.run(words, capture_output=True, text=True, check=False)
        if planned.returncode or "objective" not in planned.stdout:
            raise ValueError(f"{path.name} --dry-run: {planned.stderr.strip() or planned.stdout.strip()}")


def python_files() -> None:
    """Every Python file parses."""
    for path in sorted(HERE.glob("*.py")):
        ast.parse(path.read_text(encoding="utf-8"), str(path))


CHECKS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("file structure is complete", files),
    ("YAML config is valid", config),
    ("shell scripts are configured correctly", shell_scripts),
    ("Python scripts have correct syntax", python_files),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when all four checks and the technical tests pass."""
    failed = 0
    for name, check in CHECKS:
        try:
            check()
            print(f"PASS  {name}")
        except (ValueError, SyntaxError, OSError) as error:
            failed += 1
            print(f"FAIL  {name}: {error}")
    code = validate([*(sys.argv[1:] if arguments is None else arguments), "--quick"])
    return 1 if failed else code


if __name__ == "__main__":
    sys.exit(main())
