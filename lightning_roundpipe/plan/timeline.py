"""What happened when: spans of work and the ratios that follow from them.

Simulated and measured steps come in the same form, so that they can be compared ticket by ticket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Bubble", "Lane", "Span", "Timeline", "TransferSpan"]


class Lane(StrEnum):
    """What can be busy, apart from the compute of a worker."""

    H2D = "h2d"
    """A worker's link from the host."""
    D2H = "d2h"
    """A worker's link to the host."""
    CPU = "cpu"
    """The optimizer and the sums of gradients on the CPU."""


class Span(NamedTuple):
    """Computation of one ticket without a pause.

    ``ready`` is when everything but weights and kept inputs was there: the time that the schedule alone would allow.
    """

    worker: int
    step: int
    stage: int
    microbatch: int
    start: float
    stop: float
    ready: float


class TransferSpan(NamedTuple):
    """One transfer; ``worker`` is -1 for the CPU."""

    lane: Lane
    worker: int
    start: float
    stop: float
    num_bytes: float


@dataclass(frozen=True)
class Bubble:
    """Shares of the workers' time in which nothing is computed; the parts sum to ``total``.

    Args:
        fill: before a worker's first ticket, for want of its input.
        drain: after a worker's last ticket.
        steady: in between, for want of the ticket's input.
        stall: for want of weights or kept inputs, whose transfer is still under way.
    """

    fill: float
    drain: float
    steady: float
    stall: float

    @property
    def total(self) -> float:
        """The bubble ratio: 1 - (busy time of all workers) / (workers x window)."""
        return self.fill + self.drain + self.steady + self.stall


@dataclass(frozen=True)
class Timeline:
    """Spans of all workers, in seconds from the start of the first step.

    Args:
        num_workers: number of workers.
        spans: computation, ordered by start within each worker.
        transfers: transfers, in the order in which they end.
        step_ends: when each step was complete, with its gradients landed and, unless a later step may run without
            them, its weights updated.
    """

    num_workers: int
    spans: Sequence[Span]
    transfers: Sequence[TransferSpan] = ()
    step_ends: Sequence[float] = field(default=())

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first step to the end of the last one."""
        return max((*self.step_ends, *(span.stop for span in self.spans)), default=0.0)

    @property
    def step_time(self) -> float:
        """Seconds of a step in the :attr:`settled_window`."""
        first, last = self._settled_steps
        begin, end = self.settled_window
        return (end - begin) / max(1, last - first)

    @property
    def settled_window(self) -> tuple[float, float]:
        """The time, from the end of a step to the end of a later one, that has full steps before and after it.

        That takes four steps; of fewer, all of the time.
        """
        first, last = self._settled_steps
        return (self.step_ends[first], self.step_ends[last]) if first >= 0 else (0.0, self.makespan)

    @property
    def _settled_steps(self) -> tuple[int, int]:
        """The steps at whose ends the settled window begins and ends; -1 is the start of the first one."""
        num_steps = len(self.step_ends)
        return (num_steps // 2 - 1, num_steps - 2) if num_steps >= 4 else (-1, num_steps - 1)

    def bubble(self, window: tuple[float, float] | None = None) -> Bubble:
        """The bubble ratio and its split.

        Args:
            window: start and end in seconds; the whole timeline by default. A worker's wait before its first ticket
                counts as fill, and the wait after its last one as drain, only where no step comes before or after.
        """
        begin, end = window or (0.0, self.makespan)
        fill = drain = steady = stall = 0.0
        by_worker: list[list[Span]] = [[] for _ in range(self.num_workers)]
        for span in self.spans:
            by_worker[span.worker].append(span)
        for spans in by_worker:
            idle_from = 0.0
            for position, span in enumerate(spans):
                # The wait splits where the input arrived: before that for want of input, after that of a transfer.
                arrival = min(max(span.ready, idle_from), span.start)
                waited = _overlap(idle_from, arrival, begin, end)
                if position == 0:
                    fill += waited
                else:
                    steady += waited
                stall += _overlap(arrival, span.start, begin, end)
                idle_from = span.stop
            drain += _overlap(idle_from, max(end, idle_from), begin, end)
        whole = self.num_workers * (end - begin) or 1.0
        return Bubble(fill / whole, drain / whole, steady / whole, stall / whole)

    def busy(self, lane: Lane, window: tuple[float, float] | None = None) -> float:
        """Share of the window in which the busiest link of a kind (or the CPU) moves something."""
        begin, end = window or (0.0, self.makespan)
        time: dict[int, float] = {}
        for transfer in self.transfers:
            if transfer.lane is lane:
                time[transfer.worker] = time.get(transfer.worker, 0.0) + _overlap(
                    transfer.start, transfer.stop, begin, end
                )
        return max(time.values(), default=0.0) / ((end - begin) or 1.0)


def _overlap(start: float, stop: float, begin: float, end: float) -> float:
    return max(0.0, min(stop, end) - max(start, begin))
