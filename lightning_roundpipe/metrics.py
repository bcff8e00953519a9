"""Metrics of the pipeline, usable alone or through the callbacks."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_roundpipe.plan.timeline import Lane

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["BubbleRatio", "LinkThroughput", "LinkUtilization"]


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


class LinkThroughput(Metric):
    """Traffic between host and workers in one direction: (bytes of all workers) / window, in 10^9 bytes a second.

    Over several steps, bytes and windows are summed first.

    Args:
        lane: the direction.
        **kwargs: see `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    moved_bytes: Tensor
    window_s: Tensor

    def __init__(self, lane: Lane, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lane = lane
        self.add_state("moved_bytes", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("window_s", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, stats: "StepStats") -> None:
        """Add one step."""
        self.moved_bytes += sum(stats.moved_bytes(self.lane))
        self.window_s += stats.window_s

    def compute(self) -> Tensor:
        """GB/s, a scalar; NaN before the first step."""
        return self.moved_bytes / self.window_s / 1e9


class LinkUtilization(Metric):
    """The share of the window in which a link moves something, in one direction; the mean of the workers.

    Args:
        lane: the direction.
        **kwargs: see `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    busy_s: Tensor
    available_s: Tensor

    def __init__(self, lane: Lane, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lane = lane
        self.add_state("busy_s", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("available_s", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, stats: "StepStats") -> None:
        """Add one step."""
        self.busy_s += sum(stats.link_busy_s(self.lane))
        self.available_s += stats.schedule.num_workers * stats.window_s

    def compute(self) -> Tensor:
        """The share, a scalar between 0 and 1; NaN before the first step."""
        # A transfer may begin before the first ticket and end after the last.
        return (self.busy_s / self.available_s).clamp(max=1.0)
