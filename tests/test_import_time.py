"""`import gspo` is cheap: no model library, and nothing beyond the standard library."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "omegaconf", "ray", "vllm", "typer", "rich")


def modules_after(statement: str) -> set[str]:
    """Names of the top-level modules that a fresh interpreter holds after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    assert not modules_after("import gspo") & set(HEAVY)


def test_importing_the_package_reads_nothing_and_changes_nothing():
    """No file beside its own source is opened, no environment variable set, no sleep."""
    code = """
import os, sys, time
before, opened, slept = dict(os.environ), [], []
time.sleep = slept.append
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import gspo
assert dict(os.environ) == before and not slept
print([name for name in opened if not name.endswith((".py", ".pyc"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "statement",
    [
        "import gspo.types, gspo.algo",
        "import gspo.exit_codes, gspo.registry",
        "import gspo.data, gspo.rewards",
        "import gspo.config; gspo.config.load()",
        "import gspo.cli, gspo.commands.train, gspo.commands.config",
    ],
)
def test_types_config_and_command_line_load_no_model_library(statement):
    assert not modules_after(statement) & {"torch", "transformers", "numpy", "ray", "vllm"}


def spin_count(**environment: str) -> str | None:
    code = (
        "import os; from gspo.openmp import choose_spin_count; choose_spin_count(); "
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "GSPO", "OMP"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**kept, **environment}
    )
    return done.stdout.strip()


def test_threads_spin_as_the_user_says_or_as_the_machine_allows():
    assert spin_count() in ("20000", "100000")
    assert spin_count(GOMP_SPINCOUNT="7") == "7"
    assert spin_count(OMP_WAIT_POLICY="PASSIVE") == "None"
    # what a parent process chose is chosen again
    assert spin_count(GOMP_SPINCOUNT="7", GSPO_CHOSEN_SPINCOUNT="7") in ("20000", "100000")
