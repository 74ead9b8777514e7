"""The kernels are compiled once, kept, and done without where nothing compiles them."""

from __future__ import annotations

import logging
import os
import stat

import pytest
import torch

from gspo.cpu import library as module
from gspo.cpu.attention import takes
from gspo.cpu.library import compiler, library
from gspo.training.forward import Forward

from ..rollout.models import make_model


@pytest.fixture(autouse=True)
def _forget(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield
    library.cache_clear()


def a_compiler(path, says: str) -> str:
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_it_is_compiled_once(tmp_path, monkeypatch):
    assert library() is not None
    (kept,) = (tmp_path / "gspo").iterdir()
    made = kept.stat().st_mtime_ns
    library.cache_clear()
    monkeypatch.setattr(module, "_run", lambda *command: pytest.fail("compiled again"))
    assert library() is not None and kept.stat().st_mtime_ns == made


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "gspo").write_text("not a folder")
    assert library() is not None


def test_without_a_compiler_attention_is_torchs(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = make_model("llama")
    assert library() is None and not takes(model)
    forward = Forward.of(model.base_model, "shared")
    assert forward.kind == "shared" and forward.spans_of is None


def test_a_compiler_that_fails_costs_a_warning(tmp_path, monkeypatch, caplog):
    says = 'if [ "$1" = --version ]; then echo 1; else echo "no headers" >&2; exit 1; fi'
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "c++", says))
    with caplog.at_level(logging.WARNING):
        assert library() is None and library() is None
    assert [r.getMessage() for r in caplog.records] == ["gspo's CPU kernels are not used: no headers"]
    assert not list((tmp_path / "gspo").iterdir())


def test_a_library_that_does_not_load_costs_a_warning(tmp_path, monkeypatch, caplog):
    says = 'if [ "$1" = --version ]; then echo 1; exit; fi; while [ "$1" != -o ]; do shift; done; echo broken > "$2"'
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "c++", says))
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert "CPU kernels are not used" in caplog.text
    assert takes(make_model("llama")) is False and torch.get_num_threads() and os.environ["CXX"]
