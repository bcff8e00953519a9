"""How a user's batch becomes micro-batches, and how what their steps return becomes one output again.

A batch is a tree. Its inner nodes are mappings (``UserDict`` such as ``BatchEncoding`` and ``ModelOutput`` included),
dataclasses, named tuples, lists and tuples; everything else is a leaf. Tensors and numpy arrays are both called arrays
here. What cannot be told from the shapes is refused with the name of the part rather than guessed. Where a list could
hold samples or fields, the more likely reading is taken, and of equally likely ones that whose mistake shows: a step
that unpacks a list of the wrong length fails at once.

Nothing here knows workers, schedules or Lightning.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import reduce
from itertools import accumulate, chain
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_roundpipe.exceptions import BatchSplitError

__all__ = [
    "IGNORED_LABEL",
    "MicroBatch",
    "batch_size",
    "label_leaf",
    "map_structure",
    "merge",
    "split",
    "valid_label_counts",
]

IGNORED_LABEL = -100
"""The label that losses leave out by default (``ignore_index`` of ``torch.nn.functional.cross_entropy``)."""

Path: TypeAlias = tuple[str, ...]
"""Keys, field names and positions from the root of a tree down to a node; written with dots between them."""

Rules: TypeAlias = Mapping[str, int | str]

_REPLICATE = "replicate"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A slice of the user's batch; the user's step runs once on it.

    Attributes:
        index: position among the micro-batches of the batch.
        data: what the step gets: the same kind of tree as the batch.
        num_samples: number of samples in ``data``; 1 if the batch does not tell.
    """

    index: int
    data: Any
    num_samples: int


# ---------------------------------------------------------------------------------------------------------------------
# Trees
# ---------------------------------------------------------------------------------------------------------------------


def map_structure(function: Callable[..., list[Any] | None], *trees: Any, path: Path = ()) -> list[Any]:
    """Turn trees of one structure into any number of trees of that structure.

    Args:
        function: called as ``function(path, *nodes)`` with the nodes that the trees hold at ``path``, parents before
            their children. It returns what the resulting trees hold there, one entry per resulting tree, or None to go
            on with the children. It may return None only for nodes of the same type with the same, non-empty, keys.
        trees: the trees to walk side by side.
        path: where the trees hang in a larger tree.

    Returns:
        The resulting trees, as many as ``function`` returns entries.
    """
    results = function(path, *trees)
    if results is not None:
        return results
    columns = []
    for children in zip(*(_children(tree) or () for tree in trees), strict=True):
        nodes = (node for _, node in children)
        columns.append(map_structure(function, *nodes, path=(*path, children[0][0])))
    return [_rebuild(trees[0], values) for values in zip(*columns, strict=True)]


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """The keys and values of a container, None for a leaf."""
    # A PackedSequence is a named tuple and a torch.Size a tuple, but neither can be taken apart field by field.
    if isinstance(node, PackedSequence | torch.Size):
        return None
    # Mappings first: a ModelOutput is also a dataclass, of which only the entries that are not None are its keys.
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    if is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in fields(node)]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, list | tuple):
        return [(str(position), value) for position, value in enumerate(node)]
    return None


def _keys(node: Any) -> list[str]:
    return [key for key, _ in _children(node) or ()]


def _rebuild(node: Any, values: Sequence[Any]) -> Any:
    """A container like ``node`` that holds ``values`` instead of its children (of any number for a list or tuple)."""
    # Copies keep what constructors do not take: a default factory, the attributes of a subclass, fields without init.
    if isinstance(node, MutableMapping):
        mapping = copy.copy(node)
        for key, value in zip(node, values, strict=True):
            mapping[key] = value
        return mapping
    if isinstance(node, Mapping):
        return type(node)(dict(zip(node, values, strict=True)))  # type: ignore[call-arg]
    if is_dataclass(node):
        record = copy.copy(node)
        for field, value in zip(fields(node), values, strict=True):
            object.__setattr__(record, field.name, value)  # frozen dataclasses refuse setattr()
        return record
    if hasattr(node, "_fields"):
        return node._make(values)
    if isinstance(node, list):
        sequence = copy.copy(node)
        sequence[:] = values
        return sequence
    return type(node)(values)


