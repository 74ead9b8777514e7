"""The vLLM engine against the native one: the same draws, and log-probs under the right weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo.rollout.engine import EngineError, RolloutEngine
from gspo.rollout.native.engine import NativeEngine
from gspo.rollout.vllm.engine import VllmEngine
from gspo.rollout.vllm.settings import VllmSettings, engine_arguments
from gspo.types import Group, Rollout
from tests.rollout.models import drain, make_request, plain_log_probs
from tests.vllm.conftest import EOS, MAX_LENGTH, SLOTS, TOLERANCE, detokenize

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(running, model) -> VllmEngine:
    """The shared engine with nothing in flight and the model's weights, version 0."""
    running.clear()
    running.load_weights(dict(model.named_parameters()), 0)
    return running


@pytest.fixture
def native(model) -> NativeEngine:
    return NativeEngine(
        model, detokenize, eos_token_ids=(EOS,), pad_token_id=0, num_slots=SLOTS, max_length=MAX_LENGTH, decode_chunk=2
    )


def _submit(engine: RolloutEngine, numbers: Any, **options: Any) -> RolloutEngine:
    for i in numbers:
        engine.submit(make_request(i, n=1 + i % 3, **options))
    return engine


def _by_submission(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.submission)


def _rollouts(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in _by_submission(groups) for rollout in group.rollouts]


def _perturb(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def _assert_log_probs(groups: list[Group], model: Any, temperature: float = 1.0) -> None:
    for group in groups:
        for rollout in group.rollouts:
            plain = plain_log_probs(model, group.prompt.token_ids, rollout.token_ids, temperature)
            assert rollout.log_probs == pytest.approx(plain, abs=TOLERANCE)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.8},
    ],
    ids=["greedy", "plain", "temperature", "top-k", "top-k and top-p"],
)
def test_it_draws_the_native_engines_tokens_with_log_probs_before_top_k_and_top_p(engine, native, model, params):
    groups = drain(_submit(engine, range(9), **params))
    expected = drain(_submit(native, range(9), **params))
    assert [r.token_ids for r in _rollouts(groups)] == [r.token_ids for r in _rollouts(expected)]
    assert [r.finish_reason for r in _rollouts(groups)] == [r.finish_reason for r in _rollouts(expected)]
    assert [r.text for r in _rollouts(groups)] == [r.text for r in _rollouts(expected)]
    _assert_log_probs(groups, model, params.get("temperature") or 1.0)


def test_requests_with_different_parameters_run_together(engine, native):
    requests = [
        make_request(0, temperature=0.0),
        make_request(1, temperature=0.5, top_k=3),
        make_request(2, temperature=2.0, top_p=0.5),
        make_request(3),
    ]
    got, expected = engine.generate(requests), native.generate(requests)
    assert [r.token_ids for r in _rollouts(got)] == [r.token_ids for r in _rollouts(expected)]


def test_log_probs_agree_with_the_trainers_after_every_weight_update(engine, model):
    before = engine.generate([make_request(4, n=3)])
    for version in range(1, 5):
        _perturb(model, seed=version)
        engine.load_weights(dict(model.named_parameters()), version)
        groups = engine.generate([make_request(i, n=3) for i in range(4)])
        _assert_log_probs(groups, model)
        assert {v for r in _rollouts(groups) for v in r.versions} == {version}
    with pytest.raises(AssertionError):
        _assert_log_probs(before, model)


def test_no_cache_of_the_old_weights_is_used(engine, model):
    """A prompt longer than a cache block, the same before and after: its prefix would be found in the cache."""
    request = make_request(1, n=2, length=160)
    engine.generate([request])
    _perturb(model, seed=9)
    engine.load_weights(dict(model.named_parameters()), 1)
    _assert_log_probs(engine.generate([request]), model)


def test_an_interrupted_response_goes_on_under_the_new_weights(engine, model):
    old = AutoModelForCausalLM.from_config(model.config)
    old.load_state_dict(model.state_dict())
    _submit(engine, range(4), max_tokens=20, ignore_eos=True)
    groups = engine.step()
    _perturb(model, seed=1)
    engine.load_weights(dict(model.named_parameters()), 1)
    groups += drain(engine)
    rollouts = [(g, r) for g in groups for r in g.rollouts]
    assert {v for _, r in rollouts for v in r.versions} == {0, 1}
    crossing = 0
    for group, r in rollouts:
        assert len(r.token_ids) == len(r.log_probs) == len(r.versions) == 20 and list(r.versions) == sorted(r.versions)
        crossing += len(set(r.versions)) == 2
        by_version = [plain_log_probs(m, group.prompt.token_ids, r.token_ids) for m in (old, model)]
        expected = [by_version[version][t] for t, version in enumerate(r.versions)]
        assert r.log_probs == pytest.approx(expected, abs=TOLERANCE)
    assert crossing, "no response was interrupted"


