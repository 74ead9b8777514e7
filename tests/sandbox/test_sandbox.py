"""The sandbox's own behaviour: results, limits, isolation between runs, recovery, refusal."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gspo.processes import children_of
from gspo.sandbox import Sandbox, SandboxError, examine_level, levels, measure_speed
from gspo.sandbox.fork_server import ServerHandle
from gspo.sandbox.levels import LevelReport
from gspo.sandbox.result import RunResult

WALL = 60.0


def test_result_of_a_good_program(box: Sandbox):
    result = box.run("import sys\nprint(input())\nprint('e', file=sys.stderr)", b"hi\n", wall=WALL)
    assert (result.exit_code, result.signal, result.stdout, result.stderr) == (0, None, b"hi\n", b"e\n")
    assert result.ok and not result.timed_out and result.wall > 0


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("1/0", 1),
        ("def f(:", 1),
        ("import os; os._exit(9)", 9),
    ],
)
def test_exit_codes(box: Sandbox, source: str, code: int):
    result = box.run(source, wall=WALL)
    assert result.exit_code == code and not result.ok


def test_a_traceback_names_the_line(box: Sandbox):
    result = box.run("x = 1\nraise ValueError('why')", wall=WALL)
    assert b"line 2" in result.stderr and b"ValueError: why" in result.stderr


def test_a_signal_is_reported(box: Sandbox):
    result = box.run("import ctypes; ctypes.string_at(0)", wall=WALL)
    assert (result.exit_code, result.signal) == (None, signal.SIGSEGV)


def test_the_deadline_is_the_judges(box: Sandbox):
    result = box.run("print('before', flush=True)\nwhile True: pass", wall=0.4)
    assert result.timed_out and result.exit_code is None and not result.ok
    assert result.stdout == b"before\n" and result.wall >= 0.4


def test_flooding_output_is_cut_and_ended(box: Sandbox):
    result = box.run("while True: print('x' * 100000)", wall=WALL)
    assert result.stdout_truncated and not result.timed_out and not result.ok
    assert len(result.stdout) == 8 << 20


def test_flooding_stderr_is_cut(box: Sandbox):
    result = box.run("import sys\nsys.stderr.write('x' * 1000000)\nprint('ok')", wall=WALL)
    assert result.stderr_truncated and len(result.stderr) == 64 << 10 and result.ok


def test_only_a_whole_output_and_exit_code_0_before_the_deadline_are_ok():
    good = RunResult(0, None, b"x", b"", False, False, False, 0.1)
    assert good.ok and dataclasses.replace(good, stderr_truncated=True).ok
    for other in ({"exit_code": 1}, {"exit_code": None, "signal": 9}, {"stdout_truncated": True}, {"timed_out": True}):
        assert not dataclasses.replace(good, **other).ok, other


def test_memory_is_limited(box: Sandbox):
    source = "try:\n    bytearray(300 << 20)\n    print('got it')\nexcept MemoryError:\n    print('refused')"
    assert box.run(source, memory=256 << 20, wall=WALL).stdout == b"refused\n"
    assert box.run(source, memory=512 << 20, wall=WALL).stdout == b"got it\n"
    assert box.run(source, memory=310 << 20, wall=WALL).stdout == b"got it\n"  # what Python itself has does not count


def test_the_environment_is_empty(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    source = "import os, sys\nprint(dict(os.environ), os.listdir is not None, sys.argv)"
    assert box.run(source, wall=WALL).stdout == b"{} True ['program.py']\n"


def test_no_run_changes_a_later_one(box: Sandbox):
    box.run(
        "import builtins, json, random, sys\nbuiltins.print = None\njson.loads = None\nsys.modules['math'] = None",
        wall=WALL,
    )
    assert box.run("import math, json\nprint(json.loads('1') + math.floor(1.5))", wall=WALL).stdout == b"2\n"


def test_the_same_program_draws_the_same_numbers(box: Sandbox):
    source = "import random\nprint(random.random(), hash('a'), {'b', 'a', 'c'})"
    first = box.run(source, wall=WALL).stdout
    with Sandbox(num_servers=1) as other:
        assert other.run(source, wall=WALL).stdout == first
    assert box.run(source + "\n#", wall=WALL).stdout != first


@pytest.mark.parametrize("draw", ["np.random.rand()", "getattr(np, 'random').permutation(9)"])
def test_numpys_random_numbers_are_those_of_the_source(box: Sandbox, draw: str):
    """numpy loads its generator at the first use, which is after the process was forked."""
    source = f"import numpy as np\nprint({draw})"
    first, again = (box.run(source, wall=WALL).stdout for _ in range(2))
    assert first == again != b""
    assert box.run(source + "  # another source", wall=WALL).stdout != first


def test_nothing_of_an_earlier_program_is_left_in_memory(monkeypatch: pytest.MonkeyPatch):
    """Even a program that can read all its memory, at level 0, finds no earlier input, source or output there."""
    monkeypatch.delenv("CI", raising=False)
    scan = (
        "needle = bytes([b ^ 1 for b in bytes.fromhex(input())])\nfound = 0\n"
        "with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:\n"
        "    for line in maps:\n"
        "        span, rights = line.split()[:2]\n"
        "        low, high = (int(x, 16) for x in span.split('-'))\n"
        "        if rights.startswith('rw') and high - low < 1 << 28:\n"
        "            memory.seek(low)\n"
        "            try: found += memory.read(high - low).count(needle)\n"
        "            except OSError: pass\n"
        "print(found)"
    )
    with Sandbox(0, allow_unsandboxed=True, num_servers=1) as sandbox:
        secret = b"a-secret-of-the-first-program"
        control = sandbox.run(f"kept = {secret.decode()!r}\n" + scan, bytes(b ^ 1 for b in secret).hex().encode())
        sandbox.run("x = 'a-secret-of-' + 'the-first-program'\nprint(x, input())", secret)
        later = sandbox.run(scan, bytes(b ^ 1 for b in secret).hex().encode())
    copies = int(later.stdout)
    assert int(control.stdout) > copies, "the scan must see what is there"
    assert copies <= 1, "only the scan's own needle"


def test_many_threads_share_one_sandbox():
    with Sandbox(num_servers=2) as sandbox, ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda n: sandbox.run("print(int(input()) ** 2)", b"%d" % n, wall=WALL).stdout, range(40)))
        assert len(sandbox.server_pids()) <= 2
    assert runs == [b"%d\n" % (n * n) for n in range(40)]


def test_a_killed_server_is_replaced_and_the_run_repeated():
    with Sandbox(num_servers=1) as sandbox:
        sandbox.run("pass", wall=WALL)
        (pid,) = sandbox.server_pids()
        os.kill(pid, signal.SIGKILL)
        assert sandbox.run("print(1)", wall=WALL).stdout == b"1\n"
        assert sandbox.server_pids() != [pid]


def test_a_child_dies_with_its_server():
    server = ServerHandle(2 if examine_level(2).granted else 1)
    child = server.start("script", "import time\nprint(1, flush=True)\ntime.sleep(600)", b"", 1 << 30, 60)
    while not child.stdout.data:
        server.step(10)
    (pid,) = children_of(server.process.pid)
    os.kill(server.process.pid, signal.SIGKILL)
    server.finish(child)
    assert child.error is not None and "died" in child.error
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")
    server.close()


def test_failure_of_the_sandbox_is_an_error_not_a_result(monkeypatch: pytest.MonkeyPatch):
    with Sandbox(num_servers=1) as sandbox:
        sandbox.run("pass", wall=WALL)
        start = ServerHandle.start

        def start_and_kill(self, *args, **kwargs):
            child = start(self, *args, **kwargs)
            os.kill(self.process.pid, signal.SIGKILL)
            return child

        monkeypatch.setattr(ServerHandle, "start", start_and_kill)
        with pytest.raises(SandboxError, match=r"died|gone"):
            sandbox.run("import time\ntime.sleep(600)", wall=WALL)


def test_a_program_cannot_pose_as_a_failure_of_the_sandbox(box: Sandbox):
    result = box.run("import os\nos.write(2, b'sandbox: OSError: broken')\nos._exit(125)", wall=WALL)
    assert result.exit_code == 125


def test_no_process_is_left(box: Sandbox):
    with Sandbox(num_servers=2) as sandbox:
        threads = [
            threading.Thread(target=sandbox.run, args=("while True: pass",), kwargs={"wall": 0.3}) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pids = sandbox.server_pids()
        assert len(pids) == 2 and not any(map(children_of, pids))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("pass")


def test_a_forked_process_starts_its_own_servers():
    with Sandbox(num_servers=1) as sandbox:
        sandbox.run("pass", wall=WALL)
        pid = os.fork()
        if pid == 0:
            good = sandbox.run("print(2)", wall=WALL).stdout == b"2\n"
            sandbox.close()
            os._exit(0 if good else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert sandbox.run("print(3)", wall=WALL).stdout == b"3\n"


def test_servers_end_when_their_judge_is_killed():
    code = (
        "import os, signal\nfrom gspo.sandbox import Sandbox\ns = Sandbox(num_servers=1)\ns.run('pass')\n"
        "print(s.server_pids()[0], flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")


def test_level_zero_must_be_typed_and_is_refused_in_ci(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(SandboxError, match="--allow-unsandboxed-code"):
        Sandbox(0)
    with Sandbox(0, allow_unsandboxed=True, num_servers=1) as sandbox:
        assert sandbox.run("print(1)", wall=WALL).stdout == b"1\n"
    monkeypatch.setenv("CI", "true")
    with pytest.raises(SandboxError, match="CI=true"):
        Sandbox(0, allow_unsandboxed=True)


def test_without_any_level_it_refuses_and_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(levels, "examine_level", lambda n: LevelReport(n, False, "no seccomp here"))
    with pytest.raises(SandboxError, match=r"no seccomp here.*Landlock"):
        Sandbox()
    with pytest.raises(SandboxError, match="level 2 is not available"):
        Sandbox(2)


def test_allowed_without_isolation_still_prefers_a_level(monkeypatch: pytest.MonkeyPatch):
    with Sandbox(allow_unsandboxed=True, num_servers=1) as sandbox:
        assert sandbox.level >= 1


def test_an_unknown_level_is_named():
    with pytest.raises(SandboxError, match="7"):
        Sandbox(7)


def test_a_level_is_refused_when_a_canary_gets_through(monkeypatch: pytest.MonkeyPatch):
    """The self-test is by effect: with the filter off, the canaries do what they try, and the level is not granted."""
    from gspo.sandbox import canaries, fork_server

    monkeypatch.setattr(canaries, "ServerHandle", lambda level: fork_server.ServerHandle(0))
    report = canaries.run_canaries(2)
    assert not report.granted and "read a file" in report.reason
    through = [canary.name for canary in report.canaries if not canary.refused]
    assert len(through) >= 12, through


def test_packages_beside_the_standard_library_cannot_be_read(box: Sandbox):
    """A package installed there, this one among them, may hold tests and answers."""
    folder = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    packages = [path for path in (folder / "site-packages").glob("*/__init__.py") if path.is_file()]
    if not packages:
        pytest.skip(f"no package in {folder / 'site-packages'}")
    source = "import sys\ntry:\n    print(len(open(input()).read()) >= 0)\nexcept OSError:\n    print('refused')"
    assert box.run(source, str(packages[0]).encode(), wall=WALL).stdout == b"refused\n"
    if box.level >= 2:
        assert box.run(source, str(folder / "wave.py").encode(), wall=WALL).stdout == b"True\n"


def test_a_busy_judge_does_not_miss_an_end_that_came_in_time():
    """The program ended long before the deadline; a judge that looks only afterwards must not count it as late."""
    with Sandbox(num_servers=1) as sandbox, sandbox._lease() as server:
        child = server.start("script", "print(1)", b"", 1 << 30, 60)
        assert select.select([server._channel], [], [], 60)[0], "the server sent no message"
        assert server.pump(lambda: child.ended, deadline=time.monotonic() - 1)
        server.finish(child)
        assert child.result(timed_out=False).stdout == b"1\n"


def test_limits_of_the_judge_are_not_the_programs(box: Sandbox):
    code = (
        "import resource\nfrom gspo.sandbox import Sandbox\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, resource.getrlimit(resource.RLIMIT_DATA)[1]))\n"
        "with Sandbox(num_servers=1) as s: print(s.run('print(len(bytearray(500 << 20)))').stdout)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{b'524288000' + bytes([10])!r}\n"


def test_speed_is_measured(box: Sandbox):
    speed = measure_speed(box, seconds=0.1)
    assert speed.trivial > 0 and speed.typical > 0


def test_only_programs_that_may_import_numpy_are_forked_with_it():
    with Sandbox(num_servers=1) as sandbox:
        assert sandbox.run("print(1)", wall=WALL).stdout == b"1\n"
        plain = sandbox.server_pids()
        assert sandbox.run("print(2)", wall=WALL).stdout == b"2\n"
        assert sandbox.server_pids() == plain
        name = "importlib.import_module('num' + 'py').arange(3).sum()"
        assert sandbox.run(f"import importlib\nprint({name})", wall=WALL).stdout == b"3\n"
        assert sandbox.check("def f(): return 3", "import numpy as np\nassert f() == np.arange(3).sum()", wall=WALL).ok
        assert len(sandbox.server_pids()) == (1 if sandbox.level == 1 else 2)


def test_a_forked_interpreter_knows_its_own_thread_and_locks(box: Sandbox):
    """The hooks that modules register for a fork are not run; their effects must still hold."""
    source = (
        "import threading, random, os\n"
        "print(threading.main_thread().native_id == threading.get_native_id(), threading.active_count())\n"
        "print(threading.current_thread() is threading.main_thread(), threading.main_thread().is_alive())\n"
        "done = []\nt = threading.Thread(target=lambda: done.append(random.random()))\nt.start(); t.join()\n"
        "print(len(done), callable(os.register_at_fork), os.register_at_fork.__name__)\n"
    )
    expected = b"True 1\nTrue True\n1 True register_at_fork\n"
    assert box.run(source, wall=WALL).stdout == expected
