"""The agent of docs/agents.md is trained for two steps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from gspo.cli import app

TEXT = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")


def test_the_example_trains(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python[^\n]*\n(.*?)```", TEXT, flags=re.DOTALL)
    command = next(c for c in re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL) if "agent=agent.py" in c)
    Path("agent.py").write_text(program)
    small = [
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "data.num_val_samples=4",
        "trainer.num_threads=1",
    ]
    small += ["algorithm.filter_groups.enable=false", "trainer.experiment_name=agent"]
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], *small])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in Path("runs/agent/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2 and rows[-1]["num_turns/mean"] >= 1