def test_tokens_do_not_depend_on_interruptions(engine, native):
    _submit(engine, range(6))
    groups = engine.step()
    for version in (1, 2, 3):
        engine.load_weights(None, version)
        groups += engine.step()
    groups += drain(engine)
    expected = drain(_submit(native, range(6)))
    assert [r.token_ids for r in _rollouts(groups)] == [r.token_ids for r in _rollouts(expected)]


def test_generate_leaves_groups_in_flight_as_they_are(engine, native):
    _submit(engine, range(4))
    groups = engine.step()
    state = engine.unfinished()
    assert any(rollout.token_ids for request in state for rollout in request.partial)
    evaluation = [make_request(i, temperature=0.0) for i in (7, 3, 5)]
    assert [g.submission for g in engine.generate(evaluation)] == [7, 3, 5]
    assert engine.unfinished() == state and engine.num_in_flight == len(state)
    groups += drain(engine)
    expected = drain(_submit(native, range(4)))
    assert [r.token_ids for r in _rollouts(groups)] == [r.token_ids for r in _rollouts(expected)]


def test_it_rests_while_training_and_goes_on(engine, native, model):
    """On a CPU no memory is given back; that nothing is lost or run meanwhile is the same."""
    _submit(engine, range(3))
    groups = engine.step()
    engine.rest()
    state = engine.unfinished()
    engine.rest()
    _submit(engine, range(3, 5))
    assert engine.unfinished()[: len(state)] == state and engine.num_in_flight == len(state) + 2
    groups += engine.step()
    engine.rest()
    engine.load_weights(dict(model.named_parameters()), 1)
    groups += drain(engine)
    engine.rest()
    groups += engine.generate([make_request(5, n=3)])
    expected = drain(_submit(native, range(6)))
    assert [r.token_ids for r in _rollouts(groups)] == [r.token_ids for r in _rollouts(expected)]
    _assert_log_probs(groups, model)


def test_stop_tokens_ignored_eos_and_length(engine, native):
    (plain,) = native.generate([make_request(2, n=1, max_tokens=12, ignore_eos=True)])
    stop = plain.rollouts[0].token_ids[4]
    first = plain.rollouts[0].token_ids.index(stop)
    (group,) = engine.generate([make_request(2, n=1, ignore_eos=True, stop_token_ids=(stop,))])
    assert group.rollouts[0].token_ids == plain.rollouts[0].token_ids[: first + 1]
    assert group.rollouts[0].finish_reason == "stop"
    (group,) = engine.generate([make_request(2, n=1, ignore_eos=True, max_tokens=3)])
    assert len(group.rollouts[0].token_ids) == 3 and group.rollouts[0].finish_reason == "length"


def test_log_probs_that_are_not_numbers_stop_the_run_by_name(engine, model):
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights["model.norm.weight"].fill_(float("nan"))
    engine.load_weights(weights, 5)
    with pytest.raises(FloatingPointError, match=r"'p2' \(submission 2, response 0\).*version 5"):
        engine.generate([make_request(2)])


def test_requests_that_cannot_run_are_refused_by_name(engine):
    with pytest.raises(ValueError, match=r"'p1'.*max_length=200"):
        engine.submit(make_request(1, max_tokens=MAX_LENGTH))
    with pytest.raises(ValueError, match=r"'p1'.*top_p=0"):
        engine.submit(make_request(1, top_p=0.0))
    assert engine.num_in_flight == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("block_sise", "did you mean block_size"),
        ("logprobs_mode", "cannot be changed"),
        ("max_num_seqs", r"set rollout\.max_num_seqs"),
    ],
)
def test_engine_kwargs_are_checked_by_name(model_folder, name, message):
    settings = VllmSettings(str(model_folder), 4, 64, engine_kwargs={name: 8})
    with pytest.raises(EngineError, match=rf"engine_kwargs\.{name}=8.*{message}"):
        engine_arguments(settings)


def test_heads_that_vllm_cannot_run_on_a_cpu_are_refused():
    from gspo.models import resolve

    with pytest.raises(EngineError, match="36 dimensions"):
        engine_arguments(VllmSettings(str(resolve("embedded")), 4, 64))


def test_engine_kwargs_reach_vllm(model_folder):
    settings = VllmSettings(str(model_folder), 4, 64, engine_kwargs={"block_size": 64})
    assert engine_arguments(settings)["block_size"] == 64
    eager = dataclasses.replace(settings, max_num_batched_tokens=2, enable_chunked_prefill=False)
    assert engine_arguments(eager)["max_num_batched_tokens"] == 64
