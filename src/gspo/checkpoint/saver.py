"""When the checkpoints of a run are written, and from what.

    step boundary        │ next step
    begin: state as text │ background thread: model, moments, state → temporary folder → fsync → rename
                         │ main thread: generate ── score ── wait for the thread ── update the weights

Weights and moments do not change until the next update, so they are written from where they are while the next batch is
generated, and the update waits (`BackgroundWriter.wait`). A kill at any moment therefore loses one update at most, and
host memory holds no second copy. Weights on a device are copied to host memory first, because a thread that uses the
device would disturb the capture of CUDA graphs. Models whose saving changes them for a while, or needs the ranks that
generate, are saved in the main thread (`SavedModels.saves_in_background`).
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.background_writer import BackgroundWriter
from gspo.checkpoint.tensor_sets import TensorSet
from gspo.config import TrainerConfig
from gspo.runs.clock import Clock

STAGE = "save_checkpoint"
AUTO_SAVE_SHARE = 0.05  # save_freq=auto: checkpoints take at most this share of the time


class SavedModels(Protocol):
    """The models of a run as far as saving is concerned."""

    @property
    def saves_in_background(self) -> bool:
        """Whether a checkpoint can be written by another thread while the models are read."""
        ...

    def save_model(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the policy as an ordinary Hugging Face folder; `weights` are what `weights()` returned earlier."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The policy's tensors by name, as they are now."""
        ...

    def tensors(self) -> dict[str, TensorSet]:
        """What a resume needs beside the policy's folder, by file."""
        ...

    @property
    def write_shards(self) -> Callable[[Path], None] | None:
        """Writes what `tensors` does not hold, in one part per rank; None: it holds everything."""
        ...


class CheckpointSaver:
    """Writes the checkpoints of one run folder. `saved` is the last step known to be complete on disk."""

    def __init__(self, folder: Path, config: TrainerConfig, clock: Clock, writer: BackgroundWriter) -> None:
        self._folder, self._clock, self._writer = folder, clock, writer
        self._every, self._keep = config.trainer.save_freq, config.trainer.max_actor_ckpt_to_keep
        self._tokenizer_files: dict[Path, bytes] | None = None
        self._began, self._cost_before = time.monotonic(), 0.0  # of the last save
        self.saved: int | None = None

    def resumed(self, loaded: checkpoint.Loaded | None) -> None:
        """Record the checkpoint from which the run continues. One of another run is not in this folder."""
        here = loaded is not None and loaded.path.resolve().parent == self._folder.resolve()
        self.saved = loaded.step if loaded is not None and here else None

    def is_due(self, step: int) -> bool:
        """Whether `trainer.save_freq` asks for a checkpoint of this step."""
        if isinstance(self._every, int):
            return self._every > 0 and step % self._every == 0
        took = self._cost() - self._cost_before
        return time.monotonic() - self._began >= took / AUTO_SAVE_SHARE

    def begin(
        self, step: int, models: SavedModels, tokenizer: Any, make_state: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Start the checkpoint of this step boundary. It is on disk after `BackgroundWriter.wait`.

        `make_state` gives everything small that a resume needs, as plain values.
        """
        self._began, self._cost_before = time.monotonic(), self._cost()
        with self._clock(STAGE):
            write = self._prepare(step, models, tokenizer, checkpoint.state_text(step, make_state()))
        self._writer.charge(STAGE, time.monotonic() - self._began)
        (self._writer.do if models.saves_in_background else self._writer.do_now)(STAGE, write)

    def _prepare(
        self, step: int, models: SavedModels, tokenizer: Any, state: str
    ) -> Callable[[Callable[[], None]], None]:
        """The function that writes the checkpoint; it calls its argument as a sign of progress."""
        tensors, save_model = models.tensors(), models.save_model
        if models.saves_in_background:
            tensors = {name: on_host(members) for name, members in tensors.items()}
            save_model = functools.partial(models.save_model, weights=on_host(models.weights()))
        if self._tokenizer_files is None:  # read once: the tokenizer may be in use while a checkpoint is written
            self._tokenizer_files = _files_of(tokenizer)
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
                write_shards=models.write_shards,
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
