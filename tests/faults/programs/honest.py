"""Honest programs that must run unhindered: name, source, standard input, expected output."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Honest:
    """A program, its input and all of its output. `needs` names a module it cannot do without."""

    name: str
    source: str
    stdin: str
    expected: str
    needs: str = ""


def _square_lines(n: int) -> str:
    return "".join(f"{i * i}\n" for i in range(n))


HONEST: list[Honest] = [
    Honest("sum", "print(sum(map(int, input().split())))", "1 2 3\n", "6\n"),
    Honest("read_all", "import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1\n2\n3\n", "6\n"),
    Honest(
        "iterate_stdin", "import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", "ab\ncd\n", "ba\ndc\n"
    ),
    Honest("open_zero", "print(len(open(0).read().split()))", "a b c", "3\n"),
    Honest(
        "buffer",
        "import sys\nr = sys.stdin.buffer.readline\nsys.stdout.buffer.write(r().upper())",
        "héllo\n",
        "HéLLO\n",
    ),
    Honest("os_read", "import os\nos.write(1, os.read(0, 100).upper())", "abc\n", "ABC\n"),
    Honest("eof", "try:\n    input()\nexcept EOFError:\n    print('eof')", "", "eof\n"),
    Honest(
        "main_guard",
        "def main():\n    print('ok')\nif __name__ == '__main__':\n    main()\n    raise SystemExit",
        "",
        "ok\n",
    ),
    Honest("exit_builtin", "print(1)\nexit()\nprint(2)", "", "1\n"),
    Honest("sys_exit_0", "import sys\nprint(1)\nsys.exit(0)", "", "1\n"),
    Honest(
        "threads",
        "import threading\nr = [0] * 16\ndef f(i): r[i] = i * i\n"
        "ts = [threading.Thread(target=f, args=(i,)) for i in range(16)]\n[t.start() for t in ts]\n[t.join() for t in ts]\n"
        "print(sum(r))",
        "",
        "1240\n",
    ),
    Honest(
        "big_stack_thread",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(128 << 20)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\ndef main(): print(f(50_000))\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()",
        "",
        "50000\n",
    ),
    Honest(
        "thread_pool",
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as p: print(list(p.map(lambda x: x * x, range(5))))",
        "",
        "[0, 1, 4, 9, 16]\n",
    ),
    Honest(
        "unjoined_thread",
        "import threading, time\ndef f():\n    time.sleep(0.05)\n    print('late')\nthreading.Thread(target=f).start()\nprint('early')",
        "",
        "early\nlate\n",
    ),
    Honest(
        "recursion",
        "import sys\nsys.setrecursionlimit(20_000)\ndef f(n): return 0 if n == 0 else n + f(n - 1)\nprint(f(9000))",
        "",
        f"{sum(range(9001))}\n",
    ),
    Honest(
        "recursion_error",
        "def f(n): return f(n + 1)\ntry:\n    f(0)\nexcept RecursionError:\n    print('deep')",
        "",
        "deep\n",
    ),
    Honest(
        "asyncio",
        "import asyncio\nasync def f(i):\n    await asyncio.sleep(0.01)\n    return i\n"
        "async def main(): print(sum(await asyncio.gather(*[f(i) for i in range(10)])))\nasyncio.run(main())",
        "",
        "45\n",
    ),
    Honest(
        "asyncio_thread",
        "import asyncio\nasync def main(): print(await asyncio.to_thread(lambda: 6 * 7))\nasyncio.run(main())",
        "",
        "42\n",
    ),
    Honest(
        "numpy",
        "import numpy as np\na = np.arange(6).reshape(2, 3)\nprint(int((a @ a.T).trace()), np.linalg.matrix_rank(np.eye(3)))",
        "",
        "55 3\n",
        needs="numpy",
    ),
    Honest(
        "numpy_solve",
        "import numpy as np\nx = np.linalg.solve(np.eye(200) * 2, np.ones(200))\nprint(round(float(x.sum()), 6), "
        "np.fft.fft(np.ones(4)).real.astype(int).tolist())",
        "",
        "100.0 [4, 0, 0, 0]\n",
        needs="numpy",
    ),
    Honest(
        "late_imports",
        "import importlib\nnames = ['wave', 'colorsys', 'sched', 'plistlib', 'tomllib', 'xml.etree.ElementTree', 'sqlite3']\n"
        "print(len([importlib.import_module(n) for n in names]))",
        "",
        "7\n",
    ),
    Honest(
        "sqlite_memory",
        "import sqlite3\nc = sqlite3.connect(':memory:')\nc.execute('create table t (x)')\n"
        "c.executemany('insert into t values (?)', [(i,) for i in range(5)])\n"
        "print(c.execute('select sum(x) from t').fetchone()[0])",
        "",
        "10\n",
        needs="sqlite3",
    ),
    Honest("big_output", "for i in range(110_000):\n    print(i * i)", "", _square_lines(110_000)),
    Honest("one_write", "import sys\nsys.stdout.write('x' * 900_000)", "", "x" * 900_000),
    Honest("big_input", "import sys\nprint(len(sys.stdin.read()))", "y" * 3_000_000, "3000000\n"),
    Honest("memory_200mb", "a = bytearray(200 << 20)\na[-1] = 1\nprint(len(a) >> 20)", "", "200\n"),
    Honest(
        "collections",
        "from collections import Counter, defaultdict, deque, OrderedDict, namedtuple\n"
        "print(Counter('abca').most_common(1), deque([1, 2], maxlen=1), namedtuple('P', 'x')(1).x)",
        "",
        "[('a', 2)] deque([2], maxlen=1) 1\n",
    ),
    Honest(
        "heap_bisect",
        "import heapq, bisect\nh = [3, 1, 2]\nheapq.heapify(h)\nprint(heapq.heappop(h), bisect.bisect([1, 2, 3], 2))",
        "",
        "1 2\n",
    ),
    Honest(
        "itertools",
        "from itertools import permutations, accumulate\nfrom functools import lru_cache, reduce\n"
        "print(len(list(permutations(range(5)))), list(accumulate([1, 2, 3])), reduce(lambda a, b: a * b, [1, 2, 3]))",
        "",
        "120 [1, 3, 6] 6\n",
    ),
    Honest(
        "decimal",
        "from decimal import *\ngetcontext().prec = 30\nprint(Decimal(1) / 7)",
        "",
        "0.142857142857142857142857142857\n",
    ),
    Honest("fractions", "from fractions import Fraction\nprint(Fraction(1, 3) + Fraction(1, 6))", "", "1/2\n"),
    Honest(
        "big_int",
        "import math\nprint(len(str(math.factorial(1000))), pow(3, 10**9, 10**9 + 7))",
        "",
        f"2568 {pow(3, 10**9, 10**9 + 7)}\n",
    ),
    Honest("regex", "import re\nprint(re.findall(r'\\d+', input()))", "a1b22\n", "['1', '22']\n"),
    Honest("json", "import json\nprint(json.dumps(json.loads(input())['a']))", '{"a": [1, null]}\n', "[1, null]\n"),
    Honest(
        "datetime",
        "import datetime\nprint(datetime.date(2024, 2, 29) + datetime.timedelta(days=1))",
        "",
        "2024-03-01\n",
    ),
    Honest(
        "dataclass",
        "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass P:\n    x: int\n    y: list = field(default_factory=list)\n"
        "print(sorted([P(2), P(1)])[0])",
        "",
        "P(x=1, y=[])\n",
    ),
    Honest("unicode", "print(input().upper(), 'naïve ✓ 日本')", "straße\n", "STRASSE naïve ✓ 日本\n"),
    Honest("stderr", "import sys\nprint('debug ' * 20_000, file=sys.stderr)\nprint('ok')", "", "ok\n"),
    Honest(
        "traceback",
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\nprint('ok')",
        "",
        "ok\n",
    ),
    Honest(
        "seeded_random",
        "import random\nrandom.seed(7)\nprint(random.randint(1, 10**6))",
        "",
        f"{random.Random(7).randint(1, 10**6)}\n",
    ),
    Honest(
        "time",
        "import time\na = time.time()\ntime.sleep(0.01)\nprint(time.time() > a, time.perf_counter() > 0)",
        "",
        "True True\n",
    ),
    Honest(
        "alarm",
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('rang'))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()",
        "",
        "rang\n",
    ),
    Honest(
        "pickle_copy",
        "import pickle, copy\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x, copy.deepcopy([[1]]))",
        "",
        "1 [[1]]\n",
    ),
    Honest("hashing", "import hashlib\nprint(hashlib.sha256(b'a').hexdigest()[:8])", "", "ca978112\n"),
    Honest("atexit", "import atexit\natexit.register(lambda: print('bye'))\nprint('hi')", "", "hi\nbye\n"),
    Honest(
        "generator_class",
        "class T:\n    def __iter__(self):\n        yield from range(3)\nprint(*T(), sep=',')",
        "",
        "0,1,2\n",
    ),
    Honest(
        "limits_asked",
        "import resource, os\nprint(resource.getrlimit(resource.RLIMIT_CORE)[0], os.cpu_count() > 0)",
        "",
        "0 True\n",
    ),
    Honest(
        "signal_self",
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *a: print('got'))\nos.kill(os.getpid(), signal.SIGUSR1)",
        "",
        "got\n",
    ),
    Honest(
        "gc_weakref",
        "import gc, weakref\nclass A: pass\na = A()\nr = weakref.ref(a)\ndel a\ngc.collect()\nprint(r())",
        "",
        "None\n",
    ),
    Honest("exec_eval", "print(eval('1 + 1'))\nexec('x = 3')\nprint(x)", "", "2\n3\n"),
    Honest(
        "devnull",
        "import os, sys\nwith open(os.devnull, 'w') as f:\n    print('x', file=f)\nprint('ok')",
        "",
        "ok\n",
        needs="files",
    ),
]
