"""Gradients become ``.grad`` when Lightning expects it.

Lightning calls ``training_step``, then ``zero_grad``, then ``backward`` on the loss. The pipeline's backward has run
inside ``training_step``; the loss that it returns carries one node, whose backward hands the finished gradients to
autograd. Hooks on parameters, accumulation into ``.grad`` and a scaled or divided loss work as ever.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["publish_gradients"]


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.gradients = gradients
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
        if factor != 1.0:
            gradients = [gradient * factor for gradient in gradients]
        return None, None, None, *gradients


def publish_gradients(loss: Tensor, gradients: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Attach finished gradients to a loss.

    Args:
        loss: scalar, without a graph.
        gradients: parameters and the gradient of ``scale * loss`` for each.
        scale: see there.

    Returns:
        The loss, requiring grad. ``(k * loss).backward()`` adds ``k / scale`` times each gradient to its parameter's.
    """
    parameters = [parameter for parameter, _ in gradients]
    if not parameters:
        return loss.clone().requires_grad_()
    published: Tensor = _Publish.apply(loss, scale, [gradient for _, gradient in gradients], *parameters)  # type: ignore[no-untyped-call]
    return published
