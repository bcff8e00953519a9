"""Watches operations, for what lookups and calls of units alone do not show."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.losses import linear_cross_entropy

__all__ = ["GlueObservation", "ParameterSubstitution"]

_LABEL_LOSSES: dict[Callable[..., Any], tuple[str, int]] = {
    torch.nn.functional.cross_entropy: ("target", 1),
    torch.nn.functional.nll_loss: ("target", 1),
    linear_cross_entropy: ("labels", 2),
}
"""Losses that average over labels, with the name and the place of the argument that holds these."""

_TENSOR_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}

_GRADIENT_INSIDE_STEP = (
    "`torch.autograd.grad` was asked for a gradient that does not reach its inputs. Through a streamed unit none can,"
    " while `training_step` runs: units are differentiated after it returns. Make one unit of what is differentiated"
    " (`RoundPipeStrategy(units=[...])`) and call `torch.autograd.grad` inside its forward, or train this model without"
    " RoundPipeStrategy."
)


class ParameterSubstitution(TorchFunctionMode):
    """Replaces host parameters among the arguments of operations by what a lookup would have given.

    Needed where code reaches a parameter without looking it up on its module: the list in `nn.LSTM`, closures,
    ``self.parameters()``.

    Args:
        parameters: the host parameters.
        lookup: gives the running micro-batch's copy.

    Attributes:
        found: whether a parameter was replaced.
        may_freeze: whether flags of parameters may be set; else that is refused.
        data_taken: whether the ``data`` of a parameter was asked for, through which it could be written without a
        trace.
    """

    def __init__(self, parameters: Iterable[Tensor], lookup: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._parameters = {id(parameter) for parameter in parameters}
        self._lookup = lookup
        self.found = False
        self.data_taken = False
        self.may_freeze = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
            if name not in _TENSOR_PROPERTIES:
                return func(*args, **kwargs)  # Metadata: the host's is as good.
            self.data_taken |= name == "data" and isinstance(args[0], nn.Parameter)
        elif name in ("__set__", "requires_grad_") and id(args[0]) in self._parameters:
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            if name == "data" and args[1] is self._lookup(args[0]):
                return None  # `module.to(...)` that has nothing to convert.
            if name == "data" or (name.startswith("requires_grad") and not self.may_freeze):
                raise UnsupportedUseError(
                    f"`{name}` of a parameter was set while a step runs. Freeze, unfreeze and replace weights between"
                    " steps (for example in `on_train_batch_start`). What freezes for a while (peft's"
                    " `disable_adapter` and `set_adapter`) needs `RoundPipeStrategy(num_microbatches=1)`: the module"
                    " is one for all micro-batches."
                )
            return func(*args, **kwargs)
        elif name == "set_" and len(args) == 2 and args[0] is args[1]:
            return args[0]  # What registering a parametrization does; it would count as a write.
        arguments = [self._substitute(argument) for argument in args]
        return func(*arguments, **{name: self._substitute(value) for name, value in kwargs.items()})

    def _substitute(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self._parameters:
                self.found = True
                return self._lookup(value)
            return value
        if isinstance(value, (list, tuple)) and any(id(item) in self._parameters for item in value):
            return [self._substitute(item) for item in value]
        return value


class GlueObservation(ParameterSubstitution):
    """Substitutes parameters in user code between units, notes cross-entropies, and refuses gradients inside a step.

    Attributes:
        losses: each cross-entropy that averages, with the number of its targets that are not ignored.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lookup: Callable[[Tensor], Tensor], *, alone: bool = False
    ) -> None:
        super().__init__(parameters, lookup)
        self.may_freeze = alone
        self.losses: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch inside: units have many operations, and each would cost.

        A mode that user code has entered above this one must stay above it; then watching goes on.
        """
        if _get_current_function_mode() is not self:
            yield
            return
        _pop_mode()
        try:
            yield
        finally:
            _push_mode(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Watch one operation."""
        if func is torch.autograd.grad:
            return self._differentiate(func, args, kwargs or {})
        result = super().__torch_function__(func, types, args, kwargs)
        if func in _LABEL_LOSSES:
            self._note_loss(result, *_LABEL_LOSSES[func], args, kwargs or {})
        return result

    def _note_loss(self, loss: Tensor, name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = kwargs.get(name, args[place] if len(args) > place else None)
        if isinstance(target, Tensor) and not target.is_floating_point() and kwargs.get("reduction", "mean") == "mean":
            self.losses.append((loss.detach(), (target != kwargs.get("ignore_index", -100)).sum()))

    @staticmethod
    def _differentiate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            gradients = func(*args, **kwargs)
        except RuntimeError as error:
            if "used in the graph" not in str(error):
                raise
            raise UnsupportedUseError(_GRADIENT_INSIDE_STEP) from error
        if any(gradient is None for gradient in gradients):
            raise UnsupportedUseError(_GRADIENT_INSIDE_STEP)
        return gradients
