"""The Runner contract, run on padded rows and on pages."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from gspo.kernels.sizes import PAGE
from gspo.rollout.native.decoder import Decoder
from gspo.rollout.native.padded_rows import PaddedRows
from gspo.rollout.native.paged_model import open_pages
from gspo.rollout.native.paged_rows import PagedRows
from gspo.rollout.native.runner import Runner
from tests.contracts.runner import MAX_LENGTH, NUM_SLOTS, PROMPTS, RunnerContract, model, place, release
from tests.rollout.models import PAD
from tests.rollout.native import plain_kernels

CPU = torch.device("cpu")


class TestPaddedRows(RunnerContract):
    @pytest.fixture
    def runner(self) -> Runner:
        return PaddedRows(Decoder(model(), PAD, MAX_LENGTH, CPU), NUM_SLOTS, MAX_LENGTH)


class TestPaddedRowsThroughTransformers(RunnerContract):
    """The forward of transformers over a SlotCache, as for a model that PackedDecoder does not run."""

    @pytest.fixture
    def runner(self, monkeypatch: pytest.MonkeyPatch) -> Runner:
        monkeypatch.setattr("gspo.rollout.native.packed_decoder.supports", lambda model: False)
        return PaddedRows(Decoder(model(), PAD, MAX_LENGTH, CPU), NUM_SLOTS, MAX_LENGTH)


class TestPagedRows(RunnerContract):
    """Plain torch stands in for the GPU kernels."""

    @pytest.fixture
    def runner(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
        monkeypatch.setitem(sys.modules, "gspo.kernels.triton_decode", plain_kernels)
        paged, reason = open_pages(
            model(), CPU, num_tokens=NUM_SLOTS * MAX_LENGTH, memory=1 << 30, compiled=False, graphs=False
        )
        assert paged is not None, reason
        return PagedRows(paged, NUM_SLOTS, MAX_LENGTH)

    def test_pages_that_run_out_are_reported_without_effect(self, runner: PagedRows) -> None:
        place(runner, [PROMPTS[2]])
        with runner.running():
            page = list(range(3, 3 + PAGE))
            prefixes = [runner.prefill([page])[0] for _ in range(runner.pages.num_free)]
            assert runner.pages.num_free == 0 and runner.num_fitting([PAGE]) == 0
            assert runner.reserve(1) and not runner.reserve(PAGE + 1)
            release(runner, prefixes)
            assert runner.reserve(PAGE + 1) and runner.pages.num_free == len(prefixes) - 1
