"""Rows D1 and D3: broken data is named by file and line, and hostile artefacts are refused without running."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.row import Check, Row

_GOOD = {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "math", "reward_model": {"ground_truth": "2"}}


def _with(**changes: Any) -> bytes:
    return json.dumps({**_GOOD, **changes}).encode()


def _without(*names: str) -> bytes:
    return json.dumps({k: v for k, v in _GOOD.items() if k not in names}).encode()


# Name → (the bytes of line 2, what the message must name beside file:2).
BROKEN: dict[str, tuple[bytes, str]] = {
    "not_json": (b'{"prompt": ', "JSON"),
    "not_an_object": (b"[1, 2]", "object"),
    "not_utf8": (b'{"prompt": "\xff\xfe"}', "UTF-8"),
    "no_prompt": (_without("prompt"), "'prompt'"),
    "empty_prompt": (_with(prompt="  "), "'prompt'"),
    "number_prompt": (_with(prompt=7), "'prompt'"),
    "message_without_role": (_with(prompt=[{"content": "x"}]), "'prompt[0].role'"),
    "message_of_numbers": (_with(prompt=[{"role": "user", "content": 5}]), "'prompt[0].content'"),
    "nothing_to_answer": (_with(prompt=[{"role": "assistant", "content": "x"}]), "'prompt[-1].role'"),
    "no_ground_truth": (_without("reward_model"), "'reward_model.ground_truth'"),
    "source_not_text": (_with(data_source=["math"]), "'data_source'"),
    "extra_not_object": (_with(extra_info="easy"), "'extra_info'"),
    "other_columns_than_before": (b'{"question": "How many?", "answer": "a few"}', "'prompt'"),
    "infinite_truth": (b'{"prompt": "x", "ground_truth": Infinity}', "Infinity"),
}


def d1(seed: int) -> Row:
    """Every broken file ends `gspo data show` with exit code 2 and a message of its file, line and field."""
    problems: list[str] = []
    names = sorted(BROKEN)
    random.Random(seed).shuffle(names)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            line, field = BROKEN[name]
            file = Path(folder) / f"{name}.jsonl"
            file.write_bytes(json.dumps(_GOOD).encode() + b"\n" + line + b"\n")
            done = subprocess.run(
                [sys.executable, "-m", "gspo", "data", "show", str(file)], capture_output=True, text=True, timeout=60
            )
            if done.returncode != 2 or f"{file}:2" not in done.stderr or field not in done.stderr:
                problems.append(f"{name}: exit {done.returncode}, {done.stderr.strip()[-200:]!r}")
    detail = "; ".join(problems) or f"{len(names)} of {len(names)} named by file:line and field, exit 2"
    return Row("D1", f"{len(names)} broken data files", not problems, detail)


class _Canary:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "ran"))


Attempt = Callable[[Path, Path], None]
"""Builds an artefact in a folder, aimed at a canary file, and has us load it."""


def pickle_weights(folder: Path, canary: Path) -> None:
    _copy_model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Canary(canary)))
    _load_model(folder)


def pickle_named_safetensors(folder: Path, canary: Path) -> None:
    _copy_model(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps(_Canary(canary)))
    _load_model(folder)


def giant_header(folder: Path, canary: Path) -> None:
    _copy_model(folder)
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}" * 64)
    _load_model(folder)


def shard_outside(folder: Path, canary: Path) -> None:
    _copy_model(folder)
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _load_model(folder)


def remote_model(folder: Path, canary: Path) -> None:
    _copy_model(folder)
    _plant_code(folder, canary)
    _edit(
        folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    )
    _load_model(folder)


def remote_tokenizer(folder: Path, canary: Path) -> None:
    _copy_model(folder)
    _plant_code(folder, canary)
    _edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.C"})
    _edit(folder / "tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    from gspo.models.load import load_tokenizer

    load_tokenizer(str(folder))


def template_escape(folder: Path, canary: Path) -> None:
    _copy_model(folder)
    escape = "{{ cycler.__init__.__globals__.os.system('touch " + str(canary) + "') }}"
    (folder / "chat_template.jinja").write_text(escape)
    from gspo.data.chat_template import encode_prompt
    from gspo.data.datasets import load_rows
    from gspo.models.load import load_tokenizer

    encode_prompt(load_rows("arithmetic", limit=1)[0], load_tokenizer(str(folder)))


def yaml_object(folder: Path, canary: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(f"trainer:\n  seed: !!python/object/apply:os.system ['touch {canary}']\n")
    from gspo.config import load

    load(file)


def pickle_data(folder: Path, canary: Path) -> None:
    file = folder / "rows.pkl"
    file.write_bytes(pickle.dumps(_Canary(canary)))
    from gspo.data.datasets import load_rows

    load_rows(str(file))


def manifest_outside(folder: Path, canary: Path) -> None:
    _copy_model(folder)
    (folder.parent / "secret").write_text("x")
    entry = {"size": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
    (folder / "MANIFEST.json").write_text(json.dumps({"format": 1, "files": {"../secret": entry}}))
    from gspo.checkpoint.folder import verify

    reason = verify(folder)
    if reason and "outside" in reason:
        raise ValueError(reason)


ATTEMPTS: tuple[Attempt, ...] = (
    pickle_weights,
    pickle_named_safetensors,
    giant_header,
    shard_outside,
    remote_model,
    remote_tokenizer,
    template_escape,
    yaml_object,
    pickle_data,
    manifest_outside,
)


def d3(seed: int) -> Row:
    """Every hostile artefact is refused with an error, and none of the code in them runs."""
    attempts = list(ATTEMPTS)
    random.Random(seed).shuffle(attempts)
    problems = [problem for attempt in attempts if (problem := try_hostile(attempt))]
    detail = "; ".join(problems) or f"{len(attempts)} of {len(attempts)} refused, no canary ran"
    return Row("D3", f"{len(attempts)} hostile artefacts", not problems, detail)


def try_hostile(attempt: Attempt) -> str | None:
    """None when the artefact was refused and did nothing, else what happened."""
    with _folder() as (folder, canary):
        try:
            attempt(folder, canary)
            outcome = "was loaded"
        except Exception as error:  # any refusal will do here; what matters is that nothing was loaded or run
            outcome = None if str(error) else f"was refused without a word ({type(error).__name__})"
        if canary.exists():
            outcome = "ran its code"
    return f"{attempt.__name__} {outcome}" if outcome else None


@contextmanager
def _folder() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "model"
        folder.mkdir()
        yield folder, Path(top) / "canary"


def _copy_model(folder: Path) -> None:
    from gspo.models import embedded_path

    for file in embedded_path().iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())


def _load_model(folder: Path) -> None:
    from gspo.models.load import load_model

    load_model(str(folder))


def _plant_code(folder: Path, canary: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nC = M = T = None\n")


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


ROWS: dict[str, Check] = {"D1": d1, "D3": d3}
