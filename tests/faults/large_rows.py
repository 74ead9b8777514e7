"""Rows L1 and L2: the report and the dashboard of a run of many steps stay small, and show its extremes and its ends."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults.folder_rows import peak_mb, run_command
from tests.faults.large_runs import make_large_run, metric
from tests.faults.processes import seconds_of_children
from tests.faults.row import Check, Row

STEPS = 12_000
MEMORY_MB = 500
REWARD = "critic/score_all/mean"


def _wrong_charts(overview: dict[str, Any]) -> list[str]:
    """What a thinned chart of the reward shows wrongly."""
    columns = overview["columns"]
    values = [v for v in columns[REWARD] if v is not None]
    outliers = sum(v == -5.0 for v in values)
    expected = len([s for s in range(1, STEPS + 1) if metric(s) == -5.0])
    wrong = [] if len(columns["step"]) <= 3100 else [f"{len(columns['step'])} points"]
    if (columns["step"][0], columns["step"][-1]) != (0, STEPS):
        wrong.append("the ends of the axis")
    if (values[0], values[-1]) != (metric(0), metric(STEPS)):
        wrong.append("the values at the ends")
    return wrong if outliers == expected else [*wrong, f"{outliers} of {expected} outliers"]


def l1(seed: int) -> Row:
    """`gspo report` twice: the second time with the index that the first one completed."""
    with tempfile.TemporaryDirectory(prefix="gspo-large-") as folder:
        run = make_large_run(Path(folder) / "big", STEPS)
        times = [seconds_of_children()]
        first = run_command("report", str(run), limit=600.0)
        times.append(seconds_of_children())
        second = run_command("report", str(run), limit=600.0)
        times.append(seconds_of_children())
        page = (run / "report.html").read_text()
        found = re.search(r'id="data-overview-0">([^<]*)<', page)
        assert found is not None
        wrong = _wrong_charts(json.loads(gzip.decompress(base64.b64decode(found.group(1)))))
    peak = max(first[3], second[3])
    passed = first[0] == second[0] == 0 and peak < MEMORY_MB and not wrong
    used = [after - before for before, after in pairwise(times)]
    detail = (
        f"{peak:.0f} MB, {first[2]:.0f} s and {second[2]:.0f} s ({used[0]:.0f} s and {used[1]:.0f} s of one core), page of "
        f"{len(page) / 1e6:.0f} MB"
    )
    return Row("L1", f"gspo report of {STEPS:,} steps", passed, f"{detail}; wrong: {wrong}" if wrong else detail)


def l2(seed: int) -> Row:
    """`gspo dashboard`: the list, a run, its groups, and a step that is not listed."""
    with tempfile.TemporaryDirectory(prefix="gspo-large-") as folder:
        make_large_run(Path(folder) / "big", STEPS)
        program = [sys.executable, "-m", "gspo", "dashboard", folder, "--port", "0"]
        server = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2].split("/")[0])
            listed, first = _ask(port, "/api/runs")
            used = _seconds_of(server.pid)
            overview, _ = _ask(port, "/api/run/big/overview")
            index, _ = _ask(port, "/api/run/big/index")
            while not index["complete"]:  # as a page does: it asks for what it lacks
                known = f"after={index['num_listed']}&generation={index['generation']}"
                index, _ = _ask(port, f"/api/run/big/index?{known}")
            step, second = _ask(port, "/api/run/big/index?from=6543&to=6543")
            peak = peak_mb(server.pid)
        finally:
            server.kill()
            server.wait()
    wrong = _wrong_charts(overview)
    if listed["runs"][0]["last_step"] != STEPS or index["num_steps"] != STEPS + 2:
        wrong.append("the counts")
    if [e["step"] for e in step["entries"]] != [6543] or len(step["entries"][0]["groups"]) != 8:
        wrong.append("a step on demand")
    detail = (
        f"{peak:.0f} MB, first answer after {first:.0f} s ({used:.0f} s of one core with its start), a step on demand after "
        f"{second:.1f} s"
    )
    passed = peak < MEMORY_MB and not wrong
    return Row("L2", f"gspo dashboard over {STEPS:,} steps", passed, f"{detail}; wrong: {wrong}" if wrong else detail)


def _seconds_of(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ask(port: int, path: str) -> tuple[Any, float]:
    """The JSON answer, and the seconds that it took."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", path)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer, time.monotonic() - start


ROWS: dict[str, Check] = {"L1": l1, "L2": l2}
