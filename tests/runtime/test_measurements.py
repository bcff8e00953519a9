import time

import pytest

from lightning_roundpipe.runtime import measurements
from lightning_roundpipe.runtime.measurements import adamw_weights_per_s, host_bytes_per_s, pin_host_memory


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
