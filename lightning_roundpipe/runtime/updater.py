"""Updates parameters in the background, each as soon as its gradient is complete (see `uses`).

Gradients are complete in the reverse of the order in which the next forward pass needs the weights. Of those that are
there, the one that is needed first is updated first: what is left at the end of the step is then needed late.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_roundpipe.runtime.host_store import HostStore
from lightning_roundpipe.runtime.partial_step import PartialStepper
from lightning_roundpipe.runtime.pending import PendingStep

__all__ = ["UpdateRequest", "Updater"]

_BATCH_ELEMENTS = 2**25


@dataclass(frozen=True, eq=False)
class UpdateRequest:
    """The optimizer step that follows a batch.

    Attributes:
        stepper: the step.
        factor: factor on the gradients of the batch (1 / number of accumulated batches).
        fresh: whether ``.grad`` starts anew with the batch; otherwise it is added to.
        leaves_rest: whether parameters that are not updated when the pipeline has ended are left to the caller.
        delays: whether the next step is to lack the update (see [Note: Delayed updates]).
        measures: whether gradients are only completed and measured meanwhile (`PartialStepper.measure`), because all of
            them must be known before the first update; ``leaves_rest`` must be set, too.
    """

    stepper: PartialStepper
    factor: float
    fresh: bool
    leaves_rest: bool = False
    delays: bool = False
    measures: bool = False


class Updater:
    """Takes one optimizer step, in a thread of its own, while the pipeline still runs.

    Args:
        request: the step.
        store: its compute copies are refreshed right behind the update, or right before.
        take: waits for the gradient of a parameter and takes it; None if there is none.
        after: a step that must end first.
        needed: when the next forward pass needs a parameter, by its id; what is missing is needed at once.

    Attributes:
        updated: parameters that were updated, or are left to be, with their complete gradients.
        update_s: time spent on updates, in seconds.
    """

    def __init__(
        self,
        request: UpdateRequest,
        store: HostStore,
        take: Callable[[Tensor], Tensor | None],
        after: PendingStep | None,
        needed: Mapping[int, int],
    ) -> None:
        self._after = after
        self._take = take
        self._leaves_rest = request.leaves_rest
        self._delays = request.delays
        self._measures = request.measures
        self._leaving = False
        self._stepper = request.stepper
        self._factor = request.factor
        self._fresh = request.fresh
        self._store = store
        self.update_s = 0.0
        self._needed = needed
        self._submitted: set[int] = set()
        self._waiting: list[Tensor] = []
        self._closed = False
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._num_threads = torch.get_num_threads()
        self.updated: list[tuple[Tensor, Tensor]] = []
        self._thread = threading.Thread(target=self._work, name="roundpipe-updater", daemon=True)

    def start(self) -> None:
        """Start the thread; `finish` or `abandon` ends it."""
        self._thread.start()

    def submit(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is complete; several workers may notice that at the same time."""
        with self._changed:
            if self._stepper.owns(parameter) and id(parameter) not in self._submitted:
                self._submitted.add(id(parameter))
                self._waiting.append(parameter)
                self._changed.notify()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def finish(self) -> None:
        """Update what is left, or complete its gradients if it is left to the caller, and wait for the end.

        Raises:
            BaseException: what the optimizer raised.
        """
        self._leaving = self._leaves_rest and not self._measures
        self._close()
        self._thread.join()
        if self._error is not None:
            raise self._error
        rest = self._stepper.remaining()
        if self._measures:
            self._measure([parameter for parameter in rest if not self._stepper.is_measured(parameter)])
        elif self._leaves_rest:
            self._complete(rest)
        else:
            self._update(rest)
            self._stepper.finish()

    def abandon(self) -> None:
        """End the thread after an error elsewhere; updates that it has begun are completed."""
        if self._thread.is_alive():
            self._close()
            self._thread.join()

    def _work(self) -> None:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            if self._after is not None:
                self._after.wait()
            while not self._leaving:
                parameters = self._next()
                if parameters is None:
                    return
                if self._measures:
                    self._measure(parameters)
                else:
                    self._update(parameters)
        except BaseException as error:  # raised by `finish`
            error.add_note("While updating parameters in the background, as their gradients were complete.")
            self._error = error

    def _next(self) -> list[Tensor] | None:
        """What to update next; None when all is done and nothing more comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            chosen: list[Tensor] = []
            # As many together as are there, within bounds: the end must not wait for too many.
            for parameter in sorted(self._waiting, key=lambda parameter: self._needed.get(id(parameter), -1)):
                if sum(other.numel() for other in chosen) >= _BATCH_ELEMENTS:
                    break
                # A GPU is behind the thread that drives it: what was given last may be long in coming.
                if self._store.has_arrived(parameter):
                    chosen.append(parameter)
            chosen = chosen or self._waiting[:1]
            taken = set(map(id, chosen))
            self._waiting = [parameter for parameter in self._waiting if id(parameter) not in taken]
            return chosen

    def _update(self, parameters: Sequence[Tensor]) -> None:
        changed = self._complete(parameters)
        self._store.await_uploads(parameters)
        start = time.perf_counter()  # Waiting for gradients is not updating.
        if self._delays:
            self._store.refresh_parameters(parameters)
            self._stepper.step(changed)
            self._store.note_update(changed)
        else:
            self._stepper.step(changed)
            self._store.refresh_parameters(changed)
        self.update_s += time.perf_counter() - start

    @torch.no_grad()
    def _measure(self, parameters: Iterable[Tensor]) -> None:
        changed = self._complete(parameters)
        start = time.perf_counter()
        self._stepper.measure(changed)
        self.update_s += time.perf_counter() - start

    @torch.no_grad()
    def _complete(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Give ``parameters`` their complete ``.grad``; those that have one."""
        changed = []
        for parameter in parameters:
            gradient = self._take(parameter)
            if gradient is not None and self._factor != 1.0:
                gradient = gradient.mul_(self._factor) if gradient.layout is torch.strided else gradient * self._factor
            if not self._fresh and parameter.grad is not None:
                gradient = parameter.grad if gradient is None else parameter.grad + gradient
            if gradient is None:
                parameter.grad = None
                continue
            parameter.grad = gradient
            self.updated.append((parameter, gradient))
            changed.append(parameter)
        return changed
