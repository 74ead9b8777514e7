"""The same engine on a GPU: the same noise, the same greedy tokens, the same bits twice."""

from __future__ import annotations

import pytest
import torch

from gspo.rollout.counter_noise import sequence_key, uniform
from tests.rollout.models import drain, make_engine, make_model, make_request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_noise_is_the_same_on_both_devices():
    keys = torch.tensor([sequence_key(1, g, r) for g in range(50) for r in range(8)])[:, None]
    on_cpu = uniform(keys, torch.arange(300))
    assert torch.equal(uniform(keys.cuda(), torch.arange(300).cuda()).cpu(), on_cpu)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gemma3", "gpt2"])
def test_greedy_tokens_equal_the_cpus(kind):
    requests = [make_request(i, n=1, temperature=0.0, max_tokens=20) for i in range(6)]
    expected = make_engine(make_model(kind), num_slots=4).generate(requests)
    got = make_engine(make_model(kind).cuda(), num_slots=4, device="cuda").generate(requests)
    assert [r.token_ids for g in got for r in g.rollouts] == [r.token_ids for g in expected for r in g.rollouts]
    for mine, other in zip(got, expected):
        assert mine.rollouts[0].log_probs == pytest.approx(other.rollouts[0].log_probs, abs=1e-3)


def test_the_same_calls_give_the_same_bits_and_a_fresh_engine_continues_them():
    model = make_model().cuda()

    def start():
        engine = make_engine(model, num_slots=6, device="cuda")
        for i in range(8):
            engine.submit(make_request(i, n=3, max_tokens=20))
        return engine, [g for _ in range(2) for g in engine.step()]

    (running, early), (again, early_again) = start(), start()
    assert early == early_again
    running.load_weights(None, 1)
    again.load_weights(None, 1)
    fresh = make_engine(model, num_slots=6, device="cuda", version=1)
    for request in running.unfinished():
        fresh.submit(request)
    finished = drain(running)
    assert drain(again) == finished and drain(fresh) == finished
