import time
from contextlib import nullcontext

import pytest
import torch

from lightning_roundpipe.plan.timeline import Lane
from lightning_roundpipe.runtime import measurements
from lightning_roundpipe.runtime.measurements import (
    adamw_weights_per_s,
    host_bytes_per_s,
    link_bytes_per_s,
    peer_copy_is_right,
    pin_host_memory,
)


def test_rates_of_the_host_count_what_is_moved(monkeypatch):
    """With a clock on which every run takes a second."""
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert host_bytes_per_s(2**20) == 3 * 2**20
    assert adamw_weights_per_s(2**16) == 2**16


def test_host_rates_are_of_the_right_order():
    assert 1e8 < host_bytes_per_s(2**24) < 1e13
    assert 1e6 < adamw_weights_per_s(2**20) < 1e12


class FakeSlab:
    """Pinned memory of which there are so many bytes."""

    left = 0
    open = 0

    def __init__(self, likes, *, pin, warn):
        ((shape, dtype),) = likes
        self.size = shape.numel() * dtype.itemsize
        self.pinned = pin and self.size <= FakeSlab.left
        if self.pinned:
            FakeSlab.left -= self.size
            FakeSlab.open += 1
        else:
            warn("no more")

    def unpin(self):
        FakeSlab.open -= self.pinned
        self.pinned = False


@pytest.mark.parametrize(
    "there_is, wanted, pinned", [(1000, 350, (350, None)), (250, 350, (200, "no more")), (0, 5, (0, "no more"))]
)
def test_memory_is_pinned_until_there_is_no_more(there_is, wanted, pinned, monkeypatch):
    monkeypatch.setattr(FakeSlab, "left", there_is)
    monkeypatch.setattr(measurements, "Slab", FakeSlab)
    assert pin_host_memory(wanted, piece_bytes=100) == pinned
    assert FakeSlab.open == 0


class FakeEvent:
    """An event between any two of which 100 ms go by."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 100.0


class OrdinarySlab:
    def __init__(self, likes, *, pin, warn):
        assert pin
        ((shape, dtype),) = likes
        self.flat = torch.ones(shape, dtype=dtype)

    def unpin(self):
        self.flat = None


@pytest.fixture
def fake_cuda(monkeypatch):
    """Lets what is written for GPUs run in host memory, by a clock of its own."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(measurements, "Slab", OrdinarySlab)


CPU = torch.device("cpu")


def test_a_link_moves_the_bytes_of_all_copies(fake_cuda):
    expected = {Lane.H2D: 8 * 1000 / 0.1, Lane.D2H: 8 * 1000 / 0.1}
    assert link_bytes_per_s([CPU, CPU], [Lane.H2D, Lane.D2H], 1000) == [expected, expected]
    assert link_bytes_per_s([CPU], [Lane.D2H], 1000) == [{Lane.D2H: expected[Lane.D2H]}]


def test_a_copy_is_compared(fake_cuda, monkeypatch):
    assert peer_copy_is_right(CPU, CPU)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)  # delivers zeros
    assert not peer_copy_is_right(CPU, CPU)
