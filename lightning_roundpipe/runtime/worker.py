"""A worker: one GPU, or one virtual CPU device. It owns no state between steps.

Only the thread that holds the worker's ticket touches it, so nothing here is locked.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_roundpipe.plan.timeline import Lane, TransferSpan
from lightning_roundpipe.runtime.host_store import HostStore, UsePlace
from lightning_roundpipe.runtime.units import tensor_bytes

__all__ = ["Mark", "Worker", "as_gradient_sum"]

Mark = float | torch.cuda.Event
"""A moment on a worker: seconds of `time.perf_counter`, or an event that a GPU passes."""

_HALF = (torch.float16, torch.bfloat16)


def as_gradient_sum(gradient: Tensor) -> Tensor:
    """``gradient`` in the dtype in which sums over micro-batches are kept.

    That is float32 for half precision: splitting a batch must not cost precision.
    """
    return gradient.float() if gradient.dtype in _HALF else gradient


class Worker:
    """A virtual worker: copies of the weights of the stage that runs, and the sums of its gradients, in host memory.

    It runs the same schedule as a GPU, minus the streams; `GpuWorker` adds those.

    Args:
        index: number of the worker; virtual workers share one device, so the number tells them apart.
        device: where its copies live and its calls run.
        store: the host memory that weights come from and gradients go to.

    Attributes:
        holds_inputs: whether inputs of calls may stay on the device for their backward, because that runs here, too.
        overwrites_grad: whether a landing gradient may take the place of a parameter's ``.grad``.
        weight_budget_bytes: memory for weights.
        transfers: of the step so far: direction, marks of start and end, and bytes.
    """

    def __init__(self, index: int, device: torch.device, store: HostStore) -> None:
        self.index = index
        self.device = device
        self.holds_inputs = False
        self.overwrites_grad = True
        self.weight_budget_bytes = math.inf
        self.transfers: list[tuple[Lane, Mark, Mark, int]] = []
        self._store = store
        self._stage = -1
        # Every value holds the host tensor of its key, so that an `id` is not given to another tensor meanwhile.
        self._weights: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()
        self._buffers: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._sums: dict[tuple[int, UsePlace], tuple[Tensor, Tensor]] = {}

    def __str__(self) -> str:
        return f"worker {self.index} ({self.device})"

    # ------------------------------------------------------------------ tickets

    def activate(self) -> None:
        """Make this worker's device the calling thread's own."""

    def begin_step(self) -> None:
        """Get ready for a step."""
        self.transfers.clear()

    @property
    def allocated_bytes(self) -> int:
        """Memory of the device that is in use; 0 where nobody counts it."""
        return 0

    @property
    def free_bytes(self) -> float:
        """Memory of the device that a larger fused stage may use; 0 where nobody counts it."""
        return 0

    def mark(self) -> Mark:
        """This moment."""
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        """When ``mark`` was passed, in seconds on a clock that all workers share."""
        assert isinstance(mark, float)
        return mark

    def enter(
        self,
        stage: int,
        parameters: Sequence[Tensor],
        upcoming: Sequence[Tensor],
        *,
        comes_again: bool,
        part: int | None = None,
    ) -> None:
        """Start ``stage`` or go on with it: land the gradients of the previous one, drop its weights, bring this one's.

        Args:
            stage: its index.
            parameters: what its units need.
            upcoming: what the worker's next stage needs.
            comes_again: whether a later micro-batch will enter the stage, too.
            part: the part of the micro-batches (see `Schedule.part_of`) that goes on to that stage; None if none does.
        """
        if stage == self._stage:
            return
        self.land()
        self._stage = stage
        wanted = {id(parameter): parameter for parameter in parameters}
        for key in self._weights.keys() - wanted.keys():
            del self._weights[key]
        for parameter in wanted.values():
            if not self._store.is_pending([parameter]):
                self.weight(parameter)
        self._store.read_ahead(upcoming)

    # ------------------------------------------------------------------ weights and buffers

    def weight(self, parameter: Tensor) -> Tensor:
        """This worker's copy of ``parameter``, uploaded if it is not there yet."""
        if self.shares_memory(parameter):
            return self._store.weight(parameter)
        entry = self._weights.get(id(parameter))
        if entry is None:
            self._store.await_update([parameter])
            start = self.mark()
            entry = self._weights[id(parameter)] = parameter, self.upload_weight(parameter)
            self.transfers.append((Lane.H2D, start, self.mark(), self._store.uploaded_bytes(parameter)))
        return entry[1]

    def shares_memory(self, parameter: Tensor) -> bool:
        """Whether this worker computes with the master itself: a copy of a file in memory would be for nothing."""
        return self._store.lies_in_file(parameter) and self._store.dtype_of(parameter) is parameter.dtype

    def upload_weight(self, parameter: Tensor) -> Tensor:
        """A new copy of ``parameter`` on this worker."""
        self._store.await_update([parameter])
        return self._store.weight(parameter).to(self.device, self._store.dtype_of(parameter), copy=True)

    def forget_weights(self) -> None:
        """Masters were written, and the store told (`HostStore.refresh_parameters`): use no copy from before."""
        self._weights.clear()

    def buffer(self, host: Tensor) -> Tensor:
        """This worker's copy of the buffer ``host``, uploaded again if the host's was written since."""
        entry = self._buffers.get(id(host))
        version = 0 if host.is_inference() else host._version
        if entry is None or entry[1] != version:
            entry = self._buffers[id(host)] = host, version, self.upload(host.detach())
        return entry[2]

    def keep_buffer(self, host: Tensor, copy: Tensor) -> None:
        """Declare that ``copy`` holds what was just written to ``host``."""
        self._buffers[id(host)] = host, 0 if host.is_inference() else host._version, copy

    # ------------------------------------------------------------------ activations

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` on this worker that shares no memory with it."""
        return tensor.clone() if tensor.device == self.device else self.move(tensor)

    def uploading(self) -> AbstractContextManager[None]:
        """A context in which copies to this worker do not wait for its computation."""
        return nullcontext()

    def move(self, tensor: Tensor) -> Tensor:
        """``tensor`` on this worker; the same object if it is there already.

        From another GPU it goes through host memory: direct copies silently deliver zeros on some consumer cards.
        """
        if tensor.device == self.device:
            return tensor
        if tensor.device.type != "cpu" and self.device.type != "cpu":
            tensor = tensor.cpu()
        return tensor.to(self.device)

    def take_home(self, output: Any) -> Any:
        """``output`` without graphs, on its way to host memory; it has arrived when `synchronize` returns."""
        return tree_map_only(Tensor, lambda tensor: tensor.detach(), output)

    # ------------------------------------------------------------------ gradients

    def accumulate(self, parameter: Tensor, place: UsePlace, gradient: Tensor) -> None:
        """Add the gradient of one micro-batch; micro-batches come in their order."""
        key = id(parameter), place
        entry = self._sums.get(key)
        if entry is None:
            self._store.open_sum(parameter, place)
        total = self._store.take_partial(parameter, place) if entry is None else entry[1]
        if total is None:
            total = as_gradient_sum(gradient)
        elif total.is_sparse or gradient.is_sparse:
            total = self.move(total) + gradient
        else:
            total = self.move(total).add_(gradient)
        self._sums[key] = parameter, total

    def spill(self) -> None:
        """Send the sums to the host as partial ones: other micro-batches will go on adding to them, maybe elsewhere."""
        sums = self._take_sums(None)
        for parameter, place, total in sums:
            self._store.keep_partial(parameter, place, total.cpu())
        self._close_sums(sums)

    def land(self, place: UsePlace | None = None) -> None:
        """Send gradient sums to the host.

        Args:
            place: of this place only, where nothing more will be added, and of parameters that are used nowhere else;
                None for all.
        """
        sums = self._take_sums(place)
        for parameter, at, total in sums:
            start = self.mark()
            self._store.land(parameter, at, total)
            self.transfers.append((Lane.D2H, start, self.mark(), tensor_bytes(parameter)))
        self._close_sums(sums)

    def end_step(self) -> None:
        """Send what is left of the gradients."""
        self.land()

    def _take_sums(self, place: UsePlace | None) -> list[tuple[Tensor, UsePlace, Tensor]]:
        """Take away the sums that `land` is to send: parameter, place and sum of each."""
        taken = [
            key
            for key, (parameter, _) in self._sums.items()
            if place is None or (key[1] == place and self._store.has_one_place(parameter))
        ]
        sums = [(key, self._sums.pop(key)) for key in taken]
        return [(parameter, at, total) for (_, at), (parameter, total) in sums]

    def transfer_spans(self) -> list[TransferSpan]:
        """The transfers of the step, when all have ended."""
        return [
            TransferSpan(lane, self.index, self.seconds(start), self.seconds(stop), num_bytes)
            for lane, start, stop, num_bytes in self.transfers
        ]

    def _close_sums(self, sums: Sequence[tuple[Tensor, UsePlace, Tensor]]) -> None:
        self._store.close_sums([parameter for parameter, _, _ in sums])

    # ------------------------------------------------------------------ end

    def synchronize(self) -> None:
        """Wait until everything that was launched on this worker has run."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory of the worker's own."""
        return 0

    def close(self) -> None:
        """Wait for everything; the worker is not used any more."""
        self.synchronize()

    def clear(self) -> None:
        """Forget everything: the step is over or has failed."""
        self._stage = -1
        self._weights.clear()
        self._buffers.clear()
        self._sums.clear()

    def tidy(self) -> None:
        """Get ready for another schedule, whose memory has another shape."""

    def invalidate(self) -> None:
        """Forget what lasts longer than a step: the host's tensors may have been written without a trace."""
