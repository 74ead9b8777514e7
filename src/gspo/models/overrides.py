"""`actor_rollout_ref.model.override_config`: values that replace those of a model's config before it is built.

They act as if they stood in the model's config.json, so what transformers derives from them follows. A mapping changes
only the entries that it names. What transformers would pass over is refused: every override acts, or is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from gspo.models import ModelError

KEY = "actor_rollout_ref.model.override_config"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # a generation config has them too
_SEPARATE = {  # what another key decides
    "dtype": "actor_rollout_ref.model.dtype",
    "torch_dtype": "actor_rollout_ref.model.dtype",
    "attn_implementation": "actor_rollout_ref.model.attn_implementation",
    "model_type": "actor_rollout_ref.model.path",
    "architectures": "actor_rollout_ref.model.path",
    "transformers_version": "actor_rollout_ref.model.path",
}
_ROPE = "rope_parameters"
_OLD_ROPE = ("rope_scaling", "rope_theta")  # names of its parts in older files
_ROPE_BASE = ("rope_theta", "partial_rotary_factor")  # what scaling builds on


def overridden(own: Any, written: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """The config `own`, made anew of its file's values `written` with the overrides in their places."""
    wanted = _with_rope(own, overrides)
    _check_names(own, wanted, KEY)
    values = {name: value for name, value in written.items() if _ROPE not in wanted or name not in _OLD_ROPE}
    for name, value in wanted.items():
        before = _plain(getattr(own, name)) if name != _ROPE else None
        values[own.attribute_map.get(name, name)] = _merged(before, value)
    try:
        made = type(own).from_dict(values)
    except Exception as error:  # transformers checks a config in many ways, each with errors of its own
        reason = " ".join(str(error).split())
        raise ModelError(f"{KEY}={dict(overrides)}: {type(own).__name__} refuses it: {reason}") from error
    _check_effect(made, wanted, KEY)
    return made


def changed_values(own: Any, made: Any) -> dict[str, Any]:
    """The values of `made` that `own` does not have, whole: what another program must set to get the same config."""
    before, after = own.to_dict(), made.to_dict()
    return {name: value for name, value in after.items() if before.get(name) != value and name[0] != "_"}


def override_tokens(generation_config: Any, overrides: Mapping[str, Any]) -> Any:
    """The generation config with the special tokens that were overridden, changed in place."""
    for name in _TOKENS:
        if name in overrides:
            setattr(generation_config, name, overrides[name])
    return generation_config


def _with_rope(own: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides with all rotary parameters, complete, under the one name that transformers has for them now."""
    parameters = getattr(own, _ROPE, None)
    named = [name for name in (*_OLD_ROPE, _ROPE) if name in overrides]
    if not named or not isinstance(parameters, Mapping):
        return dict(overrides)
    by_layer = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if by_layer and named != [_ROPE]:
        remedy = f"set {KEY}.{_ROPE}.{by_layer[0]}.rope_theta and the like"
        raise ModelError(f"{KEY}.{named[0]}: {type(own).__name__} has several, by layer; {remedy}")
    for name in named:
        given = overrides[name] if name != "rope_theta" else {}
        if given is not None and not isinstance(given, Mapping):
            raise ModelError(f"{KEY}.{name}={given!r}: expected a mapping")
        _check_rope_names(by_layer, given or {}, f"{KEY}.{name}")
    made = dict(parameters)
    if "rope_scaling" in named:
        scaling = dict(overrides["rope_scaling"] or {})
        kept = {name: parameters[name] for name in _ROPE_BASE if name in parameters}
        made = {**kept, "rope_type": scaling.pop("type", "default"), **scaling}
    if "rope_theta" in named:
        made = _merged(made, {"rope_theta": overrides["rope_theta"]})
    made = _merged(made, overrides.get(_ROPE) or {})
    return {**{name: value for name, value in overrides.items() if name not in named}, _ROPE: made}


def _check_names(own: Any, wanted: Mapping[str, Any], key: str) -> None:
    """Refuse names that the config does not have, with the nearest that it has."""
    known = {name for name in (*own.to_dict(), *own.attribute_map) if name[0] != "_"}
    for name, value in wanted.items():
        if name in _SEPARATE:
            raise ModelError(f"{key}.{name}={value!r}: cannot be overridden; set {_SEPARATE[name]}")
        if name not in known:
            problem = f"{type(own).__name__} has no value of this name"
            raise ModelError(f"{key}.{name}={value!r}: {problem}{_hint(name, known)}")
        if isinstance(value, Mapping) and hasattr(getattr(own, name), "attribute_map"):
            _check_names(getattr(own, name), value, f"{key}.{name}")


def _check_rope_names(by_layer: Iterable[str], wanted: Mapping[str, Any], key: str) -> None:
    from transformers.modeling_rope_utils import RopeParameters

    known = {*RopeParameters.__annotations__, "type", *by_layer}
    for name, value in wanted.items():
        if name not in known:
            raise ModelError(f"{key}.{name}={value!r}: is no rotary parameter{_hint(name, known)}")
        if isinstance(value, Mapping):
            _check_rope_names((), value, f"{key}.{name}")


def _hint(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(known))}"


def _plain(value: Any) -> Any:
    """A value of a config as its file has it."""
    return value.to_dict() if hasattr(value, "attribute_map") else value


def _merged(own: Any, wanted: Any) -> Any:
    """What stands in the place of `own` afterwards: of mappings the entries of both, a whole number as a float."""
    if isinstance(own, Mapping) and isinstance(wanted, Mapping):
        return {**own, **{name: _merged(own.get(name), value) for name, value in wanted.items()}}
    return float(wanted) if isinstance(own, float) and type(wanted) is int else wanted


def _check_effect(made: Any, wanted: Mapping[str, Any], key: str) -> None:
    """Refuse an override after which the config says something else."""
    for name, value in wanted.items():
        found = made.get(name) if isinstance(made, Mapping) else getattr(made, name)
        if isinstance(value, Mapping) and found is not None:
            _check_effect(found, value, f"{key}.{name}")
        elif found != (type(found)(value) if isinstance(found, list | tuple) and value else value):
            raise ModelError(f"{key}.{name}={value!r}: has no effect, it stays {found!r}; remove it")
