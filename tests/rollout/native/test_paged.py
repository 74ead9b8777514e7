"""The engine on KV pages: the same tokens as on padded rows, shared prompts, few pages, and no page lost.

The kernels need a GPU (tests/rollout/native/test_gpu.py); here plain torch stands in for them alone.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise

import pytest

from gspo.kernels.sizes import PAGE
from gspo.rollout.engine import EngineError
from gspo.rollout.native.graphs import batch_sizes
from gspo.rollout.native.pages import OutOfPages, PageAllocator
from tests.rollout.models import CONFIGS, drain, make_engine, make_model, make_request
from tests.rollout.native import plain_kernels


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "gspo.kernels.triton_decode", plain_kernels)


def paged_engine(model, *, num_pages: int | None = None, **options):
    """A paged engine; with `num_pages` usable pages beside page 0, by the share of a CPU's nominal 1 GiB they take."""
    if num_pages is not None:
        c = model.config
        page_bytes = 2 * PAGE * c.num_key_value_heads * c.head_dim * c.num_hidden_layers * 4
        options["memory_utilization"] = (num_pages + 1) * page_bytes / 2**30
    engine = make_engine(model, paged=True, **options)
    assert engine.description == "paged cache"
    return engine


def tokens_of(groups):
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


def all_pages_are_free(engine) -> bool:
    pages = engine.stats.pages
    return pages.num_free == pages.num_pages > 0


@pytest.mark.parametrize("kind", sorted(set(CONFIGS) - {"gpt2"}))
def test_greedy_tokens_are_those_of_padded_rows(kind):
    model = make_model(kind)
    requests = [make_request(i, n=2, temperature=0.0, max_tokens=24, length=2 + 9 * i % 37) for i in range(5)]
    engine = paged_engine(model, num_slots=6)
    expected, got = make_engine(model, num_slots=6).generate(requests), engine.generate(requests)
    assert tokens_of(got) == tokens_of(expected)
    for mine, other in zip(got, expected):
        for a, b in zip(mine.rollouts, other.rollouts):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.6}])
def test_draws_are_those_of_padded_rows(params):
    model = make_model()
    requests = [make_request(i, n=3, max_tokens=20, length=15 + i, **params) for i in range(4)]
    expected = make_engine(model, num_slots=5).generate(requests)
    assert tokens_of(paged_engine(model, num_slots=5).generate(requests)) == tokens_of(expected)


def test_rows_drawn_in_different_ways_run_together():
    model = make_model()
    ways = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 3}]
    requests = [make_request(i, n=2, max_tokens=12, **ways[i % 3]) for i in range(6)]
    expected = make_engine(model, num_slots=8).generate(requests)
    assert tokens_of(paged_engine(model, num_slots=8).generate(requests)) == tokens_of(expected)


def test_with_few_pages_responses_take_turns_and_come_out_the_same():
    model = make_model()
    requests = [make_request(i, n=2, max_tokens=30, length=20 + i, ignore_eos=True) for i in range(4)]
    expected = make_engine(model, num_slots=8).generate(requests)
    engine = paged_engine(model, num_slots=8, num_pages=9)
    for request in requests:
        engine.submit(request)
    most = 0
    groups = []
    while engine.num_in_flight:
        groups += engine.step()
        most = max(most, len(engine.stats.rows))
    assert engine.stats.pages.num_pages == 9
    assert 0 < most < 8, "nine pages cannot hold eight responses of up to 53 tokens"
    assert tokens_of(sorted(groups, key=lambda g: g.submission)) == tokens_of(expected)
    assert all_pages_are_free(engine)


def test_a_prompt_is_stored_once_for_its_group():
    engine = paged_engine(make_model(), num_slots=4)
    engine.submit(make_request(0, n=4, length=2 * PAGE + 3, max_tokens=8, ignore_eos=True))
    engine.step()
    pages = engine.stats.pages
    assert len(engine.stats.rows) == 4
    assert pages.num_pages - pages.num_free == 2 + 4, "two full pages are shared, the half-filled one is not"
    drain(engine)
    assert all_pages_are_free(engine)


def test_prompts_are_prefilled_ahead_and_many_in_one_forward():
    engine = paged_engine(make_model(), num_slots=16)
    for i in range(24):
        engine.submit(make_request(i, n=2, max_tokens=4 + i % 5, ignore_eos=True))
    groups = drain(engine)
    assert len(groups) == 24 and engine.stats.num_contexts == 24
    # Eight groups have slots at once, and the prompt of one more is prefilled with them.
    assert engine.stats.num_prefills < 24 / 1.5
    assert all_pages_are_free(engine)


