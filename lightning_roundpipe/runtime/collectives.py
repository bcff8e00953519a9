"""Averages gradients over machines, in buckets, while the backward pass goes on.

[Note: Order of collectives]
A collective meets the one that the other machines issue at the same place in their sequence, whatever it is for. So one
thread issues all those of a step, bucket after bucket, in an order on which the machines have agreed; it waits for
gradients that complete later than others. The order is that of the reversed parameters in the first step, and
afterwards that in which gradients were complete on machine 0. Nobody else uses the process group.

Every bucket begins with a header of fixed size: it tells which parameters have a gradient on any machine, and whether
the machines are at the same place at all.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_roundpipe.exceptions import MachineLostError, MachineMismatchError

__all__ = ["GradientReducer", "Reduction", "ReductionRequest", "is_lost_connection", "naming_lost_machines"]

_BUCKET_BYTES = 2**25
"""Enough to hide the latency of a collective; small enough for the first to be under way while others are computed."""

_HEADER = 64
_CHECKS = 6
_ABSENT, _SPARSE, _DENSE = 0, 1, 2
"""In a header, of a parameter: no gradient, a sparse one, a dense one; where machines differ the greatest holds."""

_HALF = (torch.float16, torch.bfloat16)


def is_lost_connection(error: BaseException) -> bool:
    """Whether `torch.distributed` says with ``error`` that another process is gone or does not answer."""
    if isinstance(error, MachineLostError):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


@contextmanager
def naming_lost_machines(doing: str) -> Iterator[None]:
    """Give errors of lost connections a name.

    Args:
        doing: what the machines do together meanwhile, for the message.

    Raises:
        MachineLostError: another process is gone or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise MachineLostError(
            f"Another machine was lost {doing}: its process has ended, or did not answer within the timeout"
            " (`RoundPipeStrategy(timeout=...)`). Its own log says why; this one ends because training can not go on"
            f" without it. Resume from the last checkpoint. ({type(error).__name__}: {error})"
        ) from error


@dataclass(frozen=True)
class ReductionRequest:
    """How the gradients of a batch are averaged.

    Attributes:
        batch: number of the batch; the machines must be at the same one.
        is_last: whether the epoch ends with it; it must for all machines or for none.
        factor: factor on the gradients of the batch before they are averaged; None to leave that to whoever publishes
            them, and to average the batch's gradients alone.
        adds_grad: whether ``.grad`` holds what earlier batches gave on this machine, to be averaged with it.
    """

    batch: int
    is_last: bool
    factor: float | None = None
    adds_grad: bool = False

    @property
    def completes(self) -> bool:
        """Whether the results are what ``.grad`` is to become."""
        return self.factor is not None


