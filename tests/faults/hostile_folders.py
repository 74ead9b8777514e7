"""Run folders as a stranger could make them: each is a whole run in which something was replaced."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.report.synthetic import Plan, make_run

GOOD = Plan(steps=3, groups=2, n=2, questions=2, val_every=3)
STEP = "step-000002.jsonl.gz"
DEEP = 50_000


def _laughs() -> str:
    """Nine levels of nine aliases each."""
    names = "abcdefghi"
    first = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    return first + "".join(f"{n}: &{n} [{', '.join([f'*{p}'] * 9)}]\n" for p, n in pairwise(names))


def _bomb(num_bytes: int, unit: bytes = b" ") -> bytes:
    """A gzip file of about a thousandth of the bytes that it expands to, in members of 1 MiB each."""
    return gzip.compress(unit * ((1 << 20) // len(unit)), mtime=0) * (num_bytes >> 20)


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def _pipe(path: Path) -> None:
    _replace(path, os.mkfifo)


def _loop(path: Path) -> None:
    _replace(path, lambda p: p.symlink_to(p.name))


def _only_yaml(run: Path, text: str) -> None:
    (run / "config.json").unlink(missing_ok=True)
    (run / "config.yaml").write_text(text)


def _lines(run: Path, *rows: str) -> None:
    with open(run / "metrics.jsonl", "a") as f:
        f.write("".join(row + "\n" for row in rows))


def _wrong_types(run: Path) -> None:
    """Every field that a page reads, of another type than it expects."""
    result = {"start_acc": "x", "final_acc": [1], "seconds": {}, "steps": "9", "final_ci": ["a", None], "run": 5}
    (run / "result.json").write_text(json.dumps(result))
    (run / "environment.json").write_text(
        json.dumps({"device": [1], "packages": ["torch"], "argv": {"a": 1}, "git": 5})
    )
    (run / "alarms.jsonl").write_text('{"text": {"a": 1}, "step": [], "name": 5, "action": []}\n[1]\n')
    keys = ("trainer.total_training_steps", "actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.model.path")
    values: tuple[Any, ...] = ([[1]], "wide", {"a": [None]})
    records = [{"key": k, "value": v, "origin": ["x"]} for k, v in zip(keys, values)]
    (run / "config.json").write_text(json.dumps(records))
    group = {"uid": [], "fate": {}, "messages": 5, "responses": [5, {"score": "a", "ratio": [], "num_tokens": "x"}]}
    (run / "groups" / STEP).write_bytes(gzip.compress((json.dumps(group) + "\n").encode()))
    _lines(run, '{"step": 9, "critic/score_all/mean": "high", "actor/clip_ratio_low": [1], "x": {"y": 1}}')


def _lying_index(run: Path) -> None:
    """An index whose line matches the file by size and CRC but holds something else."""
    data = (run / "groups" / STEP).read_bytes()
    crc = int.from_bytes(data[-8:-4], "little")
    head = f'{{"step":2,"size":{len(data)},"mtime_ns":0,"crc":{crc},'
    (run / "groups" / "index.jsonl").write_text(head + '"groups":[[5],{}],"ratios":["x"]}\n' + head + "[" * DEEP + "\n")


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "deep_yaml": (lambda r: _only_yaml(r, "[" * DEEP), "config.yaml: is nested deeper"),
    "deep_block_yaml": (lambda r: _only_yaml(r, "- " * DEEP + "1"), "config.yaml: is nested deeper"),
    "recursive_alias": (lambda r: _only_yaml(r, "a: &a [*a]\n"), "config.yaml: has an alias *a inside"),
    "recursive_map": (lambda r: _only_yaml(r, "a: &a\n  b: *a\n"), "config.yaml: has an alias *a inside"),
    "alias_bomb": (lambda r: _only_yaml(r, _laughs()), "config.yaml: has more than 20,000 values"),
    "large_yaml": (lambda r: _only_yaml(r, "a: 1\n" * 1_000_000), "config.yaml: is larger than 1 MiB"),
    "long_number_yaml": (lambda r: _only_yaml(r, "a: 1" + ":1" * 400_000), "config.yaml: has a value of over"),
    "tagged_yaml": (lambda r: _only_yaml(r, "a: !!python/object/apply:os.system ['exit']\n"), "config.yaml: cannot"),
    "config_pipe": (lambda r: ((r / "config.json").unlink(), _pipe(r / "config.yaml")), "config.yaml: is a named pipe"),
    "deep_settings": (
        lambda r: ((r / "config.yaml").unlink(), (r / "config.json").write_text("[" * DEEP)),
        "config.json: is nested deeper",
    ),
    "metrics_pipe": (lambda r: _pipe(r / "metrics.jsonl"), "metrics.jsonl: is a named pipe"),
    "metrics_folder": (lambda r: _replace(r / "metrics.jsonl", Path.mkdir), "metrics.jsonl: is a folder"),
    "metrics_loop": (lambda r: _loop(r / "metrics.jsonl"), "metrics.jsonl: cannot be opened"),
    "long_line": (lambda r: _lines(r, '{"step": 4, "a": "' + "x" * (5 << 20) + '"}'), "metrics.jsonl: has a line of"),
    "many_names": (
        lambda r: _lines(r, json.dumps({"step": 4, **{f"m{i}": i for i in range(9000)}})),
        "metrics.jsonl: has more than 2,000 metrics",
    ),
    "result_pipe": (lambda r: _pipe(r / "result.json"), "result.json: is a named pipe"),
    "lock_pipe": (lambda r: ((r / "result.json").unlink(), _pipe(r / ".lock")), ""),
    "environment_deep": (
        lambda r: (r / "environment.json").write_text('{"a": ' + "[" * DEEP),
        "environment.json: is ne",
    ),
    "large_alarms": (
        lambda r: (r / "alarms.jsonl").write_bytes(b'{"text": "x"}\n' * (2 << 20)),
        "alarms.jsonl: is larger than 16 MiB",
    ),
    "group_bomb": (lambda r: (r / "groups" / STEP).write_bytes(_bomb(2 << 30)), f"groups/{STEP}: "),
    "group_list_bomb": (lambda r: (r / "groups" / STEP).write_bytes(_bomb(1 << 30, b"[],")), f"groups/{STEP}: "),
    "group_pipe": (lambda r: _pipe(r / "groups" / STEP), f"groups/{STEP}: is a named pipe"),
    "group_folder": (lambda r: _replace(r / "groups" / STEP, Path.mkdir), f"groups/{STEP}: is a folder"),
    "group_deep": (
        lambda r: (r / "groups" / STEP).write_bytes(gzip.compress(b'{"responses": ' + b"[" * DEEP)),
        f"groups/{STEP}: line 1 is nested deeper",
    ),
    "evaluation_bomb": (
        lambda r: [f.write_bytes(_bomb(1 << 30, b"[],")) for f in (r / "evals").glob("*.gz")],
        "evals/step-000000.jsonl.gz: ",
    ),
    "index_pipe": (lambda r: _pipe(r / "groups" / "index.jsonl"), ""),
    "lying_index": (_lying_index, ""),
    "wrong_types": (_wrong_types, ""),
}
"""Name → (what a stranger did to a whole run, the problem that must be named; "" when nothing is left out)."""


def make_hostile(folder: Path, name: str) -> Path:
    """A run folder `name` that was tampered with."""
    run = make_run(folder / name, GOOD)
    HOSTILE[name][0](run)
    return run
