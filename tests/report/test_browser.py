"""The pages in a real browser: Debian's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gspo.report.server import Dashboard
from gspo.report.write import build_report
from tests.report.synthetic import Maker, Plan, make_run, write_step

CHROMIUM = os.environ.get("GSPO_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium, or set GSPO_CHROMIUM to its path"),
]


class Tab:
    """A page that remembers every console error, failed request and attempt to reach the network."""

    def __init__(self, browser: Any, width: int = 1280, theme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda e: self.problems.append(f"error {e}"))
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.problems.append(f"{m.type} {m.text}"))
        self.page.on("requestfailed", self.failed)

    def failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left while it asked
            self.problems.append(f"failed {request.url} {request.failure}")

    def open(self, url: str, indexed: bool = True) -> Any:
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready=yes]")
        if indexed:
            self.page.wait_for_selector("html[data-indexed=yes]")
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    tab = Tab(browser)
    yield tab
    problems = tab.problems
    tab.context.close()
    assert problems == []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("pages") / "embedded", Plan())
    (run / "alarms.jsonl").write_text('{"step": 3, "name": "entropy_collapse", "text": "entropy fell below 0.01"}\n')
    return build_report(run, pictures=False).page


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    runs = tmp_path / "runs"
    runs.mkdir()
    with serving(runs) as url:
        yield runs, url


@contextmanager
def serving(runs: Path) -> Iterator[str]:
    with Dashboard(runs) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def until(page: Any, expression: str, timeout: float = 20.0) -> None:
    """Wait until an expression is true. Playwright's own wait evaluates strings in the page, which the policy forbids."""
    deadline = time.monotonic() + timeout
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {expression}\n{page.inner_text('#rollouts .count')}")
        page.wait_for_timeout(40)


