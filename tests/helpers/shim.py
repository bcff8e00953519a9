"""Runs the worker of GPUs in host memory: its bookkeeping is tested without a GPU, its streams are not."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_roundpipe.runtime import executor as executor_module
from lightning_roundpipe.runtime.gpu_worker import GpuWorker
from lightning_roundpipe.runtime.host_store import HostStore
from lightning_roundpipe.runtime.slab import Slab

__all__ = ["gpu_workers_on_the_host"]


class Event:
    """Passed at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, other: "Event") -> float:
        return 1000 * (other.time_s - self.time_s)


class Stream:
    """Does everything at once."""

    def __init__(self, *args: Any) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def gpu_workers_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
    *,
    budget_bytes: int = 2**30,
    memory_bytes: int = 2**34,
    make: Callable[..., GpuWorker] = GpuWorker,
) -> None:
    """From now on workers are those of GPUs, with memory on the host.

    Args:
        monkeypatch: undoes it.
        budget_bytes: memory of each for weights.
        memory_bytes: memory of each in all; nobody counts what of it is in use.
        make: the class of the workers.
    """
    for name, stand_in in {
        "Event": Event,
        "Stream": Stream,
        "default_stream": Stream,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: 0,
        "set_stream": lambda stream: None,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(Slab, "_register", lambda slab, num_bytes, warn: True)
    monkeypatch.setattr(executor_module, "HostStore", lambda dtype, **given: HostStore(dtype, **{**given, "pin": True}))

    def make_worker(executor: Any, index: int, device: torch.device) -> GpuWorker:
        worker = make(index, device, executor.store, budget_bytes, memory_bytes)
        worker.holds_inputs = len(executor.devices) == 1
        return worker

    monkeypatch.setattr(executor_module.Executor, "_make_worker", make_worker)
