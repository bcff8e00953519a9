"""Counts what operations allocate, and what this process takes."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["PeakBytes", "own_memory", "peak_memory"]


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside make, and how many there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._known[leaf.untyped_storage()] = leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self._known.values()))
        return result


def _status() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0]: 1024 * int(words[1]) for words in lines if words[-1] == "kB"}


def own_memory() -> int:
    """Bytes of this process in memory that are not pages of files."""
    status = _status()
    return status["RssAnon:"] + status["RssShmem:"]


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that tells by how many bytes this process has grown inside, at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # Memory that was freed but not given back would hide growth.
    Path("/proc/self/clear_refs").write_text("5")  # Starts the peak anew.
    before = _status()["VmRSS:"]
    yield lambda: _status()["VmHWM:"] - before
