"""Which host memory lies in files, and reading ahead of its use.

Weights that were loaded without a copy (by `load_pretrained`, safetensors, ``torch.load(mmap=True)``) are pages of a
file: read when touched, and dropped by the kernel when memory is short. No library marks them; the kernel knows.
"""

import os
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lightning_roundpipe.runtime.units import tensor_bytes

__all__ = ["FileMappings"]

_MAPS = Path("/proc/self/maps")
_NO_FILES = ("/dev/", "/memfd:", "/SYSV", "/anon_hugepage")
"""Names that the kernel gives to memory without a file: shared memory is "/dev/zero", or lies in /dev/shm."""

_REQUEST_BYTES = 128 * 2**10
"""Of a larger request Linux reads no more than the disk's read-ahead window, which is so large unless set otherwise."""


class _Range(NamedTuple):
    """Addresses ``start`` to ``stop``, which are the file ``path`` (of number ``inode``) from byte ``offset`` on."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str


class FileMappings:
    """The address ranges of this process that are backed by files now; none where there is no ``/proc``."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        self._open: dict[str, int | None] = {}
        for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines() if _MAPS.exists() else ():
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith("/") and not parts[5].startswith(_NO_FILES):
                start, _, stop = parts[0].partition("-")
                self._ranges.append(_Range(int(start, 16), int(stop, 16), int(parts[2], 16), int(parts[4]), parts[5]))
        self._starts = [place.start for place in self._ranges]

    def __contains__(self, tensor: Tensor) -> bool:
        return self._range_of(tensor) is not None

    def read_ahead(self, tensor: Tensor) -> None:
        """Have the kernel start to read what is not in memory yet. Advice: nothing depends on it."""
        place = self._range_of(tensor)
        if place is None or not tensor.is_contiguous():
            return
        file = self._file(place)
        if file is not None:
            begin = place.offset + tensor.data_ptr() - place.start
            end = begin + tensor_bytes(tensor)
            for offset in range(begin, end, _REQUEST_BYTES):
                os.posix_fadvise(file, offset, min(_REQUEST_BYTES, end - offset), os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the files that were opened to read ahead."""
        files, self._open = self._open, {}
        for file in files.values():
            if file is not None:
                os.close(file)

    def _range_of(self, tensor: Tensor) -> _Range | None:
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        return self._ranges[index] if index >= 0 and address < self._ranges[index].stop else None

    def _file(self, place: _Range) -> int | None:
        """The file, if it still has its name: what was replaced or removed is mapped, but can not be opened."""
        if place.path not in self._open:
            file: int | None = None
            try:
                file = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(file).st_ino != place.inode:
                    os.close(file)
                    file = None
            except OSError:
                pass
            self._open[place.path] = file
        return self._open[place.path]
