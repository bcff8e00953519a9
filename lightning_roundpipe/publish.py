"""Gradients become ``.grad`` when Lightning expects it.

Lightning calls ``training_step``, then ``zero_grad``, then ``backward`` on the loss. The pipeline's backward has run
inside ``training_step``; the loss that it returns carries one node, whose backward hands the finished gradients to
autograd. Hooks on parameters, accumulation into ``.grad`` and a scaled or divided loss work as ever.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_gradients", "publish_gradients"]


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        scale: float,
        gradients: Sequence[tuple[Tensor, Tensor]],
        final: Sequence[tuple[Tensor, Tensor]],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.scale = scale
        ctx.gradients = gradients
        ctx.final = final
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "The gradients of this training step have been handed over: `backward` can be called once for each"
                " `training_step`."
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = grad_loss.item() / ctx.scale
        with torch.no_grad():
            for parameter, gradient in ctx.final:
                parameter.grad = gradient
            published = [_publish(parameter, gradient, factor) for parameter, gradient in gradients]
        return None, None, None, None, *published, *[None] * len(ctx.final)


def _publish(parameter: Tensor, gradient: Tensor, factor: float) -> Tensor | None:
    """Add ``factor * gradient`` to ``parameter.grad``, or return it for autograd to do so, where hooks wait for it."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return gradient * factor
    # Not through autograd: it would copy the gradient, which we keep the memory of.
    if parameter.grad is None:
        parameter.grad = gradient if factor == 1.0 else gradient.mul_(factor)
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient * factor + parameter.grad  # In place a sparse gradient can not become dense.
    else:
        parameter.grad += gradient if factor == 1.0 else gradient * factor
    return None


def publish_gradients(
    loss: Tensor,
    gradients: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    final: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Attach finished gradients to a loss.

    Args:
        loss: scalar, without a graph.
        gradients: parameters and the gradient of ``scale * loss`` for each.
        scale: see there.
        final: parameters whose ``.grad`` becomes the given gradient as it is, because they were updated with it.

    Returns:
        The loss, requiring grad. ``(k * loss).backward()`` adds ``k / scale`` times each gradient to its parameter's; a
        second backward raises `RuntimeError`.
    """
    parameters = [parameter for parameter, _ in [*gradients, *final]]
    if not parameters:
        return loss.clone().requires_grad_()
    published: Tensor = _Publish.apply(loss, scale, gradients, final, *parameters)  # type: ignore[no-untyped-call]
    return published


def add_gradients(gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to ``.grad`` of their parameters, as a backward pass would: hooks of the parameters run."""
    if gradients:
        with torch.enable_grad():
            publish_gradients(torch.zeros(()), gradients, 1.0).backward()
