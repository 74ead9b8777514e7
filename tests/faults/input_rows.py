"""Rows I1 to I4: odd models, odd rows and folders that cannot be written: trained, or refused by name within seconds."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.kill_rows import Bench, with_bench
from tests.faults.processes import Child, drop_capabilities
from tests.faults.row import Check
from tests.support.small_run import final_state

SECONDS = 60.0  # for a refusal, on a loaded machine


def missing_shard(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """I1: weights in several files, whole and with one of them missing or cut short."""
    whole = _edited(bench, "shards", _split_weights)
    names = sorted(p.name for p in whole.glob("model-*.safetensors"))
    trained = bench.start("whole", f"actor_rollout_ref.model.path={whole}").wait() == 0
    problems = []
    for how, damage in (("missing", Path.unlink), ("cut", lambda path: path.write_bytes(path.read_bytes()[:100]))):
        folder = bench.folder / f"{how}-shard"
        shutil.copytree(whole, folder)
        lost = rng.choice(names)
        damage(folder / lost)
        if problem := _refusal(bench, f"{how}-run", [f"actor_rollout_ref.model.path={folder}"], lost):
            problems.append(problem)
    return trained and not problems, f"{len(names)} files trained: {trained}" + _listed(
        problems, "both refused by name"
    )


def tokenizer_without(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """I2: a tokenizer without pad, without eos, without both, and one without a chat template."""
    results = []
    for names in (("pad_token",), ("eos_token",), ("pad_token", "eos_token"), ("chat_template",)):
        title = "-and-".join(names)
        folder = _edited(bench, f"without-{title}", lambda path, names=names: _without(path, names))
        child = bench.start(f"run-{title}", f"actor_rollout_ref.model.path={folder}")
        code, output = child.wait(), child.output()
        said = code == 0 or (code == 2 and "Traceback" not in output and any(name in output for name in names))
        results.append((title, code, said))
    return all(said for *_, said in results), "; ".join(f"{title}: exit {code}" for title, code, _ in results)


def large_row(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """I3: one row of 1 MB among ordinary ones: its prompt, its ground truth, or one word without a space."""
    texts = {
        "prompt": ("two words " * 104_858, "2"),
        "truth": ("1+1=", "9" * (1 << 20)),
        "word": ("a" * (1 << 20), "2"),
    }
    problems = []
    for name, (question, truth) in texts.items():
        file = bench.folder / f"{name}.jsonl"
        rows = [(f"{i}+1=", str(i + 1)) for i in range(40)]
        rows.insert(20, (question, truth))
        file.write_text(
            "".join(json.dumps({"prompt": q, "ground_truth": t, "data_source": "x"}) + "\n" for q, t in rows)
        )
        data = [f"data.train_files={file}", "data.val_files=arithmetic", "data.num_train_samples=null"]
        start = time.monotonic()
        child = bench.start(f"run-{name}", *data, "trainer.total_training_steps=2")
        code = child.wait()
        if code != 0 or time.monotonic() - start > SECONDS:
            problems.append(f"{name}: exit {code} after {time.monotonic() - start:.0f} s: {child.output()[-200:]}")
        refused = [*data, "data.filter_overlong_prompts=false", "data.truncation=error"]
        if name != "truth" and (problem := _refusal(bench, f"refused-{name}", refused, f"{name}.jsonl:21")):
            problems.append(problem)
    return not problems, _listed(problems, "3 rows trained without them, 2 refused by file and line")


def read_only(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """I4: the model, the data or the folder of all runs cannot be written."""
    bench.reference()
    bench.model.chmod(0o555)
    child = _without_power(bench, "read-only-model")
    same = child.wait() == 0 and final_state(bench.folder / "read-only-model") == bench.reference()
    runs = bench.folder / "closed"
    runs.mkdir(mode=0o555)
    child = _without_power(bench, "read-only-runs", f"trainer.default_local_dir={runs}")
    code, output = child.wait(), child.output()
    refused = code == 6 and "Permission denied" in output and str(runs) in output and "Traceback" not in output
    bench.model.chmod(0o755)
    return same and refused, f"read-only model: same bits {same}; read-only runs: exit {code}, named {refused}"


def _without_power(bench: Bench, name: str, *overrides: str) -> Child:
    return bench.start(name, *overrides, prepare=lambda module: drop_capabilities())


def _edited(bench: Bench, name: str, edit: Callable[[Path], None]) -> Path:
    """A copy of the model, changed in a process of its own."""
    folder = bench.folder / name
    shutil.copytree(bench.model, folder)
    child = Child(lambda: edit(folder) or 0, folder.with_suffix(".log"))
    if child.wait() != 0:
        raise RuntimeError(child.output())
    return folder


def _split_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")


def _without(folder: Path, names: tuple[str, ...]) -> None:
    """Remove entries from the tokenizer's settings, and the ids that the model's config has for them."""
    for file in ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"):
        path = folder / file
        if path.exists():
            value = json.loads(path.read_text())
            for name in names:
                value.pop(name, None)
                value.pop(f"{name}_id", None)
            path.write_text(json.dumps(value))
    if "chat_template" in names:
        (folder / "chat_template.jinja").unlink(missing_ok=True)


def _refusal(bench: Bench, name: str, overrides: list[str], expected: str) -> str | None:
    """Why a run was not refused as it must be: exit 2 or 6, with the expected words, in time, without a traceback."""
    start = time.monotonic()
    child = bench.start(name, *overrides)
    code, output, seconds = child.wait(), child.output(), time.monotonic() - start
    if code in (2, 6) and expected in output and "Traceback" not in output and seconds < SECONDS:
        return None
    return f"{name}: exit {code} after {seconds:.0f} s: {output[-300:]}"


def _listed(problems: list[str], otherwise: str) -> str:
    return otherwise if not problems else "not: " + " | ".join(problems)


ROWS: dict[str, Check] = {
    "I1": with_bench(missing_shard, "I1", "a file of the model's weights is missing or cut short"),
    "I2": with_bench(tokenizer_without, "I2", "tokenizers without pad, eos or a chat template"),
    "I3": with_bench(large_row, "I3", "a row of 1 MB"),
    "I4": with_bench(read_only, "I4", "read-only folders of the model and of all runs"),
}
