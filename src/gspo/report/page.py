"""The self-contained page: styles, scripts and data in one HTML file that needs no network.

Scripts are allowed by their hash only; data is in blocks that a browser does not execute, as base64 or as JSON
without `<`. The scripts insert what a model wrote as text nodes only.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gspo.runs.reading import to_json

STATIC = Path(__file__).parent / "static"
STYLES = ("uPlot.min.css", "style.css")
OURS = ("core", "source", "chart", "group_panels", "panels", "rollouts", "turns", "detail", "run", "compare", "app")
SCRIPTS = ("uPlot.iife.min.js", *(f"{name}.js" for name in OURS))  # in the order in which they need each other


@cache
def asset(name: str) -> str:
    """The text of a file shipped in `static/`."""
    return (STATIC / name).read_text(encoding="utf-8")


def report_page(
    overview: Mapping[str, Any], index: Sequence[Any], chunks: Mapping[tuple[str, int], bytes], note: str
) -> str:
    """One run with its rollouts."""
    boot = {"mode": "report", "runs": [overview["name"]], "note": note, "chunks": [f"{k}-{s}" for k, s in chunks]}
    early = [("data-overview-0", _packed(overview))]
    late = [("data-index-0", _packed(index))]
    late += [(f"data-{kind}-{step}-0", base64.b64encode(data).decode()) for (kind, step), data in chunks.items()]
    title = f"{overview['name']} · gspo report"
    return _document(title, boot, early, late, _plain_text(overview))


def compare_page(comparison: Mapping[str, Any], overviews: Sequence[Mapping[str, Any]]) -> str:
    """Several runs side by side."""
    names = [o["name"] for o in overviews]
    early = [(f"data-overview-{i}", _packed(o)) for i, o in enumerate(overviews)]
    boot = {"mode": "compare", "runs": names, "comparison": comparison}
    text = "".join(f"<p>{html.escape(s)}</p>" for s in comparison["sentences"])
    return _document(" against ".join(names) + " · gspo compare", boot, early, [], text)


def dashboard_page() -> str:
    """The live page: the same scripts, fetched from the server, which also serves the data."""
    links = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in STYLES)
    scripts = "".join(f'<script src="/static/{name}" defer></script>' for name in SCRIPTS)
    return (
        f'<!doctype html>\n<html lang="en"><head>{_META}<title>gspo dashboard</title>{links}</head>'
        f'<body><div id="app"></div><noscript><p>The dashboard needs JavaScript.</p></noscript>'
        f"{_json_block('boot', {'mode': 'dashboard'})}{scripts}</body></html>\n"
    )


_META = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
)


def _document(
    title: str, boot: Mapping[str, Any], early: Sequence[tuple[str, str]], late: Sequence[tuple[str, str]], text: str
) -> str:
    """`early` data stands before the scripts, which need it when they start; `late` data loads after them."""
    style = "\n".join(asset(name) for name in STYLES)
    script = "\n".join(asset(name) for name in SCRIPTS).replace("</script", "<\\/script")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta http-equiv="Content-Security-Policy" content="{policy}">{_META}'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>\n"
        f'<body><div id="app"></div><noscript>{text}</noscript>\n'
        f"{_json_block('boot', boot)}{_blocks(early)}<script>{script}</script>\n{_blocks(late)}</body></html>\n"
    )


def _blocks(items: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<script type="text/plain" id="{name}">{data}</script>\n' for name, data in items)


def _json_block(name: str, value: Any) -> str:
    text = to_json(value).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _packed(value: Any) -> str:
    data = to_json(value).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _plain_text(overview: Mapping[str, Any]) -> str:
    """The verdict for a browser without scripts."""
    name, headline = html.escape(overview["name"]), html.escape(overview["verdict"]["headline"])
    sentences = "".join(f"<p>{html.escape(s)}</p>" for s in overview["verdict"]["sentences"])
    return f"<h1>{name}</h1><p><strong>{headline}</strong></p>{sentences}"
