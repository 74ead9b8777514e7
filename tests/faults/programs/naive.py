"""A grader as they are often written: the program runs beside the tests, in one process, and reports on itself.

Used to show that the attacks work where nothing isolates: always in a throwaway folder, with bounds, killed after.
"""

from __future__ import annotations

import json
import subprocess
import sys

from .attack import Attack, Outcome, World

TIMEOUT = 2
OVERRUN = 3.0

HARNESS = r"""
import contextlib, io, json, math, signal, sys

def same(got, expected):
    return got == expected

def main():
    tests = json.load(open("tests.json"))
    signal.alarm(int(sys.argv[1]))
    scope = {"__name__": "__main__", "math": math}
    if "assert_case" in tests:
        exec(open("program.py").read(), scope)
        for test in tests["assert_case"]:
            exec(test, scope)
        passed = True
    elif "fn_name" not in tests:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(open("program.py").read(), scope)
        passed = all(expected in printed.getvalue().split() for expected in tests["outputs"])
    else:
        exec(open("program.py").read(), scope)
        passed = all(same(scope[tests["fn_name"]](*i), o) for i, o in zip(tests["inputs"], tests["outputs"]))
    json.dump({"passed": passed}, open("result.json", "w"))
    sys.exit(0 if passed else 1)

main()
"""

PLAIN_HARNESS = r"""
import signal, sys
signal.alarm(int(sys.argv[1]))
exec(compile(open("program.py").read(), "program.py", "exec"), {"__name__": "__main__"})
"""


def run_naively(attack: Attack, world: World, tests: dict) -> Outcome:
    """Let the program loose on this grader; what came of it."""
    (world.folder / "program.py").write_text(world.fill(attack.source))
    (world.folder / "tests.json").write_text(json.dumps(tests))
    (world.folder / "result.json").unlink(missing_ok=True)
    harness = HARNESS if attack.kind == "verdict" else PLAIN_HARNESS
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", harness, str(TIMEOUT)],
        cwd=world.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    stdout, overran = b"", False
    try:
        stdout, _ = process.communicate(timeout=TIMEOUT + OVERRUN)
    except subprocess.TimeoutExpired:
        overran = True
        process.kill()
        # Left-over processes may hold the pipe; they are counted first and end with it.
        lasting = bool(world.left_over())
        stdout = world.done.encode() if lasting else b""
        world.sweep()
        process.communicate()
    earned = attack.kind == "verdict" and not overran and _verdict(process.returncode, world)
    broke = process.returncode < 0 or _undecodable(stdout)
    return Outcome(earned, stdout, overran, broke and not earned)


def _verdict(code: int, world: World) -> bool:
    if code == 0:
        return True
    result = world.folder / "result.json"
    return result.exists() and json.loads(result.read_text() or "{}").get("passed") is True


def _undecodable(stdout: bytes) -> bool:
    try:
        stdout.decode()
    except UnicodeDecodeError:
        return True
    return False
