"""Checkpoints that go between memory and files without a copy in between.

One file in Lightning's own format; or a folder of several, through `torch.distributed.checkpoint`, in the layout of
Lightning's sharded strategies.
"""

import shutil
import warnings
import zipfile
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_only

__all__ = ["FileCheckpointIO", "ShardedCheckpointIO", "is_sharded", "load_sharded"]

_WEIGHTS = "state_dict"
_OPTIMIZERS = "optimizer_states"
_OPTIMIZER = "optimizer_{}"


class FileCheckpointIO(TorchCheckpointIO):
    """Reads and writes what Lightning's own plugin does, straight from and to memory where the file is a local one.

    Lightning's own holds the whole file in memory while it writes it, and all tensors while it reads them: as much
    again as the model and its optimizer take. Here what is loaded is mapped, until it is copied to its place.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write ``checkpoint``; the file is complete or not there."""
        local = _local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        partial = local.with_name(f".{local.name}.incomplete")
        try:
            torch.save(checkpoint, partial)
            if local.is_dir():
                shutil.rmtree(local)
            partial.replace(local)
        finally:
            partial.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: _PATH, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; its tensors are pages of the file."""
        local = _local_path(path)
        where = map_location or _stays
        if local is None or not local.is_file() or not zipfile.is_zipfile(local):  # What is older can not be mapped.
            return super().load_checkpoint(path, map_location=where, weights_only=weights_only)
        checkpoint: dict[str, Any] = torch.load(local, map_location=where, mmap=True, weights_only=weights_only)
        return checkpoint


def _local_path(path: _PATH) -> Path | None:
    return Path(path) if "://" not in str(path) else None


class ShardedCheckpointIO(FileCheckpointIO):
    """Writes each checkpoint as a folder of several files at once, if wanted while training goes on.

    ``Trainer(plugins=ShardedCheckpointIO())``. Weights and optimizer states go to the files straight from where they
    lie. The folder is what Lightning's FSDP and model-parallel strategies write: weights and the state of each
    optimizer through `torch.distributed.checkpoint`, the rest beside them. It resumes under this plugin, and
    ``lightning-roundpipe export`` reads it; checkpoints that are one file can still be loaded.

    Args:
        num_threads: files that are written at once.
        asynchronous: whether training goes on while files are written. That takes host memory for a copy of everything
            that is written; the next checkpoint, and the end of training, wait for the previous one.

    Raises:
        ValueError: ``num_threads`` is less than 1.
    """

    def __init__(self, num_threads: int = 4, asynchronous: bool = False) -> None:
        if num_threads < 1:
            raise ValueError(f"`num_threads` must be at least 1, but got {num_threads}.")
        self.num_threads = num_threads
        self.asynchronous = asynchronous
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to the folder ``path``.

        Raises:
            TypeError: there are ``storage_options``, which are for remote file systems.
        """
        if storage_options is not None:
            raise TypeError("`ShardedCheckpointIO` writes to local folders: `storage_options` can not be used with it.")
        self.wait()
        if not self.asynchronous:
            self._write(checkpoint, Path(path))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="roundpipe-checkpoint")
        copy = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), checkpoint)
        self._running = self._pool.submit(self._write, copy, Path(path))

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        # Complete or not there: a run that dies while it writes must not leave half of a checkpoint under its name.
        partial = path.with_name(f".{path.name}.incomplete")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        state = {_WEIGHTS: checkpoint[_WEIGHTS]} if _WEIGHTS in checkpoint else {}
        optimizers = checkpoint.get(_OPTIMIZERS, [])
        state |= {_OPTIMIZER.format(number): optimizer for number, optimizer in enumerate(optimizers)}
        rest = {key: value for key, value in checkpoint.items() if key not in (_WEIGHTS, _OPTIMIZERS)}
        writer = FileSystemWriter(partial, single_file_per_rank=True, thread_count=self.num_threads)
        with warnings.catch_warnings():
            # It is so by intent: there is one process that writes.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(state, storage_writer=writer, no_dist=True)
        torch.save(rest, partial / _METADATA_FILENAME)
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        partial.rename(path)

    def load_checkpoint(
        self, path: _PATH, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, a sharded one or one file."""
        self.wait()
        if is_sharded(path):
            return load_sharded(path, weights_only=weights_only)
        return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a checkpoint, when it is written."""
        self.wait()
        super().remove_checkpoint(path)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete; raises what went wrong with it."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def teardown(self) -> None:
        """Finish what is being written."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


def is_sharded(path: _PATH) -> bool:
    """Whether ``path`` is a folder that `ShardedCheckpointIO` wrote."""
    return Path(path).is_dir() and (Path(path) / _METADATA_FILENAME).is_file()


def load_sharded(
    path: _PATH, *, keys: Collection[str] | None = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read what `ShardedCheckpointIO` wrote, as the checkpoint that was given to it.

    Args:
        path: the folder.
        keys: what to read of ``"state_dict"`` and ``"optimizer_states"``; the rest, which is small, is read only with
            all of it. None for everything.
        weights_only: as for `torch.load`, of the rest; None for True.

    Raises:
        FileNotFoundError: ``path`` is no such folder.
    """
    folder = Path(path)
    if not is_sharded(folder):
        raise FileNotFoundError(f"{folder} is not a folder with a sharded checkpoint: it has no {_METADATA_FILENAME}.")
    reader = FileSystemReader(folder)
    stored = {str(name).partition(".")[0] for name in reader.read_metadata().state_dict_metadata}
    optimizers = sorted((name for name in stored if name != _WEIGHTS), key=lambda name: int(name.rpartition("_")[2]))
    wanted = [_WEIGHTS] if keys is None or _WEIGHTS in keys else []
    wanted += optimizers if keys is None or _OPTIMIZERS in keys else []
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(keys=set(wanted)), no_dist=True)
    content: dict[str, Any] = {}
    if keys is None:
        content = torch.load(folder / _METADATA_FILENAME, map_location="cpu", weights_only=weights_only is not False)
    if _WEIGHTS in wanted:
        content[_WEIGHTS] = state.get(_WEIGHTS, {})
    if keys is None or _OPTIMIZERS in keys:
        content[_OPTIMIZERS] = [_with_numbers(state[name]) for name in optimizers]
    return content


def _with_numbers(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, whose parameters are numbers again: the files know only text."""
    state = optimizer_state.get("state", {})
    return {**optimizer_state, "state": {int(key) if key.isdecimal() else key: value for key, value in state.items()}}


def _stays(storage: Any, location: str) -> Any:
    """For `torch.load`: on the host."""
    return storage
