"""The same engine on a GPU: the same noise, the same greedy tokens, the same bits twice."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from gspo.kernels.remappable_memory import RemappableMemory, RemappingFailed
from gspo.rollout.counter_noise import sequence_key, uniform
from tests.rollout.episodes.world import ENDS, make_episodes, make_pool
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


def test_freed_pages_come_back_at_their_address_and_graphs_stay_valid():
    model = make_model().cuda().bfloat16()
    requests = [make_request(i, n=3, max_tokens=30, ignore_eos=True, temperature=0.0) for i in range(6)]

    def tokens(rests: bool) -> list[tuple[int, ...]]:
        engine = make_engine(model, num_slots=64, max_length=6000, device="cuda", free_cache=True)  # 70 MiB of pages
        for request in requests:
            engine.submit(request)
        groups = []
        while engine.num_in_flight:
            groups += engine.step()
            if rests:
                before = torch.cuda.mem_get_info()[0]
                engine.rest()
                assert torch.cuda.mem_get_info()[0] > before, "the pages' memory is the driver's again"
        assert engine.description == "paged cache, compiled, CUDA graphs"
        return [r.token_ids for g in sorted(groups, key=lambda g: g.submission) for r in g.rollouts]

    assert tokens(rests=True) == tokens(rests=False)


def test_captured_prefills_fill_the_pages_as_plain_ones_do():
    model = make_model().cuda().bfloat16()
    requests = [make_request(i, n=2, max_tokens=12, temperature=0.0, length=5 + 7 * i) for i in range(8)]
    captured = make_engine(model, num_slots=16, device="cuda").generate(requests)
    plain = make_engine(model, num_slots=16, device="cuda", eager=True).generate(requests)
    pairs = [(a, b) for x, y in zip(captured, plain) for a, b in zip(x.rollouts, y.rollouts)]
    assert sum(a.token_ids == b.token_ids for a, b in pairs) >= 0.8 * len(pairs), "bfloat16 may break a near tie"
    for a, b in pairs:
        assert a.log_probs[0] == pytest.approx(b.log_probs[0], abs=0.1)


def test_memory_is_unmapped_mapped_again_and_given_back():
    free = lambda: torch.cuda.mem_get_info()[0]  # noqa: E731
    torch.cuda.empty_cache()
    before, size = free(), 1 << 28
    memory = RemappableMemory(size, torch.device("cuda"))
    address = memory.bytes.data_ptr()
    memory.bytes.fill_(7)
    assert before - free() >= size and int(memory.bytes[-1]) == 7
    memory.unmap()
    assert free() == before
    memory.map()
    memory.bytes.fill_(9)
    assert memory.bytes.data_ptr() == address and int(memory.bytes[size // 2]) == 9
    memory.close()
    assert free() == before
    with pytest.raises(RemappingFailed, match="cuMem"):
        RemappableMemory(1 << 50, torch.device("cuda"))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2-sliding"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_caches_held_over_turns_give_the_tokens_of_a_cpu(kind, temperature):
    """Observations are appended to held pages by one forward, while graphs decode other rows between two turns."""
    requests = [make_request(i, n=3, max_tokens=70, length=9 + 7 * i, temperature=temperature) for i in range(6)]

    def play(engine, pool):
        episodes = make_episodes(engine, pool)
        for request in requests:
            episodes.submit(request)
        return sorted(drain(episodes), key=lambda group: group.submission)

    options = {"num_slots": 6, "max_length": 128, "eos_token_ids": ENDS}
    with closing(make_pool(num_turns=5)) as pool:
        expected = play(make_engine(make_model(kind), **options), pool)
        engine = make_engine(make_model(kind).cuda(), device="cuda", **options)
        got = play(engine, pool)
    assert [r.token_ids for g in got for r in g.rollouts] == [r.token_ids for g in expected for r in g.rollouts]
    for mine, other in zip(got, expected):
        for one, two in zip(mine.rollouts, other.rollouts):
            assert one.log_probs == pytest.approx(two.log_probs, abs=1e-3)
    assert engine.metrics()["rollout/prefix_saved"].value > 0.5
    pages = engine.stats.pages
    assert pages.num_free == pages.num_pages > 0
