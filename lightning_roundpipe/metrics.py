"""Metrics of the pipeline, usable alone or through the callbacks."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["BubbleRatio"]


class BubbleRatio(Metric):
    """The share of the workers' time in which nothing is computed.

    1 - (sum of the busy time of all workers) / (number of workers x window), where a step's window reaches from the
    start of its first ticket to the end of its last. Over several steps, times are summed first.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    busy_s: Tensor
    available_s: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("busy_s", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("available_s", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, stats: "StepStats") -> None:
        """Add one step."""
        self.busy_s += sum(stats.busy_s)
        self.available_s += stats.schedule.num_workers * stats.window_s

    def compute(self) -> Tensor:
        """The ratio, a scalar between 0 and 1; NaN before the first step."""
        return 1 - self.busy_s / self.available_s
