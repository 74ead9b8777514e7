"""CheckpointSaver: when the checkpoints of a run are written, and from what.

At a step boundary the small state is taken as text. Weights and moments stay as they are until the next update, so they
are written from where they lie while the next batch is generated; the update waits for it (`BackgroundWriter.wait`). A kill at any
moment therefore loses one update at most, and host memory holds no second copy. Weights on a device are copied to host
memory first, because a thread that uses the device would disturb the capture of CUDA graphs. Where writing changes the
models for a while, or needs the ranks that generate, everything waits for it (`saves_aside` of the roles).
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo.build.parts import RunParts
from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.checkpoint.tensor_sets import TensorSet
from gspo.config import TrainerConfig
from gspo.runs.clock import Clock

STAGE = "save_checkpoint"
AUTO_SAVE_SHARE = 0.05  # save_freq=auto: checkpoints take at most this share of the time


class CheckpointSaver:
    """Writes the checkpoints of one run folder. `saved` is the last step that is whole on disk, as far as is known."""

    def __init__(self, folder: Path, config: TrainerConfig, clock: Clock, writer: BackgroundWriter) -> None:
        self._folder, self._clock, self._writer = folder, clock, writer
        self._every, self._keep = config.trainer.save_freq, config.trainer.max_actor_ckpt_to_keep
        self._tokenizer_files: dict[Path, bytes] | None = None
        self._began, self._cost_before = time.monotonic(), 0.0  # of the last save
        self.saved: int | None = None

    def resumed(self, loaded: checkpoint.Loaded | None) -> None:
        """Note which checkpoint the run goes on from: one of another run is not on disk here."""
        here = loaded is not None and loaded.path.resolve().parent == self._folder.resolve()
        self.saved = loaded.step if loaded is not None and here else None

    def is_due(self, step: int) -> bool:
        """Whether this step is to be saved by `trainer.save_freq`."""
        if isinstance(self._every, int):
            return self._every > 0 and step % self._every == 0
        took = self._cost() - self._cost_before
        return time.monotonic() - self._began >= took / AUTO_SAVE_SHARE

    def begin(self, step: int, parts: RunParts, state: Mapping[str, Any]) -> None:
        """Take what may change and have the checkpoint of this step boundary written; `BackgroundWriter.wait` says it is there.

        `state` is what the loop knows beside its parts.
        """
        self._began, self._cost_before = time.monotonic(), self._cost()
        with self._clock(STAGE):
            whole = {**parts.state_dict(), **state, "fingerprint": parts.fingerprint}
            write = self._prepare(step, parts, checkpoint.state_text(step, whole))
        self._writer.charge(STAGE, time.monotonic() - self._began)
        (self._writer.do if parts.roles.saves_aside else self._writer.do_now)(STAGE, write)

    def _prepare(self, step: int, parts: RunParts, state: str) -> Callable[[Callable[[], None]], None]:
        """What writes the checkpoint, given what to call as a sign of progress."""
        roles = parts.roles
        tensors, save_model = roles.tensors(), roles.save_model
        if roles.saves_aside:
            tensors = {name: on_host(members) for name, members in tensors.items()}
            save_model = functools.partial(roles.save_model, weights=on_host(roles.weights()))
        if self._tokenizer_files is None:  # taken once: it may be in use while a checkpoint is written
            self._tokenizer_files = _files_of(parts.tokenizer)
        files = self._tokenizer_files

        def write_model(folder: Path) -> None:
            save_model(folder)
            for name, data in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)

        def write(beat: Callable[[], None]) -> None:
            checkpoint.save(
                self._folder,
                step,
                write_model=write_model,
                tensors=tensors,
                write_shards=roles.write_shards,
                state=state,
                beat=beat,
            )
            self.saved = step
            checkpoint.prune(self._folder, self._keep, step)

        return write

    def _cost(self) -> float:
        return self._writer.cost.get(STAGE, 0.0)


def on_host(tensors: Mapping[str, Tensor]) -> TensorSet:
    """The tensors in host memory: themselves where they lie there, else copies. Tied ones stay tied."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    out: TensorSet = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            out[name] = tensor
            continue
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in copies:
            copies[place] = tensor.detach().cpu()
        out[name] = copies[place]
    return out


def _files_of(tokenizer: Any) -> dict[Path, bytes]:
    """The files that a tokenizer is saved as, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return {p.relative_to(folder): p.read_bytes() for p in paths}
