"""What sees weights, gradients or optimizer state between steps waits for an update that is still under way."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["UpdateFence", "what_looks_between_steps"]

_BETWEEN_STEPS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "optimizer_step",
    "lr_scheduler_step",
)
"""Hooks that run after an update and before the next forward pass of training."""

_BLIND = (
    callbacks.DeviceStatsMonitor,
    callbacks.EarlyStopping,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateMonitor,
    callbacks.ModelCheckpoint,  # asks the strategy for the state
    callbacks.ModelSummary,
    callbacks.RichModelSummary,
    callbacks.RichProgressBar,
    callbacks.ThroughputMonitor,
    callbacks.Timer,
    callbacks.TQDMProgressBar,
)
"""Callbacks of Lightning that look at neither weights nor gradients nor optimizer state between steps."""


def what_looks_between_steps(module: pl.LightningModule) -> str | None:
    """The hook of the user, or of a callback that may look at weights, between an update and the next forward pass."""
    trainer: Any = module.trainer
    seeing = [callback for callback in trainer.callbacks if not _is_blind(type(callback))]
    owners: list[Any] = [module, *seeing]
    looks = (
        f"`{hook}` of {type(owner).__name__}"
        for owner in owners
        for hook in _BETWEEN_STEPS
        if hasattr(owner, hook) and is_overridden(hook, owner)
    )
    return next(looks, None)


def _is_blind(callback: type[Callback]) -> bool:
    return callback in _BLIND or callback.__module__.startswith("lightning_roundpipe.")


class UpdateFence(Callback):
    """Waits for the update before hooks run that are called less often than for every batch.

    The strategy puts it before all other callbacks; Lightning calls callbacks before the module.

    Args:
        finish: waits until no update is under way, and raises what the optimizer raised.
        stop: told of an error before anybody else is; waits, and raises nothing.
        settle: what `finish` does, and sees that the next step computes with what the weights are after the hook.
    """

    def __init__(
        self, finish: Callable[[], None], stop: Callable[[BaseException], None], settle: Callable[[], None]
    ) -> None:
        self._finish = finish
        self._stop = stop
        self._settle = settle

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait."""
        self._settle()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait."""
        self._settle()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait."""
        self._settle()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait."""
        self._settle()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait."""
        self._finish()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait."""
        self._finish()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Wait."""
        self._finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Wait, and let the exception be the one that is seen."""
        self._stop(exception)
