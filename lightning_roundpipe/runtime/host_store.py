"""The host-memory home of weights and gradients.

[Note: Tensors of a parameter]
master: the `nn.Parameter` of the user's module, in host memory. There is one truth, and this is it.
compute copy: a worker's, in the dtype of computation. With GPUs the master's memory is moved into a pinned slab, under
    the same `nn.Parameter`, and is uploaded as it is; the worker converts it. Only a frozen master that computes in
    another dtype has a copy in host memory, converted once: it is uploaded again and again, and never updated. Where
    updates are delayed, every trainable master has one, too, for virtual workers as well: workers read the copy while
    the master is updated. What is not to be pinned (see `WeightPlacement`) stays where it is; the thread that stages it
    converts it on the way.
gradient: where the sum over a batch lands. It becomes ``.grad`` when Lightning expects it (see `publish`).
partial sum: what the micro-batch that learns the order of calls has contributed, told apart by place of use.

A parameter that is used at several places (tied weights) gets one sum for each, and those are added up in a fixed
order: the bits of the result do not depend on which worker finished first, or on how the calls were cut into stages.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_roundpipe.runtime.in_place import InPlace
from lightning_roundpipe.runtime.mapped import FileMappings
from lightning_roundpipe.runtime.pending import PendingStep
from lightning_roundpipe.runtime.placement import Home, WeightPlacement
from lightning_roundpipe.runtime.slab import Slab
from lightning_roundpipe.runtime.staging import StagedUpload
from lightning_roundpipe.runtime.units import Unit, tensor_bytes
from lightning_roundpipe.runtime.uses import UseCounter

__all__ = ["HostStore", "LandedSum", "UsePlace", "WeightSlab"]

_SAMPLES = 64
"""Elements by which a write to a frozen parameter is noticed; an update of all of them (a moving average) always is."""

_SAMPLES_IN_FILE = 4
"""The same for parameters in files, where each may be a page to read from a disk."""

_MANY = 1000

_MIXED_DTYPES_REFUSED = (torch.nn.modules.batchnorm._NormBase, torch.nn.RNNBase)
"""Modules whose operations autocast leaves alone and which do not accept parameters of lower precision than inputs."""


class UsePlace(NamedTuple):
    """Where a step uses a parameter: in the ``occurrence``-th call of a unit, or in a stretch of user code.

    Attributes:
        group: part of the micro-batches that add to the sum: a round of a replica group (see `Schedule.part_of`).
        unit: index of the unit, or -1 for user code between calls.
        occurrence: how many calls of the unit (for user code: of any unit) came before in the micro-batch.
    """

    group: int
    unit: int
    occurrence: int


@dataclass(eq=False)
class WeightSlab:
    """Memory that an upload of one unit (or one loose parameter) reads; all of one dtype, and to one dtype.

    Attributes:
        parameters: in the order of the slab's tensors.
        slab: the masters themselves, pinned or where they are, or copies in the dtype of computation.
        version: counts the refreshes; an upload of an older version is stale.
        uploads: passed when those who may still read the slab have done so.
    """

    parameters: list[Tensor]
    slab: Slab | InPlace
    version: int = 0
    uploads: list[torch.cuda.Event | StagedUpload] = field(default_factory=list)

    @property
    def copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of master and compute copy, where the two differ."""
        for parameter, copy in zip(self.parameters, self.slab.tensors, strict=True):
            if copy.data_ptr() != parameter.data_ptr():
                yield parameter, copy


@dataclass(frozen=True, eq=False)
class LandedSum:
    """The gradient that one place of use contributed.

    Attributes:
        place: see `UsePlace`.
        gradient: in host memory.
        event: passed when it has arrived; None if it has.
    """

    place: UsePlace
    gradient: Tensor
    event: torch.cuda.Event | None = None


