"""Losses whose memory grows with a chunk of tokens, not with tokens x vocabulary."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["chunk_size", "linear_cross_entropy"]

_CHUNK_BYTES = 512 * 2**20
"""Logits of a chunk, in float32: large enough for full speed of the products, small beside the weight of a head."""


def chunk_size(vocabulary: int) -> int:
    """Tokens whose logits take about half a GiB in float32; a multiple of 64 where there are so many."""
    tokens = max(1, _CHUNK_BYTES // (4 * vocabulary))
    return tokens if tokens < 64 else tokens // 64 * 64


class _LinearCrossEntropy(torch.autograd.Function):
    """Forms the gradients along with the loss, chunk by chunk, so that no chunk's logits outlive it.

    Of a chunk there is one tensor of logits in full precision, in which softmax and gradient are formed in place, and
    one in the dtype of the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        chunk_tokens: int,
        compiled: bool,
    ) -> Tensor:
        wanted = ctx.needs_input_grad
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        full = torch.promote_types(dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Sums in full precision: many chunks must not cost precision.
        grad_weight = torch.zeros_like(weight, dtype=full) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=full) if bias is not None and wanted[2] else None
        count = (labels != ignore_index).sum()
        loss = hidden.new_zeros((), dtype=full)
        with torch.autocast(device, enabled=False):
            weight = weight.to(dtype)
            for start in range(0, len(labels), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                ignored = (labels[rows] == ignore_index)[:, None]
                target = labels[rows, None].masked_fill(ignored, 0)
                inputs = hidden[rows].to(dtype)
                logits = F.linear(inputs, weight, None if bias is None else bias.to(dtype))
                if compiled and grad_bias is None:
                    part, grad = _compiled_chunk()(logits, target, ignored)
                    loss += part
                    del logits
                    _add_products(grad, inputs, weight, rows, grad_hidden, grad_weight)
                    del grad
                    continue
                logits = logits.to(full)
                greatest = logits.amax(-1, keepdim=True)
                chosen = logits.gather(-1, target).sub_(greatest)
                total = logits.sub_(greatest).exp_().sum(-1, keepdim=True)
                loss += (total.log() - chosen).masked_fill_(ignored, 0.0).sum()
                if grad_hidden is None and grad_weight is None and grad_bias is None:
                    continue
                # d loss / d logits = softmax - one_hot. The average is taken in backward, together with the factor that
                # comes from there: so small a number as 1 / count would vanish in float16 where losses are scaled.
                logits.div_(total).scatter_add_(-1, target, torch.full_like(target, -1, dtype=full))
                logits.masked_fill_(ignored, 0.0)
                if grad_bias is not None:
                    grad_bias += logits.sum(0)
                grad = logits.to(dtype)
                del logits
                _add_products(grad, inputs, weight, rows, grad_hidden, grad_weight)
                del grad
        # Not as saved tensors: backward hands them on, and a second holder would cost a copy.
        ctx.gradients, ctx.count = (grad_hidden, grad_weight, grad_bias), count.clamp(min=1)
        return loss / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "The backward of `linear_cross_entropy` can run only once: its gradients were handed on. Call the"
                " function again, or use `F.cross_entropy` where a graph is kept for several passes."
            )
        factor = grad_loss / ctx.count
        scaled = [
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def _add_products(
    grad: Tensor, inputs: Tensor, weight: Tensor, rows: slice, grad_hidden: Tensor | None, grad_weight: Tensor | None
) -> None:
    """Take the gradient of a chunk's logits on to the inputs and the weight of the head."""
    if grad_hidden is not None:
        grad_hidden[rows] = grad @ weight
    if grad_weight is not None:
        # By parts of the vocabulary: a product for all of it would be another weight.
        step = max(1, _CHUNK_BYTES // (16 * weight.shape[1]))
        for first in range(0, len(weight), step):
            grad_weight[first : first + step] += grad[:, first : first + step].t() @ inputs


def _chunk(logits: Tensor, target: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk and the gradient of its logits, in few passes over memory when it is compiled."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_total = values.logsumexp(-1, keepdim=True)
    loss = (log_total - values.gather(-1, target)).masked_fill(ignored, 0.0).sum()
    hit = torch.arange(logits.shape[-1], device=logits.device) == target
    gradient = (values - log_total).exp() - hit.to(values.dtype)
    return loss, gradient.masked_fill(ignored, 0.0).to(logits.dtype)


@cache
def _compiled_chunk() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_chunk, fullgraph=True)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), labels)`` without holding all logits.

    The gradients are formed along with the loss, so that they can be asked for once only. Under autocast the products
    run in its dtype, the loss and the sums in float32.

    Args:
        hidden: (tokens, width), the inputs of the head.
        weight: (vocabulary, width), the weight of the head.
        labels: (tokens,), class indices; positions with ``ignore_index`` do not count.
        bias: (vocabulary,), the bias of the head, if it has one.
        ignore_index: see there.
        chunk_tokens: logits are formed for so many tokens at a time; by default so many that they take half a GiB. Peak
            extra memory is about 6 bytes x ``chunk_tokens`` x vocabulary (4 where compiled), beside the gradients.
        compiled: whether to compile what is done with the logits of a chunk, which is then limited by memory bandwidth
            far less. With a trained bias it has no effect.

    Returns:
        The mean over the labels that count, a scalar in float32 (float64 for float64); NaN if none does.

    Raises:
        ValueError: the shapes do not fit together, or ``chunk_tokens`` is less than 1.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            "`hidden` must be (tokens, width), `labels` (tokens,) and `weight` (vocabulary, width), but got"
            f" {list(hidden.shape)}, {list(labels.shape)} and {list(weight.shape)}. Flatten batch and sequence first."
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"`chunk_tokens` must be at least 1, but got {chunk_tokens}.")
    if has_torch_function((hidden, weight, labels)):
        # As torch's own functions do: who watches operations shall see this one.
        return handle_torch_function(
            linear_cross_entropy,
            (hidden, weight, labels),
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            chunk_tokens=chunk_tokens,
            compiled=compiled,
        )
    apply = _LinearCrossEntropy.apply
    chunk_tokens = chunk_tokens or chunk_size(len(weight))
    loss: Tensor = apply(hidden, weight, bias, labels, ignore_index, chunk_tokens, compiled)  # type: ignore[no-untyped-call]
    return loss
