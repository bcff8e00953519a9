"""Losses whose memory grows with a chunk of tokens, not with tokens x vocabulary."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["linear_cross_entropy"]


class _LinearCrossEntropy(torch.autograd.Function):
    """Forms the gradients along with the loss, chunk by chunk, so that no chunk's logits outlive it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk_tokens: int
    ) -> Tensor:
        count = (labels != ignore_index).sum()
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = F.linear(hidden[chunk], weight).float()
            target = labels[chunk]
            ignored = target == ignore_index
            safe = target.masked_fill(ignored, 0)[:, None]
            log_sum = logits.logsumexp(-1, keepdim=True)
            loss += (log_sum - logits.gather(-1, safe)).masked_fill_(ignored[:, None], 0.0).sum()
            # d loss / d logits = softmax - one_hot, averaged over the labels that count; formed in place.
            grad = logits.sub_(log_sum).exp_()
            grad.scatter_add_(-1, safe, torch.full_like(safe, -1, dtype=grad.dtype))
            grad.masked_fill_(ignored[:, None], 0.0)
            grad = grad.div_(count).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[chunk])
            if ctx.needs_input_grad[1]:
                part = grad.t() @ hidden[chunk]
                # float32 sums: many chunks must not cost precision.
                grad_weight = part.float() if grad_weight is None else grad_weight.add_(part)
            del logits, grad
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul(grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, chunk_tokens: int = 2048
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight), labels)`` without holding all logits.

    Args:
        hidden: (tokens, width), the inputs of the head.
        weight: (vocabulary, width), the weight of the head.
        labels: (tokens,), class indices; positions with ``ignore_index`` do not count.
        ignore_index: see there.
        chunk_tokens: logits are formed for so many tokens at a time: peak extra memory is about
            10 bytes x ``chunk_tokens`` x vocabulary.

    Returns:
        The mean over the labels that count, a float32 scalar; NaN if none does.

    Raises:
        ValueError: the shapes do not fit together.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            "`hidden` must be (tokens, width), `labels` (tokens,) and `weight` (vocabulary, width), but got"
            f" {list(hidden.shape)}, {list(labels.shape)} and {list(weight.shape)}. Flatten batch and sequence first."
        )
    apply = _LinearCrossEntropy.apply
    loss: Tensor = apply(hidden, weight, labels, ignore_index, chunk_tokens)  # type: ignore[no-untyped-call]
    return loss
