"""What a checkpoint must hold, beyond what its manifest says: its state, and tensors that fit the run that resumes it.

A checkpoint may come from anyone, and its manifest only says that nobody changed it since. `find_problem` looks at it
alone, before anything is built. `check_sets` compares its tensor sets with those of the run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo import untrusted
from gspo.runs.folder import step_of
from gspo.untrusted import Unreadable

FORMAT = 1
STATE = "training/state.json"
MAX_STEP = 10**9
MAX_STATE = 4096 * untrusted.MiB
MAX_HEADER = 100 * untrusted.MiB  # the limit of the safetensors format
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
MAPPINGS = ("config", "fingerprint", "counters")  # of the state of every run
ROLLOUTS, EXAMPLES = ("sampler", "objective"), ("examples",)  # of one that trains on rollouts, or on examples
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
OPTIMIZERS = ("optimizer", "critic/optimizer")
SHOWN = 3  # names in a message


class CheckpointError(RuntimeError):
    """There is no usable checkpoint, or one cannot be written."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The shape of a tensor, and its type as safetensors names it."""

    shape: tuple[int, ...]
    dtype: str


def find_problem(path: Path, files: Mapping[str, Any]) -> str | None:
    """Why a checkpoint cannot be a state of a run, whatever its manifest says; None when nothing is found."""
    try:
        state = read_state(path)
        _check_step(path, state)
        for name in (*MAPPINGS, *(EXAMPLES if EXAMPLES[0] in state else ROLLOUTS)):
            if not isinstance(state.get(name), dict):
                return f"{STATE} has no mapping {name!r}"
        for name, value in state["counters"].items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                return f"{STATE} has counters.{name}={value!r}, expected a number that is not negative"
        if not isinstance(untrusted.read_json(path / "config.json"), dict):
            return "config.json is not a JSON object"
        _check_weights(path, files)
        for name in files:
            if name.endswith(".safetensors"):
                read_header(path / name)
    except Unreadable as error:
        return f"{_below(error.path, path)} {error.reason}"
    except FileNotFoundError as error:
        return f"{_below(Path(str(error.filename)), path)} is missing"
    except OSError as error:
        return f"{_below(Path(str(error.filename)), path)} cannot be read ({error.strerror})"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The content of `state.json`."""
    file = path / STATE
    try:
        value = json.loads(untrusted.read_bytes(file, MAX_STATE))
    except RecursionError:
        raise Unreadable(file, f"is nested deeper than {untrusted.MAX_DEPTH} levels") from None
    except ValueError as error:
        raise error if isinstance(error, Unreadable) else Unreadable(file, f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise Unreadable(file, f"is not a JSON object but a {type(value).__name__}")
    if not untrusted.is_shallow(value):
        raise Unreadable(file, f"is nested deeper than {untrusted.MAX_DEPTH} levels")
    return value


def _check_step(path: Path, state: Mapping[str, Any]) -> None:
    file = path / STATE
    step = state.get("step")
    if state.get("format") != FORMAT:
        raise Unreadable(file, f"has format {state.get('format')!r}, this version reads {FORMAT}")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise Unreadable(file, f"has step {step!r}, expected a whole number from 0 to {MAX_STEP:,}")
    if step_of(path.name) not in (-1, step):
        raise Unreadable(file, f"has step {step}, but the folder is named {path.name}")


def _check_weights(path: Path, files: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose manifest does not list all files of the model's weights."""
    if WEIGHTS in files:
        return
    index = path / WEIGHTS_INDEX
    if WEIGHTS_INDEX not in files:
        raise Unreadable(path / WEIGHTS, "is not in the manifest")
    content = untrusted.read_json(index, untrusted.MAX_DOCUMENT * 4)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise Unreadable(index, "has no weight_map")
    for shard in {str(value) for value in shards.values()}:
        if shard not in files:
            raise Unreadable(index, f"names {shard!r}, which is not in the manifest")


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, from its header; Unreadable when they are not exactly its content."""
    with untrusted.open_plain(file) as f:
        size = os.fstat(f.fileno()).st_size
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise Unreadable(file, f"announces a header of {length} bytes in a file of {size}")
        text = f.read(length).decode("utf-8", "replace")
    header = untrusted.parse_json(text, file)
    if not isinstance(header, dict):
        raise Unreadable(file, "has no safetensors header")
    out, end = {}, 0
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    for name, entry in sorted(entries, key=lambda item: _offsets(file, *item)):
        begin, stop = _offsets(file, name, entry)
        stored = Stored(tuple(entry["shape"]), str(entry["dtype"]))
        width = _BYTES.get(stored.dtype, 1)  # other types have at least a byte per value
        if begin != end or stop - begin < width * math.prod(stored.shape) or stop < begin:
            raise Unreadable(file, f"has {name!r} at bytes {begin} to {stop}, which is not where its shape ends")
        out[name], end = stored, stop
    if end != size - 8 - length:
        raise Unreadable(file, f"has tensors that end at byte {end} of {size - 8 - length}; it is cut off or altered")
    return out


def _offsets(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Begin and end of a tensor; Unreadable when its entry is not one of a tensor."""
    try:
        begin, stop = entry["data_offsets"]
        whole = [begin, stop, *entry["shape"]]
        is_entry = isinstance(entry["dtype"], str) and all(type(n) is int and n >= 0 for n in whole)
    except (TypeError, KeyError, ValueError):
        is_entry = False
    if not is_entry:
        raise Unreadable(file, f"has a header in which {name!r} is not a tensor")
    return begin, stop


