"""PyTorch's per-thread modes, captured where work is submitted and re-entered where it runs.

Grad mode, inference mode, autocast and the number of intra-op threads belong to a thread and are not inherited by a
new one; a `contextvars` context is neither.
"""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

__all__ = ["Autocast", "ThreadState"]


@dataclass(frozen=True)
class Autocast:
    """Whether autocast is on, and to which dtype, for each device type that may run."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def capture(cls) -> "Autocast":
        """The settings of the calling thread."""
        return cls(
            tuple(
                (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
                for device_type in ("cpu", "cuda")
            )
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Re-enter the settings.

        The cache of cast weights is off: a weight that was cast without a graph must not be met again with one.
        """
        with ExitStack() as stack:
            for device_type, enabled, dtype in self.settings:
                if enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


@dataclass(frozen=True)
class ThreadState:
    """The modes of the thread that called `capture`."""

    grad: bool
    inference: bool
    autocast: Autocast
    num_threads: int
    context: contextvars.Context = field(repr=False)

    @classmethod
    def capture(cls) -> "ThreadState":
        """Take the modes of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=Autocast.capture(),
            num_threads=torch.get_num_threads(),
            context=contextvars.copy_context(),
        )

    def run(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the calling thread under the captured modes."""
        if torch.get_num_threads() != self.num_threads:
            # A new thread starts with the process's default, and the order of a reduction may depend on the number.
            torch.set_num_threads(self.num_threads)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), self.autocast.entered():
            # Two threads can not run in one context at a time: each gets a copy.
            self.context.copy().run(function)
