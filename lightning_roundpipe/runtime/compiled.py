"""Units run as compiled graphs, one for all units that are alike.

The compiler can not see through the lookup of parameters (see `lookup`), and must not keep the copies that a worker
gets anew for every stage. So what is compiled is a function of the copies: it calls a *skeleton* of the unit, which has
the unit's classes and plain attributes but no tensors, with the copies in the place of its parameters and buffers. The
guards of the compiler look at types, attributes and shapes, not at identities: equal layers share one graph.

A compiled graph may round differently from eager code, and with a graph for backward differently from without one.
"""

import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.runtime.calls import Scope
from lightning_roundpipe.runtime.lookup import LookupDict
from lightning_roundpipe.runtime.traits import OWN_TABLES, Mode, UnitTraits
from lightning_roundpipe.runtime.units import Unit

__all__ = ["CompiledUnits"]

CompiledCall = Callable[[Scope, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CompiledUnits:
    """The compiled forms of the units that have one: those whose class occurs more than once.

    Args:
        units: all units.
        traits: theirs, by index.
        options: keyword arguments of `torch.compile`.
        warn: tells the user something, once for each topic.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        traits: Sequence[UnitTraits],
        options: Mapping[str, Any],
        warn: Callable[[str, str], None],
    ) -> None:
        classes = [type(unit.module) for unit in units]
        self._options = dict(options)
        self._traits = traits
        self._warn = warn
        self._lock = threading.Lock()
        self._functions: dict[tuple[type[nn.Module], torch.device], Callable[..., Any]] = {}
        self._failed: set[type[nn.Module]] = set()
        self._skeletons = {unit.index: _Skeleton(unit) for unit in units if classes.count(type(unit.module)) > 1}
        # Here, since it takes seconds and few need it.
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._inductor import list_mode_options

        self._errors = (TorchDynamoException, FailOnRecompileLimitHit)
        if "options" not in self._options and self._options.get("backend", "inductor") == "inductor":
            # Random numbers are drawn as eager code draws them: recomputation must repeat what forward drew.
            mode = self._options.pop("mode", "default")
            self._options["options"] = {**list_mode_options(mode), "fallback_random": True}

    def begin_step(self) -> None:
        """Follow what has changed on the units since the last step: attributes, training mode, hooks."""
        for index, skeleton in self._skeletons.items():
            skeleton.follow(self._traits[index])

    def get(self, traits: UnitTraits, mode: Mode) -> CompiledCall | None:
        """What to call in ``mode`` instead of the unit itself; None if that must run eagerly.

        Returns:
            A function of the scope that gives the copies of parameters and buffers, the unit's arguments and keyword
            arguments, and its ordinary call, for the case that it turns out not to compile.
        """
        unit = traits.unit
        skeleton = self._skeletons.get(unit.index)
        if skeleton is None or type(unit.module) in self._failed or mode != skeleton.mode:
            return None
        reason = skeleton.reason or _reason(traits)
        if reason is None:
            return partial(self._call, skeleton)
        self._refuse(unit, reason)
        return None

    def _refuse(self, unit: Unit, reason: str) -> None:
        name = type(unit.module).__qualname__
        self._warn(f"Units of class {name} run eagerly, not compiled, because {reason}.", f"compile {name}")

    def _call(
        self,
        skeleton: "_Skeleton",
        scope: Scope,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        eager: Callable[..., Any],
    ) -> Any:
        module_class = type(skeleton.unit.module)
        function = self._function(module_class, scope.worker.device)
        try:
            return function(skeleton.module, skeleton.tensors(scope), args, kwargs)
        except self._errors as error:
            # Raised while it is compiled: nothing has run.
            self._failed.add(module_class)
            first, *_ = str(error).strip().splitlines() or [""]
            self._refuse(skeleton.unit, f"the compiler raised {type(error).__name__}: {first}")
            return eager(*args, **kwargs)

    def _function(self, module_class: type[nn.Module], device: torch.device) -> Callable[..., Any]:
        with self._lock:
            function = self._functions.get((module_class, device))
            if function is None:
                # The compiler keeps graphs, and limits their number, by code object: each class and device has its own.
                name = f"{module_class.__name__}_{device.type}{device.index or ''}"
                own = types.FunctionType(_call.__code__.replace(co_name=name), _call.__globals__, name)
                function = torch.compile(own, fullgraph=True, **self._options)
                self._functions[module_class, device] = function
            return function


def _call(module: nn.Module, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.func.functional_call(module, tensors, args, kwargs)


def _reason(traits: UnitTraits) -> str | None:
    """Why a unit can not run compiled, as far as watching it has shown."""
    if traits.changes_inputs:
        return "they change their arguments in place"
    if traits.changes_attributes:
        return "they store values on themselves in `forward`"
    if traits.changes_buffers:
        return "they change buffers in `forward`"
    if traits.swaps_parameters:
        return "they take parameters off their modules in `forward`"
    if traits.hides_parameters:
        return "they reach parameters other than as attributes of their modules"
    return None


class _Skeleton:
    """A unit's module tree without tensors.

    Attributes:
        unit: the unit.
        module: the skeleton of its module.
        mode: see `UnitTraits.mode`.
        reason: why it can not stand in for the unit, if it can not.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self.module = self._copy(unit.module, {})
        self._known: list[dict[str, Any]] = [{} for _ in self._pairs]
        self._holds_module = [False] * len(self._pairs)
        self._paths = [(f"{name}." if name else "", module) for name, module in unit.module.named_modules()]
        self._parameters = list(unit.module.named_parameters(remove_duplicate=False))
        self.mode: Mode = ()
        self.reason: str | None = None

    def _copy(self, module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
        if module not in copies:
            copy = copies[module] = object.__new__(type(module))
            self._pairs.append((module, copy))
            vars(copy)["_parameters"] = {name: _hollow(value) for name, value in module._parameters.items()}
            vars(copy)["_buffers"] = {name: _hollow(value) for name, value in module._buffers.items()}
            vars(copy)["_modules"] = {
                name: None if child is None else self._copy(child, copies) for name, child in module._modules.items()
            }
        return copies[module]

    def follow(self, traits: UnitTraits) -> None:
        """Take over plain attributes that have changed, and see whether the skeleton can stand in for the unit."""
        self.reason = None
        for index, (module, copy) in enumerate(self._pairs):
            plain = {name: value for name, value in vars(module).items() if name not in OWN_TABLES}
            if not _same(plain, self._known[index]):
                for name in self._known[index].keys() - plain.keys():
                    del vars(copy)[name]
                vars(copy).update({name: self._moved(value, module, copy) for name, value in plain.items()})
                self._known[index] = plain
                self._holds_module[index] = any(map(_holds_module, plain.values()))
            if self._holds_module[index]:
                self.reason = "they hold modules in plain attributes"
            elif any(plain.get(name) for name in _HOOKS):
                self.reason = "hooks are registered on them"
        self.mode = traits.mode

    @staticmethod
    def _moved(value: Any, module: nn.Module, copy: nn.Module) -> Any:
        """A method that was bound to the module by hand is bound to the skeleton."""
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return types.MethodType(value.__func__, copy)
        return value

    def tensors(self, scope: Scope) -> dict[str, Tensor]:
        """The copies of parameters and buffers in ``scope``, by name; one that has several names comes under each."""
        tensors = {name: scope.parameter(host) for name, host in self._parameters}
        for path, module in self._paths:
            buffers = module._buffers
            if buffers:
                assert isinstance(buffers, LookupDict)
                for name in buffers:
                    if buffers.host(name) is not None:
                        tensors[path + name] = scope.buffer(buffers, name)
        return tensors


def _hollow(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    hollow = torch.empty_like(tensor, device="meta")
    return nn.Parameter(hollow, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else hollow


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(value is before[name] for name, value in now.items())


def _holds_module(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_module, value))
    if isinstance(value, dict):
        return any(map(_holds_module, value.values()))
    return isinstance(value, nn.Module)