@dataclass(eq=False)
class GradientReducer:
    """Averages gradients of one set of parameters over the machines of a process group.

    Args:
        group: a process group for tensors in host memory that nobody else uses.
        parameters: those that may get gradients, by name; the same on all machines.
        wire_dtype: dtype in which gradients cross the network; None for their own. Sums are formed in float32, or in
            the gradients' own dtype if that is wider.
        bucket_bytes: gradients are averaged together until they have so many bytes.

    Attributes:
        writes_buffers: whether machine 0 has seen that training writes buffers; known after the first step.
    """

    group: dist.ProcessGroup
    parameters: Sequence[tuple[str, Tensor]]
    wire_dtype: torch.dtype | None = None
    bucket_bytes: int = _BUCKET_BYTES
    writes_buffers: bool = field(default=False, init=False)
    _buckets: list[list[int]] = field(default_factory=list, init=False)
    _agreed: bool = field(default=False, init=False)
    _rooms: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict, init=False)

    def close(self) -> None:
        """Let go of the process group; the connections close with the last reference to it."""
        del self.group

    def __post_init__(self) -> None:
        self.num_machines = dist.get_world_size(self.group)
        self.index_of = {id(parameter): index for index, (_, parameter) in enumerate(self.parameters)}
        facts = [f"{name} {list(parameter.shape)} {parameter.dtype}" for name, parameter in self.parameters]
        digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).digest()
        self._digest = int.from_bytes(digest) >> 2  # A positive 64-bit integer whose negative is one, too.
        self._fill_buckets(range(len(self.parameters))[::-1])

    def _fill_buckets(self, order: Sequence[int]) -> None:
        self._buckets = []
        room = 0
        for index in order:
            parameter = self.parameters[index][1]
            num_bytes = parameter.numel() * parameter.element_size()
            last = self._buckets[-1] if self._buckets else []
            alike = bool(last) and self.parameters[last[0]][1].dtype == parameter.dtype
            if not alike or num_bytes > room or len(last) == _HEADER - _CHECKS:
                self._buckets.append([])
                room = self.bucket_bytes
            self._buckets[-1].append(index)
            room -= num_bytes

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """Indices of parameters that are averaged together, in the order in which that is done."""
        return self._buckets

    def average(
        self, bucket: Sequence[int], gradients: Sequence[Tensor | None], request: ReductionRequest
    ) -> list[Tensor | None]:
        """Average the gradients of a bucket; a parameter that has none here counts as zeros, and none anywhere as None.

        Args:
            bucket: indices of parameters.
            gradients: of each; their memory is used for the results where it can be.
            request: tells what the gradients are of.

        Raises:
            MachineMismatchError: the other machines average something else.
        """
        kinds = self._agree_on_kinds(bucket, gradients, request)
        results: list[Tensor | None] = [None] * len(bucket)
        places = [place for place, kind in enumerate(kinds) if kind == _DENSE]
        for place, kind in enumerate(kinds):
            if kind == _SPARSE:
                results[place] = self._average_sparse(self.parameters[bucket[place]][1], gradients[place])
        if places:
            parameters = [self.parameters[bucket[place]][1] for place in places]
            averaged = self._average_dense(parameters, [gradients[place] for place in places])
            for place, gradient in zip(places, averaged, strict=True):
                results[place] = gradient
        return results

    def _agree_on_kinds(
        self, bucket: Sequence[int], gradients: Sequence[Tensor | None], request: ReductionRequest
    ) -> list[int]:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        checks = torch.tensor([request.batch, int(request.is_last), self._digest])
        header[: len(checks)], header[len(checks) : _CHECKS] = checks, -checks
        for place, gradient in enumerate(gradients, start=_CHECKS):
            header[place] = _ABSENT if gradient is None else _SPARSE if gradient.is_sparse else _DENSE
        dist.all_reduce(header, dist.ReduceOp.MAX, group=self.group)
        greatest, least = header[: len(checks)].tolist(), (-header[len(checks) : _CHECKS]).tolist()
        if greatest[2] != least[2]:
            raise MachineMismatchError(
                "Machines train different parameters: those that require a gradient, their shapes or their dtypes"
                " differ. Freeze, unfreeze and add parameters on all machines alike."
            )
        if greatest[0] != least[0]:
            raise MachineMismatchError(
                f"Machines are not at the same batch: some are at number {least[0]}, others at {greatest[0]}. Each must"
                " take the same steps, with a backward pass on all of them or on none."
            )
        if greatest[1] != least[1]:
            raise MachineMismatchError(
                f"The data of some machines ends with batch {greatest[0]}, that of others goes on. Each must have the"
                " same number of batches: with `Trainer(limit_train_batches=...)`, or leave the distribution of samples"
                " to Lightning (`use_distributed_sampler=True`, which a dataset without a length does not allow)."
            )
        return header[_CHECKS : _CHECKS + len(bucket)].tolist()

    def _average_sparse(self, parameter: Tensor, gradient: Tensor | None) -> Tensor:
        total = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64),
            torch.zeros(0, *parameter.shape[1:], dtype=parameter.dtype),
            parameter.shape,
            check_invariants=False,
        )
        total = (total if gradient is None else gradient).coalesce()
        dist.all_reduce(total, group=self.group)
        return (total / self.num_machines).coalesce()

    def _average_dense(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        own = [_dense(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)]
        values = [_real(gradient).view(-1) for gradient in own]
        if len(own) > 1:
            self._average_together(values)
        else:  # Which may be larger than a bucket.
            for piece in values[0].split(max(1, self.bucket_bytes // values[0].element_size())):
                self._average_together([piece])
        return own

    def _average_together(self, values: Sequence[Tensor]) -> None:
        """Average values of one dtype, each without gaps in memory, in place."""
        own_dtype = values[0].dtype
        wire_dtype = self.wire_dtype if self.wire_dtype and own_dtype in (torch.float32, *_HALF) else own_dtype
        # What needs no conversion, and no company, is averaged where it is.
        flat = values[0] if len(values) == 1 and wire_dtype == own_dtype else self._together(values, wire_dtype)
        averaged = self._average_flat(flat)
        if averaged is not values[0]:
            for part, average in zip(values, averaged.split([part.numel() for part in values]), strict=True):
                part.copy_(average)

    def _together(self, values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """A copy of ``values`` in one piece."""
        counts = [part.numel() for part in values]
        flat = self._room("flat", sum(counts), dtype)
        for part, place in zip(values, flat.split(counts), strict=True):
            place.copy_(part)
        return flat

    def _room(self, purpose: str, count: int, dtype: torch.dtype) -> Tensor:
        """Memory that every bucket uses again: new pages would cost as much as a copy."""
        room = self._rooms.get((purpose, dtype))
        if room is None or room.numel() < count:
            room = self._rooms[purpose, dtype] = torch.empty(count, dtype=dtype)
        return room[:count]

    def _average_flat(self, flat: Tensor) -> Tensor:
        """Average values, in place except in half precision: then each machine sums one part of them, in float32."""
        if flat.dtype not in _HALF:
            dist.all_reduce(flat, group=self.group)
            return flat.div_(self.num_machines)
        count = -(-flat.numel() // self.num_machines)
        if count == 0:
            return flat
        sent, received = (self._room(name, count * self.num_machines, flat.dtype) for name in ("sent", "received"))
        sent[: flat.numel()] = flat
        sent[flat.numel() :] = 0
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=self.group)
        mine, *others = received.split(count)
        total = mine.float()
        for other in others:
            total += other
        part = total.div_(self.num_machines).to(flat.dtype)
        dist.all_gather(list(sent.view(torch.uint8).chunk(self.num_machines)), part.view(torch.uint8), group=self.group)
        return sent[: flat.numel()]

    def agree(self, completed: Sequence[int], *, writes_buffers: bool) -> None:
        """Take over machine 0's order, if that is not done yet.

        Args:
            completed: indices of parameters in the order in which their gradients were complete; some may be missing.
            writes_buffers: whether training writes buffers.
        """
        if self._agreed:
            return
        rest = dict.fromkeys(index for bucket in self._buckets for index in bucket).keys() - set(completed)
        facts = torch.tensor([writes_buffers, *completed, *sorted(rest, reverse=True)], dtype=torch.int64)
        dist.broadcast(facts, src=0, group=self.group)
        self.writes_buffers, order = bool(facts[0]), facts[1:].tolist()
        self._fill_buckets(order)
        self._agreed = True


class Reduction:
    """Averages the gradients of one batch, in a thread of its own.

    Args:
        reducer: what is averaged, and with whom.
        request: how.
        take: waits for this machine's gradient of a parameter and takes it; None if there is none.

    Attributes:
        then: told of each parameter whose gradient is averaged.
        reduce_s: time spent on averaging, waiting for the other machines included, in seconds.
        exposed_s: part of it for which the step had to wait, in seconds.

    Threading: `submit` may be called from any thread.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        request: ReductionRequest,
        take: Callable[[Tensor], Tensor | None],
    ) -> None:
        self._reducer = reducer
        self._request = request
        self._take = take
        self.then: Callable[[Tensor], None] = lambda parameter: None
        self._progress = threading.Condition()
        self._completed: dict[int, None] = {}  # A set that keeps its order.
        self._ended = False
        self._abandoned = False
        self._averaged: dict[int, tuple[Tensor, Tensor]] = {}
        self._memory: set[int] = set()
        self._writes_buffers = False
        self._error: BaseException | None = None
        self._num_threads = torch.get_num_threads()
        self.reduce_s = 0.0
        self.exposed_s = 0.0
        self._thread = threading.Thread(target=self._work, name="roundpipe-reduction", daemon=True)

    @property
    def completes(self) -> bool:
        """See `ReductionRequest`."""
        return self._request.completes

    def start(self) -> None:
        """Start the thread; `finish` or `abandon` ends it."""
        self._thread.start()

    def submit(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is complete on this machine."""
        index = self._reducer.index_of.get(id(parameter))
        if index is not None:
            with self._progress:
                self._completed[index] = None
                self._progress.notify()

    def finish(self, *, writes_buffers: bool = False) -> None:
        """All gradients of this machine are complete: wait until all are averaged.

        Raises:
            MachineLostError: another machine is gone or does not answer.
            MachineMismatchError: the other machines average something else.
        """
        start = time.perf_counter()
        with self._progress:
            self._ended, self._writes_buffers = True, writes_buffers
            self._progress.notify()
        self._thread.join()
        self.exposed_s = time.perf_counter() - start
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End the thread after an error elsewhere, when the collective that runs has ended."""
        if self._thread.is_alive():
            with self._progress:
                self._abandoned = True
                self._progress.notify()
            self._thread.join()

    def take(self, parameter: Tensor) -> Tensor | None:
        """Take the averaged gradient of ``parameter``; None if there is none."""
        with self._progress:
            entry = self._averaged.pop(id(parameter), None)
        return None if entry is None else entry[1]

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        """Take all averaged gradients that are left, with their parameters."""
        with self._progress:
            averaged, self._averaged = list(self._averaged.values()), {}
        return averaged

    @torch.no_grad()
    def _work(self) -> None:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            for bucket in self._reducer.buckets:
                with self._progress:
                    self._progress.wait_for(lambda bucket=bucket: self._is_due(bucket))  # type: ignore[misc]
                    if self._abandoned:
                        return
                self._average(bucket)
            with self._progress:
                self._progress.wait_for(lambda: self._ended or self._abandoned)
                if self._abandoned:
                    return
            with naming_lost_machines("while the order of gradients was agreed on"):
                self._reducer.agree(list(self._completed), writes_buffers=self._writes_buffers)
        except BaseException as error:  # raised by `finish`
            self._error = error

    def _is_due(self, bucket: Sequence[int]) -> bool:
        return self._ended or self._abandoned or all(index in self._completed for index in bucket)

    def _average(self, bucket: Sequence[int]) -> None:
        members = [self._reducer.parameters[index] for index in bucket]
        gradients = [self._complete(parameter) for _, parameter in members]
        start = time.perf_counter()
        with naming_lost_machines(f"while gradients were averaged (those from `{members[0][0]}` on)"):
            averaged = self._reducer.average(bucket, gradients, self._request)
        self.reduce_s += time.perf_counter() - start
        for (_, parameter), gradient in zip(members, averaged, strict=True):
            if gradient is not None:
                with self._progress:
                    self._averaged[id(parameter)] = parameter, gradient
            self.then(parameter)

    def _complete(self, parameter: Tensor) -> Tensor | None:
        """This machine's gradient, in memory that may be written to."""
        gradient = self._take(parameter)
        if gradient is not None and not gradient.is_sparse:
            gradient = self._own(gradient)
        factor = self._request.factor
        if gradient is not None and factor not in (None, 1.0):
            gradient = gradient * factor if gradient.is_sparse else gradient.mul_(factor)
        if self._request.adds_grad and parameter.grad is not None:
            before = parameter.grad
            if gradient is None:
                return before.clone()
            sparse = gradient.is_sparse or before.is_sparse
            return before + gradient if sparse else gradient.add_(before)
        return gradient

    def _own(self, gradient: Tensor) -> Tensor:
        """``gradient``, or a copy if it shares its memory: with itself, or with another parameter's."""
        memory = gradient.untyped_storage().data_ptr()
        if not gradient.is_contiguous() or memory in self._memory:
            return gradient.clone(memory_format=torch.contiguous_format)
        self._memory.add(memory)
        return gradient


def _dense(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    return (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
