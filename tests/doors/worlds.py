"""What the documents take for granted, small: models under their hub names, GSM8K, and sizes of seconds."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.small_run import make_model

ROOT = Path(__file__).parents[2]
MODELS = (
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "microsoft/DialoGPT-medium",
)
# Sizes that make any door a matter of a second; everything else is as the door has it.
SMALL = (
    "trainer.num_threads=1",
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.log_val_generations=0",
    "data.num_val_samples=4",
    "data.max_prompt_length=400",
    "data.max_response_length=6",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "custom_reward_function.path=even_reward.py",
    "reward.num_workers=1",
)
REWARD = '''
"""Right when the first character's code is even: about half of a random model's answers."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(bool(solution_str) and ord(solution_str[0]) % 2 == 0)
    return {"score": right, "acc": right}
'''


def furnish(folder: Path) -> None:
    """Put the models under their names, GSM8K's files and the reward into a folder."""
    first = make_model(folder / MODELS[0], max_position_embeddings=1024)
    for name in MODELS[1:]:
        shutil.copytree(first, folder / name)
    (folder / "even_reward.py").write_text(REWARD)
    (folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}: how much is {i} and 2?", "answer": f"#### {i + 2}"} for i in range(64)]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def fake_hub(folder: Path):
    """`hub_records` of a machine with a network: GSM8K comes from the folder."""
    from gspo.data.files import read_records

    def records(name: str, split: str, *, config: str | None = None):
        assert (name, config) == ("openai/gsm8k", "main")
        return read_records(str(folder / "gsm8k" / f"{split}.jsonl"))

    return records


def load_script(path: str) -> ModuleType:
    """A script of the repository as a module, without running its `__main__` part."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str((ROOT / path).parent))  # as when the file is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def rows(run: Path) -> list[dict[str, Any]]:
    """The metric rows of a run that are training steps."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "actor/grad_norm" in row]
