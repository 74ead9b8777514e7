"""vLLM on the trainer's own GPU: weights by CUDA IPC, memory given back while training, runs from end to end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo.loop import ending
from gspo.loop.trainer import Trainer
from gspo.rollout.workers.cuda_weight_store import CudaWeights, CudaWeightsRef
from gspo.rollout.workers.process import ProcessConnection
from gspo.rollout.workers.worker import EngineSpec, RolloutWorker
from gspo.runs.console import Console
from gspo.types import Group
from tests.rollout.models import make_request
from tests.support.small_run import config, even_first_byte, make_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256}
# Mean distance of two kernels' log-probs: attention multiplies float32 as tf32. Other weights are much further.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.06}
SHARE = 0.2  # of the GPU's memory, for the engine
CASES = [("float32", True), ("bfloat16", True), ("bfloat16", False)]
IDS = ["float32", "bfloat16", "bfloat16 compiled, with CUDA graphs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.2, **SHAPE)


@pytest.fixture
def store() -> Iterator[CudaWeights]:
    store = CudaWeights()
    yield store
    store.close()


def _spec(model: Path, dtype: str, eager: bool) -> EngineSpec:
    return EngineSpec(
        kind="vllm",
        model=str(model),
        tokenizer=str(model),
        num_slots=8,
        max_length=200,
        eos_token_ids=(1,),
        pad_token_id=0,
        dtype=dtype,
        device="cuda",
        options={"sleep": True, "gpu_memory_utilization": SHARE, "enforce_eager": eager},
    )


def _free() -> float:
    """Share of the GPU's memory that nobody holds."""
    free, total = torch.cuda.mem_get_info()
    return free / total


def _gap(groups: list[Group], model: Any) -> float:
    """Mean distance between the engine's log-probs and those of the model's own forward."""
    distances = []
    for group in groups:
        start = len(group.prompt.token_ids)
        for rollout in group.rollouts:
            ids = torch.tensor([[*group.prompt.token_ids, *rollout.token_ids]], device="cuda")
            with torch.no_grad():
                log_probs = model(ids).logits[0, start - 1 : -1].float().log_softmax(-1)
            ours = log_probs.gather(1, ids[0, start:, None])[:, 0].tolist()
            distances += [abs(a - b) for a, b in zip(ours, rollout.log_probs, strict=True)]
    return sum(distances) / len(distances)


def _perturb(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize(("dtype", "eager"), CASES, ids=IDS)
def test_weights_come_by_cuda_ipc_and_memory_is_given_back_while_training(dtype, eager, folder, store):
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.cuda().eval()
    requests = [make_request(i, n=4, length=20 + i, max_tokens=30, ignore_eos=True) for i in range(4)]
    worker = ProcessConnection(_spec(folder, dtype, eager))
    try:
        groups = worker.send(RolloutWorker.generate, requests).result(300)
        gaps = [_gap(groups, model)]
        for version in (1, 2, 3):
            awake = _free()
            worker.send(RolloutWorker.rest).result(60)
            assert _free() - awake > 0.8 * SHARE, "resting gives the cache's memory back"
            _perturb(model, seed=version)
            assert _gap(groups, model) > 5 * TOLERANCE[dtype], "the weights are others"
            ref = store.publish(dict(model.named_parameters()), version)
            assert isinstance(ref, CudaWeightsRef)
            worker.send(RolloutWorker.load_weights, ref, version).result(60)
            store.discard(ref)
            groups = worker.send(RolloutWorker.generate, requests).result(60)
            assert {v for g in groups for r in g.rollouts for v in r.versions} == {version}
            assert abs(_free() - awake) < 0.2 * SHARE, "awake it holds what it held"
            gaps.append(_gap(groups, model))
        worker.send(RolloutWorker.rest).result(60)
        gaps.append(_gap(worker.send(RolloutWorker.generate, requests).result(60), model))  # sleep kept the weights
        print(f"mean distance of log-probs, {dtype}: {', '.join(f'{gap:.1e}' for gap in gaps)}")
        assert max(gaps) < TOLERANCE[dtype]
    finally:
        worker.close()


@pytest.mark.parametrize(("dtype", "eager"), CASES, ids=IDS)
def test_a_run_with_trainer_and_vllm_on_one_gpu(dtype, eager, tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "write_report", lambda console, run: None)
    published = []
    publish = CudaWeights.publish

    def recording(self: CudaWeights, tensors: Any, version: int) -> Any:
        published.append(publish(self, tensors, version))
        return published[-1]

    monkeypatch.setattr(CudaWeights, "publish", recording)
    resolved = config(
        tmp_path,
        make_model(tmp_path / "model", **SHAPE),
        "trainer.device=cuda",
        "trainer.total_training_steps=3",
        "algorithm.filter_groups.strategy=rounds",  # every response is then drawn under the weights it trains
        f"actor_rollout_ref.model.dtype={dtype}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={SHARE}",
        f"actor_rollout_ref.rollout.enforce_eager={str(eager).lower()}",
    )
    Trainer(resolved, reward_fn=even_first_byte, console=Console(enabled=False)).fit()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        ends = [math.log(row[f"actor/rollout_ratio_token/{end}"]) for end in ("min", "max")]
        print(f"{dtype}, step {row['step']}: log-probs of a token differ by {ends[0]:.1e} to {ends[1]:.1e}")
        assert max(map(abs, ends)) < 2 * TOLERANCE[dtype]
        assert row["rollout/worker_restarts"] == 0 and row["actor/grad_norm"] > 0
    assert len(published) >= 3 and all(isinstance(ref, CudaWeightsRef) for ref in published)
