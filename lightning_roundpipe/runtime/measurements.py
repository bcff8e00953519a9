"""Rates that links, host memory and the optimizer reach on this machine.

Copies from and to GPUs are timed by CUDA events in the streams that run them, over pinned memory of the kind that
training uses (`Slab`). Every rate is the best of several tries.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from lightning_roundpipe.plan.timeline import Lane
from lightning_roundpipe.runtime.slab import Slab

__all__ = [
    "adamw_weights_per_s",
    "host_bytes_per_s",
    "link_bytes_per_s",
    "peer_copy_is_right",
    "pin_host_memory",
]

_TRIES = 3
_COPIES = 8
"""Copies in a row that are timed as one, so that their start and their end weigh little."""


# ------------------------------------------------------------------ links


def link_bytes_per_s(
    devices: Sequence[torch.device], lanes: Sequence[Lane], num_bytes: int = 256 * 2**20
) -> list[dict[Lane, float]]:
    """Bandwidth of pinned copies that run at once, in bytes/s.

    Args:
        devices: GPUs whose links are at work.
        lanes: directions that are at work on each of them.
        num_bytes: bytes of a copy.

    Returns:
        For each device the bandwidth by direction.
    """
    shape = torch.Size([num_bytes])
    sides = [(device, lane) for device in devices for lane in lanes]
    slabs = [Slab([(shape, torch.uint8)], pin=True, warn=_ignore) for _ in sides]
    on_device = [torch.empty(shape, dtype=torch.uint8, device=device) for device, _ in sides]
    streams = [torch.cuda.Stream(device) for device, _ in sides]
    best = [math.inf] * len(sides)
    try:
        for _ in range(_TRIES):
            for device in devices:
                torch.cuda.synchronize(device)
            starts = [torch.cuda.Event(enable_timing=True) for _ in sides]
            stops = [torch.cuda.Event(enable_timing=True) for _ in sides]
            for start, stream in zip(starts, streams, strict=True):
                start.record(stream)
            # In turn, so that no link is done long before another begins.
            for _ in range(_COPIES):
                for (_, lane), slab, there, stream in zip(sides, slabs, on_device, streams, strict=True):
                    source, target = (slab.flat, there) if lane is Lane.H2D else (there, slab.flat)
                    with torch.cuda.stream(stream):
                        target.copy_(source, non_blocking=True)
            for stop, stream in zip(stops, streams, strict=True):
                stop.record(stream)
            for side, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                stop.synchronize()
                best[side] = min(best[side], start.elapsed_time(stop) / 1e3)
    finally:
        for slab in slabs:
            slab.unpin()
    rates: list[dict[Lane, float]] = [{} for _ in devices]
    for side, (_, lane) in enumerate(sides):
        rates[side // len(lanes)][lane] = _COPIES * num_bytes / best[side]
    return rates


def peer_copy_is_right(source: torch.device, target: torch.device) -> bool:
    """Whether a copy from GPU to GPU arrives; on some consumer cards it delivers zeros without an error."""
    sent = torch.arange(1, 2**20 + 1, device=source)
    received = torch.zeros_like(sent, device=target)
    received.copy_(sent)
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
    return torch.equal(received.cpu(), sent.cpu())


def pin_host_memory(num_bytes: int, piece_bytes: int = 2**30) -> tuple[int, str | None]:
    """Pins host memory, piece by piece, and gives it back.

    Args:
        num_bytes: bytes to stop at.
        piece_bytes: bytes of a piece.

    Returns:
        Bytes that were pinned at once, and why there were not more; None if nothing stopped it before ``num_bytes``.
    """
    pieces: list[Slab] = []
    complaints: list[str] = []
    pinned = 0
    try:
        while pinned < num_bytes and not complaints:
            size = min(piece_bytes, num_bytes - pinned)
            piece = Slab([(torch.Size([size]), torch.uint8)], pin=True, warn=complaints.append)
            pieces.append(piece)
            pinned += size if piece.pinned else 0
    finally:
        for piece in pieces:
            piece.unpin()
    return pinned, complaints[0] if complaints else None


def _ignore(message: str) -> None:
    """Pinning is judged by `pin_host_memory`; copies are slow without it, which is what is then measured."""


# ------------------------------------------------------------------ host


def host_bytes_per_s(num_bytes: int = 512 * 2**20) -> float:
    """Bandwidth of host memory that all threads of torch reach together, reads and writes, in bytes/s.

    Args:
        num_bytes: bytes of each of two operands; far more than caches hold.
    """
    # A sum in place: a plain copy would read its target unseen before it writes it.
    source = torch.zeros(num_bytes // 4)
    target = torch.zeros_like(source)
    return 3 * num_bytes / _best_s(partial(target.add_, source))


def adamw_weights_per_s(num_weights: int = 32 * 2**20) -> float:
    """Weights/s that PyTorch's fused AdamW updates in host memory, all in float32, with all threads of torch."""
    weight = torch.zeros(num_weights, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    return num_weights / _best_s(torch.optim.AdamW([weight], fused=True).step)


def _best_s(run: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    best = math.inf
    for _ in range(1 + _TRIES):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
