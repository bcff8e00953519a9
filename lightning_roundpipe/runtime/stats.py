"""Frozen records of what a step did; callbacks and tests read these and nothing else."""

import math
from dataclasses import dataclass, field

from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import StageKind

__all__ = ["StepStats", "TicketSpan"]


@dataclass(frozen=True, slots=True)
class TicketSpan:
    """One ticket's time on its worker, in seconds of `time.perf_counter`."""

    worker: int
    stage: int
    kind: StageKind
    microbatch: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class StepStats:
    """What one step did.

    Attributes:
        schedule: the schedule that ran.
        num_samples: samples in the batch.
        start_s: start of the step, in seconds of `time.perf_counter`.
        stop_s: its end.
        probed: whether the first micro-batch ran alone, to learn the order of calls; such a step says little about
            speed.
        update_s: time spent on updates while the step ran, in seconds (0 where the optimizer steps afterwards).
        update_exposed_s: the part of it for which the step had to wait, in seconds.
        spans: the tickets that ran.
    """

    schedule: Schedule
    num_samples: int
    start_s: float
    stop_s: float
    probed: bool
    spans: tuple[TicketSpan, ...] = field(repr=False)
    update_s: float = 0.0
    update_exposed_s: float = 0.0

    @property
    def busy_s(self) -> tuple[float, ...]:
        """For every worker the time in which it ran a ticket, in seconds."""
        busy = [0.0] * self.schedule.num_workers
        for span in self.spans:
            busy[span.worker] += span.stop_s - span.start_s
        return tuple(busy)

    @property
    def window_s(self) -> float:
        """From the start of the first ticket to the end of the last, in seconds."""
        if not self.spans:
            return 0.0
        return max(span.stop_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """1 - (busy time of all workers) / (number of workers x window); NaN for a step without tickets."""
        available = self.schedule.num_workers * self.window_s
        return 1.0 - sum(self.busy_s) / available if available > 0 else math.nan
