"""Logs the bubble ratio of training steps."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn

from lightning_roundpipe.metrics import BubbleRatio
from lightning_roundpipe.strategy import RoundPipeStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["BubbleRatioMonitor"]


class BubbleRatioMonitor(Callback):
    """Logs ``roundpipe/bubble_ratio`` for each step, and over the epoch.

    Steps that learn the order of calls (the first one, as a rule) run a micro-batch alone and are left out. With
    another strategy the callback says so once and stays quiet.

    Args:
        prog_bar: show it on the progress bar, too.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        self._prog_bar = prog_bar
        self.epoch_ratio = BubbleRatio()

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Warn if there is nothing to measure."""
        if not isinstance(trainer.strategy, RoundPipeStrategy):
            rank_zero_warn(
                f"{type(self).__name__} measures RoundPipeStrategy, but the strategy is"
                f" {type(trainer.strategy).__name__}: nothing will be logged."
            )

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Start a new epoch."""
        self.epoch_ratio.reset()

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step that has just run."""
        stats = trainer.strategy.step_stats if isinstance(trainer.strategy, RoundPipeStrategy) else None
        if stats is None or stats.probed:
            return
        self.epoch_ratio.update(stats)
        pl_module.log(
            "roundpipe/bubble_ratio",
            stats.bubble_ratio,
            prog_bar=self._prog_bar,
            on_step=True,
            on_epoch=False,
            batch_size=stats.num_samples,
        )

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Log the ratio of the epoch."""
        if self.epoch_ratio.update_called:
            pl_module.log("roundpipe/bubble_ratio_epoch", self.epoch_ratio.compute().item())
