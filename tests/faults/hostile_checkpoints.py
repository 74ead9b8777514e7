"""Checkpoints that lie: each is a whole checkpoint in which something was replaced, with a manifest that fits."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

STATE, OPTIMIZER, MODEL = "training/state.json", "training/optimizer.safetensors", "model.safetensors"
DEEP = 20_000
Change = Callable[[Path], Any]


def seal(path: Path) -> None:
    """Write a manifest of the files as they are now."""
    files = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != "MANIFEST.json"):
        data = file.read_bytes()
        name = file.relative_to(path).as_posix()
        files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "MANIFEST.json").write_text(json.dumps({"format": 1, "files": files}))


def _state(**changes: Any) -> Change:
    return lambda path: _edit(path / STATE, changes)


def _edit(file: Path, changes: dict[str, Any]) -> None:
    content = json.loads(file.read_text())
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        inner = content
        for key in parents:
            inner = inner[key]
        if value is DROP:
            inner.pop(last)
        else:
            inner[last] = value
    file.write_text(json.dumps(content))


DROP = object()


def _config(**changes: Any) -> Change:
    return lambda path: _edit(path / "config.json", changes)


def _tensors(file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def apply(path: Path) -> None:
        tensors = load_file(path / file)
        save_file(change(tensors), path / file, metadata={"format": "pt"})

    return apply


def _first(tensors: dict[str, torch.Tensor], prefix: str = "") -> str:
    return next(name for name in sorted(tensors) if name.startswith(prefix))


def _with(tensors: dict[str, torch.Tensor], prefix: str, change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    name = _first(tensors, prefix)
    return {**tensors, name: change(tensors[name])}


def _header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Replace the header of the optimiser's file; its length word stays right."""

    def apply(path: Path) -> None:
        data = (path / OPTIMIZER).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (path / OPTIMIZER).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return apply


def _text(file: str, content: str) -> Change:
    return lambda path: (path / file).write_text(content)


def _shifted(header: dict[str, Any]) -> None:
    entry = header[_first(header, "exp_avg/")]
    entry["data_offsets"] = [n + 4 for n in entry["data_offsets"]]


def _huge_shape(header: dict[str, Any]) -> None:
    header[_first(header, "exp_avg/")]["shape"] = [1 << 40, 1 << 20]


def _nan(t: torch.Tensor) -> torch.Tensor:
    return torch.full_like(t, torch.nan)


