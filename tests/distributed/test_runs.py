"""Whole runs on several ranks: the rows and weights of one process, and checkpoints from which any number can resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.checkpoint import folder as checkpoint
from gspo.loop import ending
from gspo.runs.group_log import read_groups
from tests.distributed.conftest import STEPS
from tests.distributed.runs import LOW, PPO, train
from tests.loop.runs import rows
from tests.support.small_run import final_state

# The learning rate is 1e-3 and AdamW divides by tiny gradients: the last bits of those move a weight a little.
WEIGHT_TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def without_report(monkeypatch):
    monkeypatch.setattr(ending, "write_report", lambda console, run: None)


def last_checkpoint(folder: Path) -> Path:
    return checkpoint.all_steps(folder / "run" / "checkpoints")[-1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(last_checkpoint(folder) / "model.safetensors")


# What the engine of one process measures; ranks generate in rollout workers (docs/metrics.md).
ONE_ENGINE = {f"environment/{name}" for name in ("seconds", "timeouts", "diverged")} | {"rollout/waiting_share"}


def same_rows(got: Path, want: Path, tolerance: float = 1e-4) -> None:
    """All metrics but clock times, step by step."""
    found, expected = rows(got), rows(want)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for a, b in zip(found, expected):
        kept = {k for k in b if not k.startswith(("timing_s/", "perf/"))} - ONE_ENGINE
        assert kept <= a.keys()
        for key in kept:
            assert a[key] == pytest.approx(b[key], rel=tolerance, abs=tolerance), (b["step"], key)


def same_weights(got: Path, want: Path, tolerance: float = WEIGHT_TOLERANCE) -> None:
    found, expected = weights(got), weights(want)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert float((found[name].float() - tensor.float()).abs().max()) <= tolerance, name


def test_a_run_on_two_ranks_is_the_run_of_one_process(two, here):
    assert (two.folder / "whole" / "run" / "result.json").exists(), two.problem()
    same_rows(two.folder / "whole", here / "whole")
    same_weights(two.folder / "whole", here / "whole")


def test_two_ranks_that_share_sequences_run_the_run_of_one_process(two, here):
    same_rows(two.folder / "sequences", here / "whole")
    same_weights(two.folder / "sequences", here / "whole")
    apart, together = weights(two.folder / "whole"), weights(two.folder / "sequences")
    assert any(not torch.equal(together[name], apart[name]) for name in apart)  # sums in another order


def test_ranks_draw_the_same_mini_batches_whoever_runs_a_row(two, here):
    same_rows(two.folder / "shuffled", here / "shuffled")
    same_weights(two.folder / "shuffled", here / "shuffled")


def test_rollouts_with_turns_on_two_ranks_are_those_of_one_process(two, here):
    same_rows(two.folder / "turns", here / "turns")
    same_weights(two.folder / "turns", here / "turns")
    assert max(row["num_turns/max"] for row in rows(two.folder / "turns")) > 1


def model_scores(folder: Path, step: int) -> list[tuple[str, float]]:
    """The responses of a step with the reward model's scores."""
    groups = read_groups(folder / "run" / "groups" / f"step-{step:06d}.jsonl.gz")
    return [(r["text"], r["extra"]["reward/model"]) for group in groups for r in group["responses"]]


def test_the_reward_model_scores_on_two_ranks_as_in_one_process(two, here):
    same_rows(two.folder / "scored", here / "scored")
    same_weights(two.folder / "scored", here / "scored")
    for folder, step in (("scored", 1), ("scored", 2), ("scored sequences", 1)):
        found, expected = model_scores(two.folder / folder, step), model_scores(here / "scored", step)
        assert [text for text, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-5)
        assert len({score for _, score in expected}) > 8


def test_the_same_number_of_ranks_resumes_to_the_bit(two):
    assert final_state(two.folder / "again" / "run") == final_state(two.folder / "whole" / "run")


def test_three_ranks_resume_a_run_of_two(three, here):
    assert (three.folder / "from two" / "run" / "result.json").exists(), three.problem()
    same_rows(three.folder / "from two", here / "whole")
    same_weights(three.folder / "from two", here / "whole")


