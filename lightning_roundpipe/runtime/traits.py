"""What is learned about a unit by watching it run."""

import threading
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.units import Unit

__all__ = ["OWN_TABLES", "Attributes", "Mode", "UnitTraits", "guard", "has_graph", "is_leaf_copy", "unguard"]

OWN_TABLES = ("_parameters", "_buffers", "_modules", "_call_impl", "_compiled_call_impl")
"""Attributes of a module that are not its plain ones."""

Mode = tuple[Any, ...]
"""What decides how a unit runs, apart from its arguments: training flags and dropout probabilities below it."""


@dataclass(eq=False)
class UnitTraits:
    """How a unit behaves; starts with what its structure shows.

    Attributes:
        changes_inputs: it writes to its arguments in place; it gets private copies.
        changes_attributes: it stores values on its modules; it never runs concurrently with itself, and a recomputation
            leaves them as they were.
        changes_buffers: it writes to its buffers, or assigns them anew.
        swaps_parameters: it takes parameters off its modules and puts them back, as peft does to adapt a parameter that
            is no layer's weight, or has torch cache computed ones (`torch.nn.utils.parametrize.cached`). The modules
            and that cache are those of all micro-batches, so that it runs while no other user code does.
        hides_parameters: it reaches parameters without looking them up (`nn.LSTM` keeps a list); they are substituted
            operation by operation.
        draws: for each mode in which it was watched, whether it draws random numbers: from the host's generator, and
            from the device's own if it has one.
        stored: attributes, by (module, name), in which it leaves tensors with a gradient. Nobody else may use those:
        they
            belong to any micro-batch, and their gradient would be lost.
        lock: held while a unit that changes attributes runs.
    """

    unit: Unit
    changes_inputs: bool = False
    changes_attributes: bool = False
    changes_buffers: bool = False
    swaps_parameters: bool = False
    hides_parameters: bool = False
    draws: dict[Mode, tuple[bool, ...]] = field(default_factory=dict)
    stored: set[tuple[nn.Module, str]] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._plain = [vars(module) for module in self.unit.submodules]
        parameters = {id(parameter) for parameter in self.unit.parameters}
        self.hides_parameters = any(
            _holds(value, parameters)
            for module in self.unit.submodules
            for name, value in vars(module).items()
            if name not in OWN_TABLES
        )

    @property
    def mode(self) -> Mode:
        """The mode in which the unit runs now."""
        return tuple([(plain.get("training"), plain.get("p")) for plain in self._plain])

    @property
    def has_forward_hooks(self) -> bool:
        """Whether forward hooks are registered below the unit, other than those of transformers (see `captures`)."""
        hooks = (hook for module in self.unit.submodules for hook in module._forward_hooks.values())
        return any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)

    def set_mode(self, mode: Mode) -> None:
        """Let the unit run in ``mode`` from now on."""
        for module, (training, p) in zip(self.unit.submodules, mode, strict=True):
            _set(module, "training", training)
            if "p" in vars(module):
                _set(module, "p", p)


def _set(module: nn.Module, name: str, value: Any) -> None:
    if vars(module).get(name) != value:
        vars(module)[name] = value


def _holds(value: Any, parameters: set[int], depth: int = 2) -> bool:
    if id(value) in parameters:
        return True
    if depth and isinstance(value, (list, tuple)):
        return any(_holds(item, parameters, depth - 1) for item in value)
    if depth and isinstance(value, dict):
        return any(_holds(item, parameters, depth - 1) for item in value.values())
    return False


