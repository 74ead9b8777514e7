"""Scorecard rows S1 to S4: hostile programs, honest programs, the attacks where nothing isolates, a long mixed run."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gspo.processes import children_of
from gspo.rewards.graders.code import grade_code, same_output
from gspo.sandbox import Sandbox, examine_level
from tests.faults.programs.attack import Attack, Outcome, World, make_world
from tests.faults.programs.honest import HONEST, Honest
from tests.faults.programs.hostile import ATTACKS, cases_for
from tests.faults.programs.naive import run_naively
from tests.faults.programs.resources import MEMORY_LIMIT
from tests.faults.row import Row

DEADLINE = 2.0
# Beyond the deadline a kill and a busy machine may take this long.
SLACK = 10.0
HONEST_WALL = 60.0
MIXED_RUNS = 10_000
MUST_SUCCEED = 25


def available_levels() -> list[int]:
    """The isolation levels this machine grants."""
    return [level for level in (1, 2, 3) if examine_level(level).granted]


def attack_fault(sandbox: Sandbox, attack: Attack, world: World) -> str:
    """What went wrong when the attack met the sandbox, "" when nothing did."""
    world.reset()
    start = time.monotonic()
    outcome = _confined(sandbox, attack, world)
    seconds = time.monotonic() - start
    faults = []
    if outcome.earned:
        faults.append("was rewarded")
    if attack.gained(world, outcome):
        faults.append("reached its goal")
    if world.touched() or world.contacted() or world.victim_harmed():
        faults.append("touched something")
    if seconds > 2 * DEADLINE + SLACK:
        faults.append(f"took {seconds:.1f} s")
    if world.left_over() or (left := [child for pid in sandbox.server_pids() for child in children_of(pid)]):
        faults.append(f"left processes {world.left_over() or left}")
    after = sandbox.run("print(int(input()) * 2)", b"21\n", wall=HONEST_WALL)
    if after.stdout != b"42\n":
        faults.append("the next honest program failed")
    return f"{attack.name} at level {sandbox.level}: {', '.join(faults)}" if faults else ""


def _confined(sandbox: Sandbox, attack: Attack, world: World) -> Outcome:
    source = world.fill(attack.source)
    if attack.kind == "verdict":
        reward = grade_code(source, cases_for(attack, world), timeout=DEADLINE, memory=MEMORY_LIMIT, sandbox=sandbox)
        return Outcome(earned=reward.score > 0 or reward.extra["tests_passed"] > 0)
    result = sandbox.run(source, wall=DEADLINE, memory=MEMORY_LIMIT)
    earned = result.ok and same_output(result.stdout, world.expected)
    return Outcome(earned, b"" if result.stdout_truncated else result.stdout)


def hostile_row(seed: int) -> Row:
    """S1: forty-one hostile programs at every level get no reward, touch nothing, keep the deadline, leave nothing."""
    order = list(ATTACKS.values())
    random.Random(seed).shuffle(order)
    faults: list[str] = []
    levels = available_levels()
    with make_world() as world:
        for level in levels:
            with Sandbox(level, num_servers=1) as sandbox:
                faults += [fault for attack in order if (fault := attack_fault(sandbox, attack, world))]
    count = len(order) * len(levels)
    detail = f"{count - len(faults)}/{count} contained at levels {levels}" + _listed(faults)
    return Row("S1", "hostile programs gain nothing", not faults and bool(levels), detail)


def honest_fault(sandbox: Sandbox, honest: Honest) -> str:
    """Why an honest program did not run as it should, "" when it did."""
    result = sandbox.run(honest.source, honest.stdin.encode(), wall=HONEST_WALL)
    if result.ok and result.stdout == honest.expected.encode():
        return ""
    output = result.stderr.decode(errors="replace").strip()[-200:]
    return f"{honest.name} at level {sandbox.level}: exit {result.exit_code}, signal {result.signal}, {output!r}"


def honest_programs(level: int) -> list[Honest]:
    """Those that apply at a level: /dev/null needs file calls, and a module must be installed."""
    return [h for h in HONEST if (level >= 2 if h.needs == "files" else _installed(h.needs))]


def _installed(module: str) -> bool:
    return not module or importlib.util.find_spec(module) is not None


def honest_row(seed: int) -> Row:
    """S2: honest programs run unhindered at every level."""
    faults: list[str] = []
    count, levels = 0, available_levels()
    for level in levels:
        programs = honest_programs(level)
        random.Random(seed).shuffle(programs)
        with Sandbox(level, num_servers=1) as sandbox:
            faults += [fault for program in programs if (fault := honest_fault(sandbox, program))]
        count += len(programs)
    detail = f"{count - len(faults)}/{count} ran at levels {levels}, {len(faults)} refused" + _listed(faults)
    return Row("S2", "honest programs are not refused", not faults and len(HONEST) >= 30 and bool(levels), detail)


def naive_row(seed: int) -> Row:
    """S3: the same attacks succeed against a grader that does not isolate, so S1 can fail."""
    order = list(ATTACKS.values())
    random.Random(seed).shuffle(order)
    succeeded, failed = [], []
    with make_world() as world:
        for attack in order:
            world.reset()
            outcome = run_naively(attack, world, cases_for(attack, world))
            (succeeded if attack.succeeded(world, outcome) else failed).append(attack.name)
            world.sweep()
    detail = f"{len(succeeded)}/{len(order)} succeed without isolation (at least {MUST_SUCCEED})"
    return Row("S3", "the attacks bite", len(succeeded) >= MUST_SUCCEED, f"{detail}; not: {', '.join(sorted(failed))}")


def mixed_row(seed: int, runs: int = MIXED_RUNS) -> Row:
    """S4: a long mix of honest and hostile programs gives no wrong verdict and leaks neither memory nor descriptors."""
    draw = random.Random(seed)
    wrong: list[str] = []
    with Sandbox(num_servers=1) as sandbox:
        _mix(sandbox, draw, min(500, runs))
        before = _footprint(sandbox)
        wrong += _mix(sandbox, draw, runs)
        after = _footprint(sandbox)
    grown = after[0] - before[0]
    steady = grown < 16 << 20 and after[1:] == before[1:]
    detail = (
        f"{runs} runs, {len(wrong)} wrong, memory {grown / (1 << 20):+.1f} MiB, "
        f"descriptors of judge and server {before[1:]} -> {after[1:]}" + _listed(wrong)
    )
    return Row("S4", "a long mixed run stays right and steady", not wrong and steady, detail)


def _mix(sandbox: Sandbox, draw: random.Random, runs: int) -> list[str]:
    kinds: list[Callable[[], str]] = [
        lambda: _wrong(sandbox, "print(int(input()) + 1)", draw.randrange(10**6), 1),
        lambda: _wrong(sandbox, "print(int(input()) + 1)", draw.randrange(10**6), 2),
        lambda: _wrong(sandbox, "import collections, heapq\nn = int(input())\nprint(n + len([1]))", 5, 1),
        lambda: _wrong(sandbox, "raise SystemExit(0)", 7, None),
        lambda: _wrong(sandbox, "import os\nos.kill(os.getpid(), 11)\nos.abort()", 7, None),
        lambda: _wrong(sandbox, "open('/etc/passwd')", 7, None),
        lambda: _wrong(sandbox, "import os\nos.fork()\nprint(8)", 7, None),
        lambda: _wrong_call(sandbox, "def f(n): return n + 1", draw.randrange(10**6), True),
        lambda: _wrong_call(sandbox, "class I(int):\n    __eq__ = lambda s, o: True\ndef f(n): return I(n)", 3, False),
    ]
    return [fault for _ in range(runs) if (fault := draw.choice(kinds)())]


def _wrong(sandbox: Sandbox, source: str, number: int, added: int | None) -> str:
    expected = number + (added if added is not None else 1)
    tests = {"inputs": [f"{number}\n"], "outputs": [f"{expected}\n"]}
    score = grade_code(source, tests, timeout=HONEST_WALL, sandbox=sandbox).score
    return "" if score == (1.0 if added == 1 else 0.0) else f"{source!r} got {score}"


def _wrong_call(sandbox: Sandbox, source: str, number: int, right: bool) -> str:
    tests = {"fn_name": "f", "inputs": [[number]], "outputs": [number + 1]}
    score = grade_code(source, tests, timeout=HONEST_WALL, sandbox=sandbox).score
    return "" if score == float(right) else f"{source!r} got {score}"


def _footprint(sandbox: Sandbox) -> tuple[int, int, int]:
    """Resident bytes of judge and server together, and the number of descriptors of each."""
    gc.collect()
    pids = [os.getpid(), *sandbox.server_pids()]
    return sum(_resident(pid) for pid in pids), len(os.listdir("/proc/self/fd")), _descriptors(pids[1:])


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors(pids: Iterable[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def _listed(faults: list[str]) -> str:
    return "; " + "; ".join(faults[:5]) if faults else ""


ROWS: dict[str, Callable[[int], Row]] = {"S1": hostile_row, "S2": honest_row, "S3": naive_row, "S4": mixed_row}
