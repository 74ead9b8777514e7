"""The examples of docs/serve.md are run against a server of the embedded model."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.serving.support import embedded, running

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
TEXT = PAGE.read_text(encoding="utf-8")
CURLS = [block for block in re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL) if block.startswith("curl")]
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server():
    with running(embedded(), api_key=None) as started:
        yield started


@pytest.mark.parametrize("number", range(len(CURLS)))
def test_the_curl_examples_run(server, number: int):
    command = CURLS[number].replace(ADDRESS, server.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "error" not in done.stdout
    if "-sN" in command:
        events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert events[-1] == "[DONE]" and "usage" in json.loads(events[-2])
    elif "/metrics" in command:
        assert "gspo_requests_total" in done.stdout
    else:
        answer = json.loads(done.stdout)
        assert answer.get("data") or len(answer["choices"]) == (4 if '"n": 4' in command else 1)


def test_the_python_example_runs(server, capsys: pytest.CaptureFixture[str]):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(example.replace(ADDRESS, server.url), str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip()
