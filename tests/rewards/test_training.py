"""A user's function in each signature trains through the configuration; one that fails ends the run by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FUNCTIONS = {
    "ours": "def score(prompt, response):\n    return even(response)\n",
    "verl": "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    assert data_source == 'arithmetic' and ground_truth.isdigit()\n"
    "    return {'score': even(solution_str), 'acc': even(solution_str), 'length': len(solution_str)}\n",
    "trl": "def score(completions, prompts, ground_truth, **columns):\n"
    "    assert len(completions) == len(prompts) == len(ground_truth)\n"
    "    return [even(completion) for completion in completions]\n",
    "areal": "def score(prompt, completions, prompt_ids, completion_ids, **data):\n"
    "    assert prompt_ids and isinstance(completion_ids, list)\n    return even(completions)\n",
    "async": "import asyncio\nasync def score(prompt, response):\n"
    "    await asyncio.sleep(0.001)\n    return even(response)\n",
}
EVEN = "def even(text):\n    return float(bool(text) and ord(text[0]) % 2 == 0)\n"


def train(folder: Path, source: str, *overrides: str) -> int:
    from gspo.loop.run import run_program as run
    from tests.support.small_run import config, make_model

    (folder / "reward_file.py").write_text(EVEN + source)
    settings = [
        "trainer.total_training_steps=2",
        f"custom_reward_function.path={folder / 'reward_file.py'}",
        "custom_reward_function.name=score",
        "reward.num_workers=1",
        *overrides,
    ]
    return run(config(folder, make_model(folder / "model"), *settings))


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_same_reward_in_every_signature_gives_the_same_run(tmp_path: Path) -> None:
    seen = {}
    for style, source in FUNCTIONS.items():
        folder = tmp_path / style
        folder.mkdir()
        assert train(folder, source) == 0, style
        seen[style] = [
            (row["step"], row["critic/score/mean"], row["actor/grad_norm"])
            for row in rows(folder)
            if "critic/score/mean" in row
        ]
    assert len(seen["ours"]) == 2
    assert all(values == seen["ours"] for values in seen.values()), seen


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    raise LookupError('no key')\n", ["LookupError: no key", "reward_file.py"]),
        ("    while True: pass\n", ["no result within", "reward_file.py"]),
        ("    return 'great'\n", ["'great'"]),
    ],
)
def test_a_function_that_fails_is_named_before_training(
    body: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = train(tmp_path, "def score(prompt, response):\n" + body, "reward.timeout=1.0")
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert code != 0
    for word in [*words, "score", "arithmetic/"]:
        assert word in output
