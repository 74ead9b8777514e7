"""What the native engine promises beyond the contract: slots, refills, one prefill, exact continuation, no effect on training."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo.rollout.counter_noise import sequence_key, uniform
from gspo.rollout.native.decoder import Decoder
from gspo.rollout.native.engine import decode_chunk
from gspo.rollout.native.padded_rows import PaddedRows
from gspo.rollout.native.slot_pool import SlotPool
from gspo.rollout.token_sampling import RowSampling, choose
from tests.rollout.models import EOS, PAD, VOCAB, drain, make_engine, make_model, make_request, plain_log_probs


@pytest.fixture(scope="module")
def model():
    return make_model()


def _perturb(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def _reasons(requests):
    return {r.finish_reason for request in requests for r in request.partial if r.token_ids}


@pytest.mark.parametrize("num_slots", [1, 3, 5, 64])
@pytest.mark.parametrize("decode_chunk", [1, 4])
def test_tokens_do_not_depend_on_slots_or_on_company(model, num_slots, decode_chunk):
    engine = make_engine(model, num_slots=num_slots, decode_chunk=decode_chunk)
    for i in range(6):
        engine.submit(make_request(i, n=1 + i % 4))
    groups = sorted(drain(engine), key=lambda g: g.submission)
    for group in groups:
        i = group.submission
        (alone,) = make_engine(model).generate([make_request(i, n=1 + i % 4)])
        assert [r.token_ids for r in group.rollouts] == [r.token_ids for r in alone.rollouts]
        for mine, other in zip(group.rollouts, alone.rollouts):
            assert mine.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_draws_follow_seed_submission_response_and_position(model):
    def texts(**changes):
        request = dataclasses.replace(make_request(3, n=3, ignore_eos=True), **changes)
        (group,) = make_engine(model).generate([request])
        return [r.token_ids for r in group.rollouts]

    base = texts()
    assert len(set(base)) == 3
    assert texts() == base
    assert texts(version=9) == base
    assert texts(n=2) == base[:2]
    assert texts(seed=6) != base
    assert texts(submission=4) != base


def test_groups_that_end_in_one_step_come_in_order_of_submission(model):
    """Group 0 ends last within the step; the order does not follow the tokens."""
    engine = make_engine(model, num_slots=6, decode_chunk=8)
    for i, size in enumerate((7, 2, 5)):
        engine.submit(make_request(i, n=2, ignore_eos=True, max_tokens=size))
    assert [g.submission for g in engine.step()] == [0, 1, 2]


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])  # with the attention kernel, and with masks
def test_every_token_is_the_draw_of_its_own_uniform(precision):
    model = make_model().to(precision)
    request = make_request(4, n=3, temperature=0.9, ignore_eos=True)
    (group,) = make_engine(model).generate([request])
    for index, rollout in enumerate(group.rollouts):
        ids = torch.tensor([[*request.prompt.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt.token_ids) - 1 : -1]
        key = torch.tensor(sequence_key(request.seed, request.submission, index))
        uniforms = uniform(key, torch.arange(len(logits)))
        tokens, _ = choose(logits, RowSampling.of([request.params]), uniforms)
        assert tuple(tokens.tolist()) == rollout.token_ids


def test_a_prompt_is_prefilled_once_for_its_group(model):
    engine = make_engine(model, num_slots=2, decode_chunk=1)
    for i in range(3):
        engine.submit(make_request(i, n=5, ignore_eos=True, max_tokens=3 + i))
    drain(engine)
    assert engine.stats.num_contexts == 3


def test_several_prompts_are_prefilled_together(model):
    engine = make_engine(model, num_slots=8)
    for i in range(4):
        engine.submit(make_request(i, n=2))
    drain(engine)
    assert (engine.stats.num_prefills, engine.stats.num_contexts) == (1, 4)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gemma3", "gpt2"])
def test_a_fresh_engine_continues_unfinished_groups_to_the_bit(kind):
    model = make_model(kind)
    options = {"num_slots": 10, "decode_chunk": 3}
    running = make_engine(model, **options)
    for i in range(7):  # stop tokens enough that some responses of a group end long before others
        running.submit(make_request(i, n=1 + i % 3, max_tokens=20, stop_token_ids=tuple(range(2, 10))))
    early = []
    while not (early and _reasons(running.unfinished()) >= {"aborted", "stop"}):
        assert running.num_in_flight, "the case needs a finished group, and begun and finished responses"
        early += running.step()
    _perturb(model, 1)
    running.load_weights(None, version=1)
    state = running.unfinished()

    fresh = make_engine(model, **options, version=1)
    for request in state:
        fresh.submit(request)
    assert fresh.unfinished() == state
    late = make_request(20, n=3, version=1)
    handed_out, layouts = [], []
    for engine in (running, fresh):
        steps = [engine.step()]
        # The layout of the batch too, on which rounding may depend where the model is large.
        layouts.append(engine.stats.rows)
        steps.append(engine.step())
        engine.submit(late)
        while engine.num_in_flight:
            steps.append(engine.step())
        handed_out.append(steps)
    assert handed_out[0] == handed_out[1] and layouts[0] == layouts[1]
    finished = [g for step in handed_out[0] for g in step]
    assert sorted(g.submission for g in [*early, *finished]) == [0, 1, 2, 3, 4, 5, 6, 20]
    versions = {v for g in finished for r in g.rollouts for v in r.versions}
    assert versions == {0, 1}


def test_tokens_after_a_weight_update_come_from_the_new_weights_alone():
    model = make_model()
    engine = make_engine(model, decode_chunk=4)
    engine.submit(make_request(2, n=4, ignore_eos=True, max_tokens=12))
    engine.step()
    old = make_model()
    _perturb(model, 1)
    engine.load_weights(None, version=7)
    (group,) = drain(engine)
    for rollout in group.rollouts:
        assert rollout.versions == (0,) * 4 + (7,) * 8
        before = plain_log_probs(old, group.prompt.token_ids, rollout.token_ids)
        after = plain_log_probs(model, group.prompt.token_ids, rollout.token_ids)
        assert rollout.log_probs[:4] == pytest.approx(before[:4], abs=1e-4)
        assert rollout.log_probs[4:] == pytest.approx(after[4:], abs=1e-4)
        assert after[4:] != pytest.approx(before[4:], abs=1e-2)


def test_a_kept_cache_mixes_old_keys_with_new_weights_and_says_which_tokens_are_whose():
    model, old = make_model(), make_model()
    plain, keeping = make_engine(model, decode_chunk=4), make_engine(model, decode_chunk=4, keep_cache=True)
    for engine in (plain, keeping):
        engine.submit(make_request(2, n=4, ignore_eos=True, max_tokens=12))
        engine.step()
    _perturb(model, 1)
    for engine in (plain, keeping):
        engine.load_weights(None, version=7)
    (group,), (kept,) = drain(plain), drain(keeping)
    for rollout in kept.rollouts:
        assert rollout.versions == (0,) * 4 + (7,) * 8
        before = plain_log_probs(old, kept.prompt.token_ids, rollout.token_ids)
        after = plain_log_probs(model, kept.prompt.token_ids, rollout.token_ids)
        assert rollout.log_probs[:4] == pytest.approx(before[:4], abs=1e-4)
        for policy in (before, after):
            assert rollout.log_probs[4:] != pytest.approx(policy[4:], abs=1e-4)
    assert [r.token_ids[:4] for r in kept.rollouts] == [r.token_ids[:4] for r in group.rollouts]


def test_a_fresh_engine_continues_a_kept_cache_to_the_bit_from_where_its_state_was_read():
    model = make_model()
    running = make_engine(model, decode_chunk=4, keep_cache=True)
    for i in range(3):
        running.submit(make_request(i, n=3, ignore_eos=True, max_tokens=16))
    running.step()
    _perturb(model, 1)
    running.load_weights(None, version=1)
    running.step()
    fresh = make_engine(model, decode_chunk=4, keep_cache=True, version=1)
    for request in running.unfinished():
        fresh.submit(request)
    assert drain(running) == drain(fresh)


@pytest.mark.parametrize(("ended_per_token", "expected"), [(1.0, 2), (1 / 100, 4), (1 / 1000, 13), (1e-6, 16)])
def test_chunks_are_long_when_few_rows_end(ended_per_token, expected):
    assert decode_chunk(ended_per_token) == expected


def test_weights_given_as_tensors_are_copied_into_the_model():
    model, other = make_model(), make_model(seed=1)
    engine = make_engine(model)
    engine.load_weights(dict(other.named_parameters()), version=3)
    request = make_request(1)
    expected = make_engine(other, version=3).generate([request])
    assert engine.generate([request]) == expected
    with pytest.raises(KeyError, match="no_such"):
        engine.load_weights({"no_such": torch.zeros(1)}, version=4)
    with pytest.raises(ValueError, match=r"embed_tokens.*shape"):
        engine.load_weights({"model.embed_tokens.weight": torch.zeros(1)}, version=4)


@pytest.mark.parametrize("checks_every_step", [True, False])
def test_when_the_pool_checks_for_finished_rows_changes_no_token(model, checks_every_step):
    """Checked at the end of a chunk only, as on a GPU, rows run on past their end."""
    rows = PaddedRows(Decoder(model, PAD, 64, torch.device("cpu")), 4, 64)
    rows.checks_every_step = checks_every_step
    pool = SlotPool(rows, lambda ids: " ".join(map(str, ids)), (EOS,), 4)
    requests = [make_request(i, n=3, max_tokens=1 + 5 * i, length=64 - 1 - 5 * i) for i in range(5)]
    progress = [pool.submit(request) for request in requests]
    while pool.num_groups:
        pool.advance(7, version=0)
    groups = [p.group() for p in progress]
    for group, request in zip(groups, requests):
        (alone,) = make_engine(model).generate([request])
        assert [r.token_ids for r in group.rollouts] == [r.token_ids for r in alone.rollouts]


def test_an_over_long_prefill_is_split(model):
    requests = [make_request(i, n=2, length=4 + i) for i in range(6)]
    together = make_engine(model, num_slots=12).generate(requests)
    engine = make_engine(model, num_slots=12, prefill_tokens=10)
    for request in requests:
        engine.submit(request)
    split = sorted(drain(engine), key=lambda g: g.submission)
    # Padded contexts of 3 to 8 tokens: those of 3 and 4 make a forward of 8 tokens, longer ones run alone.
    assert (engine.stats.num_prefills, engine.stats.num_contexts) == (5, 6)
    assert [r.token_ids for g in split for r in g.rollouts] == [r.token_ids for g in together for r in g.rollouts]


def test_training_goes_on_after_a_rollout():
    model = make_model().train()
    model.gradient_checkpointing_enable()
    make_engine(model).generate([make_request(0)])
    assert model.training and all(m.training for m in model.modules())
    ids = torch.tensor([[3, 4, 5, 6]])
    model(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_rollout_while_the_model_trains_runs_without_dropout():
    torch.manual_seed(0)
    model = make_model("gpt2").train()
    request = make_request(0, n=2)
    first = make_engine(model).generate([request])
    model.eval()
    assert make_engine(model).generate([request]) == first


def test_weights_that_are_not_numbers_stop_the_run_by_name():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"'p4'.*submission 4.*version 2"):
        make_engine(model, version=2).generate([make_request(4)])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(0, length=60, max_tokens=5), r"'p0'.*60 prompt tokens.*max_length=64"),
        (make_request(1, length=0), r"'p1'.*no tokens"),
        (make_request(2, n=0), r"'p2'.*n=0"),
        (make_request(3, max_tokens=0), r"'p3'.*max_tokens=0"),
        (make_request(4, top_p=0.0), r"'p4'.*top_p=0\.0"),
        (make_request(5, temperature=-1.0), r"'p5'.*temperature=-1"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_name(model, request_, message):
    engine = make_engine(model)
    for call in (engine.submit, lambda r: engine.generate([r])):
        with pytest.raises(ValueError, match=message):
            call(request_)
    assert engine.num_in_flight == 0


@pytest.mark.parametrize("option", ["num_slots", "max_length", "decode_chunk"])
def test_an_engine_of_nothing_is_refused(model, option):
    with pytest.raises(ValueError, match=f"{option}=0"):
        make_engine(model, **{option: 0})


def test_a_context_the_model_cannot_hold_is_refused(model):
    with pytest.raises(ValueError, match=r"max_length=129.*max_position_embeddings=128"):
        make_engine(model, max_length=129)


def test_stop_tokens_end_a_response_and_are_kept(model):
    stop = tuple(range(2, VOCAB))
    (group,) = make_engine(model).generate([make_request(0, n=4, stop_token_ids=stop)])
    for rollout in group.rollouts:
        assert len(rollout.token_ids) == 1 and rollout.finish_reason == "stop"
        assert rollout.loss_mask == (1,)
    (at_limit,) = make_engine(model).generate([make_request(0, n=4, stop_token_ids=stop, max_tokens=1)])
    assert {r.finish_reason for r in at_limit.rollouts} == {"stop"}  # it ended by itself, with its last token
    (cut,) = make_engine(model).generate([make_request(0, n=4, ignore_eos=True, max_tokens=1)])
    assert {r.finish_reason for r in cut.rollouts} == {"length"}


def test_ignore_eos_runs_to_max_tokens(model):
    requests = [make_request(i, n=8, ignore_eos=True, max_tokens=30) for i in range(4)]
    groups = make_engine(model).generate(requests)
    assert {len(r.token_ids) for g in groups for r in g.rollouts} == {30}
    assert any(EOS in r.token_ids for g in groups for r in g.rollouts)
