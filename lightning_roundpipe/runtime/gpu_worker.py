"""A worker that is a GPU: streams, weight slots, landing gradients.

[Note: Streams of a GPU]
compute: the device's default stream, so that user code and PyTorch's backward threads need no care.
h2d: uploads of weights; the next stage's come while this one computes.
inputs: uploads of batches, which must not queue behind weights that are needed later.
d2h: gradients and outputs on their way home, while the next micro-batch computes.

Memory that crosses streams is held, with its event, until the other stream is done with it. Nothing waits for the whole
device inside a step.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_roundpipe.plan.timeline import Lane
from lightning_roundpipe.runtime.host_store import HostStore, LandedSum, UsePlace, WeightSlab
from lightning_roundpipe.runtime.slab import Slab
from lightning_roundpipe.runtime.staging import StagedUpload, StagingRing
from lightning_roundpipe.runtime.units import tensor_bytes
from lightning_roundpipe.runtime.worker import Mark, Worker

__all__ = ["GpuWorker"]

_CHUNK_BYTES = 64 * 2**20
"""Pieces of a weight upload: long enough for full speed, short enough not to keep an activation waiting. A multiple of
every element size."""

_KEPT_GRAPHS_UP_TO = 0.7
"""Share of the memory up to which graphs are kept instead of recomputed. The rest is for gaps between the allocator's
blocks, and for batches that need more than those so far."""


@dataclass(eq=False)
class _Slot:
    """Device memory that holds one unit's weights.

    Attributes:
        flat: all elements, padding included.
        home: the slab that it holds a copy of.
        version: of that slab.
        weights: the copies, by id of the parameter.
        ready: passed by the upload stream when the copy is complete; to come, if it goes through the staging ring.
        awaited: whether the compute stream waits for `ready` already.
    """

    flat: Tensor
    home: WeightSlab
    version: int
    weights: dict[int, Tensor]
    ready: torch.cuda.Event | StagedUpload
    awaited: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return tensor_bytes(self.flat)


class _BroughtSum(NamedTuple):
    """What another place has landed, on its way back to the device.

    Attributes:
        place: see `UsePlace`.
        gradient: on the device.
        arrived: passed by the upload stream when it is complete.
    """

    place: UsePlace
    gradient: Tensor
    arrived: torch.cuda.Event


class GpuWorker(Worker):
    """See `Worker`.

    Args:
        index: see there.
        device: see there.
        store: see there.
        weight_budget_bytes: device memory for weights. What fits stays; the least recently used goes first. Two stages
            are held at least, whatever the budget.
        memory_bytes: device memory that may be in use, by whatever.
    """

    def __init__(
        self, index: int, device: torch.device, store: HostStore, weight_budget_bytes: int, memory_bytes: int
    ) -> None:
        super().__init__(index, device, store)
        self.weight_budget_bytes = weight_budget_bytes
        self._memory_bytes = memory_bytes
        self._compute = torch.cuda.default_stream(device)
        self._h2d = torch.cuda.Stream(device)
        self._inputs = torch.cuda.Stream(device)
        self._d2h = torch.cuda.Stream(device)
        self._slots: OrderedDict[int, _Slot] = OrderedDict()
        self._wanted: set[int] = set()
        self._now: list[WeightSlab] = []
        self._upcoming: list[WeightSlab] = []
        self._staging: Tensor | None = None
        self._ring: StagingRing | None = None
        self._in_flight: list[tuple[torch.cuda.Event, list[Tensor]]] = []
        self._brought: dict[tuple[int, int], tuple[Tensor, list[_BroughtSum]]] = {}
        self._epoch = self._event(self._compute)
        self._epoch_s = 0.0

    def _event(self, stream: torch.cuda.Stream, *, timing: bool = True) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    # ------------------------------------------------------------------ tickets

    def activate(self) -> None:
        """Make this worker's device and its compute stream the calling thread's own."""
        torch.cuda.set_stream(self._compute)

    def begin_step(self) -> None:
        """Start the clock of `seconds` anew: events count in single precision."""
        super().begin_step()
        self._compute.synchronize()
        self._epoch, self._epoch_s = self._event(self._compute), time.perf_counter()

    @property
    def allocated_bytes(self) -> int:
        """Memory of the device that is in use."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def free_bytes(self) -> float:
        """Memory of the device that a larger fused stage may use: beyond the most that was in use until now."""
        return max(0.0, _KEPT_GRAPHS_UP_TO * self._memory_bytes - torch.cuda.max_memory_allocated(self.device))

    def mark(self) -> Mark:
        """This moment, in the order of the compute stream."""
        return self._event(self._compute)

    def seconds(self, mark: Mark) -> float:
        """When ``mark`` was passed; it must have been."""
        assert isinstance(mark, torch.cuda.Event)
        return self._epoch_s + float(self._epoch.elapsed_time(mark)) / 1000

    def enter(
        self,
        stage: int,
        parameters: Sequence[Tensor],
        upcoming: Sequence[Tensor],
        *,
        comes_again: bool,
        part: int | None = None,
    ) -> None:
        """Start ``stage``; the uploads for the next one go on while it computes.

        They are started when its second micro-batch comes: starting them takes a while, in which the GPU needs work.
        """
        if stage != self._stage:
            self.land()
            self._send_unused(parameters)
            self._stage = stage
            now, later = self._homes(parameters), self._homes(upcoming)
            self._wanted = now.keys() | later.keys()
            self._now = list(now.values())
            self._load_updated(self._now)
            self._upcoming = list(later.values())
            if comes_again:
                return
        self._load_updated(self._upcoming)
        self._upcoming.clear()
        if part is not None:
            self._bring_sums(upcoming, part)

    def _load_updated(self, homes: Iterable[WeightSlab]) -> None:
        """Load ahead of need what no update is still to change."""
        for home in homes:
            if not self._store.is_pending(home.parameters):
                self._load(home)

    def _homes(self, parameters: Iterable[Tensor]) -> dict[int, WeightSlab]:
        homes = map(self._store.slab, parameters)
        return {id(home): home for home in homes}

    # ------------------------------------------------------------------ weights

    def upload_weight(self, parameter: Tensor) -> Tensor:
        """A new copy of ``parameter`` on this worker."""
        self._store.await_update([parameter])
        return self._store.weight(parameter).to(self.device, self._store.dtype_of(parameter))

    def weight(self, parameter: Tensor) -> Tensor:
        """This worker's copy of ``parameter``, uploaded if it is not there yet."""
        home = self._store.slab(parameter)
        if self._store.is_pending(home.parameters):
            self._store.await_update(home.parameters)
            self._load(home)
            self._load_updated(self._now)
        slot = self._load(home)
        if not slot.awaited:
            ready = slot.ready.handed_over().ready if isinstance(slot.ready, StagedUpload) else slot.ready
            self._compute.wait_event(ready)
            slot.awaited = True
        return slot.weights[id(parameter)]

    def shares_memory(self, parameter: Tensor) -> bool:
        """False: a GPU computes with copies."""
        return False

    def _load(self, home: WeightSlab) -> _Slot:
        slot = self._slots.get(id(home))
        if slot is not None and slot.version == home.version:
            self._slots.move_to_end(id(home))
            return slot
        if slot is not None:
            self._evict(id(home))
        version = home.version  # As it is before anything is read.
        source, target = home.slab, self._store.dtype_of(home.parameters[0])
        self._make_room(source.num_elements * target.itemsize)
        # Slots outlive an evaluation: they must not be inference tensors.
        with torch.inference_mode(False), torch.cuda.stream(self._h2d):
            flat = torch.empty(source.num_elements, dtype=target, device=self.device)
            tensors = source.views_of(flat)
        ready: torch.cuda.Event | StagedUpload
        if isinstance(source, Slab) and source.pinned:
            ready = self._upload(source, flat)
        else:
            if self._ring is None:
                self._ring = StagingRing(self.device, self._h2d, self._store.warn)
            ready = self._ring.upload(source, flat)
        weights = dict(zip(map(id, home.parameters), tensors, strict=True))
        self._store.uploading(home, ready)
        slot = _Slot(flat, home, version, weights, ready)
        self._slots[id(home)] = slot
        return slot

    def _upload(self, slab: Slab, flat: Tensor) -> torch.cuda.Event:
        """Copy what is pinned; returns an event that is passed when that is done."""
        start = self._event(self._h2d)
        with torch.inference_mode(False), torch.cuda.stream(self._h2d):
            for begin, piece in slab.pieces():
                self._copy_in_chunks(piece, flat[begin : begin + len(piece)])
        ready = self._event(self._h2d)
        self.transfers.append((Lane.H2D, start, ready, slab.payload_bytes))
        return ready

    def _copy_in_chunks(self, source: Tensor, target: Tensor) -> None:
        """Copy chunk by chunk, on the upload stream; where dtypes differ, through memory that is used again."""
        elements = _CHUNK_BYTES // source.element_size()
        for start in range(0, len(source), elements):
            chunk, destination = source[start : start + elements], target[start : start + elements]
            if source.dtype == target.dtype:
                destination.copy_(chunk, non_blocking=True)
                continue
            if self._staging is None:
                self._staging = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=self.device)
            staged = self._staging.view(source.dtype)[: len(chunk)]
            staged.copy_(chunk, non_blocking=True)
            destination.copy_(staged)

    def _make_room(self, num_bytes: int) -> None:
        used = sum(slot.num_bytes for slot in self._slots.values())
        for key, slot in list(self._slots.items()):
            if used + num_bytes <= self.weight_budget_bytes:
                return
            if key not in self._wanted:
                self._evict(key)
                used -= slot.num_bytes

    def _evict(self, key: int) -> None:
        # The allocator gives the memory away when nothing refers to it (a graph may, until its backward has run), and
        # when the compute stream is past this point.
        self._slots.pop(key).flat.record_stream(self._compute)

    # ------------------------------------------------------------------ activations

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Copies started inside run beside the computation that is under way.

        What they write must be held until the step is over.
        """
        with torch.cuda.stream(self._inputs):
            yield
        self._compute.wait_stream(self._inputs)

    def take_home(self, output: Any) -> Any:
        """``output`` without graphs, on its way to pinned host memory."""
        done = self._event(self._compute, timing=False)
        self._d2h.wait_event(done)
        held: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if tensor.device.type == "cpu":
                return tensor.detach()
            held.append(tensor.detach())
            return held[-1].to("cpu", non_blocking=True)

        with torch.cuda.stream(self._d2h):
            moved = tree_map_only(Tensor, copy, output)
        self._hold(held)
        return moved

    # ------------------------------------------------------------------ gradients

    def land(self, place: UsePlace | None = None) -> None:
        """Send gradient sums to the host, beside the computation that goes on."""
        sums = self._take_sums(place)
        if not sums:
            return
        counted = [parameter for parameter, _, _ in sums]
        totals: dict[tuple[int, int | UsePlace], tuple[Tensor, UsePlace, Tensor]] = {}
        for parameter, at, total in sorted(sums, key=lambda item: item[1], reverse=True):
            into = at.group if self._store.may_merge(parameter) else at
            known = totals.get((id(parameter), into))
            totals[id(parameter), into] = parameter, at, total if known is None else known[2] + total
        ready = []
        for parameter, at, total in totals.values():
            if total.is_sparse:
                self._store.land(parameter, at, total.cpu())
                continue
            if self._store.may_merge(parameter):
                # A tied weight: adding up on the GPU is cheaper than on the host.
                _, brought = self._brought.pop((id(parameter), at.group), (parameter, []))
                counted += [parameter] * bool(brought)
                landed = self._store.take_landed(parameter, at.group, self.index)
                for other in [*brought, *map(self._bring_back, landed)]:
                    self._compute.wait_event(other.arrived)
                    total = other.gradient + total
            ready.append((parameter, at, total.to(parameter.dtype)))
        self._send(ready)
        self._store.close_sums(counted)

    def _send(self, ready: Sequence[tuple[Tensor, UsePlace, Tensor]]) -> None:
        """Land parameters' gradients."""
        self._d2h.wait_event(self._event(self._compute, timing=False))
        landings = []
        start = self._event(self._d2h)
        with torch.cuda.stream(self._d2h):
            for parameter, _, total in ready:
                landings.append(self._store.landing(parameter, self.index, overwrite_grad=self.overwrites_grad))
                landings[-1].copy_(total, non_blocking=True)
        event = self._hold([total for _, _, total in ready])
        self.transfers.append((Lane.D2H, start, event, sum(tensor_bytes(total) for _, _, total in ready)))
        for (parameter, at, _), landing in zip(ready, landings, strict=True):
            self._store.land(parameter, at, landing, event)

    def _bring_back(self, landed: LandedSum) -> _BroughtSum:
        if landed.event is not None:
            self._h2d.wait_event(landed.event)
        with torch.cuda.stream(self._h2d):
            gradient = landed.gradient.to(self.device, non_blocking=True)
        arrived = self._event(self._h2d, timing=False)
        self._store.reading(landed.gradient, self.index, arrived)
        gradient.record_stream(self._compute)
        return _BroughtSum(landed.place, gradient, arrived)

    def _bring_sums(self, parameters: Iterable[Tensor], part: int) -> None:
        """Bring back ahead of need what later places of use have landed for the parameters of the next stage."""
        for parameter in parameters:
            if (id(parameter), part) not in self._brought and self._store.may_merge(parameter):
                landed = self._store.take_landed(parameter, part, self.index, ahead_of_need=True)
                if landed:
                    self._brought[id(parameter), part] = parameter, [self._bring_back(one) for one in landed]

    def _send_unused(self, used: Iterable[Tensor]) -> None:
        """Land again what was brought back for other parameters than ``used``: they got no gradient in the stage."""
        wanted = set(map(id, used))
        for key in [key for key in self._brought if key[0] not in wanted]:
            parameter, brought = self._brought.pop(key)
            for other in brought:
                self._compute.wait_event(other.arrived)
            self._send([(parameter, other.place, other.gradient) for other in brought])
            self._store.close_sums([parameter])

    def end_step(self) -> None:
        """Send what is left."""
        super().end_step()
        self._send_unused([])

    def _hold(self, tensors: list[Tensor]) -> torch.cuda.Event:
        """Keep ``tensors`` until the download stream is past this point."""
        self._in_flight = [(event, held) for event, held in self._in_flight if not event.query()]
        event = self._event(self._d2h)
        self._in_flight.append((event, tensors))
        return event

    # ------------------------------------------------------------------ end

    def synchronize(self) -> None:
        """Wait until everything that was launched on this worker has run."""
        self._drain_ring()
        for stream in (self._compute, self._h2d, self._inputs, self._d2h):
            stream.synchronize()

    def _drain_ring(self) -> None:
        if self._ring is not None:
            self.transfers += [(Lane.H2D, *upload) for upload in self._ring.drain()]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory of the worker's own."""
        return 0 if self._ring is None else self._ring.pinned_bytes

    def close(self) -> None:
        """Wait for everything, and give page-locked buffers back; the worker is not used any more."""
        self.synchronize()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def clear(self) -> None:
        """Forget what belongs to the step. Weights and buffers stay; stale versions are not used again."""
        self._drain_ring()
        self._stage = -1
        self._sums.clear()
        self._brought.clear()
        self._wanted = set()
        self._now, self._upcoming = [], []
        self._in_flight.clear()

    def tidy(self) -> None:
        """Give back the memory that is cached, in pieces of the sizes that another schedule needed."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def invalidate(self) -> None:
        """Forget buffers: the host's may have been written without a trace."""
        self._buffers.clear()
