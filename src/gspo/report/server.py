"""The dashboard's web server: listens on loopback by default and serves nothing but files of run folders."""

from __future__ import annotations

import hashlib
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from gspo import untrusted
from gspo.report import page
from gspo.report.live import LiveRuns
from gspo.runs import reading
from gspo.untrusted import Unreadable

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".png": "image/png"}
TYPES |= dict.fromkeys((".jsonl", ".json", ".md", ".yaml"), "text/plain")
MAX_COMPARED = 12
MAX_SENT = 256 << 20  # bytes of one file


class Dashboard(ThreadingHTTPServer):
    """Serves the runs under one folder. `port` 0 chooses a free one."""

    daemon_threads = True

    def __init__(self, folder: Path | str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = LiveRuns(Path(folder))
        self.guarded = host in LOOPBACK
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its connection is not an error."""


class Missing(Exception):
    """There is nothing at this address."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD. Every path that leaves the runs folder is a 404."""

    server: Dashboard
    protocol_version = "HTTP/1.1"
    server_version = "gspo"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        if self.server.guarded and not self._host_is_local():
            self._send(b"unknown host\n", "text/plain", status=HTTPStatus.FORBIDDEN)
            return
        try:
            self._route()
        except Missing:
            self._send(b"not found\n", "text/plain", status=HTTPStatus.NOT_FOUND)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Unreadable as error:
            self._send(f"{error.path.name} {error.reason}\n".encode(), "text/plain", status=HTTPStatus.CONFLICT)
        except Exception as error:
            text = f"{type(error).__name__} while reading the runs\n"
            self._send(text.encode(), "text/plain", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    do_HEAD = do_GET

    def _host_is_local(self) -> bool:
        """Prevents a foreign web page from reading the server under another host name (DNS rebinding)."""
        host = self.headers.get("Host", "")
        name = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] or host
        return name in LOOPBACK

    def _route(self) -> None:
        address = urlsplit(self.path)
        parts = [unquote(p) for p in address.path.split("/")[1:]]
        if any(p in (".", "..") or "/" in p or "\\" in p or "\0" in p for p in parts):
            raise Missing
        query = parse_qs(address.query)
        match parts:
            case [""]:
                self._send(page.dashboard_page().encode(), "text/html")
            case ["static", name] if name in page.SCRIPTS or name in page.STYLES:
                self._send(page.asset(name).encode(), TYPES[Path(name).suffix])
            case ["api", "runs"]:
                self._send_json({"folder": str(self.server.runs.folder), "runs": self.server.runs.summaries()})
            case ["api", "compare"]:
                self._compare(query.get("run", []))
            case ["api", "run", name, "overview"]:
                self._overview(self._run(name), query)
            case ["api", "run", name, "index"] if "from" in query:
                first, last = _integer(query, "from"), _integer(query, "to")
                self._send_json(self.server.runs.index_range(self._run(name), first, last))
            case ["api", "run", name, "index"]:
                after, generation = _integer(query, "after"), _integer(query, "generation")
                self._send_json(self.server.runs.index(self._run(name), after, generation))
            case ["api", "run", name, "train" | "eval" as kind, step] if step.isdecimal() and len(step) < 12:
                self._groups(self._run(name), kind, int(step))
            case ["files", name, *rest] if rest:
                self._file(self._run(name), rest)
            case _:
                raise Missing

    def _run(self, name: str) -> Path:
        path = self.server.runs.path(name)
        if path is None:
            raise Missing
        return path

    def _inside(self, path: Path) -> Path:
        """The path without symlinks, if it is a plain file inside the runs folder."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            raise Missing from None
        if not real.is_file() or not real.is_relative_to(self.server.runs.folder):
            raise Missing
        return real

    def _overview(self, path: Path, query: dict[str, list[str]]) -> None:
        tag = f'"{self.server.runs.tag(path)}"'
        if not self._unchanged(tag):
            body = self.server.runs.overview(path, _integer(query, "after"), _integer(query, "epoch"))
            self._send(_dump(body), "application/json", tag=tag)

    def _compare(self, names: list[str]) -> None:
        if not 1 < len(names) <= MAX_COMPARED:
            raise Missing
        paths = [self._run(name) for name in names]
        tag = f'"{"-".join(self.server.runs.tag(path) for path in paths)}"'
        if self._unchanged(tag):
            return
        self._send(_dump(self.server.runs.compare(paths)), "application/json", tag=tag)

    def _groups(self, path: Path, kind: str, step: int) -> None:
        folder = path / ("groups" if kind == "train" else "evals")
        file = folder / f"step-{step:06d}.jsonl.gz"
        if file.is_symlink() or not file.is_file():
            raise Missing
        real = self._inside(file)
        if real.stat().st_size > MAX_SENT:
            raise Unreadable(file, f"is larger than {MAX_SENT >> 20} MiB")
        text = bytearray()
        try:  # the stored bytes are sent as they are, unless the file is incomplete
            for piece in untrusted.gzip_chunks(real):
                text += piece[: MAX_SENT - len(text)]
        except Unreadable as error:
            if error.reason.startswith("expands"):
                raise
            self._send(bytes(text).decode("utf-8", "replace").encode("utf-8", "replace"), "application/jsonl")
        else:
            self._send(untrusted.read_bytes(real, MAX_SENT), "application/jsonl", encoding="gzip")

    def _file(self, run: Path, rest: list[str]) -> None:
        path = run.joinpath(*rest)
        if path.suffix not in TYPES or any(p.startswith(".") for p in rest):
            raise Missing
        self._send(untrusted.read_bytes(self._inside(path), MAX_SENT), TYPES[path.suffix])

    def _send_json(self, value: Any) -> None:
        body = _dump(value)
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        if not self._unchanged(tag):
            self._send(body, "application/json", tag=tag)

    def _unchanged(self, tag: str) -> bool:
        """Whether the browser has this version already; answers the request if so."""
        same = self.headers.get("If-None-Match") == tag
        if same:
            self._send(b"", "application/json", status=HTTPStatus.NOT_MODIFIED, tag=tag)
        return same

    def _send(
        self, body: bytes, kind: str, *, status: HTTPStatus = HTTPStatus.OK, tag: str = "", encoding: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind if kind.startswith("image/") else f"{kind}; charset=utf-8")
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", tag)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _dump(value: Any) -> bytes:
    return reading.to_json(value).encode("utf-8", "replace")


def _integer(query: dict[str, list[str]], name: str) -> int:
    value = query.get(name, ["0"])[0]
    return int(value) if value.isdecimal() and len(value) < 20 else 0
