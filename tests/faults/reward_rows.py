"""Rows F1-F5 (rewards that fail), D4 and D5 (math answers)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gspo.exit_codes import EXIT_REWARDS_FAILED
from gspo.rewards.compose import as_specs
from gspo.rewards.graders import symbolic
from gspo.rewards.graders.math import grade_math
from gspo.rewards.pool.worker_pool import WorkerPool
from gspo.rewards.protocol import RewardError
from gspo.rewards.scoring import PoolScorer
from gspo.types import Group, Prompt, Rollout
from tests.faults.faulty_rewards import NONSENSE
from tests.faults.hostile_math import hostile_answers
from tests.faults.kill_rows import Bench, with_bench
from tests.faults.processes import Child
from tests.faults.row import Row
from tests.support.math_pairs import make_pairs

_MODULE = "tests.faults.faulty_rewards"
_GROUP_SIZE = 8
_NUM_PAIRS = 1000
_ANSWER_TIME = 0.5


def make_group(texts: Sequence[str], number: int = 0) -> Group:
    """A group of these responses, of the row `row-<number>`."""
    prompt = Prompt(f"row-{number}", ({"role": "user", "content": "?"},), (1,), "faulty", "0")
    return Group(prompt, tuple(Rollout((), (), (), (), "stop", text=t) for t in texts), number, 0)


def score_all(scorer: PoolScorer, texts: Sequence[str]) -> list[Rollout]:
    """Score responses in groups of eight and return their rollouts in order."""
    for start in range(0, len(texts), _GROUP_SIZE):
        scorer.submit(make_group(texts[start : start + _GROUP_SIZE], start // _GROUP_SIZE))
    return [rollout for group in scorer.collect() for rollout in group.rollouts]


def make_pool(function: str = "compute_score", *, timeout: float = 20.0) -> PoolScorer:
    """A started pool scorer over one of the faulty functions."""
    scorer = PoolScorer(as_specs(f"{_MODULE}:{function}"), num_workers=2, timeout=timeout)
    scorer.start()
    return scorer


def server_pid(scorer: PoolScorer) -> int:
    """The fork server of a scorer; 0 when none runs."""
    return scorer.pool.source.pid if scorer.pool else 0


def processes_of_session(session: int) -> list[int]:
    """Ids of the live processes of a session; the reward server leads its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _finish(scorer: PoolScorer) -> list[str]:
    """Close the scorer; what is wrong when a process is left."""
    server = server_pid(scorer)
    scorer.close()
    left = processes_of_session(server) if server else []
    return [f"processes {left} are left"] if left else []


def _row(id: str, title: str, problems: list[str], detail: str) -> Row:
    return Row(id, title, not problems, "; ".join(problems[:5]) or detail)


def _named(rollout: Rollout, *words: str) -> bool:
    return rollout.reward is None and all(word in (rollout.failure or "") for word in words)


def raising(seed: int) -> Row:
    """F1: exactly the rewards that raise are missing, named, and the run may go on."""
    rng = random.Random(seed)
    texts = ["raise me"] * 20 + ["x" * (1 + i % 7) for i in range(380)]
    rng.shuffle(texts)
    scorer = make_pool()
    rollouts = score_all(scorer, texts)
    problems = []
    for index, (text, rollout) in enumerate(zip(texts, rollouts)):
        if text == "raise me":
            row = f"row-{index // _GROUP_SIZE}"
            if not _named(rollout, "compute_score", repr(row), "KeyError", "faulty_rewards.py"):
                problems.append(f"response {index} gave {rollout.reward}, {rollout.failure}")
        elif rollout.reward is None or rollout.reward.score != len(text):
            problems.append(f"response {index} gave {rollout.reward}, expected {len(text)}")
    problems += _finish(scorer)
    return _row("F1", "reward raises in 5 %", problems, "20 of 400 missing, each named, the rest scored")


