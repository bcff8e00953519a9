"""The host-memory home of weights and gradients.

The master of a weight is the `nn.Parameter` of the user's module, in host memory. Gradients of one step land here as
partial sums, one for each place at which a parameter was used, and are added up in a fixed order at the end: the bits
of the result do not depend on which worker finished first, or on how the calls were cut into stages.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HostStore", "UsePlace"]


class UsePlace(NamedTuple):
    """Where a step uses a parameter: in the ``occurrence``-th call of a unit, or in a stretch of user code.

    Attributes:
        group: replica group of the micro-batch.
        unit: index of the unit, or -1 for user code between calls.
        occurrence: how many calls of the unit (for user code: of any unit) came before in the micro-batch.
    """

    group: int
    unit: int
    occurrence: int


class HostStore:
    """Sources of weights, and the gradients of the step that runs.

    Threading: every method may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[int, UsePlace], tuple[Tensor, Tensor]] = {}
        self._hidden: dict[int, Tensor] = {}

    def weight(self, parameter: Tensor) -> Tensor:
        """The values that an upload of ``parameter`` reads."""
        return self._hidden.get(id(parameter), parameter).detach()

    def land(self, parameter: Tensor, place: UsePlace, gradient: Tensor) -> None:
        """Add a gradient, summed over some micro-batches, that was computed at ``place``."""
        with self._lock:
            known = self._sums.get((id(parameter), place))
            if known is not None:
                gradient = known[1] + gradient
            self._sums[id(parameter), place] = parameter, gradient

    def take(self, parameter: Tensor, place: UsePlace) -> Tensor | None:
        """Take back what has landed for ``place``, to go on adding to it elsewhere."""
        with self._lock:
            entry = self._sums.pop((id(parameter), place), None)
        return entry[1] if entry is not None else None

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        """Hand over all gradients, each parameter once, and forget them.

        Returns:
            Pairs of parameter and gradient, in the parameter's shape and dtype.
        """
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        with self._lock:
            # The places of a parameter are added up from the last use to the first, as a backward pass meets them.
            for (key, _), (parameter, gradient) in sorted(
                self._sums.items(), key=lambda item: item[0][1], reverse=True
            ):
                total = totals.get(key)
                totals[key] = parameter, gradient if total is None else total[1] + gradient
            self._sums.clear()
        return [(parameter, gradient.to(parameter.dtype)) for parameter, gradient in totals.values()]

    def clear(self) -> None:
        """Forget what has landed; for a step that failed."""
        with self._lock:
            self._sums.clear()

    @contextmanager
    def poisoned(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Fill the masters with NaN while weights are still read right: proves that nothing bypasses this store."""
        floating = [parameter for parameter in parameters if parameter.is_floating_point()]
        self._hidden = {id(parameter): parameter.detach().clone() for parameter in floating}
        try:
            with torch.no_grad():
                for parameter in floating:
                    parameter.fill_(float("nan"))
            yield
        finally:
            with torch.no_grad():
                for parameter in floating:
                    parameter.copy_(self._hidden[id(parameter)])
            self._hidden = {}
