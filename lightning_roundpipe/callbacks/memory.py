"""Logs memory: what GPUs needed at most, what the host holds."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_roundpipe.callbacks.step_monitor import StepMonitor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["MemoryMonitor"]

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes; None where the system does not tell."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MemoryMonitor(StepMonitor):
    """Logs memory in GiB (2^30 bytes) for each step.

    ``roundpipe/worker0/gpu_peak_gib`` (most that was allocated on the worker's GPU since the process began, or since
    somebody reset PyTorch's peak; workers that share a GPU share the figure), ``roundpipe/host_pinned_gib``
    (page-locked) and ``roundpipe/host_rss_gib`` (resident).

    See `StepMonitor` for the argument.
    """

    def on_step(self, trainer: "Trainer", pl_module: "LightningModule", stats: "StepStats", batch: Any) -> None:
        """Log the memory after the step."""
        strategy: Any = trainer.strategy
        values = {"host_pinned_gib": strategy.pinned_bytes / 2**30}
        if (resident := resident_bytes()) is not None:
            values["host_rss_gib"] = resident / 2**30
        for worker, device in enumerate(strategy.worker_devices):
            if device.type == "cuda":
                values[f"worker{worker}/gpu_peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        self.log_values(pl_module, stats, values)
