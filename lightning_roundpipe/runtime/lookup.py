"""Parameters and buffers are looked up, not moved.

`nn.Module.__getattr__` reads ``module._parameters[name]``. While a step runs, a `dict` subclass stands in the place of
``_parameters`` and ``_buffers`` and hands out the copy that belongs to the micro-batch running in the calling thread.
Everything that iterates (``parameters()``, ``state_dict()``, optimizers) reads the dict below and keeps seeing the host
tensors. A module is never copied and may run in several threads at once. Between steps the module is an ordinary one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.units import Unit

__all__ = ["LookupDict", "Resolver", "current_resolver", "installed", "resolving", "resolving_backward"]


class Resolver(Protocol):
    """What a micro-batch offers to the modules that run in its thread."""

    @property
    def is_alone(self) -> bool:
        """Whether the batch is this micro-batch alone."""

    def parameter(self, host: Tensor) -> Tensor:
        """The copy of the parameter ``host`` that running code must use."""

    def buffer(self, table: "LookupDict", name: str) -> Tensor:
        """The copy of a buffer that running code must use."""

    def assign_buffer(self, table: "LookupDict", name: str, value: Tensor) -> None:
        """Running code assigned ``module.name = value``."""

    def replace_parameter(self, table: "LookupDict", name: str, value: Tensor | None) -> None:
        """Running code puts ``value`` in the place of a parameter, or takes the parameter away."""

    def call(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Running code calls ``unit``."""


_threads = threading.local()
_backward: dict[int, Resolver] = {}
"""By GPU, the micro-batch whose backward runs there: PyTorch does that in threads of its own."""
_backward_locks: dict[int, threading.RLock] = {}


def current_resolver() -> Resolver | None:
    """The micro-batch that runs in the calling thread, if any.

    Code that runs in PyTorch's backward thread of a GPU (a model's own checkpointing, hooks, custom functions that read
    parameters) belongs to the micro-batch whose backward runs on that GPU.
    """
    resolver: Resolver | None = getattr(_threads, "resolver", None)
    if resolver is None and _backward and _is_foreign_thread():
        return _backward.get(torch.cuda.current_device())
    return resolver


def _is_foreign_thread() -> bool:
    """Whether Python did not start the calling thread; asking for `threading.current_thread` makes it up a dummy."""
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return thread is None or isinstance(thread, threading._DummyThread)


@contextmanager
def resolving_backward(resolver: Resolver, device: torch.device) -> Iterator[None]:
    """Let lookups of PyTorch's backward thread for ``device`` go to ``resolver``."""
    if device.type != "cuda":  # There the calling thread runs the backward itself.
        yield
        return
    # PyTorch has one backward thread for each GPU; workers that share one take turns.
    with _backward_locks.setdefault(device.index, threading.RLock()):
        outer = _backward.get(device.index)
        _backward[device.index] = resolver
        try:
            yield
        finally:
            if outer is None:
                del _backward[device.index]
            else:
                _backward[device.index] = outer


@contextmanager
def resolving(resolver: Resolver | None) -> Iterator[None]:
    """Let lookups of the calling thread go to ``resolver``; with None, to nobody: the model is an ordinary one."""
    outer = getattr(_threads, "resolver", None)
    _threads.resolver = resolver
    try:
        yield
    finally:
        _threads.resolver = outer


class LookupDict(dict[str, Any]):
    """Stands in for ``module._parameters`` or ``module._buffers`` during a step."""

    __slots__ = ("is_buffers", "owner")

    def __new__(cls, entries: Any = (), owner: nn.Module | None = None, *, is_buffers: bool = False) -> Any:
        """Make one for ``owner``; what copies a mapping by calling its class gets an ordinary dict."""
        return dict(entries) if owner is None else super().__new__(cls)

    def __init__(self, entries: dict[str, Any], owner: nn.Module, *, is_buffers: bool) -> None:
        super().__init__(entries)
        self.owner = owner
        self.is_buffers = is_buffers

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        resolver = current_resolver()
        if resolver is None or value is None:
            return value
        return resolver.buffer(self, name) if self.is_buffers else resolver.parameter(value)

    def __setitem__(self, name: str, value: Any) -> None:
        resolver = current_resolver()
        if self.is_buffers and resolver is not None and isinstance(value, Tensor):
            if name not in self:
                super().__setitem__(name, value.detach().cpu().clone())  # A new buffer gets a home.
            resolver.assign_buffer(self, name, value)
        elif resolver is not None and not self.is_buffers and not (value is None and super().get(name) is None):
            resolver.replace_parameter(self, name, value)
        else:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        resolver = current_resolver()
        if resolver is not None and not self.is_buffers and super().get(name) is not None:
            resolver.replace_parameter(self, name, None)
        else:
            super().__delitem__(name)

    def host(self, name: str) -> Tensor | None:
        """The host tensor itself."""
        return super().get(name)

    def replace(self, name: str, value: Any) -> None:
        """Put another host tensor into the dict."""
        super().__setitem__(name, value)

    def remove(self, name: str) -> None:
        """Take a host tensor out of the dict."""
        super().__delitem__(name)

    def put_back(self, entries: dict[str, Any]) -> None:
        """Make ``entries``, in their order, all that the dict holds."""
        self.clear()
        self.update(entries)

    def refuse(self, name: str) -> UnsupportedUseError:
        """What to raise where running code replaces the parameter ``name`` for good."""
        return UnsupportedUseError(
            f"Parameter `{name}` of {type(self.owner).__name__} was replaced while a step runs"
            " (`torch.func.functional_call`, `register_parameter` or an assignment in forward). All micro-batches"
            " share the module, so it must stay as it is during a step: build parameters before training, and pass"
            " other weights as arguments. A module that replaces them only for the length of its forward may do so"
            " inside a unit: name it in `RoundPipeStrategy(units=[...])`."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A module that is copied or pickled in the middle of a step becomes an ordinary one.
        return dict, (list(self.items()),)


class _UnitCall:
    """Stands in for ``module._call_impl`` of a unit, so that the module's own hooks run inside the call."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.forward = MethodType(type(unit.module)._call_impl, unit.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        resolver = current_resolver()
        if resolver is None:
            return self.forward(*args, **kwargs)
        return resolver.call(self.unit, self.forward, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.unit.module, "_call_impl")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.unit.module))
        return MethodType(type(self.unit.module)._call_impl, copied) if copied is not None else self.forward


@contextmanager
def installed(root: nn.Module, units: tuple[Unit, ...]) -> Iterator[None]:
    """Let every module below ``root`` look its parameters and buffers up, and intercept calls of ``units``."""
    modules = list(root.modules())
    originals = [(module, module._parameters, module._buffers) for module in modules]
    try:
        for module, parameters, buffers in originals:
            module.__dict__["_parameters"] = LookupDict(parameters, module, is_buffers=False)
            module.__dict__["_buffers"] = LookupDict(buffers, module, is_buffers=True)
        for unit in units:
            unit.module.__dict__["_call_impl"] = _UnitCall(unit)
        yield
    finally:
        for unit in units:
            unit.module.__dict__.pop("_call_impl", None)
        for module, parameters, buffers in originals:
            # User code may have registered or replaced entries during the step, or even the table.
            for original, name in ((parameters, "_parameters"), (buffers, "_buffers")):
                entries = dict(module.__dict__.get(name, {}).items())
                if entries.keys() != original.keys() or any(entries[key] is not original[key] for key in entries):
                    original.clear()
                    original.update(entries)
                module.__dict__[name] = original
