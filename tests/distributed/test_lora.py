"""Adapters over several ranks: the rows and weights of one process, resumes on any number of ranks, and the exports."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.build.ranks import build_rank
from gspo.checkpoint import folder as checkpoint
from gspo.config import load
from gspo.distributed.rank_group import RankPlace
from gspo.distributed.rank_worker import RankWorker
from gspo.models.load import load_model
from gspo.training.lora import Adapters, LoraSettings
from gspo.training.parallel import ShardError
from gspo.training.parallel.fsdp import full
from gspo.training.parallel.sharded_lora import _linear_layers
from gspo.training.roles import ADAPTER_FILES
from tests.distributed.conftest import STEPS
from tests.distributed.runs import FSDP, LORA, LOW, free_port, train
from tests.distributed.test_runs import last_checkpoint, same_rows, same_weights, without_report
from tests.loop.runs import rows
from tests.support.small_run import config

__all__ = ["without_report"]  # of every test here too

pytest.importorskip("peft")


def test_adapters_on_two_ranks_train_as_in_one_process(two, here, model):
    assert (two.folder / "lora" / "run" / "result.json").exists(), two.problem()
    same_rows(two.folder / "lora", here / "lora")
    same_weights(two.folder / "lora", here / "lora", 1e-6)
    before = load_file(model / "model.safetensors")
    after = load_file(last_checkpoint(two.folder / "lora") / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "_proj." in name}, "all linear layers but the head, and nothing else"


def test_adapters_resume_on_any_number_of_ranks(two, three, here, model, tmp_path):
    shutil.copytree(two.folder / "lora begun", tmp_path / "one")
    train(tmp_path / "one", model, *STEPS, *LORA)
    for folder in (two.folder / "lora from one", three.folder / "lora from two", tmp_path / "one"):
        same_rows(folder, here / "lora")
        same_weights(folder, here / "lora", 1e-6)


def test_low_precision_adapters_resume_in_the_precision_of_their_masters(two, here, model, tmp_path):
    shutil.copytree(two.folder / "lora low", tmp_path / "one")
    loaded = checkpoint.load(last_checkpoint(tmp_path / "one")).tensors
    masters = {k.removeprefix("master/"): t for k, t in loaded["optimizer"].items() if "master/" in k}
    saved = loaded[ADAPTER_FILES]
    assert len(saved) == len(masters) > 0
    for name, master in masters.items():
        kept = saved["base_model.model." + name.replace(".default.", ".")]
        assert master.dtype == kept.dtype == torch.float32 and torch.equal(master, kept)
    train(tmp_path / "one", model, *STEPS, *LORA, *LOW)
    assert len(rows(tmp_path / "one")) == len(rows(two.folder / "lora low from one")) == 3


def test_masters_of_one_process_reach_a_rank_unrounded(here, model, tmp_path):
    """The rank also reads the rounded adapters of one process, but continues from the masters."""
    path = last_checkpoint(here / "lora low begun")
    saved = checkpoint.load(path).tensors["optimizer"]
    masters = {k.removeprefix("master/"): t for k, t in saved.items() if "master/" in k}
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())
    worker = RankWorker()
    worker.join(RankPlace(0, 1, 0, "127.0.0.1", free_port(), "cpu"))
    try:
        settings = config(tmp_path, model, FSDP, *LORA, *LOW).config
        worker.build(functools.partial(build_rank, settings, 3, path, None, None))
        worker.prepare_sets()
        worker.load_shards(str(path / "training"), {})
        found = {name: full(p.detach()).clone() for name, p in worker.roles.policy.optimizer.parameters.items()}
    finally:
        worker.leave()
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[name], master) for name, master in masters.items())


def greedy(model, num_tokens: int = 12) -> torch.Tensor:
    prompts = torch.arange(6 * 5).reshape(6, 5) % model.config.vocab_size
    with torch.no_grad():
        return model.eval().generate(input_ids=prompts, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)


def test_the_merged_export_answers_as_that_of_one_process_and_as_base_and_adapters(two, here, model):
    from peft import PeftModel

    ours, theirs = (last_checkpoint(folder / "lora") for folder in (two.folder, here))
    answers = greedy(AutoModelForCausalLM.from_pretrained(ours))
    assert torch.equal(answers, greedy(AutoModelForCausalLM.from_pretrained(theirs)))
    base = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(answers, greedy(base)), "training changed nothing: the comparison would say nothing"
    assert torch.equal(answers, greedy(PeftModel.from_pretrained(base, ours / "training" / "adapter")))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (theirs / "training" / "adapter" / name).exists()


def test_several_ranks_and_ray_support_adapters():
    for where in ("actor_rollout_ref.actor.strategy=fsdp2", "trainer.backend=ray"):
        assert load(overrides=[where, *LORA]).config.actor_rollout_ref.model.lora_rank == 4


def test_adapters_of_other_than_linear_layers_are_refused_by_name(model):
    adapters = Adapters(
        load_model(str(model), dtype="float32", device="cpu"), LoraSettings(2, target_modules=["embed_tokens"]), seed=0
    )
    with pytest.raises(ShardError, match=r"target_modules gives adapters to model\.embed_tokens.*strategy=local"):
        _linear_layers(adapters)
