"""The worker pool and scorers under faults: raising, nonsense, hanging, dying, allocating, leaving processes behind."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo.plugins import import_plugins
from gspo.rewards import Overlong, RewardError, builtin, dry_run, make_scorer
from gspo.rewards.compose import as_specs
from gspo.rewards.pool.frames import MAX_FRAME, Channel, pack, receive
from gspo.rewards.pool.growth import WorkerLimit
from gspo.rewards.pool.worker_pool import WorkerPool
from gspo.rewards.pool.workers import ForkedWorkers, Worker, WorkerSource
from gspo.rewards.scoring import PoolScorer
from gspo.types import Group, Prompt, Rollout
from tests.faults.faulty_rewards import NONSENSE
from tests.faults.reward_rows import make_group, processes_of_session, score_all, server_pid

FAULTY = "tests.faults.faulty_rewards:compute_score"


def make_pool(timeout: float = 30.0, **kwargs: Any) -> PoolScorer:
    scorer = PoolScorer(as_specs(FAULTY), num_workers=2, timeout=timeout, **kwargs)
    scorer.start()
    return scorer


@pytest.fixture(scope="module")
def scorer() -> Iterator[PoolScorer]:
    scorer = make_pool()
    yield scorer
    server = server_pid(scorer)
    scorer.close()
    assert processes_of_session(server) == []


def scores(rollouts: list[Rollout]) -> list[float | None]:
    return [rollout.reward.score if rollout.reward else None for rollout in rollouts]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_failures_are_missing_and_named(scorer: PoolScorer) -> None:
    rollouts = score_all(scorer, ["abc", "raise it", "abcd", *NONSENSE])
    assert scores(rollouts) == [3, None, 4] + [None] * len(NONSENSE)
    failure = rollouts[1].failure or ""
    assert "compute_score" in failure and "'row-0', response 1" in failure and "KeyError: 'cannot grade it'" in failure
    assert "faulty_rewards.py" in failure and "raise KeyError" in failure
    assert "'row-1'" in (rollouts[9].failure or "")


def test_a_worker_that_dies_is_replaced_and_its_job_tried_once_more(scorer: PoolScorer, tmp_path: Path) -> None:
    texts = ["die", f"die_once {tmp_path / 'mark'}", "abc"]
    rollouts = score_all(scorer, texts)
    assert scores(rollouts) == [None, len(texts[1]), 3]
    assert "died on it 2 times" in (rollouts[0].failure or "") and "SIGKILL" in (rollouts[0].failure or "")


def test_the_memory_limit_is_a_failure_of_that_response_alone(scorer: PoolScorer) -> None:
    rollouts = score_all(scorer, ["allocate 3000", "allocate 10"])
    assert scores(rollouts) == [None, 10 << 20]
    assert "MemoryError" in (rollouts[0].failure or "")


def test_hung_rewards_are_killed_with_their_stack_and_capacity_recovers() -> None:
    scorer = make_pool(timeout=1.0)
    server = server_pid(scorer)
    scorer.submit(make_group(["spin", "sleep"] * 12))
    wait_until(lambda: len(processes_of_session(server)) > 8)  # with two workers, 24 hung jobs take 12 deadlines
    rollouts = list(scorer.collect()[0].rollouts)
    assert scores(rollouts) == [None] * 24
    assert all("no result within 1 s" in (r.failure or "") for r in rollouts)
    assert "faulty_rewards.py" in (rollouts[0].failure or "")
    assert scorer.start().counts.timeouts == 24
    assert scores(score_all(scorer, ["abc"] * 8)) == [3] * 8
    wait_until(lambda: len(processes_of_session(server)) <= 3)  # the server and two workers
    scorer.close()
    assert processes_of_session(server) == []


def test_the_limit_grows_fourfold_whenever_nobody_finished_for_an_eighth_of_the_deadline(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("gspo.rewards.pool.growth.time.monotonic", lambda: now[0])
    limit = WorkerLimit(2, 20, timeout=8.0)
    assert limit.next_growth([100.5, 100.2]) == 101.5  # of the worker that began last
    seen = []
    for now[0], starts in ((101.4, [100, 100.5]), (101.5, [100, 100.5]), (102.4, [101.5] * 8), (102.5, [101.5] * 8)):
        seen.append((limit.grow_if_stuck(starts), limit.now))
    assert seen == [(False, 2), (True, 8), (False, 8), (True, 20)]
    limit.note_done()
    now[0] = 103.4
    assert not limit.grow_if_stuck([101.5] * 8)
    limit.shrink()
    assert limit.now == 2
    assert WorkerLimit(4, 2, timeout=8.0).most == 4


class TalkativeWorkers(WorkerSource):
    """Workers that answer each job with their number, and then once more: in the same message, or a while later."""

    def __init__(self, at_once: bool) -> None:
        self.info, self._at_once = None, at_once
        self.num_started, self.num_stopped = 0, 0

    def start(self, num_workers: int) -> list[Worker]:
        ours, theirs = socket.socketpair()
        self.num_started += 1
        threading.Thread(target=self._run, args=(theirs, self.num_started), daemon=True).start()
        return [Worker(Channel(ours))]

    def _run(self, sock: socket.socket, number: int) -> None:
        answers = [pack(b'{"result": %d}' % result) for result in (number, -1)]
        with sock, contextlib.suppress(EOFError, OSError):
            receive(sock)
            for part in [b"".join(answers)] if self._at_once else answers:
                sock.sendall(part)
                time.sleep(0.05)
            receive(sock)

    def stop(self, worker: Worker) -> str:
        worker.channel.sock.close()
        self.num_stopped += 1
        return "stopped"

    def stack(self, worker: Worker) -> str:
        return ""


@pytest.mark.parametrize("at_once", [False, True])
def test_a_worker_that_answers_twice_is_replaced_and_its_second_answer_used_for_no_job(at_once: bool) -> None:
    source = TalkativeWorkers(at_once)
    pool = WorkerPool(source, num_workers=1, timeout=30.0)
    for number in (1, 2, 3):
        assert pool.submit(None).result(30) == number
        wait_until(lambda: source.num_stopped == source.num_started)
    pool.close()


def test_healthy_jobs_do_not_make_the_pool_grow() -> None:
    scorer = make_pool(timeout=240.0)  # a pool grows when all its workers hang for an eighth of this
    score_all(scorer, ["pause 0.05"] * 40)
    assert scorer.start().counts.started == 2  # its own size
    scorer.close()


def test_builtin_graders_keep_their_own_time_and_the_pool_its_size() -> None:
    scorer = PoolScorer(as_specs("math"), num_workers=2, timeout=0.5)
    assert scorer.start().limit.most == 2
    scorer.close()


def test_a_killed_server_is_started_again() -> None:
    scorer = make_pool()
    assert scores(score_all(scorer, ["abc"])) == [3]
    first = server_pid(scorer)
    os.kill(first, signal.SIGKILL)
    assert scores(score_all(scorer, ["abcd"] * 4)) == [4] * 4
    assert server_pid(scorer) != first
    scorer.close()
    assert processes_of_session(first) == []


def test_what_a_reward_leaves_running_ends_with_its_worker(tmp_path: Path) -> None:
    scorer = make_pool()
    pid_file = tmp_path / "pid"
    score_all(scorer, [f"daemon {pid_file}"])
    wait_until(pid_file.exists)
    wait_until(lambda: pid_file.read_text() != "")
    daemon = int(pid_file.read_text())
    assert is_alive(daemon)
    scorer.close()
    assert not is_alive(daemon)


def test_nothing_is_left_when_the_trainer_is_killed() -> None:
    code = f"""
