"""The background writer: jobs in order, waiting by stage, failures, and runs that are stopped at once."""

from __future__ import annotations

import threading
import time

import pytest

from gspo.checkpoint.background_writer import Abandoned, BackgroundWriter
from gspo.loop.guards.watchdog import Watchdog
from gspo.runs.clock import Clock


def until(holds) -> None:
    """Wait for a condition; fails after 30 seconds."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@pytest.fixture
def said():
    return []


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def writer(clock, said):
    writer = BackgroundWriter(clock, said.append)
    yield writer
    writer.abandon()


def test_jobs_run_in_the_thread_in_order_and_waiting_counts_to_their_stage(writer, clock):
    events = []

    def first(beat):
        until(lambda: clock.stage == "log_groups")  # so: somebody waits, and for this one
        events.append(("first", threading.current_thread().name))

    def second(beat):
        until(lambda: clock.stage == "save_checkpoint")
        events.append(("second", threading.current_thread().name))

    writer.do("log_groups", first)
    writer.do("save_checkpoint", second)
    events.append("given")
    writer.wait()
    assert events == ["given", ("first", "gspo-writer"), ("second", "gspo-writer")]
    assert set(clock.seconds) == {"log_groups", "save_checkpoint"} and clock.stage is None
    assert all(writer.cost[stage] >= clock.seconds[stage] * 0.5 for stage in clock.seconds)


def test_a_job_in_the_main_thread_comes_after_queued_ones(writer, clock):
    events = []
    writer.do("log_groups", lambda beat: (until(lambda: clock.stage == "log_groups"), events.append("aside")))
    writer.do_now("save_checkpoint", lambda beat: events.append(threading.current_thread().name))
    assert events == ["aside", threading.current_thread().name]


def test_wait_raises_the_error_of_a_job_and_later_jobs_are_dropped(writer):
    cause, done = OSError(28, "No space left on device"), []

    def fails(beat):
        raise cause

    writer.do("log_groups", fails)
    writer.do("save_checkpoint", lambda beat: done.append("after a failure"))
    with pytest.raises(OSError, match="No space left") as raised:
        writer.wait()
    assert raised.value is cause and done == []
    writer.wait()  # told once
    writer.do("save_checkpoint", lambda beat: done.append("later"))
    writer.wait()
    assert done == ["later"]


def test_jobs_that_were_queued_before_the_failure_are_dropped_too(writer):
    release, done = threading.Event(), []

    def fails(beat):
        release.wait(30)
        raise OSError(28, "No space left on device")

    writer.do("log_groups", fails)
    for _ in range(2):
        writer.do("save_checkpoint", lambda beat: done.append("after a failure"))
    release.set()
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    writer.wait()
    assert done == []


def test_after_an_error_of_the_run_jobs_finish_and_their_error_is_a_warning(writer, said):
    done = []

    def fails(beat):
        done.append("finished")
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="what ended the run"), writer:
        writer.do("save_checkpoint", fails)
        raise ValueError("what ended the run")
    assert done == ["finished"] and "No space left" in said[0]


def test_without_an_error_of_the_run_a_failed_job_is_raised_at_the_end(writer):
    def fails(beat):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), writer:
        writer.do("save_checkpoint", fails)


def test_after_ctrl_c_it_stops_at_the_next_beat_and_drops_the_rest(writer):
    begun, done = threading.Event(), []

    def endless(beat):
        begun.set()
        until(lambda: beat() or False)  # ended by what the beat raises
        done.append("past the beat")

    with pytest.raises(KeyboardInterrupt), writer:
        writer.do("save_checkpoint", endless)
        writer.do("save_checkpoint", lambda beat: done.append("next"))
        assert begun.wait(30)
        raise KeyboardInterrupt
    writer.close()
    assert done == [] and not [t for t in threading.enumerate() if t.name == "gspo-writer"]


def test_a_closed_writer_accepts_jobs_again_and_an_abandoned_one_refuses_them(writer):
    done = []
    writer.close()
    for number in range(2):  # as when a trainer is saved by hand after its run has ended
        writer.do("save_checkpoint", lambda beat, number=number: done.append(number))
        waiting = threading.Thread(target=writer.wait, daemon=True)
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive(), "waited in vain"
        time.sleep(0.05)  # for the thread to end, should it
    assert done == [0, 1]
    writer.abandon()
    with pytest.raises(Abandoned, match="stopped at once"):
        writer.do("save_checkpoint", lambda beat: done.append("unnoticed"))


def test_jobs_end_where_the_system_does_not_say_which_cores_may_be_used(writer, monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")  # as on macOS
    done: list[str] = []
    writer.do("log_groups", lambda beat: done.append("ran"))
    writer.wait()
    assert done == ["ran"]


class Hands:
    """Time that the test moves. `asked` is set when somebody asks for it."""

    def __init__(self, monkeypatch) -> None:
        self.now = self.processor = 0.0
        self.asked = threading.Event()
        where = "gspo.checkpoint.background_writer"
        monkeypatch.setattr(f"{where}.time.monotonic", self.ask)
        monkeypatch.setattr(f"{where}.time.thread_time", lambda: self.processor)
        monkeypatch.setattr(f"{where}.num_cores", lambda: 4)

    def ask(self) -> float:
        now = self.now
        self.asked.set()
        return now


def test_a_job_costs_the_time_that_the_run_waits_and_its_share_of_the_processor(writer, monkeypatch):
    hands = Hands(monkeypatch)

    def job(beat):
        assert hands.asked.wait(30)  # the main thread waits from now on
        hands.processor += 8.0
        hands.now += 5.0

    for stage in ("log_groups", "save_checkpoint", "log_groups"):
        hands.asked.clear()
        writer.do(stage, job)
        writer.wait()
    one = 5.0 + 8.0 / 4
    assert writer.cost == {"log_groups": 2 * one, "save_checkpoint": one}


def test_a_job_in_the_main_thread_costs_its_time_even_when_it_fails(writer, clock, monkeypatch):
    hands, stages = Hands(monkeypatch), []

    def job(beat):
        stages.append(clock.stage)
        beat()
        hands.now += 3.0
        raise OSError(28, "No space left on device")

    beats = clock.beats
    with pytest.raises(OSError, match="No space left"):
        writer.do_now("save_checkpoint", job)
    assert writer.cost == {"save_checkpoint": 3.0} and stages == ["save_checkpoint"] and clock.stage is None
    assert clock.beats == beats + 3  # the start and the end of the stage, and the job's own
    writer.wait()  # the error was raised where the job ran


def test_a_job_reports_progress_to_the_clock(writer, clock):
    seen = []

    def job(beat):
        before = clock.beats
        beat()
        seen.append(clock.beats - before)

    writer.do("log_groups", job)
    writer.close()
    assert seen == [1]


def test_an_abandoned_job_is_no_error_and_the_time_it_took_is_counted(writer):
    begun = threading.Event()

    def endless(beat):
        begun.set()
        until(lambda: beat() or False)

    writer.do("save_checkpoint", endless)
    assert begun.wait(30)
    writer.abandon()
    writer.wait()  # nothing is raised, and nothing is waited for
    assert "save_checkpoint" in writer.cost


def test_a_program_that_exits_abandons_its_jobs(writer, said):
    begun, done = threading.Event(), []

    def endless(beat):
        begun.set()
        until(lambda: beat() or False)

    with pytest.raises(SystemExit), writer:
        writer.do("save_checkpoint", endless)
        writer.do("save_checkpoint", lambda beat: done.append("next"))
        assert begun.wait(30)
        raise SystemExit(1)
    assert done == [] and said == []


def test_the_error_of_a_job_is_raised_by_close_and_the_thread_ends(writer):
    def fails(beat):
        raise OSError(28, "No space left on device")

    writer.do("save_checkpoint", fails)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert not [t for t in threading.enumerate() if t.name == "gspo-writer"]


def test_a_job_that_is_given_after_a_failure_waits_for_the_error_to_be_seen(writer):
    failed, done = threading.Event(), []

    def fails(beat):
        failed.set()
        raise OSError(28, "No space left on device")

    writer.do("log_groups", fails)
    assert failed.wait(30)
    until(lambda: not writer._tasks)
    writer.do("save_checkpoint", lambda beat: done.append("dropped"))
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    writer.close()
    assert done == []


def test_the_watchdog_finds_a_hanging_job_during_wait(writer, clock, said, tmp_path):
    warned = []
    dog = Watchdog(
        clock, tmp_path, seconds=0.2, stop_seconds=0.0, warn=warned.append, stacks=lambda: "", kill=lambda: None
    )

    def hanging_job(beat):
        until(lambda: warned)

    with dog:
        writer.do("save_checkpoint", hanging_job)
        writer.wait()
    assert "stage 'save_checkpoint'" in warned[0]
    assert "in hanging_job" in (tmp_path / "stalls.log").read_text(), "the writer thread's stack"


def test_a_writer_that_moves_on_is_no_stall(writer, clock, tmp_path):
    warned = []
    dog = Watchdog(
        clock, tmp_path, seconds=1.0, stop_seconds=0.0, warn=warned.append, stacks=lambda: "", kill=lambda: None
    )

    def slow(beat):
        for _ in range(150):
            time.sleep(0.01)
            beat()

    with dog:
        writer.do("save_checkpoint", slow)
        writer.wait()
    assert warned == []