# Changes that the manifest covers. Name → (change, what the refusal must say).
SEALED: dict[str, tuple[Change, str]] = {
    "step_negative": (_state(step=-5), "step -5"),
    "step_huge": (_state(step=10**15), "step 1000000000000000"),
    "step_text": (_state(step="2"), "step '2'"),
    "step_bool": (_state(step=True), "step True"),
    "step_missing": (_state(step=DROP), "step None"),
    "step_of_another": (_state(step=1), "the folder is named"),
    "format_other": (_state(format=99), "format 99"),
    "state_list": (_text(STATE, "[]"), "is not a JSON object"),
    "state_empty": (_text(STATE, ""), "is not JSON"),
    "state_deep": (_text(STATE, '{"a": ' + "[" * DEEP), "nested deeper"),
    "state_nested": (_text(STATE, '{"a": ' + "[" * 500 + "]" * 500 + "}"), "nested deeper"),
    "config_missing": (_state(config=DROP), "'config'"),
    "fingerprint_list": (_state(fingerprint=[]), "'fingerprint'"),
    "counters_missing": (_state(counters=DROP), "'counters'"),
    "counters_text": (_state(counters__generated_tokens="many"), "generated_tokens"),
    "counters_negative": (_state(counters__generated_tokens=-1), "generated_tokens"),
    "sampler_missing": (_state(sampler=DROP), "'sampler'"),
    "sampler_empty": (_state(sampler={}), "state.json cannot be restored"),
    "sampler_prompts_text": (_state(sampler__prompts="x"), "state.json cannot be restored"),
    "sampler_prompts_number": (_state(sampler__prompts=7), "state.json cannot be restored"),
    "objective_list": (_state(objective=[]), "'objective'"),
    "model_shape_other": (_state(fingerprint__model=1, **{"fingerprint__model shape": "0"}), "model shape"),
    "no_moments": (_tensors(OPTIMIZER, lambda t: {}), "missing: "),
    "one_moment_missing": (
        _tensors(OPTIMIZER, lambda t: {k: v for k, v in t.items() if k != _first(t, "exp_avg/")}),
        "missing: exp_avg/",
    ),
    "second_moments_missing": (
        _tensors(OPTIMIZER, lambda t: {k: v for k, v in t.items() if not k.startswith("exp_avg_sq/")}),
        "missing: exp_avg_sq/",
    ),
    "steps_missing": (
        _tensors(OPTIMIZER, lambda t: {k: v for k, v in t.items() if not k.startswith("step/")}),
        "missing: step/",
    ),
    "moments_unexpected": (
        _tensors(OPTIMIZER, lambda t: {**t, "exp_avg/evil": torch.ones(3)}),
        "unexpected: exp_avg/evil",
    ),
    "moments_renamed": (_tensors(OPTIMIZER, lambda t: {f"x{k}": v for k, v in t.items()}), "missing: "),
    "moments_other_shape": (
        _tensors(OPTIMIZER, lambda t: _with(t, "exp_avg/", lambda v: v.flatten()[:5].clone())),
        "has shape [5]",
    ),
    "moments_int8": (_tensors(OPTIMIZER, lambda t: _with(t, "exp_avg/", lambda v: v.to(torch.int8))), "has type I8"),
    "moments_nan": (_tensors(OPTIMIZER, lambda t: _with(t, "exp_avg/", _nan)), "not finite"),
    "moments_negative": (_tensors(OPTIMIZER, lambda t: _with(t, "exp_avg_sq/", lambda v: v - 1)), "negative"),
    "all_said_to_be_without": (
        lambda p: (
            _state(without_state={"optimizer": sorted({k.partition("/")[2] for k in load_file(p / OPTIMIZER)})})(p),
            _tensors(OPTIMIZER, lambda t: {})(p),
        ),
        "missing: ",
    ),
    "extra_set": (lambda p: save_file({"a": torch.ones(2)}, p / "training" / "evil.safetensors"), "training/evil"),
    "header_shifted": (_header(_shifted), "which is not where its shape ends"),
    "header_huge_shape": (_header(_huge_shape), "which is not where its shape ends"),
    "header_not_tensors": (_header(lambda h: h.update(evil=5)), "'evil' is not a tensor"),
    "optimizer_text": (_text(OPTIMIZER, "no tensors here"), "announces a header"),
    "weights_int8": (_tensors(MODEL, lambda t: {k: v.to(torch.int8) for k, v in t.items()}), "has type I8"),
    "weights_nan": (_tensors(MODEL, lambda t: _with(t, "", _nan)), "not finite"),
    "weights_missing": (
        _tensors(MODEL, lambda t: {k: v for k, v in t.items() if k != _first(t, "model.layers")}),
        "not in the weights",
    ),
    "weights_other_shape": (
        _tensors(MODEL, lambda t: _with(t, "model.norm", lambda v: v[:5].clone())),
        "another shape",
    ),
    "weights_gone": (lambda p: (p / MODEL).unlink(), "model.safetensors is not in the manifest"),
    "hidden_size_huge": (_config(hidden_size=1_000_000_000), "hidden_size=1000000000"),
    "layers_huge": (_config(num_hidden_layers=1_000_000_000), "num_hidden_layers=1000000000"),
    "vocab_negative": (_config(vocab_size=-1), "vocab_size=-1"),
    "heads_text": (_config(num_attention_heads="four"), "num_attention_heads='four'"),
    "model_type_unknown": (_config(model_type="evil"), "cannot be loaded"),
    "model_config_list": (_text("config.json", "[]"), "config.json"),
    "model_config_deep": (_text("config.json", "[" * DEEP), "nested deeper"),
}


def _unsealed_folder(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).mkdir()


def _manifest(**changes: Any) -> Change:
    def apply(path: Path) -> None:
        manifest = json.loads((path / "MANIFEST.json").read_text())
        (path / "MANIFEST.json").write_text(json.dumps({**manifest, **changes}))

    return apply


def _pipe(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)


# Changes of the manifest itself, or that no manifest covers.
UNSEALED: dict[str, tuple[Change, str]] = {
    "manifest_folder": (lambda p: _unsealed_folder(p, "MANIFEST.json"), "MANIFEST.json is a folder"),
    "manifest_deep": (_text("MANIFEST.json", '{"files": ' + "[" * DEEP), "MANIFEST.json is nested deeper"),
    "manifest_pipe": (lambda p: _pipe(p, "MANIFEST.json"), "MANIFEST.json is a named pipe"),
    "manifest_list": (_text("MANIFEST.json", "[]"), "MANIFEST.json cannot be read"),
    "manifest_no_sizes": (_manifest(files={"config.json": 5}), "MANIFEST.json cannot be read"),
    "manifest_null_name": (_manifest(files={"a\0b": {"size": 1, "sha256": ""}}), "outside the checkpoint"),
    "manifest_long_name": (_manifest(files={"a" * 5000: {"size": 1, "sha256": ""}}), "cannot be read"),
    "state_folder": (lambda p: _unsealed_folder(p, STATE), "training/state.json is missing"),
    "weights_pipe": (lambda p: _pipe(p, MODEL), "model.safetensors is missing"),
    "training_elsewhere": (
        lambda p: (
            shutil.copytree(p / "training", p.parent / "elsewhere"),
            shutil.rmtree(p / "training"),
            (p / "training").symlink_to("../elsewhere"),
        ),
        "is missing",
    ),
}
LYING = {**SEALED, **UNSEALED}


def make_lie(path: Path, name: str) -> None:
    """Change the checkpoint at `path`."""
    LYING[name][0](path)
    if name in SEALED:
        seal(path)
