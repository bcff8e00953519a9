"""Logs what crosses the links between host and workers."""

from typing import TYPE_CHECKING, Any

from lightning_roundpipe.callbacks.step_monitor import StepMonitor
from lightning_roundpipe.metrics import LinkThroughput, LinkUtilization
from lightning_roundpipe.plan.timeline import Lane

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["PCIeMonitor"]

_LANES = (Lane.H2D, Lane.D2H)


class PCIeMonitor(StepMonitor):
    """Logs traffic of weights and gradients for each step, in both directions.

    ``roundpipe/pcie_h2d_gb_per_s`` (10^9 bytes a second over the step's window, all workers together),
    ``roundpipe/pcie_h2d_utilization`` (share of the window in which a link moves something, mean of the workers), the
    same with ``d2h``; for each worker ``roundpipe/worker0/...``. Over the epoch the same names with ``_epoch``.

    On virtual workers the links are copies in host memory. Activations and batches are not counted.

    Args:
        per_worker: whether to log every worker by itself, too.
        prog_bar: see `StepMonitor`.
    """

    def __init__(self, per_worker: bool = True, prog_bar: bool = False) -> None:
        super().__init__(prog_bar)
        self._per_worker = per_worker
        self.throughput = {lane: LinkThroughput(lane) for lane in _LANES}
        self.utilization = {lane: LinkUtilization(lane) for lane in _LANES}

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Start a new epoch."""
        for metric in (*self.throughput.values(), *self.utilization.values()):
            metric.reset()

    def on_step(self, trainer: "Trainer", pl_module: "LightningModule", stats: "StepStats", batch: Any) -> None:
        """Log the traffic of the step."""
        values: dict[str, float] = {}
        window_s, num_workers = stats.window_s, stats.schedule.num_workers
        for lane in _LANES:
            self.throughput[lane].update(stats)
            self.utilization[lane].update(stats)
            if window_s <= 0:
                continue
            moved, busy = stats.moved_bytes(lane), stats.link_busy_s(lane)
            values[f"pcie_{lane}_gb_per_s"] = sum(moved) / 1e9 / window_s
            values[f"pcie_{lane}_utilization"] = min(1.0, sum(busy) / num_workers / window_s)
            if self._per_worker:
                for worker in range(num_workers):
                    values[f"worker{worker}/pcie_{lane}_gb_per_s"] = moved[worker] / 1e9 / window_s
                    values[f"worker{worker}/pcie_{lane}_utilization"] = min(1.0, busy[worker] / window_s)
        self.log_values(pl_module, stats, values)

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Log the traffic of the epoch."""
        for lane in _LANES:
            if self.throughput[lane].update_called:
                pl_module.log(f"roundpipe/pcie_{lane}_gb_per_s_epoch", self.throughput[lane].compute().item())
                pl_module.log(f"roundpipe/pcie_{lane}_utilization_epoch", self.utilization[lane].compute().item())
