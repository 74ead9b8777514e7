"""A rollout worker: one engine, built from a spec that can be pickled, behind the methods that a fleet calls."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gspo.plugins import import_plugins
from gspo.registry import Registry
from gspo.rollout.engine import EngineError, GroupRequest, RolloutEngine, check_finished, check_list
from gspo.types import Group

if TYPE_CHECKING:
    from gspo.rollout.workers.weight_store import WeightsRef


class Wrapper(Protocol):
    """Settings, as plain values, of an engine around another one."""

    def wrap(
        self, engine: RolloutEngine, tokenizer: Any, *, eos_token_ids: Sequence[int], max_length: int, pool: Any = None
    ) -> RolloutEngine: ...


BuildEngine = Callable[["EngineSpec"], RolloutEngine]
ENGINES: Registry[BuildEngine] = Registry(
    "rollout.name",
    {"native": "gspo.rollout.workers.worker:build_native", "vllm": "gspo.rollout.vllm.engine:build_vllm"},
    error=EngineError,
)
CACHE_FREEING_OPTIONS = ("sleep", "free_cache")  # by which engines free their cache while the trainer works


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to build an engine in another process: only plain values, so that it can be pickled.

    `kind` is a name of ENGINES or "module:function", a function of the spec that returns a RolloutEngine. The model's
    folder gives its shape and first weights; the fleet loads the current ones before any request.
    """

    kind: str
    model: str  # folder or hub name
    tokenizer: str
    num_slots: int  # responses at once
    max_length: int  # prompt and response
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int | None = None  # None: torch's default
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    override_config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the kind
    plugins: tuple[str, ...] = ()  # imported when the kind is not built in
    episodes: Wrapper | None = None  # the environment that rollouts talk to, or the agent that writes them

    def on_device(self, device: str, *, shared: bool) -> EngineSpec:
        """The spec of a worker on `device`. One that shares it with no trainer rank keeps its cache during training."""
        keeps = {} if shared else {name: False for name in CACHE_FREEING_OPTIONS if name in self.options}
        return dataclasses.replace(self, device=device, options={**self.options, **keeps})


def engine(name: str) -> Callable[[BuildEngine], BuildEngine]:
    """Register a function `EngineSpec -> RolloutEngine` under a name for `rollout.name`. It runs in rollout workers."""
    return ENGINES.register(name)


def build_engine(spec: EngineSpec) -> RolloutEngine:
    """The engine that a spec describes; an EngineError when its kind is unknown."""
    if spec.kind not in ENGINES:
        import_plugins(spec.plugins)
    engine = ENGINES.find(spec.kind)(spec)
    if not isinstance(engine, RolloutEngine):
        raise EngineError(f"rollout.name={spec.kind!r} returned a {type(engine).__name__}; expected a RolloutEngine")
    return engine if spec.episodes is None else _with_episodes(engine, spec, spec.episodes)


def _with_episodes(engine: RolloutEngine, spec: EngineSpec, settings: Wrapper) -> RolloutEngine:
    from gspo.models.load import load_tokenizer

    tokenizer = load_tokenizer(spec.tokenizer, trust_remote_code=spec.trust_remote_code)
    return settings.wrap(engine, tokenizer, eos_token_ids=spec.eos_token_ids, max_length=spec.max_length)


def build_native(spec: EngineSpec) -> RolloutEngine:
    """Build a native engine over its own copy of the model."""
    import torch

    from gspo.models.load import load_model, load_tokenizer
    from gspo.rollout.native.engine import NativeEngine

    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    model = load_model(
        spec.model,
        dtype=spec.dtype,
        device=spec.device,
        trust_remote_code=spec.trust_remote_code,
        overrides=spec.override_config,
    )
    if spec.attn_implementation is not None:
        model.set_attn_implementation(spec.attn_implementation)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.requires_grad_(False)
        tensor.data = tensor.data.clone()  # aligned as the trainer's tensors, see build/models.py
    tokenizer = load_tokenizer(spec.tokenizer, trust_remote_code=spec.trust_remote_code)
    return NativeEngine(
        model,
        functools.partial(tokenizer.decode, skip_special_tokens=True),
        eos_token_ids=spec.eos_token_ids,
        pad_token_id=spec.pad_token_id,
        num_slots=spec.num_slots,
        max_length=spec.max_length,
        device=spec.device,
        **spec.options,
    )


class RolloutWorker:
    """Runs an engine for a fleet. Arguments and results can be pickled; calls come one at a time."""

    def __init__(self, spec: EngineSpec) -> None:
        self.engine = build_engine(spec)
        self._requests: dict[int, GroupRequest] = {}  # in flight

    def ping(self) -> int:
        """The worker's process id. The answer shows that its engine is built."""
        return os.getpid()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups, in this order."""
        for request in requests:
            self.engine.submit(request)
            self._requests[request.submission] = request

    def step(self) -> list[Group]:
        """Advance by one engine step and return what finished."""
        groups = [check_finished(self._take(group), group) for group in check_list(self.engine.step())]
        if self._requests and not self.engine.num_in_flight:
            lost = sorted(self._requests)[:5]
            raise EngineError(
                f"the rollout engine lost submissions {lost}: it has nothing in flight and did not return them"
            )
        return groups

    def _take(self, group: Any) -> GroupRequest | None:
        return self._requests.pop(group.submission, None) if isinstance(group, Group) else None

    def pump(self, seconds: float) -> list[Group]:
        """Advance for about this long, at least one step, or until a group finished or nothing is in flight."""
        end = time.monotonic() + seconds
        while self._requests:
            if groups := self.step():
                return groups
            if time.monotonic() >= end:
                break
        return []

    def load_weights(self, ref: WeightsRef, version: int) -> None:
        """Make a version live; groups in flight go on under it."""
        from gspo.rollout.workers.weight_store import read_weights

        self.engine.load_weights(read_weights(ref), version)

    def rest(self) -> None:
        """Free the memory that the engine can do without while the trainer uses the device."""
        self.engine.rest()

    def unfinished(self) -> dict[int, GroupRequest]:
        """The groups in flight with the responses begun, by submission."""
        return {request.submission: request for request in self.engine.unfinished()}

    def take_back(self) -> dict[int, GroupRequest]:
        """Return what `unfinished` returns and forget these groups: they will be submitted again, here or elsewhere."""
        begun = self.unfinished()
        self.engine.clear()
        self._requests.clear()
        return begun

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Run these to the end; groups in flight stay as they are."""
        return self.engine.generate(requests)

    def close(self) -> None:
        self.engine.close()
