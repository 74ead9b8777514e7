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


VALUES = {
    "critic/score_all/mean": 0.12345,
    "train/filtered_prompts_ratio": 0.256,
    "actor/pg_clipfrac": 0.0625,
    "response_length/mean": 12.25,
    "actor/entropy": 1.5,
    "actor/grad_norm": 0.75,
    "timing_s/step": 2.5,
    "perf/throughput": 1000.0,
    "perf/rollout_throughput": 4321.4,
    "val-core/a/reward/mean@1": -0.5,
    "train/loss": 1.23456,
    "train/accuracy": 0.5,
    "val/loss": 2.0,
    "val/accuracy": 0.75,
    "actor/lr": 0.00025,
}
BEGIN = "step 2/4"
LINES = {
    "rollouts": (
        COLUMNS,
        "reward 0.123  held-out -0.500  kept 26%  clip 0.062  length 12.2  entropy 1.500  grad 0.750  tok/s 4,321  "
        "s/step 2.50  left 5 s",
    ),
    "answers": (
        module.SUPERVISED_COLUMNS,
        "loss 1.2346  held-out loss 2.0000  held-out -0.500  lr 2.50e-04  grad 0.750  tok/s 1,000  s/step 2.50  left 5 s",
    ),
    "pairs": (
        module.PREFERENCE_COLUMNS,
        "loss 1.2346  order right 0.500  held-out 0.750  lr 2.50e-04  grad 0.750  tok/s 1,000  s/step 2.50  left 5 s",
    ),
}


@pytest.mark.parametrize("kind", LINES)
def test_every_figure_of_a_step_stands_under_its_title(kind):
    columns, text = LINES[kind]
    made, out = Console(columns=columns), io.StringIO()
    made.rich = RichConsole(file=out, force_terminal=False, width=300, highlight=False)
    made.step(2, 4, VALUES)
    assert out.getvalue() == f"{BEGIN}  {text}\n"
    out.seek(0), out.truncate()
    made.step(3, None, {"timing_s/step": 1.0})  # without a length of the run nothing is known of the time left
    assert out.getvalue() == "step 3  s/step 1.00\n"


def test_the_speed_is_that_of_all_work_where_generation_has_none():
    shown, out = console(terminal=False)
    shown.step(1, 2, {"perf/throughput": 1000.0})
    assert "tok/s 1,000" in out.getvalue()


def test_the_table_on_a_terminal_is_aligned_and_leaves_unknown_cells_empty():
    shown, out = console(terminal=True, width=61)
    shown.step(2, 4, VALUES)
    shown.step(3, 4, {"critic/score_all/mean": 1.0, "timing_s/step": 2.5})
    titles, first, second = out.getvalue().splitlines()
    assert titles == "     step  reward  held-out  kept   clip  length        left"
    assert first == "      2/4   0.123    -0.500   26%  0.062    12.2         5 s"
    assert second == "      3/4   1.000                                        2 s"


@pytest.mark.parametrize(
    ("width", "titles"), [(10, ["step"]), (9, ["reward"]), (18, ["step", "reward"]), (17, ["step", "kept"])]
)
def test_columns_are_shown_by_their_rank_where_one_character_is_left_beside_them(width, titles):
    shown, out = console(terminal=True, width=width)
    shown.step(1, 2, VALUES)
    assert out.getvalue().splitlines()[0].split() == titles


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(99.4, "99 s"), (99.99, "100 s"), (5999.0, "100 min"), (6000.0, "1 h 40 min"), (7199.0, "2 h 00 min")],
)
def test_durations_at_the_change_of_their_unit(seconds, text):
    assert duration(seconds) == text


def test_the_time_of_an_activity_counts_from_its_first_word(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    made = Console(enabled=False)
    for now[0], what in ((1.0, "generating, 1 of 8"), (2.0, "generating, 2 of 8"), (3.0, "training, step 2")):
        made.doing(what)
        assert made._since == (3.0 if now[0] == 3.0 else 1.0)
    made.doing(None)
    now[0] = 9.0
    made.doing("training, step 2")
    assert made._since == 9.0
    assert made._ticker is None, "a console that shows nothing has no thread"


def test_warnings_and_commands_are_lines_that_say_what_they_are(monkeypatch):
    shown, out = console(terminal=True, width=20)
    shown.command("gspo train " + "x" * 40)
    assert out.getvalue() == "gspo train " + "x" * 40 + "\n"
    shown, out = console(terminal=False)
    shown.warn("[red]careful[/red]")
    assert out.getvalue() == "warning: [red]careful[/red]\n"
