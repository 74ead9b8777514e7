"""Loading a model and its tokenizer: safetensors only, and no code from the folder unless it is trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo import hub
from gspo.models import ModelError, resolve
from gspo.models.folder_checks import check_files, check_shapes, check_weights, remedy
from gspo.models.four_bit import four_bit_config, keep_differentiable
from gspo.models.overrides import KEY, overridden, override_tokens

if TYPE_CHECKING:
    import torch


# What reading a folder with wrong values raises, beside the library's own errors.
_ERRORS = (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


def compute_dtype(name: str, device: torch.device) -> str:
    """The precision in which a model computes on a device; `auto` is bfloat16 on a GPU and float32 elsewhere."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name ("embedded" for the packaged one)."""
    from transformers import AutoTokenizer

    with _reading(path, "tokenizer") as source:
        return AutoTokenizer.from_pretrained(**source, trust_remote_code=trust_remote_code)


def load_config(path: str, overrides: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of a folder or hub name, with `overrides` in the place of its own values."""
    from transformers import AutoConfig, PreTrainedConfig

    with _reading(path, "config") as source:
        own = AutoConfig.from_pretrained(**source, trust_remote_code=trust_remote_code)
        if not overrides:
            return own
        written, _ = PreTrainedConfig.get_config_dict(**source)
    return overridden(own, written, overrides)


def load_generation_config(
    path: str, overrides: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The generation config of a folder or hub name, as the model has it when it is loaded."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(resolve(path))
    except OSError:  # no such file
        found = GenerationConfig.from_model_config(load_config(path, overrides, trust_remote_code=trust_remote_code))
    return override_tokens(found, overrides or {})


def load_model(
    path: str,
    *,
    dtype: torch.dtype | str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    four_bit: bool = False,
) -> Any:
    """The decoder of a folder or hub name; refuses weights in a pickle, of another shape, or with tensors missing.

    With `four_bit`, the weights of its linear layers are quantised while they are read.
    """
    from transformers import AutoModelForCausalLM

    resolved = resolve(path)
    what, changed = "model", {}
    header = check_weights(Path(resolved)) if Path(resolved).is_dir() else {}
    if overrides:
        what = f"model with {KEY}={dict(overrides)}"
        changed = {"config": load_config(path, overrides, trust_remote_code=trust_remote_code)}
    if header and not trust_remote_code:
        with _reading(path, what):
            check_shapes(path, _empty_model(path, overrides), header, _asks(overrides))
    if four_bit:
        changed |= {"quantization_config": four_bit_config(dtype), "device_map": {"": device}}
    with _reading(path, what) as source, no_progress_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            **changed,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    model, info = loaded
    _check_tensors(path, info, overrides)
    override_tokens(model.generation_config, overrides or {})
    if four_bit:
        keep_differentiable(model)
        return model
    return model.to(device)


def load_reward_model(
    path: str,
    *,
    dtype: torch.dtype | str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    new_head: bool = False,
) -> Any:
    """A classifier with one label from a folder or hub name. With `new_head` its score starts at 0, over any decoder."""
    from transformers import AutoModelForSequenceClassification

    resolved = resolve(path)
    if Path(resolved).is_dir():
        check_weights(Path(resolved))
    with _reading(path, "reward model") as source, no_progress_bars(), _no_load_report():
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            **source,
            num_labels=1,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    model, info = loaded
    if not hasattr(model, "score"):
        raise ModelError(
            f"{path}: {type(model).__name__} has no layer `score`; expected a decoder with a score per text"
        )
    lacks_head = any(
        name.startswith("score.") for name in (*info["missing_keys"], *(m[0] for m in info["mismatched_keys"]))
    )
    if lacks_head and not new_head:
        raise ModelError(
            f"{path}: is no reward model: its weights have no score of one label; train one with `gspo rm`, or give the "
            "folder of a classifier with num_labels=1"
        )
    others = {**info, "missing_keys": {n for n in info["missing_keys"] if not n.startswith("score.")}}
    others["mismatched_keys"] = [m for m in info["mismatched_keys"] if not m[0].startswith("score.")]
    _check_tensors(path, others, None)
    if lacks_head:
        model.score.weight.data.zero_()
    return model.to(device)


def _empty_model(path: str, overrides: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """The tensors of the model that the config asks for, without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(path, overrides)).state_dict()


def _asks(overrides: Mapping[str, Any] | None) -> str:
    return f"{KEY}={dict(overrides)}" if overrides else "config.json"


def _check_tensors(path: str, info: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> None:
    """Refuse a model some of whose tensors the weights do not hold, or hold in another shape."""
    absent = sorted(info["missing_keys"])
    other = sorted((name, tuple(file), tuple(asked)) for name, file, asked in info["mismatched_keys"])
    if not absent and not other:
        return
    asks = _asks(overrides)
    if absent:
        found = f"{len(absent)} tensors that {asks} asks for are not in the weights, such as {absent[0]}"
    else:
        name, file, asked = other[0]
        found = f"{len(other)} tensors have another shape than {asks} asks for: {name} is {file}, not {asked}"
    raise ModelError(f"{path}: {found}; {remedy(asks)}")


def _only_from_cache(resolved: str) -> bool:
    """Whether a hub name must be read from the cache because the hub is unreachable; ModelError when it is not cached."""
    if Path(resolved).is_dir():
        return False
    if Path(resolved).is_file():
        raise ModelError(f"{resolved}: is a file; expected the folder of a model, with config.json and its weights")
    reason = hub.why_unreachable(resolved, "model")
    if reason and not hub.is_cached(resolved, "model"):
        raise ModelError(
            f"{resolved}: is not a local folder, and the hub cannot be reached ({reason}); give a folder, or check the name "
            "in actor_rollout_ref.model.path and the connection"
        )
    return bool(reason)


@contextmanager
def _reading(path: str, what: str) -> Iterator[dict[str, Any]]:
    """Where `from_pretrained` reads a folder or hub name; its errors become a ModelError that names it."""
    from safetensors import SafetensorError

    resolved = resolve(path)
    if Path(resolved).is_dir():
        check_files(Path(resolved))
        needed = ("config.json", *(["tokenizer_config.json"] if what == "tokenizer" else []))
        if not any((Path(resolved) / name).is_file() for name in needed):
            raise ModelError(f"{path}: the folder has no config.json, so it is not a model; give the folder of a model")
    elif resolved.count("/") > 1 or resolved.startswith((".", "/", "~")):
        raise ModelError(f"{path}: there is no such folder, and names on the hub have the form owner/name")
    source = {"pretrained_model_name_or_path": resolved, "local_files_only": _only_from_cache(resolved)}
    try:
        yield source
    except ModelError:
        raise
    except _ERRORS + (SafetensorError,) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "give a folder or hub name with a decoder's config.json, safetensors and tokenizer files"
        if "trust_remote_code" in str(error):
            first = "needs Python code from its folder, which is not run"
            hint = "set trust_remote_code=true if you have read and trust it"
        raise ModelError(f"{path}: the {what} cannot be loaded: {first}; {hint}") from error


@contextmanager
def _no_load_report() -> Iterator[None]:
    """Prevent transformers from listing a missing score: the caller says what it means."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Prevent transformers from drawing progress bars over ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
