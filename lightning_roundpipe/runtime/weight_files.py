"""Weights in safetensors files: found by name, mapped or read piece by piece, written as they come.

The format is a length (8 bytes, little endian), a JSON header with dtype, shape and place of every tensor, and the
bytes. The library of that name wants all tensors of a file at once to write it; here one tensor at a time is enough, so
that neither reading nor writing needs memory for more than one.

Source: the format as described at https://github.com/huggingface/safetensors.
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_roundpipe.exceptions import WeightFileError

__all__ = ["StoredTensor", "TensorSpec", "WeightFiles", "byte_view", "shard_names", "write_weights"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_READ_BYTES = 64 * 2**20
"""Pieces in which values are read or converted: large enough for full speed, small beside any layer."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor will be, without its values."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: see `_WeightFile`.
        name: its name there.
        dtype: of the stored elements.
        shape: of the tensor.
        start: first byte, counted from the start of the file.
    """

    file: "_WeightFile"
    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize

    def map(self) -> Tensor:
        """The tensor, on pages of the file: they are read when touched. What is written to it stays in this process."""
        return self.file.view(self)

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new tensor with the values, converted to ``dtype`` if given."""
        target = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.read_into(target)
        return target

    def read_into(self, target: Tensor) -> None:
        """Copy the values into ``target``, converting them piece by piece if it has another dtype.

        The file is read past the page tables of this process: the only memory this takes is that of ``target`` and, for
        a conversion, of one piece.

        Raises:
            ValueError: ``target`` is of another shape.
        """
        if target.shape != self.shape:
            raise ValueError(f"`{self.name}` is stored with shape {list(self.shape)}, not {list(target.shape)}.")
        flat = target.detach().view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
        with self.file.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            if flat.dtype is self.dtype:
                _read_exactly(file, flat, self)
            else:
                step = max(1, _READ_BYTES // self.dtype.itemsize)
                piece = _scratch(min(step, flat.numel()), self.dtype)
                for begin in range(0, flat.numel(), step):
                    part = flat[begin : begin + step]
                    _read_exactly(file, piece[: part.numel()], self)
                    part.copy_(piece[: part.numel()])
        if not target.is_contiguous():
            target.detach().copy_(flat.view(target.shape))


def _scratch(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Memory that goes back to the system at once: the allocator would leave holes between weights."""
    return torch.frombuffer(mmap.mmap(-1, max(1, num_elements) * dtype.itemsize), dtype=dtype)[:num_elements]


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    flat = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    view: Any = flat.numpy()
    return memoryview(view)


def _read_exactly(file: Any, target: Tensor, stored: StoredTensor) -> None:
    view = byte_view(target)
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _READ_BYTES])
        if not count:
            raise WeightFileError(f"{stored.file.path} ends in the middle of `{stored.name}`. Fetch the file again.")
        done += count


@dataclass(eq=False)
class _WeightFile:
    """One safetensors file, open until nothing refers to it."""

    path: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    _map: mmap.mmap | None = None

    def __post_init__(self) -> None:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            text = file.read(length) if 0 < length <= size - _LENGTH_BYTES else b""
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            data = _LENGTH_BYTES + length
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                if entry["dtype"] not in _DTYPES:
                    raise WeightFileError(
                        f"`{name}` in {self.path} is stored as {entry['dtype']}, which is not one of"
                        f" {', '.join(_DTYPES)}."
                    )
                dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
                if end - begin != prod(shape) * dtype.itemsize or data + end > size:
                    raise WeightFileError(f"{self.path} ends before `{name}` does. Fetch the file again.")
                self.tensors[name] = StoredTensor(self, name, dtype, shape, data + begin)
        except WeightFileError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightFileError(
                f"{self.path} is not a safetensors file ({type(error).__name__}: {error}). Convert the checkpoint, for"
                " example with `save_pretrained`, or fetch the file again."
            ) from error

    def view(self, stored: StoredTensor) -> Tensor:
        if stored.shape.numel() == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if self._map is None:
            with self.path.open("rb") as file:
                # Private: a write makes a copy of the page, and never reaches the file.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = stored.shape.numel()
        return torch.frombuffer(self._map, dtype=stored.dtype, count=count, offset=stored.start).view(stored.shape)


class WeightFiles(Mapping[str, StoredTensor]):
    """All tensors of a checkpoint in safetensors files, by name.

    Args:
        path: a safetensors file, an index (``*.index.json``), or a folder with ``model.safetensors`` or an index of its
            shards.

    Raises:
        WeightFileError: there are no such files, a shard is missing, or a file is cut off.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._tensors: dict[str, StoredTensor] = {}
        for file, names in self._files().items():
            if not file.exists():
                raise WeightFileError(f"The index of {self.path} lists {file.name}, which is not there. Fetch it.")
            found = _WeightFile(file).tensors
            if names is not None and (absent := sorted(names - found.keys())):
                raise WeightFileError(f"{file} does not hold `{absent[0]}`, which the index says it does.")
            self._tensors |= found if names is None else {name: found[name] for name in names}

    def _files(self) -> dict[Path, set[str] | None]:
        path = self.path
        if path.is_dir():
            if (path / _INDEX).exists():
                path = path / _INDEX
            elif (path / _SINGLE).exists():
                path = path / _SINGLE
            else:
                others = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.safetensors.index.json"))
                hint = f" There is {others[0].name}: name it." if others else ""
                raise WeightFileError(
                    f"A folder of weights must hold {_SINGLE} or {_INDEX}, but {path} does not.{hint}"
                )
        if not path.exists():
            raise WeightFileError(
                f"Weights must be a safetensors file or a local folder of such files, but {str(path)!r} does not exist."
                " For a model on the hub, pass the folder that `huggingface_hub.snapshot_download` returns."
            )
        if path.suffix != ".json":
            return {path: None}
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise WeightFileError(f"{path} is not an index of safetensors files: it has no `weight_map`.") from error
        names: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            known = names.setdefault(path.parent / file, set())
            assert known is not None
            known.add(name)
        return dict(sorted(names.items()))

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# ---------------------------------------------------------------------------------------------------------- writing


def shard_names(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> dict[str, list[str]]:
    """Share tensors out to files, in their order; one that is larger than the limit gets a file of its own.

    Returns:
        The names of the tensors by name of the file.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.num_bytes
    if len(shards) == 1:
        return {_SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def write_weights(
    folder: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Write a checkpoint, holding one tensor at a time.

    Nothing that was in the folder is touched until all is written: weights that are mapped from files of the same names
    stay valid, and an export that fails leaves the previous one.

    Args:
        folder: where; it must exist.
        specs: what will come.
        tensors: the tensors, in any order; converted to the dtype of their spec.
        max_shard_bytes: size of a file.

    Raises:
        ValueError: ``tensors`` are not those of ``specs``, or one has a dtype that the format does not know.
    """
    shards = shard_names(specs, max_shard_bytes)
    file_of = {name: file for file, names in shards.items() for name in names}
    places: dict[str, int] = {}
    waiting = dict(specs)
    with _replacing(folder, list(shards)) as files:
        for file, names in shards.items():
            places |= _write_header(files[file], {name: specs[name] for name in names})
        for name, tensor in tensors:
            spec = waiting.pop(name, None)
            if spec is None or tensor.shape != spec.shape:
                raise ValueError(f"`{name}` of shape {list(tensor.shape)} was not announced, or twice, or otherwise.")
            files[file_of[name]].seek(places[name])
            for piece in _pieces(tensor, spec.dtype):
                files[file_of[name]].write(byte_view(piece))
        if waiting:
            raise ValueError(f"`{next(iter(waiting))}` was announced, but did not come.")
    if len(shards) > 1:
        total = sum(spec.num_bytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: file_of[name] for name in sorted(file_of)}}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # What a previous export of another size has left would be taken for a part of this one.
    for old in {*folder.glob("model-*-of-*.safetensors"), folder / _SINGLE, folder / _INDEX}:
        if old.name not in shards and (old.name != _INDEX or len(shards) == 1):
            old.unlink(missing_ok=True)


@contextmanager
def _replacing(folder: Path, names: Sequence[str]) -> Iterator[dict[str, BinaryIO]]:
    """Files to write, which take their names when the block ends well and vanish otherwise."""
    files: dict[str, BinaryIO] = {}
    try:
        for name in names:
            files[name] = (folder / f".{name}.incomplete").open("wb")
        yield files
        for file in files.values():
            file.close()
        for name in names:
            (folder / f".{name}.incomplete").replace(folder / name)
    finally:
        for name, file in files.items():
            file.close()
            (folder / f".{name}.incomplete").unlink(missing_ok=True)


def _write_header(file: BinaryIO, specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Write the header and return the place of every tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        if spec.dtype not in _NAMES:
            raise ValueError(f"`{name}` is {spec.dtype}, which safetensors files do not know.")
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    file.write(text)
    data = _LENGTH_BYTES + len(text)
    file.truncate(data + end)
    return {name: data + header[name]["data_offsets"][0] for name in specs}


def _pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The elements in order, contiguous and in ``dtype``, without a copy where they are so already."""
    tensor = tensor.detach()
    if tensor.dtype is dtype and tensor.is_contiguous() and tensor.device.type == "cpu":
        yield tensor
    elif tensor.numel() * tensor.element_size() <= _READ_BYTES or tensor.dim() == 0:
        yield tensor.to("cpu", dtype).contiguous()
    elif tensor.is_contiguous():
        for piece in tensor.view(-1).split(_READ_BYTES // tensor.element_size()):
            yield from _pieces(piece, dtype)
    else:
        for row in tensor:
            yield from _pieces(row, dtype)
