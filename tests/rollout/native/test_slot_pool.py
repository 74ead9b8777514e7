"""The pool of slots: rows with parameters of their own, and rows that make room for others."""

from __future__ import annotations

import pytest
import torch

from gspo.rollout.native.decoder import Decoder
from gspo.rollout.native.padded_rows import PaddedRows
from gspo.rollout.native.slot_pool import CacheFull, SlotPool
from tests.rollout.models import EOS, PAD, drain, make_engine, make_model, make_request


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_rows_keep_their_own_sampling_parameters_wherever_they_run(model):
    """Short groups end first, so that rows move; new ones with other parameters come beside running ones."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 1.5, "top_k": 3}, {"top_p": 0.4}]
    requests = [
        make_request(i, n=2, ignore_eos=True, max_tokens=(3, 14, 5, 9, 4, 11)[i], **kinds[i % 4]) for i in range(6)
    ]
    engine = make_engine(model, num_slots=5, decode_chunk=2)
    for request in requests:
        engine.submit(request)
    found = sorted(drain(engine), key=lambda g: g.submission)
    for group, request in zip(found, requests, strict=True):
        (alone,) = make_engine(model).generate([request])
        assert [r.token_ids for r in group.rollouts] == [r.token_ids for r in alone.rollouts]


class Tight(PaddedRows):
    """Rows with memory for `most` of them."""

    most = 9

    def reserve(self, num_steps: int) -> bool:
        return self._num_rows <= self.most


def tight_pool(model) -> tuple[Tight, SlotPool]:
    rows = Tight(Decoder(model, PAD, 64, torch.device("cpu")), 3, 64)
    return rows, SlotPool(rows, lambda ids: "", (EOS,), 3)


def test_the_rows_placed_last_make_room_and_keep_what_they_have(model):
    rows, pool = tight_pool(model)
    requests = [make_request(i, n=1, ignore_eos=True, max_tokens=10) for i in range(3)]
    progress = [pool.submit(request) for request in requests]
    pool.advance(4, version=0)
    rows.most = 1
    pool.advance(2, version=0)
    assert pool.stats.rows == ((0, 0),)
    assert [len(r.partial[0].token_ids) for r in pool.unfinished(0)] == [6, 4, 4]
    rows.most = 9
    pool.rewind(0)
    while pool.num_groups:
        pool.advance(3, version=1)
    versions = [p.group().rollouts[0].versions for p in progress]
    assert versions == [(0,) * 6 + (1,) * 4, (0,) * 4 + (1,) * 6, (0,) * 4 + (1,) * 6]
    for p, request in zip(progress, requests):
        (alone,) = make_engine(model).generate([request])
        assert p.group().rollouts[0].token_ids == alone.rollouts[0].token_ids


def test_a_response_without_room_for_itself_is_an_error(model):
    rows, pool = tight_pool(model)
    rows.most = 0
    pool.submit(make_request(0, n=1))
    with pytest.raises(CacheFull, match="cannot hold one response"):
        pool.advance(2, version=0)
