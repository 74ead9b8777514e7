"""The engine against plain transformers, family by family: same greedy tokens, same log-probs."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from tests.rollout.models import CONFIGS, EAGER, EOS, PAD, drain, make_engine, make_model, make_request, plain_log_probs

_CASES = [(kind, None) for kind in CONFIGS] + [("llama", "eager"), ("qwen2-sliding", "eager"), ("gpt2", "eager")]
_LENGTHS = (1, 2, 5, 9, 14)


def _generate(model, prompts, max_new, **options):
    """transformers' own greedy continuation of left-padded prompts, cut after the first eos."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = hf.GenerationConfig(do_sample=False, max_new_tokens=max_new, pad_token_id=PAD, **options)
    out = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in out]


@pytest.mark.parametrize(("kind", "attention"), _CASES)
def test_greedy_output_equals_transformers_generate(kind, attention):
    model = make_model(kind, attention)
    requests = [make_request(i, n=1, length=k, temperature=0.0, max_tokens=20) for i, k in enumerate(_LENGTHS)]
    groups = make_engine(model, num_slots=3).generate(requests)  # fewer slots than prompts: some are refilled
    expected = _generate(model, [r.prompt.token_ids for r in requests], 20, eos_token_id=EOS)
    assert [list(g.rollouts[0].token_ids) for g in groups] == expected
    reasons = ["stop" if row[-1] == EOS else "length" for row in expected]
    assert [g.rollouts[0].finish_reason for g in groups] == reasons


@pytest.mark.parametrize(("kind", "attention"), _CASES)
def test_log_probs_agree_with_a_full_forward(kind, attention):
    model = make_model(kind, attention)
    engine = make_engine(model, num_slots=5)
    for i, length in enumerate(_LENGTHS):
        engine.submit(make_request(i, n=3, length=length, temperature=0.7, top_k=20, max_tokens=16))
    for group in drain(engine):
        for rollout in group.rollouts:
            expected = plain_log_probs(model, group.prompt.token_ids, rollout.token_ids, 0.7)
            assert rollout.log_probs == pytest.approx(expected, abs=1e-4)
    assert model.config._attn_implementation == (attention or ("eager" if kind in EAGER else "sdpa"))


def test_greedy_log_probs_are_taken_at_temperature_one():
    model = make_model()
    (group,) = make_engine(model).generate([make_request(3, n=1, temperature=0.0)])
    (rollout,) = group.rollouts
    assert rollout.log_probs == pytest.approx(
        plain_log_probs(model, group.prompt.token_ids, rollout.token_ids), abs=1e-5
    )


def test_bfloat16_weights_give_float32_log_probs():
    model = make_model().to(torch.bfloat16)
    (group,) = make_engine(model).generate([make_request(3, n=2)])
    for rollout in group.rollouts:
        expected = plain_log_probs(model, group.prompt.token_ids, rollout.token_ids)
        assert rollout.log_probs == pytest.approx(expected, abs=0.2)
        narrowed = torch.tensor(rollout.log_probs).to(torch.bfloat16).float().tolist()
        assert narrowed != pytest.approx(rollout.log_probs, abs=1e-6)


def test_a_model_with_other_layers_is_refused_by_name():
    model = make_model()
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"linear_attention.*another model"):
        make_engine(model)


def test_an_attention_without_masks_is_refused_by_name():
    model = make_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*sdpa"):
        make_engine(model)
