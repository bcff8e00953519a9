"""Steps an optimizer over some of its parameters at a time.

A shallow copy of the optimizer shares its ``state`` and steps a subset, with the hyper-parameters that the parameter
groups had when the step began: a scheduler may change them while it still runs. Elementwise optimizers give the same
bits as one step over everything.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["PartialStepper", "intercepted", "reason_against_parts"]


def reason_against_parts(optimizer: torch.optim.Optimizer) -> str | None:
    """Why ``optimizer`` must step over all its parameters at once; None if it need not."""
    name = type(optimizer).__name__
    arguments = inspect.signature(type(optimizer).step).parameters
    closure = arguments.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        return f"{name} evaluates the loss several times in a step"
    if "grad_scaler" in arguments:
        return f"{name} takes the loss scale out of the gradients by itself"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"hooks are registered on {name}'s steps"
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "hooks are registered on the steps of all optimizers"
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):  # Schedulers do so, to see that it is called.
        return f"`step` of the {name} was replaced"
    return None


@contextmanager
def intercepted(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Iterator[None]:
    """Let ``optimizer.step(...)`` call ``step`` instead."""
    own = vars(optimizer).get("step")
    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del vars(optimizer)["step"]
        else:
            vars(optimizer)["step"] = own


class PartialStepper:
    """One step of ``optimizer``, taken in parts.

    Args:
        optimizer: not changed but for its ``state``, and for what its own step changes in the parameter groups.
        only: which parameters to step; None for all.

    Threading: no two methods may run concurrently.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, only: Callable[[Tensor], bool] | None = None) -> None:
        self._optimizer = optimizer
        self._class = type(optimizer)
        self._groups = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in optimizer.param_groups
        ]
        self._group_of = {
            id(p): index for index, group in enumerate(self._groups) for p in group["params"] if only is None or only(p)
        }
        self._stepped: set[int] = set()
        self._changes: dict[tuple[int, str], Any] = {}
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self._clip: tuple[float, Tensor] | None = None
        self._part = object.__new__(self._class)
        vars(self._part).update(vars(optimizer))
        # A scheduler patches `step` on the instance to see that it was called.
        vars(self._part).pop("step", None)
        vars(self._part).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())

    def owns(self, parameter: Tensor) -> bool:
        """Whether the optimizer steps ``parameter``."""
        return id(parameter) in self._group_of

    def remaining(self) -> list[Tensor]:
        """Parameters that have not been stepped yet."""
        members = [p for group in self._groups for p in group["params"]]
        return [p for p in members if id(p) in self._group_of and id(p) not in self._stepped]

    def measure(self, parameters: Iterable[Tensor]) -> None:
        """Take the norms of gradients that are complete, for `clip`."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                self._norms[id(parameter)] = gradient, torch.linalg.vector_norm(gradient)

    def is_measured(self, parameter: Tensor) -> bool:
        """Whether `measure` has taken the norm of the gradient of ``parameter``."""
        return id(parameter) in self._norms

    def clip(self, max_norm: float) -> bool:
        """Have gradients clipped by their total norm, each right before its parameter is stepped.

        The bits are those of `torch.nn.utils.clip_grad_norm_`, which takes the norm of each gradient, and the norm of
        these norms.

        Returns:
            Whether that will be done; not if some gradient was not measured, or if their dtypes differ.
        """
        with_gradient = [p for group in self._groups for p in group["params"] if p.grad is not None]
        measured = [self._norms.get(id(p), (None, None)) for p in with_gradient]
        if any(p.grad is not gradient for p, (gradient, _) in zip(with_gradient, measured, strict=True)):
            return False
        norms = [norm for _, norm in measured if norm is not None]
        if len({norm.dtype for norm in norms}) != 1:
            return False
        self._clip = max_norm, torch.linalg.vector_norm(torch.stack(norms))
        return True

    def step(self, parameters: Sequence[Tensor]) -> None:
        """Step those of ``parameters`` that belong to the optimizer and have a ``.grad``."""
        parts: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            index = self._group_of.get(id(parameter))
            if index is not None and id(parameter) not in self._stepped:
                self._stepped.add(id(parameter))
                parts.setdefault(index, []).append(parameter)
        if not parts:
            return
        if self._clip is not None:
            max_norm, total_norm = self._clip
            torch.nn.utils.clip_grads_with_norm_([p for part in parts.values() for p in part], max_norm, total_norm)
        groups = [(index, {**self._groups[index], "params": part}) for index, part in sorted(parts.items())]
        self._part.param_groups = [group for _, group in groups]
        self._class.step(self._part)
        for index, group in groups:
            before = self._groups[index]
            self._changes |= {
                (index, name): value for name, value in group.items() if name != "params" and value is not before[name]
            }

    def finish(self) -> None:
        """Carry over what the step changed in the parameter groups (some optimizers count there)."""
        for (index, name), value in self._changes.items():
            self._optimizer.param_groups[index][name] = value