from gspo.rewards.compose import as_specs
from gspo.rewards.scoring import PoolScorer
from tests.faults.reward_rows import make_group, score_all, server_pid
scorer = PoolScorer(as_specs({FAULTY!r}), num_workers=2, timeout=100.0)
score_all(scorer, ["a", "b", "c"])
scorer.submit(make_group(["spin", "sleep"]))
print(server_pid(scorer), flush=True)
input()
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    server = int(trainer.stdout.readline())
    wait_until(lambda: len(processes_of_session(server)) == 3)
    trainer.kill()
    trainer.communicate()
    wait_until(lambda: processes_of_session(server) == [])


def test_close_fails_what_is_unfinished_and_may_be_called_twice() -> None:
    workers = ForkedWorkers("gspo.rewards.compose:build_grading", (as_specs(FAULTY),))
    pool = WorkerPool(workers, num_workers=1, timeout=100.0)
    group = make_group(["sleep"])
    future = pool.submit((group.prompt, ["sleep"]))
    pool.close()
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        future.result(timeout=1)
    with pytest.raises(RewardError, match="closed"):
        pool.submit(None)


def test_jobs_from_many_threads_get_their_own_results() -> None:
    workers = ForkedWorkers("gspo.rewards.compose:build_grading", (as_specs(FAULTY),))
    pool = WorkerPool(workers, num_workers=2, timeout=100.0)
    from gspo.rewards import Response

    prompt, wrong = make_group([]).prompt, []

    def work(length: int) -> None:
        for _ in range(20):
            (result,) = pool.submit((prompt, [Response("x" * length)])).result()
            if result["score"] != length:
                wrong.append(result)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert wrong == [] and pool.counts.done == 160


