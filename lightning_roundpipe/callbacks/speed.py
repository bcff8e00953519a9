"""Logs how fast training is: samples, tokens, share of the GPUs' peak."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor

from lightning_roundpipe.callbacks.step_monitor import StepMonitor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["SpeedMonitor"]


def count_tokens(batch: Any) -> int | None:
    """Tokens in a batch: the elements of its ``input_ids``, or of the batch itself if that is (samples, tokens) ids."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        return ids.numel()
    return None


class SpeedMonitor(StepMonitor):
    """Logs ``roundpipe/step_ms``, ``roundpipe/samples_per_s``, ``roundpipe/tokens_per_s`` and ``roundpipe/mfu``.

    Times are from the start of a step to its end, without what Lightning does in between. ``step_ms`` comes with
    ``update_ms`` (the optimizer's part, if it runs along) and ``update_exposed_ms`` (what the step had to wait for of
    it); on several machines, with ``reduce_ms`` and ``reduce_exposed_ms``, the same of the averaging of gradients. MFU,
    the share of the peak rate that a step's operations amount to (PaLM, arXiv 2204.02311, appendix B), needs a
    ``flops_per_batch`` attribute of the module, as Lightning's ``ThroughputMonitor`` does, and a GPU that Lightning
    knows the peak of.

    Args:
        tokens: counts the tokens of a batch; by default those of ``input_ids``. Nothing is logged for None.
        prog_bar: see `StepMonitor`.
    """

    def __init__(self, tokens: Callable[[Any], int | None] = count_tokens, prog_bar: bool = False) -> None:
        super().__init__(prog_bar)
        self._tokens = tokens
        self._peak_flops: float | None = None

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Look up the peak of the GPUs."""
        super().on_train_start(trainer, pl_module)
        devices = getattr(trainer.strategy, "worker_devices", ())
        dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(str(trainer.precision).split("-")[0], torch.float32)
        peaks = [get_available_flops(device, dtype) for device in set(devices) if device.type == "cuda"]
        self._peak_flops = sum(peak for peak in peaks if peak) if peaks and all(peaks) else None

    def on_step(self, trainer: "Trainer", pl_module: "LightningModule", stats: "StepStats", batch: Any) -> None:
        """Log the speed of the step."""
        step_s = stats.stop_s - stats.start_s
        values = {
            "step_ms": 1e3 * step_s,
            "update_ms": 1e3 * stats.update_s,
            "update_exposed_ms": 1e3 * stats.update_exposed_s,
            "samples_per_s": stats.num_samples / step_s,
        }
        if trainer.world_size > 1:
            values |= {"reduce_ms": 1e3 * stats.reduce_s, "reduce_exposed_ms": 1e3 * stats.reduce_exposed_s}
        if (tokens := self._tokens(batch)) is not None:
            values["tokens_per_s"] = tokens / step_s
        flops = getattr(pl_module, "flops_per_batch", None)
        if flops and self._peak_flops:
            values["mfu"] = float(flops) / step_s / self._peak_flops
        self.log_values(pl_module, stats, values)