def nonsense(seed: int) -> Row:
    """F2: what is not a finite number is missing, never 0."""
    words = sorted(NONSENSE)
    random.Random(seed).shuffle(words)
    scorer, batch = make_pool(), make_pool("too_many")
    rollouts = score_all(scorer, [text for word in words for text in (word, "fine")])
    wrong_length = score_all(batch, ["a", "b", "c"])
    problems = [
        f"{word} gave {rollout.reward}, {rollout.failure}"
        for word, rollout in zip(words, rollouts[::2])
        if not _named(rollout, "compute_score", "row-")
    ]
    problems += [f"a fine answer gave {r.reward}" for r in rollouts[1::2] if not r.reward or r.reward.score != 4]
    problems += [f"wrong length gave {r.reward}" for r in wrong_length if not _named(r, "too_many", "4 values")]
    problems += _finish(scorer) + _finish(batch)
    return _row("F2", "reward returns nonsense", problems, f"{len(words)} kinds and a wrong length missing, never 0")


def hanging(seed: int) -> Row:
    """F3: 64 hung rewards cost at most two deadlines, each is killed in time, and capacity recovers."""
    deadline = 5.0
    texts = ["spin", "sleep"] * 32
    random.Random(seed).shuffle(texts)
    scorer = make_pool(timeout=deadline)
    pool = scorer.start()
    start = time.monotonic()
    hung = score_all(scorer, texts)
    seconds = time.monotonic() - start
    honest = score_all(scorer, ["abc"] * 64)
    problems = [f"a hung reward gave {r.reward}" for r in hung if not _named(r, "compute_score", "no result within")]
    problems += ["capacity did not recover"] * any(r.reward is None or r.reward.score != 3 for r in honest)
    if seconds > 2 * deadline:
        problems.append(f"64 hung rewards took {seconds:.1f} s, at most {2 * deadline:g} s were promised")
    if pool.counts.latest_kill > 0.5:
        problems.append(f"one was killed {pool.counts.latest_kill:.2f} s after its deadline")
    problems += _finish(scorer)
    detail = (
        f"{seconds / deadline:.2f} deadlines, killed at most {pool.counts.latest_kill:.2f} s late, 64 honest scored"
    )
    return _row("F3", "64 rewards hang", problems, detail)


