"""The fields of a request's body, checked one by one: types, ranges, and names that are not supported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.slots import MAX_TOP
from gspo.serving.errors import ApiError, bad_value
from gspo.serving.replies import CallEnd

MAX_CHOICES, MAX_STOPS, MAX_STOP_CHARS = 128, 16, 256
MAX_INTEGER = 1 << 31
GREEDY_BELOW = 1e-5  # as in vLLM; logits divided by less may not be finite
# Fields that change nothing here, whatever their value.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"),
    *("request_id", "priority", "cache_salt", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
    *("output_kind", "reasoning_effort", "verbosity", "prompt_cache_retention"),
}
# Fields that are accepted with the value that switches them off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("echo", "use_beam_search", "add_special_tokens"), (False,)),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "prompt_logprobs": (),
    "features": (),
    "kv_transfer_params": (),
}


class Fields:
    """A JSON object whose fields are read one by one; `finish` refuses those that nothing read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._values.get(name, default)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise bad_value(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.get(name, default)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise bad_value(name, value, f"a whole number from {low} to {high}")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise bad_value(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """One of these words; the first without a value."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise bad_value(name, value, f"one of {', '.join(allowed)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts; () without."""
        value = self.get(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
            raise bad_value(name, value, "a text or a list of texts, none empty")
        return tuple(values)

    def finish(self) -> None:
        """Refuse fields that are unknown, or that ask for something that is not supported."""
        for name, value in self._values.items():
            if name in self._read or name in IGNORED:
                continue
            if name not in NEUTRAL:
                raise ApiError(400, f"{name}: unknown field", param=name)
            if value not in NEUTRAL[name]:
                raise ApiError(400, f"{name}={value!r:.100} is not supported here; leave it out", param=name)


@dataclass(frozen=True, slots=True)
class Ask:
    """How a request wants its answers. `params.max_tokens` is 0 where it did not say."""

    params: SamplingParams
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    log_probs: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    call_end: CallEnd | None = None  # where an inline tool call ends, and with it the answer

    def with_max_tokens(self, max_tokens: int) -> Ask:
        return dataclasses.replace(self, params=dataclasses.replace(self.params, max_tokens=max_tokens))


def read_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        value = orjson.loads(raw)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}; expected an object")
    return value


def read_ask(fields: Fields, *, num_top: int, log_probs: bool, default_tokens: int) -> Ask:
    """The sampling fields that all endpoints share."""
    stop = fields.texts("stop")
    if len(stop) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in stop):
        raise bad_value("stop", stop, f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters")
    max_tokens = fields.integer("max_tokens", None, 1, MAX_INTEGER)
    completion = fields.integer("max_completion_tokens", None, 1, MAX_INTEGER)
    params = SamplingParams(
        max_tokens=completion or max_tokens or default_tokens,
        temperature=as_temperature(fields.number("temperature", 1.0, 0.0, 100.0)),
        top_k=fields.integer("top_k", -1, -1, MAX_INTEGER) or -1,
        top_p=_share(fields),
        stop_token_ids=_stop_tokens(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        num_top=num_top,
    )
    stream = fields.boolean("stream")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or (options and not stream):
        raise bad_value("stream_options", options, "an object, with stream=true only")
    return Ask(
        params,
        n=fields.integer("n", 1, 1, MAX_CHOICES) or 1,
        seed=fields.integer("seed", None, -(1 << 63), (1 << 63) - 1),
        stop=stop,
        include_stop=fields.boolean("include_stop_str_in_output"),
        log_probs=log_probs,
        stream=stream,
        include_usage=options.get("include_usage") is True,
        return_token_ids=fields.boolean("return_token_ids"),
    )


def read_num_top(fields: Fields, name: str) -> int:
    return fields.integer(name, 0, 0, MAX_TOP) or 0


def as_temperature(value: float) -> float:
    """The temperature to draw with: 0, which is greedy, for one that is nearly 0."""
    return 0.0 if value < GREEDY_BELOW else value


def _share(fields: Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise bad_value("top_p", top_p, "a number above 0, at most 1")
    return top_p


def _stop_tokens(fields: Fields) -> tuple[int, ...]:
    tokens = fields.get("stop_token_ids", [])
    is_short = isinstance(tokens, list) and len(tokens) <= MAX_STOPS
    if not is_short or not all(type(token) is int and 0 <= token < MAX_INTEGER for token in tokens):
        raise bad_value("stop_token_ids", tokens, f"a list of at most {MAX_STOPS} tokens")
    return tuple(tokens)