@dataclass(eq=False)
class HostStore:
    """Sources of weights, and the gradients of the step that runs.

    Args:
        compute_dtype: dtype to which float32 parameters are converted for computation; None to leave them.
        pin: whether there are GPUs to copy to and from.
        warn: tells the user something.
        delays: whether workers read copies of trainable parameters, which may lack the last update.
        placement: where weights are to lie.

    Threading: every method may be called from any thread, except `adopt`, `refresh` and `close`.
    """

    compute_dtype: torch.dtype | None
    pin: bool
    warn: Callable[[str], None]
    delays: bool = False
    placement: WeightPlacement = field(default_factory=WeightPlacement)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _slabs: dict[int, WeightSlab] = field(default_factory=dict, init=False)
    _delayed: dict[int, Tensor] = field(default_factory=dict, init=False)
    _partials: dict[tuple[int, UsePlace], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _full_precision: set[int] = field(default_factory=set, init=False)
    _sums: dict[int, tuple[Tensor, list[LandedSum]]] = field(default_factory=dict, init=False)
    _landings: dict[int, list[Slab]] = field(default_factory=dict, init=False)
    _places: dict[int, set[tuple[int, int]]] = field(default_factory=dict, init=False)
    _num_places: dict[int, int] = field(default_factory=dict, init=False)
    _reserved: set[int] = field(default_factory=set, init=False)
    _hidden: dict[int, Tensor] = field(default_factory=dict, init=False)
    _readers: list[tuple[Tensor, int, torch.cuda.Event | None]] = field(default_factory=list, init=False)
    uses: UseCounter | None = field(default=None, init=False)
    pending: PendingStep | None = field(default=None, init=False)
    on_complete: Callable[[Tensor], None] | None = field(default=None, init=False)
    _fingerprints: dict[int, tuple[int, int, Tensor]] = field(default_factory=dict, init=False)
    _files: FileMappings | None = field(default=None, init=False)
    _in_files: dict[int, Tensor] = field(default_factory=dict, init=False)
    _may_pin: bool = field(default=True, init=False)

    # ------------------------------------------------------------------ weights

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """The dtype in which ``parameter`` computes."""
        if self.compute_dtype is None or parameter.dtype is not torch.float32 or id(parameter) in self._full_precision:
            return parameter.dtype
        return self.compute_dtype

    def uploaded_dtype(self, parameter: Tensor) -> torch.dtype:
        """The dtype in which ``parameter`` crosses the link."""
        home = self._slabs.get(id(parameter))
        staged = home is not None and not home.slab.pinned
        as_it_is = parameter.requires_grad and not self.delays and not staged
        return parameter.dtype if as_it_is else self.dtype_of(parameter)

    def uploaded_bytes(self, parameter: Tensor) -> int:
        """The bytes that cross the link when ``parameter`` is uploaded."""
        return parameter.numel() * self.uploaded_dtype(parameter).itemsize

    def adopt(self, root: nn.Module, units: Sequence[Unit]) -> None:
        """Decide how parameters compute and where they lie; lay out what GPUs read, and copies that may lack an update.

        Frozen and trainable parameters of a unit are apart: the first need not be uploaded again after an update. So
        are dtypes: all of a slab is converted alike. Trainable ones come first, should not all find a place.
        """
        for module in root.modules():
            if isinstance(module, _MIXED_DTYPES_REFUSED):
                self._full_precision.update(map(id, module.parameters(recurse=False)))
        parameters = list(root.parameters())
        files = self._files = FileMappings()
        self._in_files = {id(parameter): parameter for parameter in parameters if parameter in files}
        groups: list[Sequence[nn.Parameter]] = [unit.parameters for unit in units]
        groups += [[parameter] for parameter in parameters]
        # In host memory nothing is gained by taking weights out of files.
        placement = self.placement if self.pin or self.placement.kind != "auto" else WeightPlacement(kind="mmap")
        seen: set[int] = set()
        taken_bytes = 0
        for trainable in (True, False):
            for group in groups:
                alike: dict[tuple[torch.dtype, torch.dtype, bool], list[nn.Parameter]] = {}
                for parameter in group:
                    if parameter.requires_grad is trainable and id(parameter) not in seen:
                        seen.add(id(parameter))
                        kind = parameter.dtype, self.dtype_of(parameter), id(parameter) in self._in_files
                        alike.setdefault(kind, []).append(parameter)
                for (_, _, in_file), new in alike.items():
                    num_bytes = sum(map(tensor_bytes, new))
                    home = placement.home(
                        trainable=trainable, in_file=in_file, num_bytes=num_bytes, taken_bytes=taken_bytes
                    )
                    taken_bytes += num_bytes if in_file and not trainable and home is not Home.FILE else 0
                    self._adopt(new, home)

    def _adopt(self, new: Sequence[nn.Parameter], home: Home) -> None:
        delayed = self.delays and new[0].requires_grad
        if delayed or (home is Home.PINNED and self.pin):
            self._lay_out(new, pin=home is Home.PINNED, delayed=delayed)
        elif home is not Home.FILE:
            self._take_out_of_files(new)
        if self.pin and id(new[0]) not in self._slabs:
            source = WeightSlab(list(new), InPlace(new, self._files if home is Home.FILE else None))
            self._slabs.update((id(parameter), source) for parameter in new)

    def _lay_out(self, new: Sequence[nn.Parameter], *, pin: bool, delayed: bool) -> None:
        likes = [(parameter.shape, self.uploaded_dtype(parameter)) for parameter in new]
        home = WeightSlab(list(new), self._slab(likes, pin=pin))
        for parameter, tensor in zip(new, home.slab.tensors, strict=True):
            tensor.copy_(parameter.detach())
            if delayed:
                self._delayed[id(parameter)] = tensor
            elif tensor.dtype == parameter.dtype:
                # One copy in memory: the slab becomes the master's own memory.
                parameter.data = tensor
                self._in_files.pop(id(parameter), None)
            self._slabs[id(parameter)] = home
        if delayed:
            self._take_out_of_files(new)

    def _take_out_of_files(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if self._in_files.pop(id(parameter), None) is not None:
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)

    def _slab(self, likes: Sequence[tuple[torch.Size, torch.dtype]], *, pin: bool = True) -> Slab:
        pin = pin and self.pin and self._may_pin
        slab = Slab(likes, pin=pin, warn=self.warn)
        # Where the driver has refused once it is not asked again: that takes long, and other things need memory, too.
        self._may_pin &= slab.pinned or not pin or slab.num_bytes == 0
        return slab

    def lies_in_file(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` stays in the file from which it was loaded."""
        return id(parameter) in self._in_files

    def read_ahead(self, parameters: Iterable[Tensor]) -> None:
        """Have the kernel read those of ``parameters`` that lie in files."""
        if self._files is not None and self._in_files:
            for parameter in parameters:
                if self.lies_in_file(parameter):
                    self._files.read_ahead(parameter)

    def slab(self, parameter: Tensor) -> WeightSlab:
        """The slab from which ``parameter`` is uploaded."""
        return self._slabs[id(parameter)]

    def refresh(self, *, everything: bool) -> None:
        """Carry the masters into their compute copies, where they have changed.

        Args:
            everything: take every trainable parameter for changed; otherwise changes are noticed as those of frozen
                ones are, by samples.
        """
        for home in self._homes():
            if self.is_updating(home.parameters):
                continue  # Its update refreshes it, and is no change by the user.
            changed = {
                id(parameter)
                for parameter in home.parameters
                if self._has_changed(parameter) or (everything and parameter.requires_grad)
            }
            if changed:
                self._copy(home, changed)

    def is_pending(self, parameters: Iterable[Tensor]) -> bool:
        """Whether any of ``parameters`` has not been updated yet by the optimizer step before."""
        pending = self.pending
        return pending is not None and pending.holds_back and any(map(pending.is_pending, parameters))

    def is_updating(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the optimizer step before has still to do with any of ``parameters``."""
        pending = self.pending
        return pending is not None and any(map(pending.is_updating, parameters))

    def await_update(self, parameters: Iterable[Tensor]) -> None:
        """Wait until the optimizer step before lets ``parameters`` be used."""
        if (pending := self.pending) is not None:
            for parameter in parameters:
                pending.await_update(parameter)

    def refresh_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Carry the masters of ``parameters`` into their compute copies."""
        wanted = {id(parameter): parameter for parameter in parameters}
        for home in self._homes(wanted):
            self._copy(home, wanted.keys())
        self.note_update(wanted.values())

    def note_update(self, parameters: Iterable[Tensor]) -> None:
        """``parameters`` were updated: `refresh` is not to take that for a change by the user."""
        for parameter in parameters:
            if id(parameter) in self._slabs:
                self._has_changed(parameter)

    def uploading(self, home: WeightSlab, upload: torch.cuda.Event | StagedUpload) -> None:
        """An upload reads ``home`` until ``upload`` is passed."""
        with self._lock:
            home.uploads = [earlier for earlier in home.uploads if not earlier.query()]
            home.uploads.append(upload)

    def await_uploads(self, parameters: Iterable[Tensor]) -> None:
        """Wait until no upload that was started reads the memory of ``parameters``: they may be written then."""
        for home in self._homes(map(id, parameters)):
            with self._lock:
                uploads, home.uploads = home.uploads, []
            for upload in uploads:
                upload.synchronize()

    def _copy(self, home: WeightSlab, wanted: Collection[int]) -> None:
        for parameter, copy in home.copies:
            if id(parameter) in wanted:
                copy.copy_(self._master(parameter))
        home.version += 1  # Only now: an upload that began before may have read anything.

    def _has_changed(self, parameter: Tensor) -> bool:
        """Whether a parameter was written to: by its version, or (writes to ``.data`` leave that) by samples."""
        values = self._master(parameter).flatten()
        samples = _SAMPLES_IN_FILE if self.lies_in_file(parameter) else _SAMPLES
        now = parameter._version, parameter.data_ptr(), values[:: max(1, values.numel() // samples)].clone()
        before = self._fingerprints.get(id(parameter))
        self._fingerprints[id(parameter)] = now
        return before is None or before[:2] != now[:2] or not torch.equal(before[2], now[2])

    def _homes(self, keys: Iterable[int] | None = None) -> list[WeightSlab]:
        homes = map(self._slabs.get, self._slabs if keys is None else keys)
        return list({id(home): home for home in homes if home is not None}.values())

    def _master(self, parameter: Tensor) -> Tensor:
        return self._hidden.get(id(parameter), parameter).detach()

    def weight(self, parameter: Tensor) -> Tensor:
        """The values of ``parameter`` with which workers compute, in host memory."""
        delayed = self._delayed.get(id(parameter))
        return self._master(parameter) if delayed is None else delayed

    # ------------------------------------------------------------------ gradients

    def keep_partial(self, parameter: Tensor, place: UsePlace, gradient: Tensor) -> None:
        """Keep a sum that later micro-batches go on adding to."""
        with self._lock:
            self._partials[id(parameter), place] = parameter, gradient

    def take_partial(self, parameter: Tensor, place: UsePlace) -> Tensor | None:
        """Take back what `keep_partial` kept for ``place``."""
        with self._lock:
            entry = self._partials.pop((id(parameter), place), None)
        return entry[1] if entry is not None else None

    @property
    def partial_bytes(self) -> int:
        """Bytes of the sums that `keep_partial` keeps."""
        with self._lock:
            return sum(tensor_bytes(gradient) for _, gradient in self._partials.values())

    def land(self, parameter: Tensor, place: UsePlace, gradient: Tensor, event: torch.cuda.Event | None = None) -> None:
        """Give the sum for one place, in host memory; it has arrived when ``event`` is passed."""
        with self._lock:
            self._sums.setdefault(id(parameter), (parameter, []))[1].append(LandedSum(place, gradient, event))
            if not gradient.is_sparse:
                self._reserved.discard(gradient.data_ptr())

    def open_sum(self, parameter: Tensor, place: UsePlace) -> None:
        """A worker starts to sum a gradient."""
        with self._lock:
            self._places.setdefault(id(parameter), set()).add((place.unit, place.occurrence))
        if self.uses is not None:
            self.uses.add([parameter])

    def close_sums(self, parameters: Sequence[Tensor]) -> None:
        """Those sums have landed; tell if that completes a gradient."""
        if self.uses is None or self.on_complete is None:
            return
        self.uses.remove(parameters)
        for parameter in {id(parameter): parameter for parameter in parameters}.values():
            if self.uses.is_complete(parameter):
                self.on_complete(parameter)

    def has_arrived(self, parameter: Tensor) -> bool:
        """Whether all that has been landed for ``parameter`` is in host memory."""
        with self._lock:
            _, sums = self._sums.get(id(parameter), (parameter, []))
            return all(landed.event is None or landed.event.query() for landed in sums)

    def take_gradient(self, parameter: Tensor) -> Tensor | None:
        """Wait for all of one parameter's gradient and take it; None if there is none."""
        with self._lock:
            _, sums = self._sums.pop(id(parameter), (parameter, []))
            for key in [key for key in self._partials if key[0] == id(parameter)]:
                sums.append(LandedSum(key[1], self._partials.pop(key)[1]))
        return self._total(parameter, sums)

    @staticmethod
    def _total(parameter: Tensor, sums: list[LandedSum]) -> Tensor | None:
        # Added up from the last use to the first, as a backward pass meets them.
        total: Tensor | None = None
        for landed in sorted(sums, key=lambda landed: landed.place, reverse=True):
            if landed.event is not None:
                landed.event.synchronize()
            total = landed.gradient if total is None else total + landed.gradient
        return None if total is None else total.to(parameter.dtype)

    def has_one_place(self, parameter: Tensor) -> bool:
        """Whether a step has shown that ``parameter`` is used at one place only."""
        return self._num_places.get(id(parameter)) == 1

    def may_merge(self, parameter: Tensor) -> bool:
        """Whether a worker may add what another place has landed to its own sum.

        With two places of use the result is the same whoever adds. With more it depends on what has landed by then, so
        that all are added up at the end. How many there are is known when a step has shown it.
        """
        return self._num_places.get(id(parameter), _MANY) <= 2

    def take_landed(
        self, parameter: Tensor, group: int, worker: int, *, ahead_of_need: bool = False
    ) -> list[LandedSum]:
        """Take back what later places of the same replica group have landed, for ``worker`` to add it up.

        Nobody else may land in that memory until `reading` has told when the worker is done with it.

        Args:
            parameter: the master.
            group: of the places.
            worker: the one that takes it.
            ahead_of_need: only what has arrived, so that nothing waits for it; the gradient is not complete until
                `close_sums` is called for it, too.
        """
        with self._lock:
            _, sums = self._sums.get(id(parameter), (parameter, []))
            taken = [landed for landed in sums if landed.place.group == group]
            if ahead_of_need:
                taken = [landed for landed in taken if landed.event is None or landed.event.query()]
                if taken and self.uses is not None and not self.uses.hold(parameter):
                    return []  # Complete: no later stage adds to it, and its update may be taking it.
            sums[:] = [landed for landed in sums if landed not in taken]
            self._readers += [(landed.gradient, worker, None) for landed in taken]
        return taken

    def reading(self, gradient: Tensor, worker: int, event: torch.cuda.Event) -> None:
        """``worker`` is done with ``gradient``, which `take_landed` gave it, when ``event`` is passed."""
        with self._lock:
            self._readers = [reader for reader in self._readers if reader[0] is not gradient]
            self._readers.append((gradient, worker, event))

    def landing(self, parameter: Tensor, worker: int, *, overwrite_grad: bool) -> Tensor:
        """Pinned memory in which the gradient of ``parameter`` may land; nobody else gets it until `land`.

        Args:
            parameter: the master.
            worker: the one that writes; its own reads come before that, in the order of its streams.
            overwrite_grad: whether ``parameter.grad``, if it lies in such memory, is of no use any more.
        """
        with self._lock:
            slabs = self._landings.setdefault(id(parameter), [])
            sums = self._sums.get(id(parameter), (parameter, []))[1]
            used = {landed.gradient.data_ptr() for landed in sums if not landed.gradient.is_sparse} | self._reserved
            self._readers = [reader for reader in self._readers if reader[2] is None or not reader[2].query()]
            used |= {gradient.data_ptr() for gradient, reader, _ in self._readers if reader != worker}
            if parameter.grad is not None and not parameter.grad.is_sparse:
                used.add(parameter.grad.data_ptr())
                if overwrite_grad and any(parameter.grad.data_ptr() == slab.tensors[0].data_ptr() for slab in slabs):
                    used.remove(parameter.grad.data_ptr())
                    parameter.grad = None
            landing = next((slab.tensors[0] for slab in slabs if slab.tensors[0].data_ptr() not in used), None)
            if landing is None:
                slabs.append(self._slab([(parameter.shape, parameter.dtype)]))
                landing = slabs[-1].tensors[0]
            self._reserved.add(landing.data_ptr())
            return landing

    def owns(self, gradient: Tensor) -> bool:
        """Whether ``gradient`` lies in memory that `landing` gave."""
        if gradient.is_sparse:
            return False
        pointer = gradient.data_ptr()
        return any(slab.tensors[0].data_ptr() == pointer for slabs in self._landings.values() for slab in slabs)

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        """Wait for all gradients, hand them over, each parameter once, and forget them.

        Returns:
            Pairs of parameter and gradient, in the parameter's shape and dtype.
        """
        with self._lock:
            found = {key: parameter for key, (parameter, _) in self._sums.items()}
            found |= {key: parameter for (key, _), (parameter, _) in self._partials.items()}
        gradients = [(parameter, self.take_gradient(parameter)) for parameter in found.values()]
        return [(parameter, gradient) for parameter, gradient in gradients if gradient is not None]

    def clear(self) -> None:
        """Forget what has landed; for a step that failed."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._num_places |= {key: len(places) for key, places in self._places.items()}
        self.uses = self.on_complete = None
        self._readers.clear()
        self._partials.clear()
        self._sums.clear()
        self._reserved.clear()

    # ------------------------------------------------------------------ end, and tests

    @property
    def copy_bytes(self) -> int:
        """Host memory of copies that workers read in place of the masters, in bytes."""
        return sum(tensor_bytes(copy) for home in self._homes() for _, copy in home.copies)

    @property
    def landing_bytes(self) -> int:
        """Host memory in which gradients arrive from GPUs, in bytes; `owns` tells which gradients lie there."""
        return sum(slab.num_bytes for slabs in self._landings.values() for slab in slabs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory."""
        return sum(slab.num_bytes for slab in self._all_slabs() if slab.pinned)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the weights that stay in files."""
        return sum(map(tensor_bytes, self._in_files.values()))

    def close(self) -> None:
        """End the registration of all memory. Masters and gradients stay valid."""
        for slab in self._all_slabs():
            slab.unpin()
        self._slabs.clear()
        self._delayed.clear()
        self._landings.clear()
        self._in_files.clear()
        if self._files is not None:
            self._files.close()

    def _all_slabs(self) -> list[Slab]:
        weights = [home.slab for home in self._homes() if isinstance(home.slab, Slab)]
        return weights + [slab for slabs in self._landings.values() for slab in slabs]

    @contextmanager
    def poisoned(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Fill the masters with NaN while weights are still read right: proves that nothing bypasses this store."""
        floating = [parameter for parameter in parameters if parameter.is_floating_point()]
        self._hidden = {id(parameter): parameter.detach().clone() for parameter in floating}
        # A master that is uploaded from where it lies can not be hidden.
        copied = {id(parameter) for home in self._homes() for parameter, _ in home.copies}
        uploaded_in_place = self._slabs.keys() - copied
        try:
            with torch.no_grad():
                for parameter in floating:
                    if id(parameter) not in uploaded_in_place:
                        parameter.fill_(float("nan"))
            yield
        finally:
            with torch.no_grad():
                for parameter in floating:
                    parameter.copy_(self._hidden[id(parameter)])
            self._hidden = {}
