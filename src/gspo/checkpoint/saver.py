"""When the checkpoints of a run are written, and from which data.

    step boundary        │ next step
    begin: state as text │ background thread: model, moments, state → temporary folder → fsync → rename
                         │ main thread: generate ── score ── wait for the thread ── update the weights

Weights and moments do not change until the next update, so the thread writes them without a copy while the next batch
is generated, and the update waits (`BackgroundWriter.wait`). A kill at any moment loses at most one update. Weights on
a device are first copied to host memory, because a thread that uses the device would disturb the capture of CUDA
graphs. Models whose saving changes them temporarily, or needs the ranks that generate, are saved in the main thread
(`SavedModels.saves_in_background`).
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.background_writer import BackgroundWriter, Job
from gspo.checkpoint.tensor_sets import TensorSet
from gspo.config import TrainerConfig
from gspo.runs.clock import Clock
from gspo.runs.folder import step_of

STAGE = "save_checkpoint"
AUTO_SAVE_SHARE = 0.05  # save_freq=auto: the share of time that checkpoints may cost


class SavedModels(Protocol):
    """What a save needs of the models of a run."""

    @property
    def saves_in_background(self) -> bool:
        """Whether another thread may write a checkpoint while the models generate and score."""
        ...

    def save_model(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the policy as a Hugging Face folder; `weights` are an earlier result of `weights()`."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The policy's current tensors by name."""
        ...

    def tensors(self) -> dict[str, TensorSet]:
        """The tensor sets that a resume needs beside the policy's folder, by file."""
        ...

    @property
    def write_shards(self) -> Callable[[Path], None] | None:
        """Writes sharded tensor sets, one part per rank; None when `tensors` has all sets."""
        ...


class CheckpointSaver:
    """Writes the checkpoints of one run folder. `saved` is the last step that is complete on disk.

    `best(steps)` returns those of the given steps whose checkpoints are kept however old they are.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainerConfig,
        clock: Clock,
        writer: BackgroundWriter,
        best: Callable[[Collection[int]], Collection[int]] = lambda steps: (),
    ) -> None:
        self._best = best
        self._folder, self._clock, self._writer = folder, clock, writer
        self._every, self._keep = config.trainer.save_freq, config.trainer.max_actor_ckpt_to_keep
        self._tokenizer_files: dict[Path, bytes] | None = None
        self._began, self._cost_before = time.monotonic(), 0.0  # of the last save
        self.saved: int | None = None

    def resumed(self, loaded: checkpoint.Loaded | None) -> None:
        """Record the checkpoint from which the run continues, unless it is in another run's folder."""
        here = loaded is not None and loaded.path.resolve().parent == self._folder.resolve()
        self.saved = loaded.step if loaded is not None and here else None

    def is_due(self, step: int) -> bool:
        """Whether `trainer.save_freq` requires a checkpoint of this step."""
        if isinstance(self._every, int):
            return self._every > 0 and step % self._every == 0
        took = self._cost() - self._cost_before
        return time.monotonic() - self._began >= took / AUTO_SAVE_SHARE

    def begin(
        self, step: int, models: SavedModels, tokenizer: Any, make_state: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Start the checkpoint of this step boundary. It is on disk after `BackgroundWriter.wait`.

        `make_state` returns the rest of the state, as JSON values.
        """
        self._began, self._cost_before = time.monotonic(), self._cost()
        with self._clock(STAGE):
            write = self._prepare(step, models, tokenizer, checkpoint.state_text(step, make_state()))
        self._writer.charge(STAGE, time.monotonic() - self._began)
        (self._writer.do if models.saves_in_background else self._writer.do_now)(STAGE, write)

    def _prepare(self, step: int, models: SavedModels, tokenizer: Any, state: str) -> Job:
        """The job that writes the checkpoint."""
        tensors, shards, save_model = models.tensors(), models.write_shards, models.save_model
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
                write_shards=shards,
                state=state,
                beat=beat,
            )
            self.saved = step
            steps = [step_of(path.name) for path in checkpoint.all_steps(self._folder)]
            checkpoint.prune(self._folder, self._keep, step, self._best(steps))

        return write

    def _cost(self) -> float:
        return self._writer.cost.get(STAGE, 0.0)


def on_host(tensors: Mapping[str, Tensor]) -> TensorSet:
    """The tensors in host memory; those on a device are copied. Tied tensors stay tied."""
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
    """The files of a saved tokenizer, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return {p.relative_to(folder): p.read_bytes() for p in paths}
