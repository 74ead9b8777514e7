"""What a person sees of a run: a table that fits a terminal, plain lines elsewhere, and no long silence."""

from __future__ import annotations

import io
import threading
import time

import pytest
from rich.console import Console as RichConsole

from gspo.runs import console as module
from gspo.runs.console import COLUMNS, Console, duration

ROW = {name: 0.5 for _, name, *_ in COLUMNS} | {
    "timing_s/step": 3.25,
    "response_length/mean": 1234.5,
    "val-core/arithmetic/acc/mean@1": 0.25,
    "perf/rollout_throughput": 143000.0,
}
ROW = {name: value for name, value in ROW.items() if name not in ("step", "val", "speed", "left")}


def console(*, terminal: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    made, out = Console(), io.StringIO()
    made.rich = RichConsole(file=out, force_terminal=terminal, width=width, highlight=False, color_system=None)
    return made, out


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_every_step_is_a_row_that_fits_the_terminal(width):
    shown, out = console(terminal=True, width=width)
    for step in range(1, 8):
        shown.step(step, 1000, ROW)
    lines = out.getvalue().splitlines()
    assert all(len(line) < width for line in lines)
    assert sum(f"{step}/1000" in line for line in lines for step in range(1, 8)) == 7
    titles = next(line for line in lines if "step" in line)
    assert "reward" in titles and "held-out" in titles and "left" in titles
    assert ("entropy" in titles) == (width > 80)


def test_titles_are_repeated_as_often_as_asked():
    shown, out = console(terminal=True)
    shown.every = 3
    for step in range(1, 8):
        shown.step(step, 7, ROW)
    assert out.getvalue().count("reward") == 3


def test_elsewhere_every_step_is_a_line_with_titles():
    shown, out = console(terminal=False)
    shown.step(1, 10, ROW)
    assert out.getvalue().startswith("step 1/10  reward 0.500  held-out 0.250  kept 50%  clip 0.500  length 1234.5")
    assert "left " in out.getvalue()


def test_long_sentences_are_broken_between_words_on_a_terminal_only():
    sentence = "word " * 40
    for terminal in (True, False):
        shown, out = console(terminal=terminal)
        shown.say(sentence)
        lines = out.getvalue().splitlines()
        assert (len(lines) > 1) == terminal and all(set(line.split()) == {"word"} for line in lines)


@pytest.mark.parametrize("terminal", [True, False])
def test_long_work_is_never_silent(monkeypatch, terminal):
    monkeypatch.setattr(module, "QUIET", 0.05)
    monkeypatch.setattr(module, "TICK", 0.01)
    shown, out = console(terminal=terminal)
    shown.doing("loading the model")
    wait_for(lambda: "loading the model, 0 s" in out.getvalue())
    shown.generating(1, 30, 2, 8)
    wait_for(lambda: "step 1/30: generating, 2 of 8 groups kept, 0 s" in out.getvalue())
    shown.doing(None)
    shown.stop()
    before = out.getvalue()
    shown.say("done")
    assert out.getvalue().removeprefix(before).strip() == "done"


def wait_for(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("not seen within 10 s")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5000, "83 min"), (11100, "3 h 05 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_time_left_follows_from_the_steps_so_far():
    shown, out = console(terminal=False)
    shown.step(0, 10, ROW)  # the evaluation before training is not a step
    shown.step(1, 10, {**ROW, "timing_s/step": 2.0})
    shown.step(2, 10, {**ROW, "timing_s/step": 4.0})
    lines = out.getvalue().splitlines()
    assert "left" not in lines[0] and lines[1].endswith("left 18 s") and lines[2].endswith("left 24 s")


def test_a_silent_part_of_a_command_says_what_runs_on_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(module, "QUIET", 0.0)
    monkeypatch.setattr(module, "TICK", 0.01)
    said = threading.Event()
    show = RichConsole.print
    monkeypatch.setattr(RichConsole, "print", lambda *a, **k: (show(*a, **k), said.set()))
    with module.waiting("loading torch"):
        assert said.wait(30)
    captured = capsys.readouterr()
    assert "loading torch, 0 s" in captured.err and not captured.out
