"""The hub is asked once and quickly, not again and again by a library."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest

from gspo import hub
from gspo.models.load import ModelError, load_model, load_tokenizer


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    hub._ask.cache_clear()
    yield
    hub._ask.cache_clear()


def api_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint=url))


def test_a_model_is_refused_after_one_question_when_nobody_answers(monkeypatch: pytest.MonkeyPatch):
    asked = []

    class Api:
        def repo_info(self, name: str, *, repo_type: str, timeout: float) -> None:
            asked.append((name, repo_type))
            raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    for load in (load_tokenizer, load_model):
        with pytest.raises(
            ModelError,
            match=r"no-such-owner/x: is not a local folder.*no route to host.*actor_rollout_ref\.model\.path",
        ):
            load("no-such-owner/x")
    assert asked == [("no-such-owner/x", "model")]


def test_paths_are_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "_ask", lambda name, kind: pytest.fail(f"{name} was asked for"))
    for path in ("./a/b", "/a/b", "a/b/c", "~/a"):
        assert hub.why_unreachable(path, "model") == ""


def test_any_answer_of_the_hub_counts_as_reachable(monkeypatch: pytest.MonkeyPatch):
    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(HTTPStatus.NOT_FOUND)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), NotFound) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        api_at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
        assert hub.why_unreachable("owner/name", "dataset") == ""
        server.shutdown()
    hub._ask.cache_clear()
    api_at("http://127.0.0.1:1", monkeypatch)
    assert hub.why_unreachable("owner/name", "dataset") != ""


def test_a_downloaded_model_is_read_without_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert not hub.is_cached("owner/name", "model")
    folder = tmp_path / "models--owner--name" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    assert not hub.is_cached("owner/name", "model")
    (folder / "config.json").write_text("{}")
    assert hub.is_cached("owner/name", "model")
    monkeypatch.setattr(hub, "_ask", lambda name, kind: "offline")
    given = {}
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *path, **options: given.update(options))
    load_tokenizer("owner/name")
    assert given["local_files_only"] is True
