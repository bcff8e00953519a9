"""What is learned about a unit by watching it run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_roundpipe.runtime.units import Unit

__all__ = ["UnitTraits", "module_attributes", "restored_attributes"]

_OWN_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(eq=False)
class UnitTraits:
    """How a unit behaves; starts with what its structure shows.

    Attributes:
        changes_inputs: it writes to its arguments in place; it gets private copies.
        changes_attributes: it stores values on its modules; it never runs concurrently with itself, and a recomputation
            leaves them as they were.
        hides_parameters: it reaches parameters without looking them up (`nn.LSTM` keeps a list); they are substituted
            operation by operation.
        draws: for each combination of training flags, whether it draws random numbers: from the host's generator, and
            from the device's own if it has one.
        lock: held while a unit that changes attributes runs.
    """

    unit: Unit
    changes_inputs: bool = False
    changes_attributes: bool = False
    hides_parameters: bool = False
    draws: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        parameters = {id(parameter) for parameter in self.unit.parameters}
        self.hides_parameters = any(
            _holds(value, parameters)
            for attributes in module_attributes(self.unit.module).values()
            for value in attributes.values()
        )

    @property
    def training_flags(self) -> int:
        """Names the combination of ``training`` flags below the unit."""
        return hash(tuple(module.training for module in self.unit.submodules))


def _holds(value: Any, parameters: set[int], depth: int = 2) -> bool:
    if id(value) in parameters:
        return True
    if depth and isinstance(value, (list, tuple)):
        return any(_holds(item, parameters, depth - 1) for item in value)
    if depth and isinstance(value, dict):
        return any(_holds(item, parameters, depth - 1) for item in value.values())
    return False


def module_attributes(module: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """For every module below ``module`` a snapshot of its plain attributes."""
    return {
        inner: {name: value for name, value in vars(inner).items() if name not in _OWN_TABLES}
        for inner in module.modules()
    }


@contextmanager
def restored_attributes(module: nn.Module) -> Iterator[None]:
    """Put plain attributes back as they were, whatever runs inside."""
    before = module_attributes(module)
    try:
        yield
    finally:
        for inner, attributes in before.items():
            for name in set(vars(inner)) - attributes.keys() - set(_OWN_TABLES):
                del vars(inner)[name]
            vars(inner).update(attributes)
