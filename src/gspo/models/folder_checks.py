"""Model folders from strangers: every file is a plain one within limits, and the config has the shapes of the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo import untrusted
from gspo.models import ModelError
from gspo.untrusted import Unreadable

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100 << 20  # the limit of the safetensors format
MAX_VOCABULARY = 1024 * untrusted.MiB  # of tokenizer.json and similar files
PARSED = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
READ = (".json", ".jinja", ".txt", ".model", ".safetensors")
# Sizes in config.json. Each is a dimension of some tensor, or a count of tensors, or belongs to layers that the model has not.
SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts"),
    *("n_embd", "n_layer", "n_head", "n_inner", "d_model"),
)
LAYERS = ("num_hidden_layers", "n_layer")  # each has at least one tensor
UNUSED = 1 << 16  # a mixture of experts may have a size of dense layers, which no tensor has
FLOATS = ("F64", "F32", "F16", "BF16")
Header = dict[str, tuple[tuple[int, ...], str]]  # name → shape and type of a tensor


def check_files(folder: Path) -> None:
    """Refuse a folder in which a file that loading reads is not a plain file, is too large or too deep."""
    try:
        for file in sorted(folder.iterdir()):
            if file.suffix in READ and file.name != "MANIFEST.json":
                with untrusted.open_plain(file) as f:
                    if file.suffix != ".safetensors" and f.seek(0, 2) > MAX_VOCABULARY:
                        raise Unreadable(file, f"is larger than {MAX_VOCABULARY >> 20} MiB")
        for name in PARSED:
            if (folder / name).exists() and not isinstance(untrusted.read_json(folder / name), dict):
                raise Unreadable(folder / name, "is not a JSON object")
    except Unreadable as error:
        raise ModelError(f"{error}; give a folder with a model's plain files") from None
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read ({error.strerror})") from None


def check_weights(folder: Path) -> Header:
    """The tensors of a folder's weights; ModelError when they are not safetensors, lie elsewhere or have a bad header."""
    check_files(folder)
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif index.is_file():
        files = _shards(index)
    else:
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
        found = f"only {', '.join(pickles)}, which may run code when read" if pickles else "no weights"
        raise ModelError(
            f"{folder}: has {found}; expected {SINGLE}. Convert it with save_pretrained in a place you trust"
        )
    header: Header = {}
    for file in files:
        header |= _read_header(file)
    _check_sizes(folder, header)
    return header


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(untrusted.read_json(index, 4 * untrusted.MAX_DOCUMENT)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: is not an index of weights ({type(error).__name__}: {error})") from None
    for name in names:
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: names {name!r}; expected safetensors files in the same folder")
        if not (index.parent / name).is_file():
            raise ModelError(f"{index}: names {name!r}, which is not there; expected all shards")
    return [index.parent / name for name in names]


def _read_header(file: Path) -> Header:
    """A safetensors header, a length and JSON, checked before any library allocates memory by it."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ModelError(
                f"{file}: announces a header of {length} bytes in a file of {size}; expected safetensors "
                f"(a header of at most {MAX_HEADER} bytes)"
            )
        try:
            entries = {k: v for k, v in json.loads(f.read(length)).items() if k != "__metadata__"}
            ends = [entry["data_offsets"][1] for entry in entries.values()]
            header = {name: (tuple(map(int, e["shape"])), str(e["dtype"])) for name, e in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, IndexError) as error:
            raise ModelError(f"{file}: has no safetensors header ({type(error).__name__}: {error})") from None
    if max(ends, default=0) != size - 8 - length:
        raise ModelError(
            f"{file}: its tensors end at byte {max(ends, default=0)} of {size - 8 - length}; it is cut off or altered"
        )
    return header


def _check_sizes(folder: Path, header: Header) -> None:
    """Refuse a config with a size beyond every dimension and the number of tensors: building it would take all memory."""
    if not (folder / "config.json").exists():
        return
    config = untrusted.read_json(folder / "config.json")
    largest = max([UNUSED, len(header), *(size for shape, _ in header.values() for size in shape)])
    for part in (config, config.get("text_config")):
        for key in SIZES if isinstance(part, dict) else ():
            value, limit = part.get(key), len(header) if key in LAYERS else largest
            if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit):
                continue
            raise ModelError(
                f"{folder}: config.json has {key}={value!r}, which no tensor of the weights has; expected a whole number "
                f"of at most {limit:,}"
            )


def check_shapes(path: str, expected: Mapping[str, Any], header: Header, asks: str) -> None:
    """Refuse weights with another shape or type than the model's tensors of the same names, before they are allocated."""
    for name, tensor in expected.items():
        if name not in header:
            continue
        shape, dtype = header[name]
        if shape != tuple(tensor.shape):
            other = sum(n in header and header[n][0] != tuple(t.shape) for n, t in expected.items())
            raise ModelError(
                f"{path}: {other} tensors have another shape than {asks} asks for: {name} is {shape}, not "
                f"{tuple(tensor.shape)}; " + remedy(asks)
            )
        if tensor.is_floating_point() and dtype not in FLOATS and not dtype.startswith("F8"):
            raise ModelError(f"{path}: {name} has type {dtype}; expected floating-point weights")


def remedy(asks: str) -> str:
    """What to do about weights that differ from what the config, or its overrides, ask for."""
    return (
        "expected weights and config of one model"
        if asks == "config.json"
        else "override only what leaves the weights' shapes"
    )
