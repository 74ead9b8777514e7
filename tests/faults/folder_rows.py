"""Rows R1 to R3: hostile run folders and configs cost seconds, are refused by name, and leave the others alone."""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.hostile_folders import GOOD, HOSTILE, make_hostile
from tests.faults.row import Check, Row
from tests.report.synthetic import make_run

SECONDS = 60.0  # a loaded machine needs many of them to import torch
MEMORY_MB = 500
NOT_IN_LIST = ("groups/", "evals/")  # problems of single files of groups: shown with the run, not in the list
DRAWN = ("wrong_types", "many_names")  # the others differ in nothing that a picture shows
REPLAYED = ("deep_yaml", "alias_bomb", "config_pipe")
HOSTILE_CONFIGS = (
    "deep_yaml",
    "deep_block_yaml",
    "recursive_alias",
    "recursive_map",
    "alias_bomb",
    "large_yaml",
    "long_number_yaml",
    "tagged_yaml",
    "config_pipe",
)


def run_command(*words: str, limit: float = SECONDS) -> tuple[int, str, float, float]:
    """Exit code, output, seconds and peak MB of a `gspo` command, which is killed after `limit` seconds."""
    start = time.monotonic()
    program = [sys.executable, "-m", "gspo", *words]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(program, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        status, usage = _wait(child.pid, start + limit)
        child.returncode = status
        output.seek(0)
        text = output.read().decode(errors="replace")
    return status, text, time.monotonic() - start, usage.ru_maxrss / 1024


def _wait(pid: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    """The exit code and resources of a child, which is killed at the deadline."""
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            deadline = float("inf")
        time.sleep(0.01)


def r1(seed: int) -> Row:
    """`gspo report` on each hostile folder: it ends, within limits, and names what it left out."""
    problems, most, slowest = [], 0.0, 0.0
    names = sorted(HOSTILE)
    random.Random(seed).shuffle(names)
    with tempfile.TemporaryDirectory(prefix="gspo-folders-") as folder:
        for name in names:
            run, expected = make_hostile(Path(folder), name), HOSTILE[name][1]
            code, text, seconds, megabytes = run_command(
                "report", str(run), *([] if name in DRAWN else ["--no-pictures"])
            )
            most, slowest = max(most, megabytes), max(slowest, seconds)
            named = f"not read: {expected}" in text if expected else "not read" not in text
            if code != 0 or not named or "Traceback" in text or megabytes > MEMORY_MB:
                problems.append(f"{name}: exit {code}, {megabytes:.0f} MB, {text.strip()[-150:]!r}")
    detail = "; ".join(problems) or f"{len(names)} of {len(names)} named, at most {most:.0f} MB and {slowest:.1f} s"
    return Row("R1", f"gspo report on {len(names)} hostile run folders", not problems, detail)


def r2(seed: int) -> Row:
    """`gspo dashboard` over all hostile folders and a good one: every answer comes, and the good run is as if alone."""
    names = [*HOSTILE, "good"]
    random.Random(seed).shuffle(names)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gspo-folders-") as top:
        folder = Path(top)
        for name in names:
            make_run(folder / name, GOOD) if name == "good" else make_hostile(folder, name)
        program = [sys.executable, "-m", "gspo", "dashboard", str(folder), "--port", "0"]
        server = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2].split("/")[0])
            problems, slowest = _ask_all(port)
            peak = peak_mb(server.pid)
        finally:
            server.kill()
            server.wait()
    if peak > MEMORY_MB:
        problems.append(f"{peak:.0f} MB")
    detail = "; ".join(problems) or f"all {len(names)} listed, slowest answer {slowest:.1f} s, {peak:.0f} MB"
    return Row("R2", "gspo dashboard over hostile run folders and a good one", not problems, detail)


def _ask_all(port: int) -> tuple[list[str], float]:
    """What the dashboard answered wrongly, and its slowest answer in seconds."""
    problems: list[str] = []
    slowest = 0.0

    def ask(path: str) -> tuple[int, bytes]:
        nonlocal slowest
        start = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request("GET", path)
        reply = connection.getresponse()
        answer = reply.status, reply.read()
        connection.close()
        slowest = max(slowest, time.monotonic() - start)
        return answer

    listed = {run["name"]: run for run in json.loads(ask("/api/runs")[1])["runs"]}
    for name, (_, expected) in HOSTILE.items():
        if name not in listed:
            problems.append(f"{name} is not listed")
        shown = listed.get(name, {}).get("problems", [])
        if expected and not expected.startswith(NOT_IN_LIST) and not any(p.startswith(expected) for p in shown):
            problems.append(f"{name} is listed without its reason")
        for path in ("overview", "index", "train/1", "train/2", "eval/0"):
            status, _ = ask(f"/api/run/{name}/{path}")
            if status not in (200, 404, 409):
                problems.append(f"{name}/{path}: {status}")
    good = listed.get("good", {})
    if good.get("problems") != [] or good.get("last_step") != GOOD.steps or good.get("accuracy") is None:
        problems.append(f"the good run is shown as {good}")
    return problems, slowest


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def r3(seed: int) -> Row:
    """`gspo train` and `gspo replay` with a hostile config: exit code 2, the file and the reason named."""
    problems, slowest = [], 0.0
    cases = [("train", name) for name in HOSTILE_CONFIGS] + [("replay", name) for name in REPLAYED]
    random.Random(seed).shuffle(cases)
    with tempfile.TemporaryDirectory(prefix="gspo-folders-") as folder:
        for number, (command, name) in enumerate(cases):
            run = make_hostile(Path(folder) / str(number), name)
            target = run / "config.yaml" if command == "train" else run
            code, text, seconds, _ = run_command(command, str(target))
            slowest = max(slowest, seconds)
            reason = HOSTILE[name][1].partition(": ")[2]
            if code != 2 or str(run / "config.yaml") not in text or reason not in text or "Traceback" in text:
                problems.append(f"{command} {name}: exit {code}, {text.strip()[-150:]!r}")
    detail = "; ".join(problems) or f"{len(cases)} of {len(cases)} refused by name, exit 2, at most {slowest:.1f} s"
    return Row("R3", "gspo train and replay with hostile configs", not problems, detail)


ROWS: dict[str, Check] = {"R1": r1, "R2": r2, "R3": r3}
