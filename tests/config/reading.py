"""Which keys the program reads: attribute reads in every module outside `gspo.config`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import gspo
from gspo.config.loading import tree

SOURCE = Path(gspo.__file__).parent
GENERIC = 7  # a shorter name, or one that several keys share, also needs its sections' names in the same file


ROOTS = {"actor_rollout_ref", "algorithm", "trainer", "reward_model", "custom_reward_function"}


@cache
def attributes_by_file() -> dict[Path, frozenset[str]]:
    """Names read as attributes (or by getattr with a literal) in each file that reads the config."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        if SOURCE / "config" in path.parents:
            continue
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                names |= {
                    a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
                }
        if names & ROOTS:
            found[path] = frozenset(names)
    return found


def is_generic(key: str) -> bool:
    """Whether the last part of a key says too little to be searched for alone."""
    last = key.rpartition(".")[2]
    shared = sum(other.rpartition(".")[2] == last for other in tree.leaves())
    return len(last) < GENERIC or shared > 1


def is_read(key: str) -> bool:
    """Whether some module outside the config package reads the key."""
    *parents, last = key.split(".")
    for names in attributes_by_file().values():
        if last in names and (not is_generic(key) or names >= set(parents) - {"actor_rollout_ref"}):
            return True
    return False
