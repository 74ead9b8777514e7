"""What the doctor reports about the machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo.checks.doctor.machine import why_no_vllm

PLATFORM = "class current_platform:\n    device_type = {device!r}\n"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"__init__.py": "import no_such_library"}, "No module named 'no_such_library'"),
        ({"notes.txt": "left over"}, "cannot import name 'LLM'"),
        ({"__init__.py": "LLM = SamplingParams = 1", "platforms.py": PLATFORM.format(device="")}, "no device"),
        ({"__init__.py": "LLM = SamplingParams = 1", "platforms.py": PLATFORM.format(device="cpu")}, ""),
    ],
)
def test_vllm_counts_only_when_it_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], reason: str
) -> None:
    (tmp_path / "vllm").mkdir()
    for name, text in files.items():
        (tmp_path / "vllm" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = why_no_vllm()
    assert found == "" if not reason else reason in (found or "")
    assert "vllm" not in sys.modules
