"""Uploads from memory that is not page-locked, through a ring of small page-locked buffers.

A copy from ordinary or file-backed memory would hold up whoever starts it, and wait for the disk. Here a thread copies
piece after piece into a buffer, from which the GPU fetches it, while the caller goes on. What lies in files is read
ahead of it.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_roundpipe.runtime.in_place import InPlace
from lightning_roundpipe.runtime.mapped import FileMappings
from lightning_roundpipe.runtime.slab import Slab
from lightning_roundpipe.runtime.units import tensor_bytes

__all__ = ["RING_BYTES", "HandedOver", "StagedUpload", "StagingRing"]

_NUM_BUFFERS = 4
_BUFFER_BYTES = 32 * 2**20
"""Long enough for full speed on the link, short enough for the copy into one and out of another to overlap."""

_READ_AHEAD_BYTES = 512 * 2**20
"""How far ahead of the copy files are read: many requests keep a disk busy, and little of it is evicted again."""

RING_BYTES = _NUM_BUFFERS * _BUFFER_BYTES
"""Page-locked memory of a ring."""


class HandedOver(NamedTuple):
    """An upload of which the GPU knows.

    Attributes:
        start: passed by the upload stream before the first piece.
        ready: passed when the copy is complete.
        num_bytes: that crossed the link.
    """

    start: torch.cuda.Event
    ready: torch.cuda.Event
    num_bytes: int


class StagedUpload:
    """An upload that was asked for. It can be waited for as for an event, though that does not raise its errors.

    Args:
        source: where from.
        target: flat memory on the device.
    """

    def __init__(self, source: Slab | InPlace, target: Tensor) -> None:
        self.source = source
        self.target: Tensor | None = target  # Until it is handed over: the memory is the slot's.
        self._future: Future[HandedOver] = Future()

    def handed_over(self) -> HandedOver:
        """Wait until the GPU knows of the copy.

        Raises:
            BaseException: what went wrong.
        """
        return self._future.result()

    def query(self) -> bool:
        """Whether the copy is complete, or has failed."""
        return self._future.done() and (self.failed or self._future.result().ready.query())

    def synchronize(self) -> None:
        """Wait until the copy is complete, or has failed."""
        if not self.failed:
            self._future.result().ready.synchronize()

    @property
    def failed(self) -> bool:
        """Whether the copy has failed; waits until that is known."""
        return self._future.exception() is not None

    def run(self, copy: Callable[[Slab | InPlace, Tensor], HandedOver]) -> None:
        """Hand the copy over by ``copy``; to be called once."""
        assert self.target is not None
        try:
            self._future.set_result(copy(self.source, self.target))
        except BaseException as error:  # raised where the copy is needed
            self._future.set_exception(error)
        finally:
            self.target = None


class StagingRing:
    """Uploads to one GPU, one after another, in the order in which they are asked for.

    Args:
        device: the GPU.
        stream: its stream for uploads.
        warn: told if the buffers can not be page-locked; uploads are then slow but right.

    Threading: every method may be called from any thread.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, warn: Callable[[str], None]) -> None:
        self._device = device
        self._stream = stream
        self._slab = Slab([(torch.Size([_BUFFER_BYTES]), torch.uint8)] * _NUM_BUFFERS, pin=True, warn=warn)
        self._free: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0
        self._num_threads = torch.get_num_threads()
        self._more = threading.Condition()
        self._waiting: deque[StagedUpload] = deque()
        self._unread: deque[tuple[FileMappings, Tensor]] = deque()
        self._ahead_bytes = 0
        self._uploads: list[StagedUpload] = []
        self._closes = False
        self._thread = threading.Thread(target=self._work, name=f"roundpipe-staging-{device}", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory."""
        return self._slab.num_bytes if self._slab.pinned else 0

    def upload(self, source: Slab | InPlace, target: Tensor) -> StagedUpload:
        """Copy ``source`` to the device, in the dtype of ``target``.

        Args:
            source: where from; it must not be freed before.
            target: flat memory on the device, allocated for the upload stream.
        """
        upload = StagedUpload(source, target)
        with self._more:
            if (files := _files(source)) is not None:
                self._unread.extend((files, part) for _, part in _parts(source, target))
            self._waiting.append(upload)
            self._uploads.append(upload)
            self._more.notify()
        return upload

    def drain(self) -> list[HandedOver]:
        """Wait until nothing is under way; returns what was handed over since the last call, but for what failed."""
        with self._more:
            uploads, self._uploads = self._uploads, []
        return [upload.handed_over() for upload in uploads if not upload.failed]

    def close(self) -> None:
        """Finish what was asked for, and give the buffers back."""
        with self._more:
            self._closes = True
            self._more.notify()
        self._thread.join()
        self._stream.synchronize()
        self._slab.unpin()

    def _work(self) -> None:
        torch.cuda.set_device(self._device)
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        while True:
            with self._more:
                self._more.wait_for(lambda: self._waiting or self._closes)
                if not self._waiting:
                    return
                upload = self._waiting.popleft()
            upload.run(self._copy)

    def _copy(self, source: Slab | InPlace, target: Tensor) -> HandedOver:
        start = self._event()
        for begin, part in _parts(source, target):
            if _files(source) is not None:
                self._read_ahead()
                self._ahead_bytes -= tensor_bytes(part)
            self._send(part, target[begin : begin + len(part)])
        return HandedOver(start, self._event(), source.num_elements * target.element_size())

    def _read_ahead(self) -> None:
        while self._ahead_bytes < _READ_AHEAD_BYTES:
            with self._more:
                if not self._unread:
                    return
                files, part = self._unread.popleft()
            files.read_ahead(part)
            self._ahead_bytes += tensor_bytes(part)

    def _send(self, part: Tensor, target: Tensor) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % _NUM_BUFFERS
        free = self._free[turn]
        if free is not None:
            free.synchronize()
        # Converted on the way: what crosses the link is what is computed with.
        buffer = self._slab.tensors[turn].view(target.dtype)[: len(part)]
        buffer.copy_(part)
        with torch.cuda.stream(self._stream):
            target.copy_(buffer, non_blocking=True)
        done = self._free[turn] = torch.cuda.Event(blocking=True)
        done.record(self._stream)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


def _files(source: Slab | InPlace) -> FileMappings | None:
    return source.files if isinstance(source, InPlace) else None


def _parts(source: Slab | InPlace, target: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The elements of ``source`` in parts that fit a buffer, before and after conversion, each with its place."""
    size = _BUFFER_BYTES // max(source.dtype.itemsize, target.element_size())
    for begin, piece in source.pieces():
        for start in range(0, len(piece), size):
            yield begin + start, piece[start : start + size]
