"""Signals that ask a run to stop: which are handled, and what a closed terminal leaves behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from gspo.loop.guards.stop_request import StopRequest

PROGRAM = """
import os, signal, sys, time
from gspo.loop.guards.stop_request import StopRequest
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
with StopRequest() as stop:
    print("ready", flush=True)
    while stop.signal is None:
        time.sleep(0.01)
    print("saved", flush=True)
    print("saved", file=sys.stderr, flush=True)
os._exit(stop.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_stops(number: int) -> None:
    inherited = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            assert stop.signal == number and stop.exit_code == 128 + number
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, inherited)


def test_a_second_hang_up_says_nothing_new() -> None:
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup a hang-up is ignored
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal == signal.SIGHUP and stop.exit_code == 129
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)  # while the program ends
    finally:
        signal.signal(signal.SIGHUP, inherited)


def test_without_a_hang_up_its_handler_is_put_back() -> None:
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with StopRequest():
            pass
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, inherited)


def test_under_nohup_a_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_does_not_stop_what_is_written_afterwards() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100).startswith(b"ready")
    os.close(ours)
    for _ in range(2):  # as the system and the shell do for the programs of a terminal
        child.send_signal(signal.SIGHUP)
        time.sleep(0.1)
    assert child.wait(timeout=60) == 128 + signal.SIGHUP
