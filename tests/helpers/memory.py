"""Counts what operations allocate."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["PeakBytes"]


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
