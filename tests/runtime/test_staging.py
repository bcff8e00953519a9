"""The staging ring, on streams that are played here: what it copies, in which order, and how far ahead it reads."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.runtime import staging
from lightning_roundpipe.runtime.in_place import InPlace
from lightning_roundpipe.runtime.slab import Slab
from lightning_roundpipe.runtime.staging import StagingRing

CPU = torch.device("cpu")


class Moment:
    """An event that is passed at once, as everything is here."""

    def __init__(self, **options: Any) -> None:
        self.recorded = False

    def record(self, stream: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded

    def query(self) -> bool:
        return self.recorded


class Stream:
    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Slab, "_register", lambda slab, num_bytes, warn: True)
    monkeypatch.setattr(Slab, "unpin", lambda slab: None)
    monkeypatch.setattr(staging, "_BUFFER_BYTES", 1024)


@contextlib.contextmanager
def ring() -> Any:
    made: Any = StagingRing(CPU, Stream(), print)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["in place", "slab"])
def test_copies_arrive_in_the_dtype_of_computation(target: torch.dtype, kind: str) -> None:
    masters = [torch.randn(3, 5), torch.randn(40, 41), torch.empty(0), torch.randn(200, 10).t()]
    source: Any = InPlace(masters)
    if kind == "slab":
        source = Slab(source.likes, pin=True, warn=print)
        for tensor, master in zip(source.tensors, masters, strict=True):
            tensor.copy_(master)
    with ring() as staged:
        assert staged.pinned_bytes == 4 * 1024
        copies = [torch.zeros(source.num_elements, dtype=target) for _ in range(3)]
        uploads = [staged.upload(source, copy) for copy in copies]
        for upload in uploads:
            upload.synchronize()
            assert upload.query()
            assert upload.handed_over().num_bytes == source.num_elements * target.itemsize
        assert staged.drain() == [upload.handed_over() for upload in uploads]
        assert staged.drain() == []
    for copy in copies:
        for master, view in zip(masters, source.views_of(copy), strict=True):
            assert torch.equal(view, master.to(target))


def test_files_are_read_ahead_of_the_copy_but_not_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the copies, each part once, and never more than a window."""
    window = 8 * 1024
    monkeypatch.setattr(staging, "_READ_AHEAD_BYTES", window)
    read: list[Tensor] = []
    ahead: list[int] = []
    files: Any = SimpleNamespace(read_ahead=read.append)
    send = StagingRing._send
    sent = 0

    def watched(self: StagingRing, part: Tensor, target: Tensor) -> None:
        nonlocal sent
        if part.data_ptr() in mapped:
            ahead.append(sum(tensor.nbytes for tensor in read) - sent)
            sent += part.nbytes
        send(self, part, target)

    monkeypatch.setattr(StagingRing, "_send", watched)
    weights = [torch.randn(100, 100) for _ in range(3)]
    mapped = {weight.data_ptr() + start for weight in weights for start in range(0, weight.nbytes, 1024)}
    gate = threading.Event()
    sources = [InPlace([weight], files) for weight in weights]
    with ring() as staged:
        hold = InPlace([torch.ones(1)])
        monkeypatch.setattr(hold, "pieces", lambda: iter([(0, torch.ones(1))] if gate.wait(10) else []))
        staged.upload(hold, torch.zeros(64))
        for source in sources:
            staged.upload(source, torch.zeros(source.num_elements))
        gate.set()
        staged.drain()
    assert [t.data_ptr() for t in read] == [w.data_ptr() + s for w in weights for s in range(0, w.nbytes, 1024)]
    assert min(ahead[:-8]) >= window - 1024
    assert max(ahead) < window + 1024


def test_an_error_is_told_where_the_copy_is_waited_for() -> None:
    with ring() as staged:
        good = InPlace([torch.ones(8)])
        failed = staged.upload(good, torch.zeros(2))  # too small
        after = staged.upload(good, torch.zeros(64))
        with pytest.raises(RuntimeError, match="size"):
            failed.handed_over()
        failed.synchronize()
        assert failed.query()
        assert staged.drain() == [after.handed_over()]