def test_random_rewards_depend_on_the_response_alone(tmp_path: Path) -> None:
    file = tmp_path / "noisy.py"
    file.write_text("import random\ndef score(prompt, response):\n    return random.random() + len(set(response))\n")
    results = []
    for texts in (["a", "b", "c", "d"], ["a", "b", "c", "d"]):
        scorer = make_scorer(f"{file}:score", num_workers=2)
        results.append(scores(score_all(scorer, texts)))  # type: ignore[arg-type]
        scorer.close()
    assert results[0] == results[1] and len(set(results[0])) == 4


def test_an_import_that_starts_threads_is_done_in_each_worker(tmp_path: Path) -> None:
    file = tmp_path / "threaded.py"
    file.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "def score(prompt, response):\n    return len(response) + 10 * threading.active_count()\n"
    )
    scorer = make_scorer(f"{file}:score", num_workers=1)
    assert scores(score_all(scorer, ["abc"])) == [23]  # type: ignore[arg-type]
    scorer.close()


def test_errors_of_loading_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import no_such_thing\n")
    with pytest.raises(RewardError, match="no_such_thing"):
        make_scorer(f"{file}:score")
    file.write_text("def score(a, b, c):\n    return 1\n")
    with pytest.raises(RewardError, match="unknown signature"):
        make_scorer(f"{file}:score")


def test_an_import_that_never_ends_is_said_early_and_stopped_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gspo.rewards.pool.workers.SAY_AFTER", 0.5)
    monkeypatch.setattr("gspo.rewards.pool.workers.LOAD_TIMEOUT", 3.0)
    file, number = tmp_path / "endless.py", tmp_path / "pid"
    file.write_text(
        f"import os, time\nopen({str(number)!r}, 'w').write(str(os.getpid()))\nwhile True:\n    time.sleep(1)\n"
    )
    with pytest.raises(RewardError, match=r"did not load within 3 s.*endless"):
        make_scorer(f"{file}:score")
    assert "still being imported after 0.5 s" in caplog.text and "endless.py" in caplog.text
    assert not is_alive(int(number.read_text()))


def test_python_functions_run_in_threads_with_a_deadline() -> None:
    calls = []

    def mine(prompt: Prompt, response: str) -> float:
        calls.append(str(response))
        if response == "hang":
            time.sleep(3)
        return float(len(response))

    scorer = make_scorer(mine, timeout=0.4)
    scorer.submit(make_group(["abc", "hang", "de"]))
    (group,) = scorer.collect()
    assert scores(list(group.rollouts)) == [3, None, 2]
    assert "no result within 0.4 s" in (group.rollouts[1].failure or "")
    assert "time.sleep(3)" in (group.rollouts[1].failure or "")
    assert sorted(calls) == ["abc", "de", "hang"]
    scorer.close()


@pytest.mark.parametrize("style", ["trl", "async"])
def test_a_group_is_one_call_for_functions_that_take_it_whole(style: str, tmp_path: Path) -> None:
    file = tmp_path / f"whole_{style}.py"
    bodies = {
        "trl": "def score(completions, **columns):\n    return [float(len(completions))] * len(completions)\n",
        "async": "seen = []\nasync def score(prompt, response):\n    seen.append(1)\n    import asyncio\n"
        "    await asyncio.sleep(0.05)\n    return float(len(seen))\n",
    }
    file.write_text(bodies[style])
    scorer = make_scorer(f"{file}:score", num_workers=1)
    assert scores(score_all(scorer, ["a", "b", "c"])) == [3, 3, 3]  # type: ignore[arg-type]
    scorer.close()


def test_cheap_builtins_stay_in_process_and_others_go_to_the_pool() -> None:
    scorer = make_scorer()
    assert isinstance(scorer, PoolScorer)

    def group(source: str, truth: Any, text: str) -> Group:
        prompt = Prompt(source, (), (), source, truth)
        return Group(prompt, (Rollout((), (), (), (), "stop", text=text),), 0, 0)

    scorer.submit(group("arithmetic", "75", "70+5=75;75"))
    scorer.submit(group("poetry", "75", "75"))
    scorer.submit(group("gsm8k", "75", "#### 75"))
    assert server_pid(scorer) == 0
    scorer.submit(group("math", "75", "\\boxed{75}"))
    assert server_pid(scorer) != 0
    right, unknown, number, symbol = scorer.collect()
    assert scores([*right.rollouts, *unknown.rollouts, *number.rollouts, *symbol.rollouts]) == [1, None, 1, 1]
    assert "'poetry'" in (unknown.rollouts[0].failure or "")
    scorer.close()


