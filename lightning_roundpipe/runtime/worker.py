"""A worker: one GPU, or one virtual CPU device. It owns no state between stages.

Only the thread that holds the worker's ticket touches it, so nothing here is locked.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_roundpipe.runtime.host_store import HostStore, UsePlace

__all__ = ["Worker"]

_HALF = (torch.float16, torch.bfloat16)


class Worker:
    """Copies of the weights of the stage that runs, and the sums of its gradients.

    Args:
        index: number of the worker; virtual workers share one device, so the number tells them apart.
        device: where its copies live and its calls run.
        store: the host memory that weights come from and gradients go to.
    """

    def __init__(self, index: int, device: torch.device, store: HostStore) -> None:
        self.index = index
        self.device = device
        self._store = store
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._stage = -1
        # Every value holds the host tensor of its key, so that an `id` is not given to another tensor meanwhile.
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        self._buffers: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._sums: dict[tuple[int, UsePlace], tuple[Tensor, Tensor]] = {}

    def __str__(self) -> str:
        return f"worker {self.index} ({self.device})"

    def activate(self) -> None:
        """Make this worker's device and stream the calling thread's own."""
        if self._stream is not None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._stream)

    def synchronize(self) -> None:
        """Wait until everything that was launched on this worker has run."""
        if self._stream is not None:
            self._stream.synchronize()

    def enter(self, stage: int, parameters: Iterable[Tensor]) -> None:
        """Start ``stage``: land the gradients of the previous one, drop its weights, bring this one's."""
        if stage == self._stage:
            return
        self.land()
        self._stage = stage
        wanted = {id(parameter): parameter for parameter in parameters}
        self._weights = {key: entry for key, entry in self._weights.items() if key in wanted}
        for parameter in wanted.values():
            self.weight(parameter)

    def weight(self, parameter: Tensor) -> Tensor:
        """This worker's copy of ``parameter``, uploaded if it is not there yet."""
        entry = self._weights.get(id(parameter))
        if entry is None:
            entry = self._weights[id(parameter)] = parameter, self.upload(self._store.weight(parameter))
        return entry[1]

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

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` on this worker that shares no memory with it."""
        return tensor.clone() if tensor.device == self.device else self.move(tensor)

    def move(self, tensor: Tensor) -> Tensor:
        """``tensor`` on this worker; the same object if it is there already.

        From another GPU it goes through host memory: direct copies silently deliver zeros on some consumer cards.
        """
        if tensor.device == self.device:
            return tensor
        if tensor.device.type != "cpu" and self.device.type != "cpu":
            tensor = tensor.cpu()
        return tensor.to(self.device)

    def accumulate(self, parameter: Tensor, place: UsePlace, gradient: Tensor) -> None:
        """Add the gradient of one micro-batch; micro-batches come in their order.

        Half-precision gradients are summed in float32: splitting a batch must not cost precision.
        """
        if gradient.dtype in _HALF:
            gradient = gradient.float()
        key = id(parameter), place
        entry = self._sums.get(key)
        total = self._store.take(parameter, place) if entry is None else entry[1]
        if total is not None:
            total = self.move(total)
            gradient = total + gradient if total.is_sparse or gradient.is_sparse else total.add_(gradient)
        self._sums[key] = parameter, gradient

    def land(self) -> None:
        """Send the gradient sums to the host."""
        for (_, place), (parameter, gradient) in self._sums.items():
            self._store.land(parameter, place, gradient.cpu())
        self._sums.clear()

    def clear(self) -> None:
        """Forget everything: the step is over or has failed."""
        self._stage = -1
        self._weights.clear()
        self._buffers.clear()
        self._sums.clear()