def test_held_out_accuracy_of_sources_with_slashes(tab: Tab, tmp_path: Path) -> None:
    """One chart with a line for each source by its whole name, and each with its interval."""
    run = make_run(tmp_path / "run", Plan(source="openai/gsm8k"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {k.replace("openai/gsm8k", "a/b/c"): v for k, v in row.items() if k.startswith("val-")}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tab.open(build_report(run, pictures=False).page.as_uri())
    assert page.evaluate('G.accuracySource("val-core/openai/gsm8k/acc/mean@4")') == "openai/gsm8k"
    assert page.evaluate('G.accuracySource("val-core/openai/gsm8k/reward/mean@4")') is None
    legend = page.inner_text("#chart-accuracy")
    for source in ("openai/gsm8k", "a/b/c"):
        assert all(label in legend for label in (source, f"{source} high", f"{source} low"))


def show_all_charts(page: Any) -> None:
    page.evaluate("for (const chart of G.chart.all) chart.show()")


COLOURS = """() => Object.fromEntries([...G.chart.all].map((chart) => {
  const canvas = chart.box.querySelector("canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let coloured = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 40 && Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 40) coloured++;
  }
  return [chart.spec.id, coloured];
}))"""


def test_charts_show_the_metrics(tab: Tab, report: Path) -> None:
    page = tab.open(report.as_uri())
    show_all_charts(page)
    painted = page.evaluate(COLOURS)
    expected = {
        "accuracy",
        "reward",
        "difficulty",
        "length",
        "fates",
        "tokens",
        "ratio",
        "ratio-hist",
        "clip",
        "clip-mb",
    }
    assert expected | {"entropy", "grad", "kl", "timing", "speed", "any"} == set(painted)
    assert all(count > 150 for count in painted.values()), painted
    rows = [json.loads(line) for line in (report.parent / "metrics.jsonl").read_text().splitlines()]
    shown = page.evaluate(
        "[...G.chart.all].flatMap((c) => c.spec.series.filter((s) => s.metric).map((s) => [s.metric, c.spec.x, s.values]))"
    )
    assert len(shown) > 20
    for metric, steps, values in shown:
        by_step = {row["step"]: row.get(metric) for row in rows}
        assert [by_step[s] for s in steps] == values, metric
        assert sum(v is not None for v in by_step.values()) == sum(v is not None for v in values), metric


def test_the_rule_is_beside_the_model_and_a_judge_gives_its_reason(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Plan(steps=3))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        parts = {"arithmetic": 0.1 * row["step"], "judge": 0.2, "model": 20.0 + row["step"]}
        row |= {f"reward/reward/{name}/mean": value for name, value in parts.items()}
        row |= {"judge/disagreement": 0.25, "reward_model/disagreement": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {"judge": {"verdict": "wrong", "reason": "The sum is <b>off</b> by 1."}}
    facts = {"num_tokens": 2, "finish_reason": "stop", "extra": {"reward/arithmetic": 0.0, "reward/model": 21.5}}
    judged = {"text": "8", "score": 0.0, "acc": 0.0, "failure": None, "notes": told, **facts}
    right = {"text": "7", "score": 1.0, "acc": 1.0, "failure": None, **facts}
    failed = {**facts, "text": "9", "score": None, "acc": None, "extra": {}, "failure": "judge: some-model: HTTP 500"}
    group = {"uid": "judged", "submission": 99, "version": 2, "fate": "kept", "data_source": "arithmetic"}
    group |= {"ground_truth": "7", "messages": [{"role": "user", "content": "3 + 4 ="}]}
    write_step(run / "groups", 3, [{**group, "responses": [right, judged, failed]}])
    page = tab.open(build_report(run, pictures=False).page.as_uri())
    show_all_charts(page)
    painted = page.evaluate(COLOURS)
    assert painted["parts"] > 150 and painted["disagreement"] > 150
    assert page.inner_text("#chart-parts .u-legend").endswith("arithmetic0.3judge0.2model (right)23")
    scales = page.evaluate("[...G.chart.all].find((c) => c.spec.id === 'parts').plot.scales")
    assert scales["y"]["max"] < 1 < 20 < scales["right"]["min"] + 1
    page.fill("#rollouts input[type=search]", "judged")
    until(page, "document.querySelector('#rollouts .count').textContent.startsWith('1 of')")
    assert "1/2 right" in page.inner_text("#row-0")
    page.click("#row-0")
    page.wait_for_selector(".opinion")
    assert page.inner_text(".opinion") == "judge wrong · The sum is <b>off</b> by 1."
    assert "reward/model 21.5" in page.inner_text("article.response >> nth=1")
    assert "judge: some-model: HTTP 500" in page.inner_text("article.response >> nth=2")


def test_the_page_says_the_verdict_alarms_config_and_environment(tab: Tab, report: Path) -> None:
    page = tab.open(report.as_uri())
    assert page.inner_text(".headline").replace("\u00a0", " ") == "Held-out accuracy rose from 32.5 % to 80.0 %"
    assert "entropy fell below 0.01" in page.inner_text(".alarms")
    assert "flag --learning-rate" in page.inner_text("#config")
    assert "adv_estimator" not in page.inner_text("#config")
    page.uncheck("#config input[type=checkbox]")
    page.wait_for_selector("#config th:has-text('algorithm.adv_estimator')")
    assert "2.13.0" in page.inner_text("#environment")


def test_search_and_filter(tab: Tab, report: Path) -> None:
    page = tab.open(report.as_uri())
    total = page.evaluate("[...document.querySelectorAll('#rollouts .count')].map((e) => e.textContent)[0]")
    assert total.startswith("280 of 280 groups")  # 12 steps of 10 and 4 evaluations of 40
    fates = page.eval_on_selector_all("#rollouts select >> nth=0", "s => [...s[0].options].map(o => o.value)")
    assert set(fates) == {"", "kept", "all_right", "all_wrong", "held_out"}
    page.select_option("#rollouts select >> nth=0", "held_out")
    until(page, "document.querySelector('#rollouts .count').textContent.startsWith('160 of')")
    page.fill("#rollouts input[type=search]", "arithmetic/val/7")
    until(page, "document.querySelector('#rollouts .count').textContent.startsWith('4 of')")
    assert "fate=held_out" in page.url and "q=arithmetic" in page.url
    page.select_option("#rollouts select >> nth=0", "")
    page.fill("#rollouts input[type=search]", "gives 1")
    until(page, "document.querySelector('#rollouts .count').textContent.startsWith('0 of')")
    page.check("#rollouts .check input")
    until(page, "/^[1-9]\\d* of 280 groups$/.test(document.querySelector('#rollouts .count').textContent)")
    page.click("#rollouts .row >> nth=0")
    page.wait_for_selector("#rollouts .response")
    assert "gives 1" in page.inner_text("#rollouts .responses")


def test_groups_of_a_group_filter_have_a_name_a_colour_and_an_explanation(serve: tuple[Path, str], tab: Tab) -> None:
    runs, url = serve
    run = make_run(runs / "filtered", Plan(steps=3, questions=2, group_filter=True))
    for address in (build_report(run, pictures=False).page.as_uri(), url + "#run=filtered"):
        page = tab.open(address)
        series = "[...G.chart.all].find((c) => c.spec.id === 'fates').spec.series.map((s) => [s.label, G.css(s.color)])"
        assert dict(page.evaluate(series))["filtered"] == "#8d6e63"
        page.select_option("#rollouts select >> nth=0", label="filtered")
        page.click("#rollouts .row >> nth=0")
        page.wait_for_selector("#rollouts .response")
        assert "dropped by the group filter" in page.inner_text("#rollouts .detail-head")


def test_a_link_opens_its_group_with_coloured_tokens(tab: Tab, report: Path) -> None:
    lines = (json.loads(line) for line in _group_lines(report.parent, 5))
    kept = next(record for record in lines if record["fate"] == "kept")
    page = tab.open(f"{report.as_uri()}#step=5&group={kept['uid']}")
    page.wait_for_selector("#rollouts .response")
    assert kept["messages"][0]["content"] in page.inner_text("#rollouts .message")
    assert page.locator("#rollouts .response").count() == 8
    first = kept["responses"][0]
    facts = page.inner_text("#rollouts .response >> nth=0")
    assert f"{first['ratio']:.5f}" in facts
    assert (
        page.eval_on_selector_all("#rollouts .response:first-child .token", "t => t.map(e => e.textContent)")
        == first["tokens"]
    )
    tints = page.eval_on_selector_all(
        "#rollouts .response:first-child .token", "t => t.map(e => e.style.backgroundColor)"
    )
    ratios = [new - old for new, old in zip(first["new_log_probs"], first["old_log_probs"])]
    strongest = max(range(len(ratios)), key=lambda i: abs(ratios[i]))
    up, down = (page.evaluate(f"G.css('{name}')") for name in ("--token-up", "--token-down"))
    wanted = up if ratios[strongest] > 0 else down
    assert tints[strongest].startswith("rgba({}, {}, {}".format(*(int(wanted[i : i + 2], 16) for i in (1, 3, 5))))
    page.select_option("#rollouts .legend select", "ratio")
    other = page.eval_on_selector_all(
        "#rollouts .response:first-child .token", "t => t.map(e => e.style.backgroundColor)"
    )
    assert other != tints
    page.focus("#rollouts .response:first-child .tokens")
    page.keyboard.press("ArrowRight")
    assert "token 1" in page.inner_text("#rollouts .response:first-child .readout")


def _group_lines(run: Path, step: int) -> list[str]:
    import gzip

    return gzip.decompress((run / "groups" / f"step-{step:06d}.jsonl.gz").read_bytes()).decode().splitlines()


def test_model_text_is_text(serve: tuple[Path, str], tab: Tab) -> None:
    runs, url = serve
    run = make_run(runs / "evil", Plan(steps=1, groups=1, n=2, questions=1))
    evil = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'></script>"
    trained = {
        "score": 1.0,
        "advantage": 1.0,
        "ratio": 1.0,
        "tokens": [evil, "b"],
        "log_probs": [-1, -1],
        "old_log_probs": [-1, -1],
    }
    record = {"uid": evil, "fate": evil, "data_source": evil, "ground_truth": evil, "version": evil}
    record |= {
        "messages": [{"role": evil, "content": evil}],
        "responses": [{"text": evil, **trained}, {"text": evil, "failure": evil}],
    }
    write_step(run / "groups", 1, [record])
    (run / "alarms.jsonl").write_text(json.dumps({"step": 1, "name": evil, "text": evil}) + "\n")
    for address in (build_report(run, pictures=False).page.as_uri(), url + "#run=evil"):
        page = tab.open(address)
        page.click("#rollouts .row:has-text('hacked') >> nth=0")
        page.wait_for_selector("#rollouts .response")
        assert page.inner_text("#rollouts .message .text") == evil
        assert evil in page.inner_text("#rollouts .response >> nth=0")
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.querySelectorAll('img').length") == 0


def test_turns_can_be_folded_and_what_the_environment_says_is_grey(serve: tuple[Path, str], tab: Tab) -> None:
    runs, url = serve
    run = make_run(runs / "turns", Plan(steps=1, groups=1, n=2, questions=1))
    called = {"start": 0, "end": 2, "text": "<tool>6*7</tool>", "observation": "<b>42</b>", "calls": 1, "errors": 1}
    turns = [{**called, "reward": -0.25}, {"start": 4, "end": 5, "text": "42", "observation": "", "reward": 1}]
    trained = {"tokens": ["<tool>", "6*7</tool>", "<b>42", "</b>", "42"], "log_probs": [-1, -2, 0, 0, -3]}
    trained |= {"old_log_probs": [-1, -2, 0, 0, -3], "advantage": 1.0, "ratio": 1.0, "num_tokens": 3, "score": 0.75}
    record = {"uid": "turned", "fate": "kept", "data_source": "calculator", "ground_truth": "42", "version": 0}
    record |= {
        "messages": [{"role": "user", "content": "6*7="}],
        "responses": [{"text": "42", "turns": turns, **trained}, {"text": "42", "turns": turns, "num_tokens": 3}],
    }
    write_step(run / "groups", 1, [record])
    for address in (build_report(run, pictures=False).page.as_uri(), url + "#run=turns"):
        page = tab.open(address)
        page.click("#rollouts .row:has-text('6*7=') >> nth=0")
        page.wait_for_selector("#rollouts .response")
        first, plain = "#rollouts .response:nth-child(1)", "#rollouts .response:nth-child(2)"
        heads = page.eval_on_selector_all(f"{first} .turn > summary", "all => all.map(e => e.textContent)")
        assert heads == ["turn 1 · reward −0.25 · 1 call · 1 error", "turn 2 · reward 1"]
        drawn = page.eval_on_selector_all(f"{first} .turn", "all => all.map(e => e.querySelectorAll('.token').length)")
        assert drawn == [2, 1], "tokens of the environment are not among those of the model"
        assert page.inner_text(f"{plain} .turn >> nth=0 >> .text >> nth=0") == "<tool>6*7</tool>"
        assert page.inner_text(f"{first} .observation .text") == "<b>42</b>"
        muted = page.evaluate("G.css('--muted')")
        shade = page.eval_on_selector(f"{first} .observation .text", "e => getComputedStyle(e).color")
        assert shade == "rgb({}, {}, {})".format(*(int(muted[i : i + 2], 16) for i in (1, 3, 5)))
        page.focus(f"{first} .turn >> nth=1 >> .tokens")
        page.keyboard.press("ArrowRight")
        assert 'token 5 "42"' in page.inner_text(f"{first} .turn >> nth=1 >> .readout")
        page.click(f"{first} .observation summary")
        assert not page.is_visible(f"{first} .observation .text") and page.is_visible(f"{first} .tokens >> nth=0")
        page.click(f"{first} .turn >> nth=0 >> summary >> nth=0")
        assert not page.is_visible(f"{first} .tokens >> nth=0") and page.is_visible(f"{first} .tokens >> nth=1")


def test_a_live_run_moves_and_half_written_files_do_no_harm(serve: tuple[Path, str], tab: Tab) -> None:
    runs, url = serve
    maker = Maker(runs / "live", Plan(steps=20, groups=3, n=4, questions=5))
    maker.append(0, maker.evaluate(0))
    maker.step(1)
    (maker.path / ".lock").write_text(str(os.getpid()))
    page = tab.open(url, indexed=False)
    page.wait_for_selector("td .status-running")
    page.click("a:has-text('live')")
    page.wait_for_selector(".headline")
    show_all_charts(page)
    for step in (2, 3, 4):
        maker.step(step)
        until(page, f"[...G.chart.all].find((c) => c.spec.id === 'reward').spec.x.at(-1) === {step}")
        until(
            page,
            f"document.querySelector('#rollouts .count').textContent.startsWith('{3 * step + 5 + 5 * (step == 4)} of')",
        )
    assert "step 4 of 20" in page.inner_text(".verdict")
    with open(maker.path / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "critic/sc')
        f.flush()
        whole = (maker.path / "groups" / "step-000004.jsonl.gz").read_bytes()
        (maker.path / "groups" / "step-000005.jsonl.gz").write_bytes(whole[: len(whole) // 2])
        page.wait_for_timeout(1800)
        assert page.evaluate("[...G.chart.all].find((c) => c.spec.id === 'reward').spec.x.at(-1)") == 4
        f.write('ore_all/mean": 0.75}\n')
    until(page, "[...G.chart.all].find((c) => c.spec.id === 'reward').spec.x.at(-1) === 5")
    maker.finish(0.2, 0.4)
    (maker.path / "result.json").write_text(json.dumps({"steps": 5, "start_acc": 0.2, "final_acc": 0.4}))
    page.wait_for_selector(".verdict .status-finished")


def test_runs_side_by_side(serve: tuple[Path, str], tab: Tab) -> None:
    runs, url = serve
    make_run(runs / "one", Plan(steps=4, groups=2, n=2))
    make_run(runs / "two", Plan(steps=4, groups=2, n=2, gain=0.68, lr=3e-4, seed=3))
    page = tab.open(url, indexed=False)
    page.check("input[aria-label='Choose one']")
    page.check("input[aria-label='Choose two']")
    page.click("button:has-text('Compare 2 runs')")
    page.wait_for_selector("#config-differences")
    assert "actor_rollout_ref.actor.optim.lr" in page.inner_text("#config-differences")
    show_all_charts(page)
    assert all(count > 150 for count in page.evaluate(COLOURS).values())
    page.click("button:has-text('over tokens')")
    last = page.evaluate("[...G.chart.all].find((c) => c.spec.id === 'c-reward').spec.x.at(-1)")
    assert last == 4 * 2 * 2 * 12
    page.reload()
    page.wait_for_selector("button[aria-pressed=true]:has-text('over tokens')")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_fits_the_screen_in_both_themes(browser: Any, report: Path, width: int, theme: str) -> None:
    tab = Tab(browser, width, theme)
    page = tab.open(report.as_uri() + "#step=5")
    page.wait_for_selector("#rollouts .response")
    show_all_charts(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(15, 20, 27)"}[theme]
    page.click(f"button:has-text('{'Light' if theme == 'dark' else 'Dark'}')")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background
    assert tab.problems == []
    tab.context.close()


NAMELESS = """() => [...document.querySelectorAll("a, button, input, select, [role=img], [role=listbox], [tabindex='0']")].filter((e) => {
  const label = e.getAttribute("aria-label") || e.textContent.trim() || (e.labels && [...e.labels].map((l) => l.textContent.trim()).join(""));
  return !label && e.offsetParent !== null;
}).map((e) => e.outerHTML.slice(0, 120))"""


def test_keyboard_and_screen_reader(tab: Tab, report: Path) -> None:
    page = tab.open(report.as_uri())
    assert page.evaluate(NAMELESS) == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    show_all_charts(page)
    page.focus("#chart-reward .plot")
    page.keyboard.press("End")
    last = json.loads((report.parent / "metrics.jsonl").read_text().splitlines()[-1])
    spoken = page.inner_text("#chart-reward [aria-live]")
    assert spoken.startswith("step 12: all groups ") and f"all groups {last['critic/score_all/mean']:.4g}," in spoken
    page.focus("#rollouts .list")
    for expected in (0, 1, 2):
        page.keyboard.press("ArrowDown")
        until(
            page,
            f"document.querySelector('#rollouts .list').getAttribute('aria-activedescendant') === 'row-{expected}'",
        )
    page.wait_for_selector("#rollouts .response")
    page.focus("#chart-reward summary")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chart-reward .numbers td")
    cells = page.eval_on_selector_all("#chart-reward .numbers tbody tr:last-child td", "c => c.map(e => e.textContent)")
    assert float(cells[0]) == last["critic/score_all/mean"]


@pytest.fixture(scope="module")
def big_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 steps and 208,000 rollouts; forty steps are made up and repeated, which is quicker and just as large."""
    plan = Plan(steps=40, groups=13, n=8, questions=50, val_every=20, tokens=5)
    run = make_run(tmp_path_factory.mktemp("big") / "big", plan)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = [(run / "groups" / f"step-{step:06d}.jsonl.gz").read_bytes() for step in range(1, 41)]
    with open(run / "metrics.jsonl", "a") as f:
        for step in range(41, 2001):
            row = {k: v for k, v in rows[1 + step % 40].items() if not k.startswith("val-")}
            f.write(json.dumps({**row, "step": step}) + "\n")
            (run / "groups" / f"step-{step:06d}.jsonl.gz").write_bytes(files[step % 40])
    return run


def test_a_long_run_opens_and_scrolls(tab: Tab, big_run: Path, record_property: Any) -> None:
    with serving(big_run.parent) as url:
        page = tab.open(url + "#run=big", indexed=False)
        opened = page.evaluate("performance.now()")
        record_property("dashboard_ready_ms", opened)
        print(f"dashboard of 208,000 rollouts ready after {opened:.0f} ms")
        page.wait_for_selector("html[data-indexed=yes]", timeout=60_000)
        check_scrolling(page)
        page.goto("about:blank")


def test_a_long_report_opens_and_scrolls(tab: Tab, big_run: Path, record_property: Any) -> None:
    report = build_report(big_run, pictures=False, budget=4 << 20)
    assert "of 2,000 steps" in report.notes[0]
    page = tab.open(report.page.as_uri(), indexed=False)
    opened = page.evaluate("performance.now()")
    record_property("report_ready_ms", opened)
    print(f"report of 208,000 rollouts ({report.page.stat().st_size >> 20} MB) ready after {opened:.0f} ms")
    page.wait_for_selector("html[data-indexed=yes]")
    check_scrolling(page)
    page.fill("#rollouts input[aria-label='Search rollouts']", "")
    page.evaluate("location.hash = 'step=1001'")
    page.wait_for_selector("#rollouts .detail .empty:has-text('not in this file'), #rollouts .response")


def check_scrolling(page: Any) -> None:
    """However long the list, only what is seen exists; the far end is one scroll away."""
    assert page.inner_text("#rollouts .count").startswith("26,150 of")
    assert page.evaluate("document.querySelectorAll('*').length") < 3000
    for share in (0.25, 0.5, 1.0):
        page.eval_on_selector("#rollouts .list", f"(e) => {{ e.scrollTop = e.scrollHeight * {share}; }}")
        until(
            page,
            """() => {
          const list = document.querySelector("#rollouts .list").getBoundingClientRect();
          const rows = [...document.querySelectorAll("#rollouts .row")].filter((r) => r.getBoundingClientRect().bottom > list.top && r.getBoundingClientRect().top < list.bottom);
          return rows.length >= Math.floor(list.height / 58) - 1 && document.querySelectorAll("#rollouts .row").length < 60;
        }""",
        )
    page.wait_for_selector("#rollouts .row:has-text('step 0')")


def test_samples_smoothing_and_zoom(tab: Tab, finished_run: Path) -> None:
    page = tab.open(build_report(finished_run).page.resolve().as_uri())
    assert page.locator(".sample").count() == 3
    assert page.locator(".samples").bounding_box()["y"] < page.locator("#learning").bounding_box()["y"]
    values = "() => [...document.querySelector('#chart-reward .plot').chart.plot.data[1]]"
    page.locator("#chart-reward").scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('#chart-reward .plot').chart.plot")
    measured = page.evaluate(values)
    page.locator(".smoothing input").fill("0.9")
    assert page.evaluate(values)[0] == measured[0] and page.evaluate(values)[-1] != measured[-1]
    page.locator(".smoothing input").fill("0")
    assert page.evaluate(values) == measured
    page.locator("#chart-reward").scroll_into_view_if_needed()
    box = page.locator("#chart-reward .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_selector("#chart-reward .plot.zoomed")
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 40)
    page.wait_for_selector("#chart-reward .plot:not(.zoomed)")


def test_runs_are_found_by_name_and_tag_and_a_killed_run_shows_what_it_has(browser: Any, tmp_path: Path) -> None:
    for name, tags in (("alpha", ["baseline"]), ("beta", []), ("killed", ["baseline"])):
        path = make_run(tmp_path / name, Plan(steps=4, finished=name != "killed"))
        settings = json.loads((path / "config.json").read_text())
        settings.append({"key": "trainer.tags", "value": tags, "origin": "override"})
        (path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "killed" / ".lock").write_text("999999999")
    tab = Tab(browser, width=390)
    with Dashboard(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = tab.open(server.url, indexed=False)
        assert page.locator(".runs tbody tr").count() == 3
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        page.locator(".tag").first.click()
        page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 2")
        page.get_by_label("Search runs").fill("alpha base")
        page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 1")
        page = tab.open(f"{server.url}#run=killed")
        assert page.locator(".badge").first.inner_text() == "stopped"
        assert page.locator(".tile").count() >= 3 and page.locator(".sample").count() == 3
        server.shutdown()
    assert tab.problems == []
    tab.context.close()
