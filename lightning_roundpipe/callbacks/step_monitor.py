"""What the monitors have in common: they look at the record of each step, and keep quiet with another strategy."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn

from lightning_roundpipe.strategy import RoundPipeStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["StepMonitor"]


class StepMonitor(Callback):
    """Calls `on_step` with the record of each training step.

    Steps that learn the order of calls (the first one, as a rule) run a micro-batch alone and are left out. With
    another strategy the callback says so once and stays quiet. Nothing here waits for a GPU: times come from events
    that have passed when the step is over.

    Args:
        prog_bar: show what is logged on the progress bar, too.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        self._prog_bar = prog_bar

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Warn if there is nothing to measure."""
        if not isinstance(trainer.strategy, RoundPipeStrategy):
            rank_zero_warn(
                f"{type(self).__name__} measures RoundPipeStrategy, but the strategy is"
                f" {type(trainer.strategy).__name__}: nothing will be logged."
            )

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the step that has just run."""
        stats = trainer.strategy.step_stats if isinstance(trainer.strategy, RoundPipeStrategy) else None
        if stats is not None and not stats.probed:
            self.on_step(trainer, pl_module, stats, batch)

    def on_step(self, trainer: "Trainer", pl_module: "LightningModule", stats: "StepStats", batch: Any) -> None:
        """Measure one step.

        Args:
            trainer: the trainer; its strategy is a `RoundPipeStrategy`.
            pl_module: the module, to log with.
            stats: the record of the step.
            batch: the batch.
        """
        raise NotImplementedError

    def log_values(self, pl_module: "LightningModule", stats: "StepStats", values: dict[str, float]) -> None:
        """Log ``values`` of the step under ``roundpipe/``."""
        pl_module.log_dict(
            {f"roundpipe/{name}": value for name, value in values.items()},
            prog_bar=self._prog_bar,
            on_step=True,
            on_epoch=False,
            batch_size=stats.num_samples,
        )
