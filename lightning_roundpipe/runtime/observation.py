"""Watches operations of the first micro-batch, for what calls of units alone do not show."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.exceptions import UnsupportedUseError

__all__ = ["ParameterSubstitution", "StepObservation"]

_GRADIENT_INSIDE_STEP = (
    "`torch.autograd.grad` was asked for a gradient that does not reach its inputs. Through a streamed unit none can,"
    " while `training_step` runs: units are differentiated after it returns. Make one unit of what is differentiated"
    " (`RoundPipeStrategy(units=[...])`) and call `torch.autograd.grad` inside its forward, or train this model without"
    " RoundPipeStrategy."
)

_TENSOR_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}


class ParameterSubstitution(TorchFunctionMode):
    """Replaces host parameters among the arguments of operations by what a lookup would have given.

    Needed where code reaches a parameter without looking it up on its module: the list in `nn.LSTM`, closures.
    """

    def __init__(self, parameters: Iterable[Tensor], lookup: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._parameters = {id(parameter) for parameter in parameters}
        self._lookup = lookup

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        getter = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else None
        if getter is not None and getter.__name__ not in _TENSOR_PROPERTIES:
            return func(*args, **kwargs)  # Metadata: the host's is as good.
        arguments = [self._substitute(argument) for argument in args]
        result = func(*arguments, **{name: self._substitute(value) for name, value in kwargs.items()})
        self.observe(func, args, kwargs, result)
        return result

    def observe(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See an operation after it ran."""

    def substituted(self, parameter: Tensor) -> None:
        """Hear that ``parameter`` was reached without a lookup."""

    def _substitute(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self._parameters:
                self.substituted(value)
                return self._lookup(value)
            return value
        if isinstance(value, (list, tuple)) and any(id(item) in self._parameters for item in value):
            return [self._substitute(item) for item in value]
        return value


class StepObservation(ParameterSubstitution):
    """Substitutes parameters, tells about it, and notes cross-entropies.

    Attributes:
        losses: each cross-entropy that averages, with the number of its targets that are not ignored.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lookup: Callable[[Tensor], Tensor],
        on_hidden_parameter: Callable[[], None],
    ) -> None:
        super().__init__(parameters, lookup)
        self._on_hidden_parameter = on_hidden_parameter
        self.losses: list[tuple[Tensor, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.autograd.grad:
            return super().__torch_function__(func, types, args, kwargs)
        try:
            gradients = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "used in the graph" not in str(error):
                raise
            raise UnsupportedUseError(_GRADIENT_INSIDE_STEP) from error
        if any(gradient is None for gradient in gradients):
            raise UnsupportedUseError(_GRADIENT_INSIDE_STEP)
        return gradients

    def substituted(self, parameter: Tensor) -> None:
        """Tell about it."""
        self._on_hidden_parameter()

    def observe(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note averaging cross-entropies."""
        if func is not torch.nn.functional.cross_entropy and func is not torch.nn.functional.nll_loss:
            return
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if isinstance(target, Tensor) and not target.is_floating_point() and kwargs.get("reduction", "mean") == "mean":
            self.losses.append((result.detach(), int((target != kwargs.get("ignore_index", -100)).sum())))
