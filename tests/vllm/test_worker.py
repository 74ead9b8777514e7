"""A rollout worker whose vLLM spans two processes: weights reach both, and both go with it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from gspo.models.load import load_model, load_tokenizer
from gspo.rollout.native.engine import NativeEngine
from gspo.rollout.workers.process import ProcessConnection
from gspo.rollout.workers.weight_store import SharedWeights
from gspo.rollout.workers.worker import EngineSpec, RolloutWorker
from tests.rollout.models import make_request
from tests.vllm.conftest import children
from tests.vllm.test_engine import _assert_log_probs, _perturb, _rollouts

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_process_left")]


def _spec(model: Path) -> EngineSpec:
    return EngineSpec(
        kind="vllm",
        model=str(model),
        tokenizer=str(model),
        num_slots=6,
        max_length=64,
        eos_token_ids=(1,),
        pad_token_id=0,
        num_threads=1,
        options={"tensor_parallel_size": 2},
    )


def test_an_engine_over_two_processes_takes_new_weights_and_leaves_nothing_when_killed(model_folder):
    before = children()
    worker, store = ProcessConnection(_spec(model_folder)), SharedWeights()
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = load_tokenizer(str(model_folder))
    native = NativeEngine(model, tokenizer.decode, eos_token_ids=(1,), pad_token_id=0, num_slots=6, max_length=64)
    requests = [make_request(i, n=2) for i in range(4)]
    for version in (1, 2):
        _perturb(model, seed=version)
        worker.send(RolloutWorker.load_weights, store.publish(dict(model.named_parameters()), version), version)
        groups = worker.send(RolloutWorker.generate, requests).result(300)
        expected = native.generate(requests)
        assert [r.token_ids for r in _rollouts(groups)] == [r.token_ids for r in _rollouts(expected)]
        assert {v for r in _rollouts(groups) for v in r.versions} == {version}
        _assert_log_probs(groups, model)
    assert len(children() - before) >= 3  # the worker and vLLM's two
    worker.kill()
    store.close()
    deadline = time.monotonic() + 60
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    worker.close()


def test_overrides_of_the_models_config_are_those_of_the_trainers_model(model_folder):
    overrides = {"rope_theta": 50, "rms_norm_eps": 0.3}
    spec = dataclasses.replace(_spec(model_folder), options={}, override_config=overrides)
    worker, store = ProcessConnection(spec), SharedWeights()
    model = load_model(str(model_folder), overrides=overrides).eval()
    worker.send(RolloutWorker.load_weights, store.publish(dict(model.named_parameters()), 1), 1)
    groups = worker.send(RolloutWorker.generate, [make_request(i, n=2) for i in range(4)]).result(300)
    worker.close()
    store.close()
    _assert_log_probs(groups, model)
    with pytest.raises(AssertionError):
        _assert_log_probs(groups, AutoModelForCausalLM.from_pretrained(model_folder).eval())
