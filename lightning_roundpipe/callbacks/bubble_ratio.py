"""Logs the bubble ratio of training steps."""

from typing import TYPE_CHECKING, Any

from lightning_roundpipe.callbacks.step_monitor import StepMonitor
from lightning_roundpipe.metrics import BubbleRatio

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["BubbleRatioMonitor"]


class BubbleRatioMonitor(StepMonitor):
    """Logs the share of the workers' time in which nothing is computed, and where it goes.

    For each step ``roundpipe/bubble_ratio`` and its parts: ``bubble_fill`` (before a worker's first ticket),
    ``bubble_drain`` (after its last), ``bubble_steady`` (in between, for want of a ticket's input) and ``bubble_stall``
    (its input was there: hand-over between threads). Over the epoch ``roundpipe/bubble_ratio_epoch``.

    See `StepMonitor` for which steps count, and for the argument.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        super().__init__(prog_bar)
        self.epoch_ratio = BubbleRatio()

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Start a new epoch."""
        self.epoch_ratio.reset()

    def on_step(self, trainer: "Trainer", pl_module: "LightningModule", stats: "StepStats", batch: Any) -> None:
        """Log the ratio and its split."""
        self.epoch_ratio.update(stats)
        bubble = stats.bubble
        self.log_values(
            pl_module,
            stats,
            {
                "bubble_ratio": stats.bubble_ratio,
                "bubble_fill": bubble.fill,
                "bubble_drain": bubble.drain,
                "bubble_steady": bubble.steady,
                "bubble_stall": bubble.stall,
            },
        )

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Log the ratio of the epoch."""
        if self.epoch_ratio.update_called:
            pl_module.log("roundpipe/bubble_ratio_epoch", self.epoch_ratio.compute().item())