class Attributes:
    """A snapshot of the plain attributes of a module and all below it; containers are taken with their contents."""

    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self._values = {inner: self._plain(inner) for inner in module.modules()}
        self._contents = {
            id(value): (value, _contents(value))
            for values in self._values.values()
            for value in values.values()
            if isinstance(value, (list, dict, set, deque))
        }

    @staticmethod
    def _plain(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in OWN_TABLES}

    def changed(self) -> list[tuple[nn.Module, str]]:
        """What has changed since; a container that was written to counts as changed."""
        changes = []
        for module in self._root.modules():
            before, now = self._values.get(module, {}), self._plain(module)
            for name, value in now.items():
                known = self._contents.get(id(value))
                if value is not before.get(name) or (known is not None and known[1] != _contents(value)):
                    changes.append((module, name))
            changes += [(module, name) for name in before.keys() - now.keys()]
        return changes

    def restore_one(self, module: nn.Module, name: str) -> None:
        """Put one attribute back as it was."""
        if name in self._values[module]:
            vars(module)[name] = self._values[module][name]
        else:
            vars(module).pop(name, None)

    def restore(self) -> None:
        """Put everything back as it was."""
        for module, values in self._values.items():
            for name in self._plain(module).keys() - values.keys():
                del vars(module)[name]
            vars(module).update(values)
        for value, contents in self._contents.values():
            if _contents(value) == contents:
                continue
            value.clear()
            if isinstance(value, dict):
                value.update((_original(key), item) for key, (item,) in contents)
            elif isinstance(value, set):
                value.update(_original(key) for key, _ in contents)
            else:
                value.extend(item for _, (item,) in contents)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything back after what runs inside."""
        try:
            yield
        finally:
            self.restore()


class _Same(tuple[Any]):
    """A one-tuple that equals another only if it holds the very same object; tensors can not be compared by ``==``."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self[0] is other[0]

    __hash__ = None  # type: ignore[assignment]


def _original(key: Any) -> Any:
    return key[0] if isinstance(key, _Same) else key


def _comparable(key: Any) -> Any:
    return _Same((key,)) if isinstance(key, Tensor) else key


def _contents(container: Any) -> list[tuple[Any, _Same]]:
    if isinstance(container, dict):
        return [(_comparable(key), _Same((value,))) for key, value in container.items()]
    if isinstance(container, set):
        return [(_comparable(value), _Same((None,))) for value in container]
    return [(index, _Same((value,))) for index, value in enumerate(container)]


class _Stored(Tensor):
    """Stands in for a tensor that a unit left on itself; any use of it is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise UnsupportedUseError(
            "A tensor with a gradient that a unit stored on itself in `forward` was used outside of the unit. It"
            " belongs to any micro-batch, and its gradient would be lost. Return it from `forward`, or store it"
            " detached."
        )


_HARMLESS = ("grad_fn", "requires_grad", "is_leaf", "shape", "dtype", "device", "_version")


def has_graph(value: Any) -> bool:
    """Whether ``value`` is, or a list or tuple holds, a tensor that was computed with a graph."""
    if isinstance(value, (list, tuple)):
        return any(map(has_graph, value))
    return isinstance(value, Tensor) and value.grad_fn is not None


def is_leaf_copy(value: Any, masters: Container[int]) -> bool:
    """Whether ``value`` is, or a list or tuple holds, a worker's copy of a parameter."""
    if isinstance(value, (list, tuple)):
        return any(is_leaf_copy(item, masters) for item in value)
    return isinstance(value, nn.Parameter) and id(value) not in masters


def guard(module: nn.Module, name: str) -> None:
    """Make tensors in an attribute unusable."""
    vars(module)[name] = _map_tensors(vars(module).get(name), lambda tensor: tensor.detach().as_subclass(_Stored))


def unguard(module: nn.Module, name: str) -> None:
    """Make them ordinary tensors again."""
    with torch._C.DisableTorchFunctionSubclass():
        vars(module)[name] = _map_tensors(vars(module).get(name), lambda tensor: tensor.as_subclass(Tensor))


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, list):
        value[:] = [_map_tensors(item, function) for item in value]
        return value
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_map_tensors(item, function) for item in value)
    return function(value) if isinstance(value, Tensor) and value.is_floating_point() else value