def test_two_ranks_resume_a_run_of_one_process(two, here):
    same_rows(two.folder / "from one", here / "whole")
    same_weights(two.folder / "from one", here / "whole")


def test_one_process_resumes_a_run_of_two_ranks(two, here, model, tmp_path):
    shutil.copytree(two.folder / "begun", tmp_path / "one")
    train(tmp_path / "one", model, *STEPS)
    same_rows(tmp_path / "one", here / "whole")
    same_weights(tmp_path / "one", here / "whole")


def test_a_mixture_of_experts_is_exported_as_one_process_exports_it(two, here):
    same_rows(two.folder / "moe", here / "moe")
    same_weights(two.folder / "moe", here / "moe")
    assert "actor/router_change" in rows(two.folder / "moe")[0]


def test_critic_and_reference_resume_on_other_ranks(two, three, here, model, tmp_path):
    shutil.copytree(two.folder / "ppo", tmp_path / "one")
    train(tmp_path / "one", model, *STEPS, *PPO)
    for folder in (tmp_path / "one", three.folder / "ppo from two"):
        same_rows(folder, here / "ppo")
        same_weights(folder, here / "ppo")


def test_masters_of_a_low_precision_run_are_kept(two, model, tmp_path):
    shutil.copytree(two.folder / "low", tmp_path / "one")
    loaded = checkpoint.load(last_checkpoint(tmp_path / "one"))
    exported = load_file(loaded.path / "model.safetensors")
    masters = {k.removeprefix("master/"): t for k, t in loaded.tensors["optimizer"].items() if "master/" in k}
    assert exported.keys() == masters.keys()
    for name, master in masters.items():
        assert master.dtype == torch.float32 and exported[name].dtype == torch.bfloat16
        assert torch.equal(master.to(torch.bfloat16), exported[name])
    assert any(not torch.equal(m, m.to(torch.bfloat16).float()) for m in masters.values())
    train(tmp_path / "one", model, *STEPS, *LOW)
    assert len(rows(tmp_path / "one")) == 3


def test_the_export_is_an_ordinary_folder(two, here, model):
    path = last_checkpoint(two.folder / "whole")
    exported = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = exported(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(last_checkpoint(here / "whole"))(input_ids=ids).logits
    assert torch.allclose(logits, plain, atol=1e-3)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (path / name).read_bytes() == (last_checkpoint(here / "whole") / name).read_bytes()
    assert not list(path.rglob("*.distcp")) and not list(path.rglob(".metadata"))  # no pickles


def test_a_shard_that_is_missing_or_foreign_is_noticed(two, tmp_path):
    for change in ("gone", "added", "altered"):
        path = tmp_path / change / "step-000003"
        shutil.copytree(last_checkpoint(two.folder / "whole"), path)
        shard = sorted((path / "training" / "shards" / "optimizer").glob("*.safetensors"))[1]
        if change == "gone":
            shard.unlink()
        elif change == "added":
            shutil.copy(shard, shard.with_name("shard-00009.safetensors"))
        else:
            shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        problem = checkpoint.verify(path)
        assert problem is not None and "shard-0000" in problem


def test_a_rank_that_is_killed_ends_all_and_is_named(two):
    assert two.codes == [0, -9], two.problem()  # rank 0 caught the error and says so
    cause = (two.folder / "fault.txt").read_text()
    assert cause.startswith("trainer rank 1 (process ") and "killed or crashed" in cause


def test_a_rank_that_fails_ends_all_with_its_cause_first(three):
    assert three.codes == [0, 8, 8], three.problem()
    cause = (three.folder / "fault.txt").read_text()
    assert cause.startswith("trainer rank 2: ArithmeticError: the numbers are wrong")
    assert "ArithmeticError: the numbers are wrong" in three.launch.log(2)
    assert "Traceback" not in three.launch.log(1)  # that rank only stopped, and names the one that failed
    assert "trainer rank 2: ArithmeticError" in three.launch.log(1)


def test_shards_name_their_sets(two):
    index = json.loads((last_checkpoint(two.folder / "ppo") / "training/shards/index.json").read_text())
    assert index == {"world_size": 2, "sets": ["optimizer", "critic/model", "critic/optimizer"]}
