"""The Python example of the README runs as it is written, at a smaller size."""

from __future__ import annotations

import json
import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
SMALLER = [
    "trainer.total_training_steps=1",
    "trainer.num_threads=1",
    "data.train_batch_size=4",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.filter_groups.on_limit=keep_unfiltered",
    "algorithm.filter_groups.max_num_gen_batches=2",
]


def test_the_python_example_trains(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    small = example.replace("rows[:64]", "rows[:8]")
    small, found = re.subn(r"overrides=\[(.*?)\]", rf"overrides=[\1 *{SMALLER!r}]", small, flags=re.DOTALL)
    assert found == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(small, str(README), "exec"), {"__name__": "example"})
    (result,) = (tmp_path / "runs").glob("*/result.json")
    facts = json.loads(result.read_text())
    assert facts["steps"] == 1 and facts["final_acc"] is not None