def test_contexts_that_were_prefilled_ahead_give_way_to_running_rows():
    model = make_model()
    requests = [make_request(i, n=1, max_tokens=40, length=17, ignore_eos=True) for i in range(6)]
    engine = paged_engine(model, num_slots=4, num_pages=12)
    for request in requests:
        engine.submit(request)
    groups = sorted(drain(engine), key=lambda g: g.submission)
    assert tokens_of(groups) == tokens_of(make_engine(model).generate(requests))
    assert all_pages_are_free(engine)


def test_the_engine_asks_for_what_its_slots_hold_and_a_few_more():
    engine = paged_engine(make_model(), num_slots=16)
    assert engine.num_wanted(100) == 16 + 2 and engine.num_wanted(8) == 8 + 1
    engine.submit(make_request(0, n=5))
    assert engine.num_wanted(100) == 16 + 2 - 5
    assert make_engine(make_model(), num_slots=16).num_wanted(100) is None, "a CPU counts groups"
    drain(engine)
    assert engine.num_wanted(100) == 18


@pytest.mark.parametrize("keep_cache", [False, True])
def test_an_engine_whose_pages_are_freed_continues_to_the_same_tokens(keep_cache):
    model = make_model()
    requests = [make_request(i, n=2, max_tokens=20, ignore_eos=True) for i in range(3)]
    engine = paged_engine(model, num_slots=6, free_cache=not keep_cache, keep_cache=keep_cache)
    for request in requests:
        engine.submit(request)
    groups = engine.step()
    engine.rest()
    assert all_pages_are_free(engine) != keep_cache
    groups = sorted([*groups, *drain(engine)], key=lambda g: g.submission)
    assert tokens_of(groups) == tokens_of(make_engine(model).generate(requests))


def test_a_response_that_never_fits_is_refused_by_name():
    engine = paged_engine(make_model(), num_slots=2, num_pages=3)
    engine.submit(make_request(7, n=1, length=50, max_tokens=14))
    with pytest.raises(EngineError, match=r"'p7'.*gpu_memory_utilization"):
        engine.step()


def test_new_weights_keep_no_page_and_a_fresh_engine_continues_to_the_same_tokens():
    model = make_model()
    engine = paged_engine(model, num_slots=6)
    for i in range(5):
        engine.submit(make_request(i, n=2, max_tokens=20, ignore_eos=True))
    for _ in range(2):
        engine.step()
    engine.load_weights(None, 1)
    assert all_pages_are_free(engine)
    fresh = paged_engine(model, num_slots=6, version=1)
    for request in engine.unfinished():
        fresh.submit(request)
    assert drain(engine) == drain(fresh)


def test_a_page_is_free_when_its_last_reference_is_released():
    pages = PageAllocator(5)
    a, b = pages.allocate(2), pages.allocate(1)
    pages.share(a)
    pages.release(a)
    assert pages.num_free == 1 and pages.num_usable == 4
    pages.release(a)
    pages.release(b)
    assert pages.num_free == 4 and 0 not in pages.allocate(4)
    with pytest.raises(OutOfPages):
        pages.allocate(1)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8, 9, 24, 100, 256, 1000, 1024])
def test_batch_sizes_cover_the_slots_without_much_waste(num_slots):
    sizes = batch_sizes(num_slots)
    assert sizes == sorted(set(sizes)) and sizes[-1] >= num_slots and sizes[0] >= 2
    assert all(b <= 2 * a for a, b in pairwise(sizes))
    assert all(2 * b <= 3 * a for a, b in pairwise(sizes) if a >= 16)


def test_an_evaluation_preempts_groups_in_flight_when_pages_run_out():
    model = make_model()
    requests = [make_request(i, n=1, temperature=0.0, max_tokens=40, length=20) for i in range(4)]
    evaluation = [make_request(9, n=2, temperature=0.0, max_tokens=8, length=50)]
    engine = paged_engine(model, num_slots=4, num_pages=7)
    for request in requests:
        engine.submit(request)
    engine.step()
    expected = make_engine(model, num_slots=4).generate(evaluation)
    assert tokens_of(engine.generate(evaluation)) == tokens_of(expected)
    expected = make_engine(model, num_slots=4).generate(requests)
    got = sorted(drain(engine), key=lambda group: group.submission)
    assert tokens_of(got) == tokens_of(expected) and all_pages_are_free(engine)