def _below(file: Path, path: Path) -> str:
    return file.relative_to(path).as_posix() if file.is_relative_to(path) else str(file)


@dataclass
class Differences:
    """How a stored tensor set differs from that of the run, by tensor: lines for a message, and the names."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other: dict[str, str] = field(default_factory=dict)  # name → what is wrong with it

    def lines(self) -> Iterator[str]:
        for what, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                yield f"{what}: {_some(names)}"
        if self.other:
            yield _some([f"{name} {problem}" for name, problem in self.other.items()])

    def unusable(self) -> set[str]:
        """Names of the run's tensors that the set does not give."""
        return {*self.missing, *self.other}


def compare_set(
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    may_miss: Callable[[str], bool] = lambda name: False,
) -> Differences:
    """The differences of a set; `expected` are the shapes of the run's tensors, which must be floating point."""
    found = Differences()
    for name, shape in expected.items():
        entry = stored.get(name)
        if entry is None:
            if not may_miss(name):
                found.missing.append(name)
        elif entry.shape != tuple(shape):
            found.other[name] = f"has shape {list(entry.shape)}, expected {list(shape)}"
        elif entry.dtype.lstrip("B") not in ("F64", "F32", "F16"):
            found.other[name] = f"has type {entry.dtype}, expected floating-point numbers"
    found.unexpected = [name for name in stored if name not in expected]
    return found


Shapes = Mapping[str, tuple[int, ...]]


def check_sets(
    path: Path,
    state: Mapping[str, Any],
    expected: Mapping[str, Shapes],
    stored: Mapping[str, Mapping[str, Stored]],
    *,
    reset: bool,
) -> tuple[dict[str, set[str]], list[str]]:
    """Compare the tensor sets of a checkpoint with those of the run that resumes it.

    Missing, unexpected or unfit tensors raise CheckpointError with their names. With `reset` those of an optimiser are
    returned instead, by set, to be left at 0, with a note for each set.
    """
    problems, notes = [], []
    unusable: dict[str, set[str]] = {}
    for name in [*expected, *(n for n in stored if n not in expected)]:
        without = _without_state(name, state, expected.get(name, {}))
        found = compare_set(
            expected.get(name, {}), stored.get(name, {}), lambda key, w=without: key.partition("/")[2] in w
        )
        lines = list(found.lines())
        if name not in expected and not lines:
            lines = ["a tensor set that this run does not have"]
        if not lines:
            continue
        if reset and (name in OPTIMIZERS or name not in expected):
            unusable[name] = found.unusable()
            notes.append(f"trainer.resume_missing=reset: training/{name} starts at 0 where it does not fit: {lines[0]}")
        else:
            problems += [f"  training/{name}: {line}" for line in lines]
    if problems:
        raise CheckpointError(
            f"{path} does not hold the state of this run:\n" + "\n".join(problems) + "\n"
            "Restore it, or set trainer.resume_missing=reset: optimiser state that is missing then starts at 0"
        )
    return unusable, notes


def _without_state(name: str, state: Mapping[str, Any], expected: Shapes) -> set[str]:
    """The parameters that had no optimiser state when the checkpoint was saved, because no update had reached them.

    A checkpoint names them. That none had any is believed only of a run whose updates were all skipped or not due.
    """
    parameters = {key.partition("/")[2] for key in expected if key.startswith("step/")}
    record = state.get("without_state")
    without = record.get(name, []) if isinstance(record, dict) else None
    warmup = _integer(state, "config", "trainer", "critic_warmup") if name == "optimizer" else 0
    is_untouched = state["step"] <= warmup + _integer(state, "counters", "bad_steps_in_row")
    if without is None:
        return parameters if is_untouched else set()
    named = {str(parameter) for parameter in without} if isinstance(without, list) else set()
    return named if is_untouched or not parameters <= named else set()


def _integer(state: Any, *keys: str) -> int:
    for key in keys:
        state = state.get(key) if isinstance(state, Mapping) else None
    return state if isinstance(state, int) else 0


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
