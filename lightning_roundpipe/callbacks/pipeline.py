"""All monitors in one."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.callbacks.bubble_ratio import BubbleRatioMonitor
from lightning_roundpipe.callbacks.memory import MemoryMonitor
from lightning_roundpipe.callbacks.pcie import PCIeMonitor
from lightning_roundpipe.callbacks.speed import SpeedMonitor
from lightning_roundpipe.callbacks.step_monitor import StepMonitor
from lightning_roundpipe.callbacks.timeline import TimelineWriter

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["PipelineMonitor"]


class PipelineMonitor(StepMonitor):
    """Logs what `BubbleRatioMonitor`, `PCIeMonitor`, `MemoryMonitor` and `SpeedMonitor` log.

    Args:
        timeline_steps: steps of which `TimelineWriter` writes a trace; none by default.
        dirpath: where to.
        per_worker: see `PCIeMonitor`.
        prog_bar: whether to show the bubble ratio on the progress bar.
    """

    def __init__(
        self,
        timeline_steps: list[int] | None = None,
        dirpath: str | Path | None = None,
        per_worker: bool = True,
        prog_bar: bool = False,
    ) -> None:
        super().__init__(prog_bar)
        self._monitors: list[StepMonitor] = [
            BubbleRatioMonitor(prog_bar), PCIeMonitor(per_worker), MemoryMonitor(), SpeedMonitor(),
        ]  # fmt: skip
        if timeline_steps:
            self._monitors.append(TimelineWriter(dirpath, timeline_steps))

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Warn if there is nothing to measure, and let the speed monitor look up peaks."""
        super().on_train_start(trainer, pl_module)
        if hasattr(trainer.strategy, "step_stats"):
            for monitor in self._monitors:
                monitor.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Start a new epoch."""
        for monitor in self._monitors:
            monitor.on_train_epoch_start(trainer, pl_module)

    def on_step(self, trainer: "Trainer", pl_module: "LightningModule", stats: "StepStats", batch: Any) -> None:
        """Log everything about the step."""
        for monitor in self._monitors:
            monitor.on_step(trainer, pl_module, stats, batch)

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Log everything about the epoch."""
        for monitor in self._monitors:
            monitor.on_train_epoch_end(trainer, pl_module)
