"""Files that cannot be written: the error names them, nothing half written is left, and a command ends with code 6."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gspo.cli import main
from gspo.exit_codes import EXIT_FILE
from gspo.runs.files import write_atomic


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gspo.runs.files.os.fsync", refuse)


def test_a_full_disk_leaves_the_old_file_and_is_an_error_with_its_path(tmp_path: Path, full_disk: None) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*/file'$") as caught:
        write_atomic(file, b"new")
    assert caught.value.errno == errno.ENOSPC
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_command_that_cannot_write_ends_with_the_path_and_no_traceback(
    tmp_path: Path, full_disk: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.yaml").write_text("data: {train_batch_size: 8}\n")
    written = str(tmp_path / "own.yaml")
    monkeypatch.setattr("sys.argv", ["gspo", "config", "import", str(tmp_path / "foreign.yaml"), "--to", written])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == EXIT_FILE
    assert capsys.readouterr().err == f"error: [Errno 28] No space left on device: '{written}'\n"
