"""How many programs per second the sandbox runs on one core."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from .judge import Sandbox
from .result import SandboxError

TRIVIAL = "print(int(input()) + 1)\n"

TYPICAL = """
import sys, heapq
from collections import defaultdict, deque
from functools import lru_cache

def main():
    data = sys.stdin.read().split()
    n = int(data[0])
    values = [int(x) for x in data[1 : n + 1]]
    graph = defaultdict(list)
    for i in range(1, n):
        graph[i // 2].append((i, values[i] % 7 + 1))
    distance = {0: 0}
    heap = [(0, 0)]
    while heap:
        d, node = heapq.heappop(heap)
        for other, w in graph[node]:
            if d + w < distance.get(other, 1 << 60):
                distance[other] = d + w
                heapq.heappush(heap, (d + w, other))

    @lru_cache(maxsize=None)
    def ways(k):
        return 1 if k < 2 else (ways(k - 1) + ways(k - 2)) % 1_000_000_007

    print(sum(distance.values()), ways(200), max(values))

main()
"""


@dataclass(frozen=True, slots=True)
class Speed:
    """Programs per second, run one after the other: by the clock, and per second of one core's processor time.

    The clock also counts other work of the machine. Processor time is the sum over all processes involved.
    """

    trivial: float
    typical: float
    trivial_per_core: float
    typical_per_core: float


def measure_speed(sandbox: Sandbox, seconds: float = 1.0) -> Speed:
    """Run a trivial and a typical program for `seconds` each from one thread; raises SandboxError if one fails."""
    data = b"200\n" + b" ".join(b"%d" % (i * 37 % 1000) for i in range(200)) + b"\n"
    trivial, trivial_per_core = _rates(sandbox, TRIVIAL, b"41\n", seconds)
    typical, typical_per_core = _rates(sandbox, TYPICAL, data, seconds)
    return Speed(trivial, typical, trivial_per_core, typical_per_core)


def _rates(sandbox: Sandbox, source: str, stdin: bytes, seconds: float) -> tuple[float, float]:
    sandbox.run(source, stdin)
    count, start, used = 0, time.perf_counter(), _processor_time(sandbox)
    while (elapsed := time.perf_counter() - start) < seconds:
        result = sandbox.run(source, stdin)
        if not result.ok:
            raise SandboxError(f"an honest program failed: {result.stderr.decode(errors='replace')[-300:]}")
        count += 1
    return count / elapsed, count / (_processor_time(sandbox) - used)


def _processor_time(sandbox: Sandbox) -> float:
    """Seconds of processor time used by this thread, the idle servers and the children that they had."""
    ticks = 0
    for pid in sandbox.server_pids():
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, words[11:15]))  # its own and its children's, user and system
    return time.thread_time() + ticks / os.sysconf("SC_CLK_TCK")
