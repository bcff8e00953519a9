"""When updates, or what comes before them, may run along with the backward pass: nothing may need all gradients."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_roundpipe.precision import RoundPipePrecision
from lightning_roundpipe.runtime.partial_step import reason_against_parts

__all__ = [
    "clears_or_reads_spent_gradients",
    "hooks_between_steps",
    "needs_gradients_of_each_batch",
    "reason_against_completion",
    "reason_against_overlap",
]

_SEE_GRADIENTS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_CHANGE_GRADIENTS = ("backward", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients")
_KNOWN = ("lightning.", "lightning_roundpipe.")
_BETWEEN_STEPS = ("on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer", "on_after_batch_transfer")


def reason_against_completion(module: LightningModule, precision: RoundPipePrecision) -> str | None:
    """Why gradients may not become ``.grad`` as they land, before the backward pass is over; None if they may."""
    trainer = module.trainer
    if getattr(trainer.fit_loop, "_skip_backward", False):
        return "the backward pass is skipped (as stochastic weight averaging does to set the statistics of its average)"
    for hook in (*_SEE_GRADIENTS, *_CHANGE_GRADIENTS):
        if is_overridden(hook, module):
            return f"`{hook}` of {type(module).__name__} needs all gradients"
    for callback in _callbacks(trainer):
        for hook in _SEE_GRADIENTS:
            if is_overridden(hook, callback):
                return f"`{hook}` of {type(callback).__name__} may need all gradients"
    if getattr(precision, "scaler", None) is not None:
        return "loss scaling looks for infinite values in all gradients"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()):
        return "hooks are registered on parameters"
    return None


def reason_against_overlap(
    module: LightningModule, optimizer: torch.optim.Optimizer, precision: RoundPipePrecision
) -> str | None:
    """Why the optimizer must step after the backward pass; None if it need not."""
    if (reason := reason_against_completion(module, precision)) is not None:
        return reason
    if module.trainer.gradient_clip_val:
        return "gradient clipping needs all gradients"
    return reason_against_parts(optimizer)


def needs_gradients_of_each_batch(module: LightningModule) -> bool:
    """Whether user code sees or changes what a batch adds to ``.grad``, so that it must be right for each batch."""
    return (
        is_overridden("backward", module)
        or is_overridden("optimizer_zero_grad", module)
        or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())
    )


def hooks_between_steps(module: LightningModule) -> bool:
    """Whether user code runs between two steps, which may change weights in any way."""
    callbacks = [c for c in _callbacks(module.trainer) if not type(c).__module__.startswith(_KNOWN)]
    return any(is_overridden(hook, owner) for owner in (module, *callbacks) for hook in _BETWEEN_STEPS)


def clears_or_reads_spent_gradients(module: LightningModule) -> bool:
    """Whether user code clears gradients itself, or looks at those of the last step before they are cleared."""
    return (
        is_overridden("optimizer_zero_grad", module)
        or is_overridden("on_before_zero_grad", module)
        or any(is_overridden("on_before_zero_grad", callback) for callback in _callbacks(module.trainer))
    )


def _callbacks(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)
