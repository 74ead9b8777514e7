"""The dashboard's server over real sockets: what it serves, what it refuses, what it does with a run that changes."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo.report.live import LiveRuns
from gspo.report.server import Dashboard
from tests.report.synthetic import Maker, Plan, make_run

Reply = tuple[int, dict[str, str], bytes]


class Client:
    """Sends paths exactly as given: no normalising of dots."""

    def __init__(self, server: Dashboard) -> None:
        self.server = server

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=20)
        try:
            connection.putrequest(method, path, skip_host=bool(headers and "Host" in headers))
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, _, body = self.get(path)
        assert status == 200, (path, status)
        return json.loads(body)


@pytest.fixture
def runs(tmp_path: Path, finished_run: Path) -> Path:
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    shutil.copytree(finished_run, tmp_path / "runs" / "embedded")
    return tmp_path / "runs"


@pytest.fixture
def client(runs: Path) -> Iterator[Client]:
    with Dashboard(runs) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield Client(server)
        server.shutdown()
        thread.join()


def test_listens_on_loopback_only_by_default(client: Client) -> None:
    assert client.server.server_address[0] == "127.0.0.1"
    assert client.server.url.startswith("http://127.0.0.1:")


ESCAPES = [
    "/files/embedded/../../secret.json",
    "/files/embedded/..%2f..%2fsecret.json",
    "/files/embedded/%2e%2e/%2e%2e/secret.json",
    "/files/../secret.json",
    "/files/..",
    "/files/embedded//etc/passwd",
    "/files//etc/hostname.json",
    "/files/embedded/%2Fetc%2Fpasswd",
    "/files/embedded/..\\..\\secret.json",
    "/files/embedded/%00.json",
    "/api/run/../overview",
    "/api/run/%2e%2e/overview",
    "/api/run/..%2f/overview",
    "/api/run/embedded/train/..",
    "/api/run/embedded/train/-1",
    "/api/run/embedded/train/99999999999999999999",
    "/api/compare?run=embedded&run=../..",
    "/static/../server.py",
    "/static/uPlot.LICENSE.txt/../../page.py",
    "/../secret.json",
    "//etc/passwd",
    "/etc/passwd",
    "/secret.json",
    "/files/embedded/.lock",
    "/files/embedded",
    "/files/embedded/",
    "/files/embedded/groups",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_nothing_outside_the_runs_folder(client: Client, path: str) -> None:
    status, _, body = client.get(path)
    assert status == 404, path
    assert b"secret" not in body and b"root:" not in body


def test_symlinks_out_of_the_folder_are_not_followed(client: Client, runs: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside", Plan(steps=1, groups=1, n=2, questions=1))
    (runs / "linked").symlink_to(outside)
    run = runs / "embedded"
    (run / "leak.json").symlink_to(tmp_path / "secret.json")
    (run / "pictures").symlink_to(tmp_path)
    (run / "groups" / "step-000099.jsonl.gz").symlink_to(outside / "groups" / "step-000001.jsonl.gz")
    for path in (
        "files/embedded/leak.json",
        "files/embedded/pictures/secret.json",
        "api/run/embedded/train/99",
        "api/run/linked/overview",
    ):
        assert client.get("/" + path)[0] == 404, path
    assert client.get("/files/linked/config.yaml")[0] == 404
    assert [r["name"] for r in client.json("/api/runs")["runs"]] == ["embedded"]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "config.json", "environment.json", "alarms.jsonl", "evals", "groups"]
)
def test_a_run_whose_files_lie_elsewhere_is_not_served(client: Client, runs: Path, tmp_path: Path, name: str) -> None:
    outside = make_run(tmp_path / "outside", Plan(steps=1, groups=1, n=2, questions=1))
    target = runs / "embedded" / name
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.symlink_to(outside / name)
    assert client.json("/api/runs")["runs"] == []
    assert client.get("/api/run/embedded/overview")[0] == 404
    assert client.get("/api/run/embedded/index")[0] == 404


def test_a_foreign_host_name_is_refused(client: Client) -> None:
    assert client.get("/api/runs", {"Host": "evil.example:80"})[0] == 403
    port = client.server.server_address[1]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80", "localhost"):
        assert client.get("/api/runs", {"Host": host})[0] == 200, host


def test_headers_keep_the_page_in_its_box(client: Client) -> None:
    for path in ("/", "/api/runs", "/static/app.js", "/nothing"):
        headers = client.get(path)[1]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_only_reading(client: Client) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.get("/api/runs", method=method)[0] == 501
    status, headers, body = client.get("/api/runs", method="HEAD")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 0


def test_run_files_are_served_as_text(client: Client, runs: Path) -> None:
    status, headers, body = client.get("/files/embedded/metrics.jsonl")
    assert status == 200 and body == (runs / "embedded" / "metrics.jsonl").read_bytes()
    assert headers["Content-Type"].startswith("text/plain")
    (runs / "embedded" / "report.html").write_text("<script>1</script>")
    assert client.get("/files/embedded/report.html")[0] == 404


def test_groups_go_out_as_stored_and_half_files_as_far_as_they_go(client: Client, runs: Path) -> None:
    file = runs / "embedded" / "groups" / "step-000001.jsonl.gz"
    status, headers, body = client.get("/api/run/embedded/train/1")
    assert status == 200 and headers["Content-Encoding"] == "gzip" and body == file.read_bytes()
    file.write_bytes(body[: len(body) // 2])
    status, headers, cut = client.get("/api/run/embedded/train/1")
    assert status == 200 and "Content-Encoding" not in headers
    assert gzip.decompress(body).startswith(cut) and len(cut) > 200


def test_overview_is_sent_only_when_something_changed(client: Client, runs: Path) -> None:
    status, headers, body = client.get("/api/run/embedded/overview")
    first = json.loads(body)
    assert (status, first["offset"], len(first["columns"]["step"])) == (200, 0, 13)
    assert client.get("/api/run/embedded/overview", {"If-None-Match": headers["ETag"]})[0] == 304
    with open(runs / "embedded" / "metrics.jsonl", "a") as f:
        f.write('{"step": 13, "actor/entropy": 0.5, "new/metric": 1}\n{"step": 14, "act')
    status, _, body = client.get(
        f"/api/run/embedded/overview?after=13&epoch={first['epoch']}", {"If-None-Match": headers["ETag"]}
    )
    more = json.loads(body)
    assert (status, more["offset"], more["columns"]["step"]) == (200, 12, [12, 13])
    assert more["columns"]["new/metric"] == [None, 1]


def test_a_cut_metrics_file_is_sent_whole(client: Client, runs: Path) -> None:
    first = client.json("/api/run/embedded/overview")
    file = runs / "embedded" / "metrics.jsonl"
    kept = file.read_text().splitlines(keepends=True)[:5]
    other = file.with_suffix(".tmp")
    other.write_text("".join(kept))
    os.replace(other, file)
    again = client.json(f"/api/run/embedded/overview?after=13&epoch={first['epoch']}")
    assert (again["offset"], again["columns"]["step"]) == (0, [0, 1, 2, 3, 4])


def test_the_index_grows_with_the_run_and_starts_over_after_a_cut(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "runs" / "live", Plan(steps=4, groups=2, n=2, questions=2, val_every=9))
    live = LiveRuns(tmp_path / "runs")
    maker.step(1)
    first = live.index(maker.path, 0, 0)
    assert ([e["step"] for e in first["entries"]], first["complete"]) == ([1], True)
    maker.step(2)
    second = live.index(maker.path, 1, first["generation"])
    assert [e["step"] for e in second["entries"]] == [2]
    maker.step(2)  # a resumed run writes the step again
    third = live.index(maker.path, 2, second["generation"])
    assert third["generation"] != second["generation"]
    assert [e["step"] for e in third["entries"]] == [1, 2]
    (maker.path / "groups" / "step-000001.jsonl.gz").unlink()
    fourth = live.index(maker.path, 2, third["generation"])
    assert [e["step"] for e in fourth["entries"]] == [2]


def test_the_index_answers_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path / "runs" / "run", Plan(steps=6, groups=1, n=2, questions=1, val_every=9))
    for name in ("FIRST_SECONDS", "BATCH_SECONDS"):
        monkeypatch.setattr(f"gspo.report.live_index.{name}", -1.0)
    live, steps, rounds = LiveRuns(tmp_path / "runs"), [], 0
    complete = False
    while not complete:
        part = live.index(path, len(steps), 1)
        steps += [(e["step"], e["kind"]) for e in part["entries"]]
        complete, rounds = part["complete"], rounds + 1
    assert rounds == 8
    assert sorted(steps) == [(0, "eval"), *((s, "train") for s in range(1, 6)), (6, "eval"), (6, "train")]


def test_status_turns_when_the_process_dies(runs: Path) -> None:
    run = runs / "embedded"
    (run / "result.json").unlink()
    (run / ".lock").write_text(str(os.getpid()))
    live = LiveRuns(runs)
    assert live.run(run).status == "running"
    before = live.tag(run)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    (run / ".lock").write_text(str(child))
    assert live.run(run).status == "stopped"
    assert live.tag(run) != before


def test_a_run_that_cannot_be_read_is_an_answer_not_silence(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *_: object) -> None:
        raise ValueError("unreadable")

    monkeypatch.setattr("gspo.report.live.read_run", fail)
    (listed,) = client.json("/api/runs")["runs"]
    assert (listed["name"], listed["problems"]) == ("embedded", ["cannot be read (ValueError: unreadable)"])
    assert client.get("/api/run/embedded/overview")[0] == 500
    assert client.get("/")[0] == 200


def test_compare_over_http(client: Client, runs: Path) -> None:
    make_run(runs / "other", Plan(steps=2, groups=2, n=2, gain=0.6))
    answer = client.json("/api/compare?run=embedded&run=other")
    assert [o["name"] for o in answer["overviews"]] == ["embedded", "other"]
    assert answer["comparison"]["differences"][0]["paired"]["num_questions"] == 40
    assert client.get("/api/compare?run=embedded")[0] == 404
