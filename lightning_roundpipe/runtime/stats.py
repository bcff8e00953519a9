"""Frozen records of what a step did; callbacks and tests read these and nothing else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import StageKind
from lightning_roundpipe.plan.timeline import Bubble, Lane, Span, Timeline, TransferSpan

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
        update_s: time spent on updates while the step ran, in seconds: its own, and what was left of the one before (0
            where the optimizer steps afterwards).
        update_exposed_s: the part of it for which the step had to wait, in seconds.
        reduce_s: time spent on averaging gradients over machines, waiting for the others included, in seconds.
        reduce_exposed_s: the part of it for which the step had to wait, in seconds.
        spans: the tickets that ran.
        graph_bytes: for calls that ran with a graph, where memory was watched (on GPUs, while calls are timed), what it
            holds, in bytes.
        transfers: uploads of weights and downloads of gradients, in seconds of `time.perf_counter`.
    """

    schedule: Schedule
    num_samples: int
    start_s: float
    stop_s: float
    probed: bool
    spans: tuple[TicketSpan, ...] = field(repr=False)
    transfers: tuple[TransferSpan, ...] = field(default=(), repr=False)
    graph_bytes: Mapping[int, int] = field(default_factory=dict, repr=False)
    update_s: float = 0.0
    update_exposed_s: float = 0.0
    reduce_s: float = 0.0
    reduce_exposed_s: float = 0.0

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

    def moved_bytes(self, lane: Lane) -> tuple[int, ...]:
        """For every worker the bytes that crossed its link in one direction."""
        moved = [0] * self.schedule.num_workers
        for transfer in self.transfers:
            if transfer.lane is lane:
                moved[transfer.worker] += int(transfer.num_bytes)
        return tuple(moved)

    def link_busy_s(self, lane: Lane) -> tuple[float, ...]:
        """For every worker the time in which its link was moving something in one direction, in seconds."""
        busy, reached = [0.0] * self.schedule.num_workers, [-math.inf] * self.schedule.num_workers
        for transfer in sorted(self.transfers, key=lambda transfer: transfer.start):
            if transfer.lane is lane:
                worker = transfer.worker
                busy[worker] += max(0.0, transfer.stop - max(transfer.start, reached[worker]))
                reached[worker] = max(reached[worker], transfer.stop)
        return tuple(busy)

    @property
    def timeline(self) -> Timeline:
        """The step as the simulator gives it, in seconds from its first ticket or transfer.

        A ticket is ready when the micro-batch has been through the stage before.
        """
        begin = min((span.start_s for span in self.spans), default=0.0)
        ends = {(span.microbatch, span.stage): span.stop_s for span in self.spans}
        spans = []
        for span in sorted(self.spans, key=lambda span: (span.worker, span.start_s)):
            earlier = [ends[span.microbatch, stage] for stage in range(span.stage) if (span.microbatch, stage) in ends]
            ready = min(max(earlier, default=begin), span.start_s)
            times = (span.start_s - begin, span.stop_s - begin, ready - begin)
            spans.append(Span(span.worker, 0, span.stage, span.microbatch, *times))
        transfers = [t._replace(start=t.start - begin, stop=t.stop - begin) for t in self.transfers]
        return Timeline(self.schedule.num_workers, spans, transfers, (self.window_s,))

    @property
    def bubble(self) -> Bubble:
        """The bubble ratio and its split, over the window."""
        return self.timeline.bubble((0.0, self.window_s))
