"""The report's files: figures equal the metrics, hostile text stays text, nothing raises into the trainer."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from gspo.data.files import SUFFIXES
from gspo.report import write_report
from gspo.report.overview import overview
from gspo.report.page import asset
from gspo.report.pictures import FATES
from gspo.report.rollout_store import choose, collect, pack
from gspo.report.run_card import DATA_SUFFIXES, run_card
from gspo.report.verdict import DROPPED, judge
from gspo.report.write import build_report
from gspo.runs.group_index import FIELDS
from gspo.runs.run import read_run
from gspo.sampling.filters import Reason
from tests.report.synthetic import Maker, Plan, make_run, write_step


def block(page: str, name: str) -> Any:
    """A data block of the page, decoded."""
    match = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    assert match, name
    return gzip.decompress(base64.b64decode(match.group(1))).decode()


@pytest.fixture(scope="module")
def page(finished_run: Path) -> str:
    return build_report(finished_run, pictures=False).page.read_text()


def test_figures_equal_metrics_jsonl(finished_run: Path, page: str) -> None:
    columns = json.loads(block(page, "data-overview-0"))["columns"]
    rows = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert columns["step"] == [row["step"] for row in rows]
    names = {name for row in rows for name in row} - {"step"}
    assert names == set(columns) - {"step"}
    for name in names:
        assert columns[name] == [row.get(name) for row in rows], name


def test_a_data_source_with_a_slash_is_named_in_full(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", Plan(source="openai/gsm8k")))
    assert "Measured on held-out questions of openai/gsm8k only." in run_card(run)
    plain = read_run(make_run(tmp_path / "plain", Plan()))
    assert run.accuracy == plain.accuracy and run.interval("final") == plain.interval("final") is not None
    tiles = {tile["label"]: tile for tile in overview(run)["tiles"]}
    assert tiles["Held-out accuracy"]["value"] == "32.5 → 80.0 %"
    assert "95 % interval" in tiles["Held-out accuracy"]["detail"]


def test_every_group_is_listed_and_carried(finished_run: Path, page: str) -> None:
    index = json.loads(block(page, "data-index-0"))
    train = [entry for entry in index if entry["kind"] == "train"]
    assert [entry["step"] for entry in train] == list(range(1, 13))
    for entry in train:
        stored = gzip.decompress((finished_run / "groups" / f"step-{entry['step']:06d}.jsonl.gz").read_bytes())
        records = [json.loads(line) for line in stored.decode().splitlines()]
        carried = [json.loads(line) for line in block(page, f"data-train-{entry['step']}-0").splitlines()]
        for record, line, shown in zip(records, entry["groups"], carried, strict=True):
            facts = dict(zip(FIELDS, line))
            assert (facts["uid"], facts["fate"], facts["n"]) == (record["uid"], record["fate"], 8)
            assert facts["rate"] == pytest.approx(sum(r["acc"] for r in record["responses"]) / 8)
            assert [r["text"] for r in shown["responses"]] == [r["text"] for r in record["responses"]]
        ratios = [r["ratio"] - 1 for g in records for r in g["responses"] if "ratio" in r]
        assert entry["ratios"] == pytest.approx(ratios, abs=1e-8)


def test_token_numbers_survive_packing() -> None:
    trained = {
        "text": "ab",
        "tokens": ["a", "b"],
        "log_probs": [-0.1234567, -2.0],
        "old_log_probs": [-0.1234517, -2.5],
        "new_log_probs": [-0.1234527, -1.5],
        "score": 1.0,
    }
    holes = {"text": "c", "tokens": ["c"], "log_probs": [None], "old_log_probs": [-1.0]}
    lonely = {"text": "d", "tokens": ["d"], "log_probs": [-1.0], "failure": None, "extra": {}}
    packed = gzip.decompress(pack([{"uid": "u", "responses": [trained, holes, lonely, "noise"]}])).decode()
    first, second, third = json.loads(packed)["responses"]
    assert (first["mlp"], first["mlr"], first["mln"]) == ([-123, -2000], [5, -500000], [-1, 1000000])
    assert first["score"] == 1.0 and "log_probs" not in first and "new_log_probs" not in first
    assert "mlp" not in second and "log_probs" not in second
    assert third == {"text": "d", "tokens": ["d"], "mlp": [-1000]}


def test_scripts_are_pinned_by_hash_and_nothing_is_fetched(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy.group(1).startswith("default-src 'none'")
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy.group(1)
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.S)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", markup)


def test_model_text_cannot_leave_its_block(tmp_path: Path) -> None:
    run = make_run(tmp_path / "evil</script><script>alert(1)<!--", Plan(steps=1, groups=1, n=2, questions=1))
    evil = "</script><script>alert(1)</script><!-- \ud800"
    record = {
        "uid": evil,
        "fate": "kept",
        "messages": [{"role": "user", "content": evil}],
        "responses": [{"text": evil, "score": 1}],
    }
    text = json.dumps({**record, "data_source": evil, "ground_truth": evil})
    (run / "groups" / "step-000001.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (run / "alarms.jsonl").write_text(json.dumps({"step": 1, "name": evil, "text": evil}) + "\n")
    page = build_report(run, pictures=False).page.read_text()
    assert page.count("<script>") == 1
    assert "alert(1)</script>" not in page and "<!--" not in page.replace("<!doctype", "")
    assert "<script" not in (run / "RUN.md").read_text()


def test_a_long_run_is_sampled_evenly_within_the_budget(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", Plan(steps=40, groups=4, n=2, questions=4, val_every=20, finished=False))
    sizes = {int(p.name[5:11]): p.stat().st_size for p in (run / "groups").iterdir()}
    store = collect(read_run(run), budget=sum(sizes.values()) // 4)
    carried = sorted(step for kind, step in store.chunks if kind == "train")
    assert 3 <= len(carried) < 12 and carried[-1] == 40
    assert len({b - a for a, b in itertools.pairwise(carried)}) == 1
    assert sum(sizes[s] for s in carried) <= sum(sizes.values()) // 4
    assert f"{len(carried)} of 40 steps" in store.note
    assert len([e for e in store.index if e["kind"] == "train"]) == 40
    assert choose({}, 100) == set()
    assert choose({7: run / "groups" / "step-000007.jsonl.gz"}, 0) == {7}


@pytest.mark.parametrize(
    "damage", ["groups", "evals", "config.yaml", "config.json", "environment.json", "metrics.jsonl", "result.json"]
)
def test_reports_are_written_whatever_is_missing(tmp_path: Path, finished_run: Path, damage: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    target = run / damage
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    report = build_report(run, pictures=damage == "metrics.jsonl")
    assert block(report.page.read_text(), "data-overview-0")
    assert report.card.read_text().startswith("---\n")


def test_write_report_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = tmp_path / "nowhere"
    assert write_report(nowhere) is None
    assert "not a run folder" in caplog.text
    assert not nowhere.exists()


def test_pictures_are_drawn_or_their_absence_is_said(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = build_report(finished_run)
    assert {p.stem for p in report.pictures} == {
        "learning",
        "groups",
        "difficulty",
        "ratios",
        "clipping",
        "stability",
        "timing",
    }
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5000 for p in report.pictures)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "gspo.report.pictures")
    for name in [m for m in sys.modules if m.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    report = build_report(finished_run)
    assert report.pictures == [] and "gspo[report]" in report.notes[-1]


def test_the_verdict_says_what_happened(finished_run: Path) -> None:
    verdict = judge(read_run(finished_run))
    assert (verdict.headline, verdict.tone) == ("Held-out accuracy rose from 32.5 % to 80.0 %", "good")
    text = " ".join(verdict.sentences)
    assert "The embedded model was trained on arithmetic with GSPO: 12 steps in 19 s" in text
    assert "Over the same 40 questions the change is +47.5 points" in text
    row = read_run(finished_run)
    generated, wasted = row.total("train/generated_tokens"), row.total("train/wasted_tokens")
    assert generated and wasted
    assert f"generated {generated:,.0f} tokens" in text and f"{wasted:,.0f} ({100 * wasted / generated:.0f} %)" in text


def test_groups_of_a_group_filter_are_counted_and_listed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", Plan(group_filter=True))
    run, index = read_run(path), collect(read_run(path)).index
    listed = [line[FIELDS.index("fate")] for entry in index for line in entry["groups"] if entry["kind"] == "train"]
    counts = {fate: run.total(f"train/groups_{fate}") for fate in sorted(set(listed))}
    assert counts == {fate: listed.count(fate) for fate in ("all_right", "all_wrong", "filtered", "kept")}
    assert f"{listed.count('filtered')} filtered" in " ".join(judge(run).sentences)
    tiles = {tile["label"]: tile["detail"] for tile in overview(run)["tiles"]}
    assert tiles["Groups kept"] == f"{listed.count('kept')} of {len(listed)}"


def test_pictures_pages_and_verdict_know_every_fate() -> None:
    assert set(get_args(Reason)) <= {fate for fate, _, _ in FATES}
    dropped = {f"train/groups_{reason}" for reason in get_args(Reason) if reason != "kept"}
    assert dropped | {"train/groups_stale_dropped", "train/groups_surplus"} == set(DROPPED)
    script, styles = asset("core.js"), asset("style.css")
    for fate, label, color in FATES:
        entry = re.search(rf'\b{fate}: {{\s*label: "{label}",\s*color: "(--c-\w+)",\s*text: "[^"]+"', script)
        assert entry, fate
        values = re.findall(rf"{entry[1]}: (#\w+);", styles)
        assert len(values) == 2 and (fate == "surplus" or values[0] == color), fate


@pytest.mark.parametrize(
    ("gain", "tone", "start"),
    [
        (0.0, "flat", "No clear change"),
        (-0.3, "bad", "Held-out accuracy fell"),
        (0.2, "good", "Held-out accuracy rose"),  # by question, although the intervals of both ends overlap
    ],
)
def test_the_verdict_does_not_flatter(tmp_path: Path, gain: float, tone: str, start: str) -> None:
    run = make_run(tmp_path / "run", Plan(steps=2, groups=2, n=2, gain=gain, questions=60))
    verdict = judge(read_run(run))
    assert verdict.tone == tone and verdict.headline.startswith(start)


def test_a_run_without_evaluation_is_judged_by_its_reward(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "critic/score/mean": 0.25}\n{"step": 2, "critic/score/mean": 0.5}\n'
    )
    verdict = judge(read_run(tmp_path))
    assert verdict.headline == "Training reward rose from 0.250 to 0.500; no held-out evaluation yet"
    assert overview(read_run(tmp_path))["tiles"][0]["value"] == "0.500"


def test_the_card_holds_what_a_hub_wants(finished_run: Path) -> None:
    card = run_card(read_run(finished_run))
    assert card.startswith("---\nlibrary_name: transformers\n")
    for part in (
        "arithmetic",
        "GSPO",
        "| seed | 0 |",
        "gspo train config.yaml",
        "gspo train trainer.seed=0",
        "2.13.0",
        "+47.5 points",
    ):
        assert part in card, part
    assert "`actor_rollout_ref.actor.optim.lr`" in card and "flag --learning-rate" in card
    assert "`algorithm.adv_estimator`" not in card  # a default


def test_the_card_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Plan(steps=1, groups=1, n=2, questions=2))
    argv = [
        "/opt/me/bin/gspo",
        "train",
        "/home/me/my conf.yaml",
        "data.train_files=[/home/me/a.jsonl,/home/me/b.jsonl]",
    ]
    argv += ["--model", "/home/me/models/small", "custom_reward_function.path=~/me/reward.py", "x=https://h.org/a/b"]
    (run / "environment.json").write_text(json.dumps({"argv": argv}))
    records = [
        {
            "key": "data.train_files",
            "value": ["/home/me/a.jsonl"],
            "origin": "override data.train_files=/home/me/a.jsonl",
        },
        {"key": "actor_rollout_ref.model.path", "value": "/home/me/models/small", "origin": "default"},
    ]
    (run / "config.json").write_text(json.dumps(records))
    card = run_card(read_run(run))
    assert "/home" not in card and "/me/" not in card and "/opt" not in card
    for part in ("…/a.jsonl", "…/b.jsonl", "…/my conf.yaml", "…/small", "…/reward.py", "https://h.org/a/b"):
        assert part in card, part


def test_the_card_takes_no_file_or_folder_for_a_name_of_a_hub(tmp_path: Path, monkeypatch) -> None:
    run = make_run(tmp_path / "run", Plan(steps=1, groups=1, n=2, questions=2))
    (tmp_path / "models" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def front_matter(files: list[str], model: str) -> str:
        records = [{"key": "data.train_files", "value": files}, {"key": "actor_rollout_ref.model.path", "value": model}]
        (run / "config.json").write_text(json.dumps([{**record, "origin": "default"} for record in records]))
        return run_card(read_run(run)).split("---")[1]

    assert DATA_SUFFIXES == SUFFIXES
    local = front_matter([f"data/train{suffix}" for suffix in SUFFIXES], "models/small")
    assert "datasets:" not in local and "base_model:" not in local
    named = front_matter(["openai/gsm8k", "data/train.csv"], "org/small")
    assert "base_model: org/small\ndatasets:\n- openai/gsm8k\n" in named and "train.csv" not in named


@pytest.mark.parametrize("bad", ["x", ["x"], [["x"]], {"a": 1}, 5, True, [None], None, [1e308, "y"]])
def test_a_recorded_value_of_another_kind_is_left_out(tmp_path: Path, bad: Any) -> None:
    run = make_run(tmp_path / "run", Plan(steps=1, groups=1, n=2, questions=2, val_every=1))
    for file in (run / "groups" / "step-000001.jsonl.gz", run / "evals" / "step-000001.jsonl.gz"):
        (record, *_) = (json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines())
        spoiled = [{**record, "responses": [{**record["responses"][0], key: bad}]} for key in record["responses"][0]]
        spoiled += [{**record, key: bad} for key in record]
        write_step(file.parent, 1, [*spoiled, record])
    assert build_report(run, pictures=False).page.exists()
    index = json.loads(block(build_report(run, pictures=False).page.read_text(), "data-index-0"))
    assert index[-1]["groups"]


def test_a_growing_run_can_be_reported_at_any_moment(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "live", Plan(steps=3, groups=2, n=2, questions=3))
    for step in (1, 2):
        maker.step(step)
        write_step(maker.path / "groups", step + 1, [])
        page = build_report(maker.path, pictures=False).page.read_text()
        assert json.loads(block(page, "data-overview-0"))["last_step"] == step


def test_no_torch_for_looking(finished_run: Path) -> None:
    code = (
        "import sys, gspo.report.server, gspo.report.comparison, gspo.report.pictures\n"
        f"from gspo.report import write_report; write_report({str(finished_run)!r})\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("losses", "tone", "start"), [((2.0, 1.0), "good", "fell"), ((1.0, 2.0), "bad", "rose")])
def test_a_supervised_run_is_judged_by_its_held_out_loss(tmp_path: Path, losses: Any, tone: str, start: str) -> None:
    rows = [{"step": 0, "val/loss": losses[0]}]
    rows += [{"step": i, "train/loss": 1.5, "actor/grad_norm": 1.0, "timing_s/step": 1.0} for i in (1, 2)]
    rows[-1] |= {"val/loss": losses[1], "val/perplexity": 2.7}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data.train_files": "gsm8k", "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}
    records = [{"key": key, "value": value, "origin": "default"} for key, value in settings.items()]
    (tmp_path / "config.json").write_text(json.dumps(records))
    run = read_run(tmp_path)
    verdict = judge(run)
    assert (verdict.tone, verdict.headline) == (tone, f"Held-out loss {start} from {losses[0]:.3f} to {losses[1]:.3f}")
    assert "the answers of gsm8k" in verdict.sentences[0] and "GSPO" not in " ".join(verdict.sentences)
    assert [tile["label"] for tile in overview(run)["tiles"]][:2] == ["Held-out loss", "Training loss, last step"]
    build_report(tmp_path)
    card = (tmp_path / "RUN.md").read_text()
    assert "supervised-fine-tuning" in card and "gspo sft config.yaml" in card and "advantage" not in card
    assert (tmp_path / "plots" / "learning.png").is_file()
