"""An optimizer step that goes on after `training_step` has returned, into the next step's forward pass.

It takes the parameters in the order in which the forward pass will need them, and whoever needs one waits for it: no
weight is read before it is updated. Everything else that looks at parameters, gradients or optimizer state waits for
the whole step (see `UpdateFence`).

[Note: Delayed updates]
RoundPipe (arXiv 2604.27085) lets a step compute with weights that lack the update of the step before, and so never
waits for it. Workers then read copies of the trainable parameters. When the gradient of step t is complete, nothing in
step t reads the copy any more: it is refreshed from the master, which has the update of step t-1, and then the master
is updated with the gradient of step t. The next step waits for the refresh only. A step does not end before the update
of the step before has, so that none is ever two updates behind.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_roundpipe.runtime.partial_step import PartialStepper

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.host_store import HostStore

__all__ = ["PendingStep"]

_BATCH_ELEMENTS = 2**24
"""Parameters are updated together until they have so many elements: enough for all cores, and soon done."""


class PendingStep:
    """The rest of an optimizer step, in a thread of its own.

    Args:
        stepper: the step; its parameters have their complete ``.grad``.
        parameters: what is left to be stepped, in the order in which it is needed.
        store: told of updates, and refreshes compute copies.
        delays: whether compute copies are refreshed before the update instead of after it, and so lack it.

    Attributes:
        update_s: time spent on updates so far, in seconds.
        waited_s: time for which threads waited for a parameter so far, in seconds.

    Threading: `await_update`, `is_pending` and `is_updating` may be called from any thread.
    """

    def __init__(
        self, stepper: PartialStepper, parameters: Sequence[Tensor], store: "HostStore", *, delays: bool = False
    ) -> None:
        self._stepper = stepper
        self._parameters = parameters
        self._store = store
        self._delays = delays
        self._left = {id(parameter) for parameter in parameters}
        self._updating = set(self._left)
        self._progress = threading.Condition()
        self._error: BaseException | None = None
        self._num_threads = torch.get_num_threads()
        self.update_s = 0.0
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._work, name="roundpipe-pending-step", daemon=True)

    def start(self) -> None:
        """Start the thread; `join` waits for its end."""
        self._thread.start()

    @property
    def holds_back(self) -> bool:
        """Whether there is any parameter that the next step may not use yet."""
        return bool(self._left)

    def is_pending(self, parameter: Tensor) -> bool:
        """Whether the next step may not use ``parameter`` yet."""
        return id(parameter) in self._left

    def is_updating(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` has not been updated yet."""
        return id(parameter) in self._updating

    def await_update(self, parameter: Tensor) -> None:
        """Wait until the next step may use ``parameter``."""
        if id(parameter) not in self._left:
            return
        start = time.perf_counter()
        with self._progress:
            self._progress.wait_for(lambda: id(parameter) not in self._left)
            self.waited_s += time.perf_counter() - start

    def wait(self) -> None:
        """Wait for the end of the step, whatever comes of it."""
        self._thread.join()

    def join(self) -> None:
        """Wait for the end of the step.

        Raises:
            BaseException: what the optimizer raised; once.
        """
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            batches = list(_batches(self._parameters))
            if self._delays:
                for batch in batches:
                    with self._timed():
                        self._store.refresh_parameters(batch)
                    self._release(batch)
            for batch in batches:
                with self._timed():
                    self._stepper.step(batch)
                    if self._delays:
                        self._store.note_update(batch)
                    else:
                        self._store.refresh_parameters(batch)
                self._updating.difference_update(map(id, batch))
                self._release(batch)
            self._stepper.finish()
        except BaseException as error:  # raised by `join`
            error.add_note("While updating parameters in the background, after the training step.")
            self._error = error
        finally:
            self._updating.clear()
            self._release(self._parameters)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.update_s += time.perf_counter() - start

    def _release(self, parameters: Iterable[Tensor]) -> None:
        with self._progress:
            self._left.difference_update(map(id, parameters))
            self._progress.notify_all()


def _batches(parameters: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    batch: list[Tensor] = []
    for parameter in parameters:
        batch.append(parameter)
        if sum(member.numel() for member in batch) >= _BATCH_ELEMENTS:
            yield batch
            batch = []
    if batch:
        yield batch