def too_many_failures(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """F4: training goes on past 5 % failed rewards, counted; 60 % stop it with the first exception."""
    seed = f"trainer.seed={rng.randrange(1000)}"
    few = _train(bench, "few", seed, share=0.05)
    many = _train(bench, "many", seed, share=0.6)
    problems = []
    if few.wait() != 0:
        problems.append(f"5 % failures stopped the run: {few.output()[-500:]}")
    elif not _count_failures(bench.folder / "few"):
        problems.append("no failure was counted in 5 %")
    code, output = many.wait(), many.output()
    if (
        code != EXIT_REWARDS_FAILED
        or "KeyError" not in output
        or "sometimes_raising" not in output
        or "arithmetic/train/" not in output
    ):
        problems.append(f"60 % failures gave exit code {code}: {output[-500:]}")
    return not problems, "; ".join(problems) or f"5 % goes on; 60 % stops with exit code {code} and the first exception"


def _count_failures(run: Path) -> float:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return sum(row.get("train/reward_failures", 0.0) for row in rows)


def _train(bench: Bench, name: str, seed: str, share: float) -> Child:
    reward = [f"path={_MODULE}", "name=sometimes_raising", f"reward_kwargs.share={share}"]
    overrides = [seed, "reward.num_workers=1", *(f"custom_reward_function.{setting}" for setting in reward)]
    return bench.start(name, *overrides, reward=None)  # pyright: ignore[reportArgumentType]


def killed_worker(seed: int) -> Row:
    """F5: workers and the server killed from outside: every reward is still computed."""
    rng = random.Random(seed)
    scorer = make_pool()
    texts = [f"pause 0.05{'0' * (i % 9)}" for i in range(96)]
    for start in range(0, len(texts), _GROUP_SIZE):
        scorer.submit(make_group(texts[start : start + _GROUP_SIZE], start // _GROUP_SIZE))
    pool, kills = scorer.start(), 0
    for _ in range(6):
        workers = [pid for pid in processes_of_session(server_pid(scorer)) if pid != server_pid(scorer)]
        kills += _kill(rng.choice(workers)) if workers else 0
        _wait_for(pool, rng.randint(5, 10))  # a job is retried once: the next kill must not find it again
    _kill(server_pid(scorer))
    rollouts = [rollout for group in scorer.collect() for rollout in group.rollouts]
    problems = [
        f"response {i} gave {r.reward}, {r.failure}"
        for i, (text, r) in enumerate(zip(texts, rollouts))
        if r.reward is None or r.reward.score != len(text)
    ]
    twice = score_all(scorer, ["die", "abc"])
    if not _named(twice[0], "compute_score", "died", "SIGKILL") or twice[1].reward is None:
        problems.append(f"a reward that kills its worker gave {twice[0].reward}, {twice[0].failure}")
    problems += _finish(scorer)
    return _row(
        "F5", "reward workers killed", problems, f"{kills} workers and the server killed, 96 of 96 rewards right"
    )


def _wait_for(pool: WorkerPool, num_jobs: int) -> None:
    goal, end = pool.counts.done + num_jobs, time.monotonic() + 10.0
    while pool.counts.done < goal and time.monotonic() < end:
        time.sleep(0.005)


def _kill(pid: int) -> int:
    try:
        os.kill(pid, signal.SIGKILL)
        return 1
    except ProcessLookupError:
        return 0


def hostile_math(seed: int) -> Row:
    """D4: the right verdict on each hostile answer within half a second, and nothing of it runs."""
    grade_math("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")  # the verifying process starts here, as it would at the run's start
    problems, slowest = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        answers = hostile_answers(str(canary))
        random.Random(seed).shuffle(answers)
        for answer in answers:
            start = time.monotonic()
            try:
                score = grade_math(answer.response, answer.truth).score
            except RewardError as error:
                score = str(error)
            seconds = time.monotonic() - start
            slowest = max(slowest, seconds)
            if score != answer.score:
                problems.append(f"{answer.name} scored {score}, expected {answer.score}")
            if seconds > _ANSWER_TIME:
                problems.append(f"{answer.name} took {seconds:.2f} s")
        if canary.exists():
            problems.append("the canary ran")
    symbolic.close()
    if "math_verify" in sys.modules:
        problems.append("math-verify was imported into this process")
    detail = f"{len(answers)} right verdicts, the slowest {slowest:.2f} s, no canary"
    return _row("D4", "hostile math answers", problems, detail)


def same_verdicts(seed: int) -> Row:
    """D5: the verdicts on 1,000 pairs are right, and the same from one thread, eight threads and a subprocess."""
    one = pair_verdicts(_NUM_PAIRS, seed, num_threads=1)
    eight = pair_verdicts(_NUM_PAIRS, seed, num_threads=8)
    code = f"from tests.faults.reward_rows import pair_verdicts; print(pair_verdicts({_NUM_PAIRS}, {seed}, 1))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    symbolic.close()
    problems = ["eight threads give other verdicts than one"] * (eight != one)
    problems += [f"a subprocess gives other verdicts: {process.stderr[-300:]}"] * (process.stdout.strip() != one)
    wrong = sum(a + b != "10" for a, b in zip(one[::2], one[1::2]))
    problems += [f"{wrong} pairs are graded wrongly"] * bool(wrong)
    return _row(
        "D5", "1,000 right/wrong pairs", problems, "identical from 1 thread, 8 threads, a subprocess; all right"
    )


def pair_verdicts(count: int, seed: int, num_threads: int) -> str:
    """One character per verdict (1 right, 0 wrong, x none): of each pair the right response, then the wrong one."""
    work = [(text, pair.truth) for pair in make_pairs(count, seed) for text in (pair.right, pair.wrong)]
    if num_threads == 1:
        return "".join(map(_verdict, work))
    with ThreadPoolExecutor(num_threads) as threads:
        return "".join(threads.map(_verdict, work))


def _verdict(item: tuple[str, str]) -> str:
    try:
        return str(int(grade_math(*item).score))
    except RewardError:
        return "x"


ROWS: dict[str, Callable[[int], Row]] = {
    "F1": raising,
    "F2": nonsense,
    "F3": hanging,
    "F4": with_bench(too_many_failures, "F4", "over 20 % of rewards fail"),
    "F5": killed_worker,
    "D4": hostile_math,
    "D5": same_verdicts,
}
