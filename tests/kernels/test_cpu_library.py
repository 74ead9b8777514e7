"""The kernels are compiled once, kept, and done without where nothing compiles them."""

from __future__ import annotations

import logging
import os
import stat

import pytest
import torch

from gspo.kernels import cpu_library as module
from gspo.kernels.cpu_attention import supports
from gspo.kernels.cpu_library import compiler, library
from gspo.training.forward import Forward
from tests.rollout.models import make_model


@pytest.fixture(autouse=True)
def _forget(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield
    library.cache_clear()


BROKEN_LIBRARY = (
    'if [ "$1" = --version ]; then echo 1; exit; fi; while [ "$1" != -o ]; do shift; done; echo broken > "$2"'
)


def a_compiler(path, says: str) -> str:
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def quick_compiler(tmp_path, monkeypatch):
    """The machine's compiler without its optimisations, which take most of its time."""
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "quick", f'exec "{compiler()}" "$@" -O0'))


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_it_is_compiled_once_and_again_when_the_file_is_damaged(tmp_path, monkeypatch, quick_compiler):
    assert library() is not None
    (kept,) = (tmp_path / "gspo").iterdir()
    made = kept.stat().st_mtime_ns
    library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: pytest.fail("compiled again"))
        assert library() is not None and kept.stat().st_mtime_ns == made
    damaged = tmp_path / "other" / "gspo" / kept.name
    damaged.parent.mkdir(parents=True)
    damaged.write_text("damaged")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    library.cache_clear()
    assert library() is not None and damaged.stat().st_size == kept.stat().st_size


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, quick_compiler):
    (tmp_path / "gspo").write_text("not a folder")
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    assert library() is not None


def test_without_a_home_the_library_is_kept_among_temporary_files(tmp_path, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "c++", BROKEN_LIBRARY))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(module.Path, "home", homeless)
    library()
    (folder,) = (tmp_path / "temporary").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [file.suffix for file in folder.iterdir()] == [".so"]


def test_a_compiler_that_speaks_no_utf8_is_listened_to(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "c++", "printf '\\377 no\\n' >&2; exit 1"))
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert "CPU kernels are not used: \ufffd no" in caplog.text


def test_without_a_compiler_attention_is_torchs(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = make_model("llama")
    assert library() is None and not supports(model)
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
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "c++", BROKEN_LIBRARY))
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert "CPU kernels are not used" in caplog.text
    assert supports(make_model("llama")) is False and torch.get_num_threads() and os.environ["CXX"]
