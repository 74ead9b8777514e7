"""How many programs a second the sandbox runs on one core."""

from __future__ import annotations

import time
from dataclasses import dataclass

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
    """Programs a second on one core, one after the other."""

    trivial: float
    typical: float


def measure_speed(sandbox: Sandbox, seconds: float = 1.0) -> Speed:
    """Run a trivial and a typical program for `seconds` each from one thread; raises SandboxError if one goes wrong."""
    data = b"200\n" + b" ".join(b"%d" % (i * 37 % 1000) for i in range(200)) + b"\n"
    return Speed(_rate(sandbox, TRIVIAL, b"41\n", seconds), _rate(sandbox, TYPICAL, data, seconds))


def _rate(sandbox: Sandbox, source: str, stdin: bytes, seconds: float) -> float:
    sandbox.run(source, stdin)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        result = sandbox.run(source, stdin)
        if not result.ok:
            raise SandboxError(f"an honest program failed: {result.stderr.decode(errors='replace')[-300:]}")
        count += 1
    return count / elapsed
