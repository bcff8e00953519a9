"""Frozen records of what a step did; callbacks and tests read these and nothing else."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import StageKind

__all__ = ["StepStats", "TicketSpan"]


@dataclass(frozen=True, slots=True)
class TicketSpan:
    """One ticket's time on its worker, in seconds of `time.perf_counter`.

    ``calls``: for each call that ran, in the order in which they ran, its place in the plan and its start; a fused
    stage has each call twice. Only where calls are timed.
    """

    worker: int
    stage: int
    kind: StageKind
    microbatch: int
    start_s: float
    stop_s: float
    calls: tuple[tuple[int, float], ...] = ()

    def call_seconds(self) -> dict[int, float]:
        """For each call that was timed the seconds that it took, forward and backward together.

        User code counts for the call before it, and what comes before the first call for that one.
        """
        starts = [self.start_s, *(start_s for _, start_s in self.calls[1:]), self.stop_s]
        seconds: dict[int, float] = {}
        for (call, _), (start_s, stop_s) in zip(self.calls, pairwise(starts), strict=False):
            seconds[call] = seconds.get(call, 0.0) + stop_s - start_s
        return seconds


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