@pytest.mark.parametrize("imported", ["by name", "as a plugin"])
def test_a_registered_reward_is_known_to_the_workers(
    imported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"rewards_{imported.replace(' ', '_')}.py"
    file.write_text(
        "import os\nfrom gspo.rewards import reward\n"
        "@reward('mine', sources=('my_data',))\ndef mine(prompt, response):\n"
        "    return {'score': len(response), 'worker': os.environ.get('GSPO_REWARD_WORKER') is not None}\n"
    )
    monkeypatch.setattr(builtin.REWARDS, "_items", dict(builtin.REWARDS._items))
    if imported == "by name":
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.import_module(file.stem)
    else:
        import_plugins([str(file)])
    scorer = make_scorer()
    prompt = Prompt("r", (), (), "my_data", None)
    scorer.submit(Group(prompt, (Rollout((), (), (), (), "stop", text="abc"),), 0, 0))
    (group,) = scorer.collect()
    scorer.close()
    assert group.rollouts[0].reward is not None, group.rollouts[0].failure
    assert group.rollouts[0].reward.score == 3 and group.rollouts[0].reward.extra == {"worker": 1.0}


def test_composition_manager_and_shaping_reach_the_reward() -> None:
    scorer = make_scorer("exact", manager="dapo", overlong=Overlong(4, 2), format_weight=0.5)
    prompt = Prompt("r", (), (), "any", "<think>a</think><answer>b</answer>")
    rollouts = tuple(
        Rollout((0,) * n, (0.0,) * n, (1,) * n, (0,) * n, "stop", text=prompt.ground_truth) for n in (2, 3, 4)
    )
    scorer.submit(Group(prompt, rollouts, 0, 0))
    (group,) = scorer.collect()
    assert scores(list(group.rollouts)) == [1.5, 1.0, 0.5]
    assert group.rollouts[1].reward is not None and group.rollouts[1].reward.acc == 1.0
    with pytest.raises(RewardError, match="reward_manager=dapo"):
        make_scorer("exact", overlong=Overlong(4, 2))


@pytest.mark.parametrize("named", [None, "code"])
def test_a_test_of_code_has_half_the_time_of_its_job_unless_its_settings_say_otherwise(named, monkeypatch) -> None:
    """A program that hangs is then graded as wrong before the job itself reaches its deadline."""

    def grader(prompt: Prompt, response: str, *, timeout: float, level: int, allow_unsandboxed: bool) -> float:
        return timeout + 100 * level + 1000 * allow_unsandboxed

    monkeypatch.setattr(builtin.REWARDS, "_items", {})
    builtin.reward("code", cheap=True)(grader)
    group = make_group(["program"])
    group = dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, data_source="code"))
    own = {"timeout": 3.0} if named else {"code": {"timeout": 3.0}}
    for reward, expected in ((named, 1202.0), ({"name": named or "default", "kwargs": own}, 1203.0)):
        scorer = make_scorer(reward, timeout=4.0, sandbox_level=2, allow_unsandboxed_code=True)
        scorer.submit(group)
        assert scores(list(scorer.collect()[0].rollouts)) == [expected]


def test_a_message_that_announces_too_many_bytes_is_refused_before_they_are_read() -> None:
    for size, is_refused in ((MAX_FRAME, False), (MAX_FRAME + 1, True)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(struct.pack("!I", size) + b"x")
            if is_refused:
                with pytest.raises(ValueError, match=f"a message of {size} bytes was announced"):
                    Channel(ours).read()
            else:
                assert Channel(ours).read() is None


def test_dry_run_gives_the_reward_or_the_reason(scorer: PoolScorer) -> None:
    prompt = make_group([]).prompt
    assert dry_run(scorer, prompt, "abcde").score == 5
    with pytest.raises(RewardError, match=r"tried on one row(.|\n)*KeyError"):
        dry_run(scorer, prompt, "raise now")


def test_a_lying_worker_cannot_send_code_or_nonsense(tmp_path: Path) -> None:
    file = tmp_path / "liar.py"
    file.write_text(
        "import os, json, struct\n"
        "def score(prompt, response):\n"
        "    if response == 'plain': return 1.0\n"
        '    text = {\'nan\': \'{"result": [{"score": NaN}]}\', \'text\': \'{"result": [{"score": "high"}]}\',\n'
        "            'short': '{\"result\": []}', 'none': '[1]', 'pickle': 'cos\\nsystem\\n(S\"x\"tR.'}[response].encode()\n"
        "    import socket, stat\n"
        "    fds = [fd for fd in range(3, 20) if os.path.exists(f'/proc/self/fd/{fd}') and stat.S_ISSOCK(os.fstat(fd).st_mode)]\n"
        "    os.write(fds[0], struct.pack('!I', len(text)) + text)\n"
        "    os._exit(0)\n"
    )
    scorer = make_scorer(f"{file}:score", num_workers=1, timeout=20.0)
    rollouts = score_all(scorer, ["nan", "text", "short", "none", "pickle"])  # type: ignore[arg-type]
    scorer.close()
    assert scores(rollouts) == [None] * 5
    expected = ["score is nan", "score is 'high'", "list of results", "not JSON", "not JSON"]
    for rollout, words in zip(rollouts, expected):
        assert words in (rollout.failure or "")
