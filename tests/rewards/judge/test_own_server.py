"""The served start model as a process: when it is ready, when it ends before, and what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo.rewards.judge import own_server
from gspo.rewards.judge.own_server import OwnServer
from gspo.rewards.protocol import RewardError


def speak(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let a program stand in for `python -m gspo serve`."""
    file = folder / "serve"
    file.write_text(f"#!{sys.executable}\nimport sys\n{program}\n")
    file.chmod(0o755)
    monkeypatch.setattr(own_server.sys, "executable", str(file))


def test_a_server_that_says_much_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speak(
        tmp_path, monkeypatch, "print('serving m at http://h/v1', flush=True)\nprint('error\\n' * 100_000, flush=True)"
    )
    server = OwnServer("m", "cpu")
    assert server.url == "http://h/v1"
    assert server._process.wait(60) == 0 and server.has_ended()  # more than a pipe holds
    server.close()


def test_a_server_that_ends_before_it_is_ready_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak(tmp_path, monkeypatch, "print('no such model:', sys.argv[4])\nsys.exit(3)")
    with pytest.raises(RewardError, match=r"reward.judge.base_url=policy: gspo serve .*3.*: no such model: nowhere"):
        OwnServer("nowhere", "cpu")