def _nodes(tree: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Every node of a tree with its path, parents before their children."""
    found = []

    def visit(path: Path, node: Any) -> list[Any] | None:
        found.append((path, node))
        return None if _children(node) else []

    map_structure(visit, tree, path=path)
    return found


def _is_array(node: Any) -> TypeGuard[Any]:
    return isinstance(node, np.ndarray) or (isinstance(node, Tensor) and not node.is_nested)


def _is_ragged(node: Any) -> TypeGuard[Any]:
    return isinstance(node, PackedSequence) or (isinstance(node, Tensor) and node.is_nested)


def _is_sequence(node: Any) -> TypeGuard[Any]:
    return isinstance(node, list | tuple) and not hasattr(node, "_fields") and not isinstance(node, torch.Size)


def _length(node: Any) -> int | None:
    """Size of dim 0 of an array, length of a list or tuple, None for anything else."""
    if _is_array(node):
        return len(node) if node.ndim else None
    return len(node) if _is_sequence(node) else None


def _is_signed_integer(array: Any) -> bool:
    if isinstance(array, Tensor):
        return array.dtype.is_signed and not array.dtype.is_floating_point and not array.dtype.is_complex
    return bool(array.dtype.kind == "i")


def _looks_like_boundaries(array: Any) -> bool:
    """Whether an array looks like ``cu_seqlens``, the running total of sequence lengths: 0, then never less.

    A plain count 0, 1, 2, ... is not taken for one: those are positions or indices.
    """
    if array.ndim != 1 or len(array) <= 2 or not _is_signed_integer(array) or array[0] != 0 or array[-1] == 0:
        return False
    steps = array[1:] - array[:-1]
    return bool((steps >= 0).all()) and not bool((steps == 1).all())


def _sample_kind(element: Any) -> Hashable:
    """What all samples in a list have in common; None for what says nothing, such as a number."""
    if _is_array(element):
        return element.ndim, element.dtype
    if isinstance(element, Mapping):
        return frozenset(element)
    if isinstance(element, str | bytes):
        return str
    if _is_sequence(element):  # an (input, target) pair, say; a list of equal things could be anything
        kinds = tuple(map(_sample_kind, element))
        return kinds if len(set(kinds)) > 1 else None
    return None


def _are_alike(elements: Sequence[Any]) -> bool:
    """Whether the elements of a list could be samples: texts, mappings of the same keys, arrays of one kind, ..."""
    kinds = {_sample_kind(element) for element in elements}
    return len(kinds) == 1 and kinds != {None}


def _is_collated(element: Any) -> bool:
    """Whether a mapping looks like a batch, not a sample: its arrays agree on dim 0, no value is a number or text."""
    if not isinstance(element, Mapping) or any(isinstance(value, str | int | float) for value in element.values()):
        return False
    lengths = {_length(node) for _, node in _nodes(element) if _is_array(node)}
    return None not in lengths and len(lengths - {1}) == 1


def _are_fields(batch: Sequence[Any]) -> bool:
    """Whether a batch that is a list or tuple is what loaders make of (input, target) pairs: arrays of one dim 0."""
    return all(_is_array(field) and field.ndim for field in batch) and len({len(field) for field in batch}) == 1


def _holds_samples(sequence: Sequence[Any], size: int) -> bool:
    """Whether a list or tuple has one element for each of ``size`` samples, and not fields such as inputs and targets.

    Elements that themselves have the length ``size`` are fields, unless they are likely to have it by chance: mappings
    of the same keys (detection targets), pairs of the same kinds, and arrays of which only some have it (ragged ones).
    """
    if len(sequence) != size:
        return False
    has_size = [any(_length(node) == size for _, node in _nodes(element)) for element in sequence]
    if not any(has_size):
        return True
    return _are_alike(sequence) and not (_is_array(sequence[0]) and all(has_size))


# ---------------------------------------------------------------------------------------------------------------------
# Split
# ---------------------------------------------------------------------------------------------------------------------


def batch_size(batch: Any, rules: Rules | None = None) -> int | None:
    """The number of samples in a batch.

    Every part of the batch has a say and the most common answer wins. An array names its dim 0. A list or tuple of like
    elements (texts, mappings with the same keys, arrays of one kind; not a whole batch of arrays that agree on dim 0,
    such as inputs and targets) names its length; if they are arrays, or a whole
    batch is a list of smaller batches, also the size that they agree on. Of equally common answers those other than 1
    go first, then those of arrays, then the first. ``cu_seqlens`` and the like are asked only if nothing else answers.
    A part that a rule cuts overrules all these.

    Args:
        batch: any tree.
        rules: see :func:`split`.

    Returns:
        The number of samples, or None if nothing tells: then the batch cannot be split.
    """
    rules = rules or {}
    ruled: list[int] = []
    arrays: list[int] = []
    lengths: list[int] = []
    boundaries: list[int] = []

    def ask(path: Path, node: Any) -> list[Any] | None:
        rule = _rule(rules, path)
        if rule == _REPLICATE:
            return []
        if _is_ragged(node):
            arrays.append(int(node.batch_sizes[0]) if isinstance(node, PackedSequence) else node.size(0))
        elif _is_array(node):
            if isinstance(rule, int) and -node.ndim <= rule < node.ndim:
                ruled.append(node.shape[rule])
            elif node.ndim:
                (boundaries if _looks_like_boundaries(node) else arrays).append(len(node))
        elif _is_sequence(node):
            if rule == 0:
                ruled.append(len(node))
                return []
            if not path and _are_fields(node):
                return None
            if _are_alike(node) and not _has_rule_inside(rules, path, node):
                if _is_array(node[0]) or (not path and all(map(_is_collated, node))):
                    inner = {batch_size(element) for element in node}
                    arrays.extend(size for size in inner if len(inner) == 1 and size is not None)
                lengths.append(len(node))
                return []
        return None if _children(node) else []

    map_structure(ask, batch)
    votes = Counter(ruled or arrays + lengths or boundaries)
    # Counter keeps the order in which sizes came up, and max() takes the first of equals.
    return max(votes, key=lambda size: (votes[size], size != 1), default=None)


def split(batch: Any, num_microbatches: int, rules: Rules | None = None) -> list[MicroBatch]:
    """Cut a batch into micro-batches.

    Arrays whose dim 0 is the batch size B are cut on dim 0, as views. A list or tuple of B elements that have no dim of
    size B themselves (texts, ragged arrays, one mapping of targets per sample) is cut as a sequence. All else is
    replicated: every micro-batch gets the same object, but containers of its own around it, so that a step may change
    its batch. Sizes differ by one at most, larger ones first.

    Args:
        batch: any tree.
        num_microbatches: how many micro-batches to make, at least 1. There are never more than samples.
        rules: how to treat named parts, instead of by their shape: the dim to cut (0 for a list or tuple) or
            ``"replicate"``. A key is a path (``"inputs.position_ids"``, ``"1.0"``), its last component
            (``"position_ids"``), or an ``fnmatch`` pattern of either (``"inputs.*_mask"``); ``""`` is the batch itself.
            The first key that matches decides; a dim given for a mapping or a leaf that is no array has no effect, and
            a rule that matches nothing is fine.

    Returns:
        The micro-batches. If there is only one, its data is ``batch`` itself.

    Raises:
        BatchSplitError: a part could be cut in several ways or in none, or a rule asks for a dim whose size is not B.
        ValueError: ``num_microbatches`` or the value of a rule is not valid.
    """
    if num_microbatches < 1:
        raise ValueError(f"`num_microbatches` must be at least 1, but got {num_microbatches}.")
    rules = rules or {}
    for pattern, rule in rules.items():
        if isinstance(rule, bool) or not (isinstance(rule, int) or rule == _REPLICATE):
            raise ValueError(f'A split rule must be a dim or "replicate", but got {rule!r} for {pattern!r}.')
    size = batch_size(batch, rules)
    num_microbatches = min(num_microbatches, size or 1)
    if size is None or num_microbatches == 1:
        return [MicroBatch(0, batch, 1 if size is None else size)]
    smaller, num_larger = divmod(size, num_microbatches)
    sizes = [smaller + (index < num_larger) for index in range(num_microbatches)]
    parts = map_structure(_Splitter(sizes, rules), batch)
    return [MicroBatch(index, *part) for index, part in enumerate(zip(parts, sizes, strict=True))]


@dataclass(frozen=True)
class _Splitter:
    """The function that :func:`split` maps over a batch: from a node to the parts of it that the micro-batches get."""

    sizes: list[int]
    rules: Rules

    def __call__(self, path: Path, node: Any) -> list[Any] | None:
        rule = _rule(self.rules, path)
        if rule == _REPLICATE:
            return [node] * len(self.sizes)
        if (kind := self._uncuttable(node)) is not None:
            raise BatchSplitError(
                f"Arrays must be dense to be cut into micro-batches, but {_name(path)} is {kind}. Pass a padded tensor"
                " and the lengths, or a list with one tensor per sample, and convert it in the step; or replicate it"
                f" with the split rule {_example(path, _REPLICATE)}."
            )
        if _is_array(node):
            return self._split_array(path, node, rule)
        if _is_sequence(node) and self._is_cut_here(path, node, rule):
            return [_rebuild(node, node[start:stop]) for start, stop in self._bounds]
        children = _children(node)
        if children is None:
            return [node] * len(self.sizes)
        return None if children else [_rebuild(node, ()) for _ in self.sizes]

    @property
    def batch_size(self) -> int:
        return sum(self.sizes)

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        return [(stop - size, stop) for stop, size in zip(accumulate(self.sizes), self.sizes, strict=True)]

    def _uncuttable(self, node: Any) -> str | None:
        """What a node is, if it holds samples but no view of it holds some of them."""
        if isinstance(node, PackedSequence):
            return "a `PackedSequence`"
        if isinstance(node, Tensor) and node.is_nested:
            return "a nested tensor"
        if isinstance(node, Tensor) and node.layout is not torch.strided and _length(node) == self.batch_size:
            return f"a `{node.layout}` tensor"
        return None

    def _split_array(self, path: Path, array: Any, rule: int | str | None) -> list[Any]:
        dim = self._ruled_dim(path, array, rule) if isinstance(rule, int) else self._guess_dim(path, array)
        if dim is None:
            return [array] * len(self.sizes)
        if isinstance(array, Tensor):
            return [array.narrow(dim, start, stop - start) for start, stop in self._bounds]
        return [array[(slice(None),) * dim + (slice(start, stop),)] for start, stop in self._bounds]

    def _ruled_dim(self, path: Path, array: Any, rule: int) -> int:
        if not -array.ndim <= rule < array.ndim or array.shape[rule] != self.batch_size:
            raise BatchSplitError(
                f"The size of a dim to split on must be the batch size {self.batch_size}, but a split rule asks for dim"
                f" {rule} of {_describe(path, array)}. Correct the dim, or replicate the array with"
                f" {_example(path, _REPLICATE)}."
            )
        return rule % int(array.ndim)

    def _guess_dim(self, path: Path, array: Any) -> int | None:
        """The dim to cut an array on, None to replicate it."""
        if array.ndim == 0 or len(array) == 1:
            return None
        size = self.batch_size
        if len(array) == size:
            if array.ndim == 3 and array.shape[1] == size and _is_signed_integer(array):
                self._refuse(
                    f"{_describe(path, array)} has it in dim 0 and in dim 1, as position ids with several axes may",
                    _example(path, 1),
                    f"{_example(path, 0)} or {_example(path, _REPLICATE)}",
                )
            return 0
        if size in array.shape[1:]:
            dim = array.shape.index(size, 1)
            self._refuse(
                f"{_describe(path, array)} has it in dim {dim}", _example(path, dim), _example(path, _REPLICATE)
            )
        if _looks_like_boundaries(array):
            self._refuse(
                f"{_describe(path, array)} looks like sequence boundaries (`cu_seqlens`), which cannot be cut",
                _example(path, _REPLICATE),
                "pass the lengths, one per sample",
            )
        return None

    def _is_cut_here(self, path: Path, sequence: Sequence[Any], rule: int | str | None) -> bool:
        """Whether a list or tuple is cut itself; otherwise its elements are."""
        size = self.batch_size
        if rule is not None:
            if rule != 0 or len(sequence) != size:
                raise BatchSplitError(
                    f"Only a list or tuple with one element for each of the {size} samples can be cut, and on dim 0,"
                    f" but a split rule asks for dim {rule} of {_name(path)} with {len(sequence)} elements. Write a"
                    f" rule for its elements instead, such as {_example((*path, '*'), rule)}."
                )
            return True
        if len(sequence) != size or _has_rule_inside(self.rules, path, sequence):
            return False
        lengths = [_length(node) for _, node in _nodes(sequence) if _is_array(node)]
        if not path and size in lengths and all(map(_is_collated, sequence)):
            return False  # a list of batches, such as queries and documents, that are of two samples
        nested = all(_is_sequence(element) and len(element) == size for element in sequence) and size not in lengths
        images = all(_is_array(element) and element.ndim == 3 and len(element) == size == 3 for element in sequence)
        if images or (path and nested):
            self._refuse(
                f"the {size} elements of {_name(path)} have it as well",
                _example(path, 0),
                f"{_example((*path, '*'), 0)} to cut each element",
            )
        return _holds_samples(sequence, size)

    def _refuse(self, found: str, rule: str, other: str) -> None:
        raise BatchSplitError(
            f"It must be clear where the batch size {self.batch_size} is, but {found}. Add the split rule {rule}, or"
            f" {other}."
        )


def _rule(rules: Rules, path: Path) -> int | str | None:
    """The first rule that names the node at ``path``."""
    names = (".".join(path), *path[-1:])
    for pattern, rule in rules.items():
        # Literally first: a key may hold brackets. Only "" names the batch itself: "*" means its parts.
        if pattern in names or (path and any(fnmatchcase(name, pattern) for name in names)):
            return rule
    return None


def _has_rule_inside(rules: Rules, path: Path, sequence: Sequence[Any]) -> bool:
    return bool(rules) and any(_rule(rules, inner) is not None for inner, _ in _nodes(sequence, path)[1:])


def _name(path: Path) -> str:
    return f"`{'.'.join(path)}`" if path else "the batch itself"


def _describe(path: Path, array: Any) -> str:
    return f"{_name(path)} with shape {list(array.shape)}"


def _example(path: Path, rule: int | str) -> str:
    return f"`{ {'.'.join(path): rule} }`"


# ---------------------------------------------------------------------------------------------------------------------
# Merge
# ---------------------------------------------------------------------------------------------------------------------


def merge(outputs: Sequence[Any], weights: Sequence[float], batch_sizes: Sequence[int]) -> Any:
    """Make one output of what the micro-batches' steps returned: the inverse of :func:`split`.

    ========================================================================= ==========================================
    what the steps return                                                     what becomes of it
    ========================================================================= ==========================================
    the same object everywhere                                                that object
    arrays whose dim 0 is their micro-batch's size                            concatenated on dim 0
    floating 0-dim tensors and Python floats                                  weighted mean
    equal 0-dim integer tensors                                               the first
    other 0-dim integer tensors                                               stacked, one entry per micro-batch
    lists and tuples with one element per sample                              concatenated
    containers of one type with the same keys                                 merged key by key
    equal objects, such as texts and None                                     the first
    anything else, such as arrays that are padded to different lengths        the list of what the steps returned
    ========================================================================= ==========================================

    A list whose length is its micro-batch's size has one element per sample unless its elements have that length
    themselves (then they are fields); a tuple also not if it holds only numbers and 0-dim tensors, as ``(loss,
    accuracy)`` does. Tensors stay in their autograd graph and are expected on one device.

    Args:
        outputs: what the steps returned, in the order of the micro-batches. None is left out, and with it its weight.
        weights: weight of each micro-batch in means, in any unit. Values of weight 0 are left out of the mean (a loss
            that averages over no label is nan); if all weights are 0, the mean is the plain one.
        batch_sizes: number of samples of each micro-batch.

    Returns:
        The one output. It is the step's own object if there is only one that is not None.

    Raises:
        ValueError: the arguments are empty or differ in length, or a weight is negative or not finite.
    """
    if not outputs or not len(outputs) == len(weights) == len(batch_sizes):
        raise ValueError(
            "`outputs`, `weights` and `batch_sizes` must have one entry per micro-batch, but got"
            f" {len(outputs)}, {len(weights)} and {len(batch_sizes)}."
        )
    if any(weight < 0 or not math.isfinite(weight) for weight in weights):
        raise ValueError(f"`weights` must be finite and not negative, but got {list(weights)}.")
    kept = [index for index, output in enumerate(outputs) if output is not None]
    if not kept:
        return None
    if len(kept) == 1:
        return outputs[kept[0]]
    merger = _Merger([weights[index] for index in kept], [batch_sizes[index] for index in kept])
    return map_structure(merger, *(outputs[index] for index in kept))[0]


@dataclass(frozen=True)
class _Merger:
    """The function that :func:`merge` maps over the outputs: from one node per micro-batch to the merged node."""

    weights: list[float]
    sizes: list[int]

    def __call__(self, path: Path, *nodes: Any) -> list[Any] | None:
        first = nodes[0]
        if all(node is first for node in nodes):
            return [first]
        if all(isinstance(node, Tensor) for node in nodes):
            return [self._merge_tensors(nodes)]
        if all(_is_array(node) for node in nodes):
            return [np.concatenate(nodes) if self._can_concatenate(nodes) else list(nodes)]
        if all(_is_number(node) for node in nodes) and any(isinstance(node, float | np.floating) for node in nodes):
            return [self._mean([float(node) for node in nodes])]
        if all(map(self._has_samples, nodes, self.sizes)):
            return [_rebuild(first, list(chain.from_iterable(nodes)))]
        if _keys(first) and all(type(node) is type(first) and _keys(node) == _keys(first) for node in nodes):
            return None
        return [first if all(_are_equal(first, node) for node in nodes) else list(nodes)]

    def _merge_tensors(self, tensors: Sequence[Tensor]) -> Any:
        if all(tensor.ndim == 0 for tensor in tensors):
            dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
            if dtype.is_floating_point or dtype.is_complex:
                precise = torch.promote_types(dtype, torch.float64)
                return self._mean([tensor.to(precise) for tensor in tensors]).to(dtype)
            return tensors[0] if all(map(tensors[0].equal, tensors)) else torch.stack(list(tensors))
        return torch.cat(list(tensors)) if self._can_concatenate(tensors) else list(tensors)

    def _can_concatenate(self, arrays: Sequence[Any]) -> bool:
        have_size = all(_length(array) == size for array, size in zip(arrays, self.sizes, strict=True))
        return have_size and len({tuple(array.shape[1:]) for array in arrays}) == 1

    def _mean(self, values: Sequence[Any]) -> Any:
        total = math.fsum(self.weights)
        if total == 0:
            return sum(values) / len(values)
        return sum(value * (weight / total) for value, weight in zip(values, self.weights, strict=True) if weight)

    @staticmethod
    def _has_samples(node: Any, size: int) -> bool:
        if not _is_sequence(node):
            return False
        if isinstance(node, tuple) and all(_is_number(value) or _is_scalar_tensor(value) for value in node):
            return False
        return _holds_samples(node, size)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_scalar_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False  # objects that compare element by element, or not at all


# ---------------------------------------------------------------------------------------------------------------------
# Labels
# ---------------------------------------------------------------------------------------------------------------------


def label_leaf(batch: Any, batch_size: int) -> Tensor | None:
    """The labels of a batch of which the loss leaves some out.

    Args:
        batch: any tree.
        batch_size: number of samples B.

    Returns:
        The tensor called ``labels``, anywhere in the batch, if it is one of integers, of shape ``(B, ...)``, and holds
        -100 at least once; else the only such tensor of any name; else None.
    """
    found = _label_leaves([MicroBatch(0, batch, batch_size)])
    return found[0] if found else None


def valid_label_counts(micro_batches: Sequence[MicroBatch], shifted: bool) -> list[int] | None:
    """How many labels the loss of each micro-batch averages over, as weights for the mean of their losses.

    Args:
        micro_batches: all micro-batches of one batch: a single one may hold no -100 by chance.
        shifted: whether the loss compares each position with the label of the next, as causal language models do. Then
            the first label of each sequence, ``labels[..., 0]``, is never used.

    Returns:
        The number of labels other than -100 per micro-batch, or None if the batch has no labels to leave out
        (see :func:`label_leaf`).
    """
    found = _label_leaves(micro_batches)
    if found is None:
        return None
    used = [labels[..., 1:] if shifted and labels.ndim > 1 else labels for labels in found]
    return [int((labels != IGNORED_LABEL).sum()) for labels in used]


def _label_leaves(micro_batches: Sequence[MicroBatch]) -> list[Tensor] | None:
    """The labels as :func:`label_leaf` finds them in the whole batch, one tensor per micro-batch."""
    tensors_by_path: dict[Path, list[Tensor]] = {}
    for micro_batch in micro_batches:
        for path, node in _nodes(micro_batch.data):
            if isinstance(node, Tensor) and _is_signed_integer(node) and _length(node) == micro_batch.num_samples:
                tensors_by_path.setdefault(path, []).append(node)
    candidates = {
        path: tensors
        for path, tensors in tensors_by_path.items()
        if len(tensors) == len(micro_batches)
        # A replicated tensor is not labels: it has one row, and so may the micro-batches.
        and (len(tensors) == 1 or tensors[0] is not tensors[1])
        and any(bool((tensor == IGNORED_LABEL).any()) for tensor in tensors)
    }
    named = [tensors for path, tensors in candidates.items() if path and path[-1] == "labels"]
    if named:
        return named[0]
    return next(iter(candidates.values())) if len(candidates) == 1 else None
