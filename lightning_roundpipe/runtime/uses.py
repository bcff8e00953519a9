"""Knows when a gradient is complete.

[Note: When a gradient is complete]
A parameter's gradient is complete when every micro-batch has finished its forward pass, no call or stretch of user code
that used the parameter still waits for its backward, and no worker holds a sum for it that has not landed. Uses are
counted as they happen, not taken from the plan: a micro-batch may call otherwise than planned.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["UseCounter"]


@dataclass(eq=False)
class UseCounter:
    """Counts what may still contribute to each parameter's gradient.

    Args:
        open_forwards: number of micro-batches; each tells when its forward pass is over.

    Threading: every method may be called from any thread.
    """

    open_forwards: int
    _uses: Counter[int] = field(default_factory=Counter, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """A call that uses ``parameters`` will have a backward, or a worker holds a sum for each."""
        with self._lock:
            self._uses.update(map(id, parameters))

    def hold(self, parameter: Tensor) -> bool:
        """Keep the gradient of ``parameter`` from being complete, until `remove`; False if it is already."""
        with self._lock:
            if self.open_forwards == 0 and self._uses[id(parameter)] == 0:
                return False
            self._uses[id(parameter)] += 1
            return True

    def remove(self, parameters: Iterable[Tensor]) -> None:
        """That backward is done, or that sum has landed."""
        with self._lock:
            self._uses.subtract(map(id, parameters))

    def forward_done(self) -> None:
        """A micro-batch will make no more calls."""
        with self._lock:
            self.open_forwards -= 1

    def is_complete(self, parameter: Tensor) -> bool:
        """Whether nothing more can be added to the gradient of ``parameter``."""
        with self._lock:
            return self.open_forwards == 0 and self._uses[id(parameter)] == 0
