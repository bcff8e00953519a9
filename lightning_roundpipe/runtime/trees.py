"""Arguments and results of a unit as flat lists of leaves.

PyTorch's own pytrees know lists, tuples, dicts and registered classes. Dataclasses are taken apart here, too; any other
object that holds tensors can not be streamed, because nobody knows how to put a copy of it together.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Structure", "flatten", "hidden_tensors"]


@dataclasses.dataclass(frozen=True)
class Structure:
    """How to put leaves together again.

    Attributes:
        spec: the tree as PyTorch sees it.
        inner: for each of its leaves that is a dataclass, the object, its field names and the structure of its fields.
    """

    spec: TreeSpec
    inner: tuple[tuple[Any, tuple[str, ...], "Structure"] | None, ...]

    @property
    def num_leaves(self) -> int:
        """Number of leaves."""
        return sum(1 if entry is None else entry[2].num_leaves for entry in self.inner)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The tree with other leaves."""
        outer, start = [], 0
        for entry in self.inner:
            if entry is None:
                outer.append(leaves[start])
                start += 1
                continue
            template, names, structure = entry
            stop = start + structure.num_leaves
            values = structure.unflatten(leaves[start:stop])
            rebuilt = copy.copy(template)
            for name, value in zip(names, values, strict=True):
                object.__setattr__(rebuilt, name, value)  # Also where the dataclass is frozen.
            outer.append(rebuilt)
            start = stop
        return tree_unflatten(outer, self.spec)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Take ``tree`` apart."""
    outer, spec = tree_flatten(tree)
    leaves: list[Any] = []
    inner: list[tuple[Any, tuple[str, ...], Structure] | None] = []
    for leaf in outer:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            leaves.append(leaf)
            inner.append(None)
            continue
        names = tuple(field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name))
        values, structure = flatten([getattr(leaf, name) for name in names])
        leaves += values
        inner.append((leaf, names, structure))
    return leaves, Structure(spec, tuple(inner))


def hidden_tensors(leaf: Any, matters: Callable[[Tensor], bool]) -> list[str]:
    """Names of attributes of ``leaf``, an object that was not taken apart, that are tensors which matter."""
    if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__") or isinstance(leaf, type) or callable(leaf):
        return []
    return [name for name, value in vars(leaf).items() if isinstance(value, Tensor) and matters(value)]
