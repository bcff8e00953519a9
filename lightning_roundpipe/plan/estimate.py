"""A step at a glance, for those who try a thousand plans.

The model follows the tickets of one replica group stage by stage. It leaves out kept inputs and gives every user of
host memory a fixed share of it; the simulator knows better, for the few plans that are worth it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from lightning_roundpipe.plan.costs import CallCost
from lightning_roundpipe.plan.devices import Machine
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.simulator import Boundary
from lightning_roundpipe.plan.stages import StageKind

__all__ = ["Estimator"]


class _StageSeconds(NamedTuple):
    """Seconds of a stage: of each micro-batch on the worker, on its links, and on the CPU when all have landed."""

    early_s: float
    main_s: float
    upload_s: float
    download_s: float
    sum_s: float
    update_s: float


class Estimator:
    """A quick model of a step: no queues, every link at a fixed share of the host's bandwidth.

    Args:
        costs: costs of the calls of one micro-batch.
        machine: the workers.
        early_recompute: whether a backward stage recomputes before the gradient of its outputs has arrived.
        boundary: what a step waits for.
    """

    def __init__(self, costs: Sequence[CallCost], machine: Machine, early_recompute: bool, boundary: Boundary) -> None:
        share = machine.host_bytes_per_s / machine.num_workers
        self._machine = machine
        self.h2d_bytes_per_s = min(machine.h2d_bytes_per_s, share)
        self._d2h_bytes_per_s = min(machine.d2h_bytes_per_s, share)
        self._early = early_recompute
        self._boundary = boundary
        # Only where steps overlap is the time from end to end another than that of a single step.
        self._num_steps = 5 if boundary is Boundary.STALE else 1
        self._forward = _sums(call.forward_s for call in costs)
        self._backward = _sums(call.backward_s for call in costs)
        self._recompute = _sums(call.forward_s if call.recompute_s is None else call.recompute_s for call in costs)
        self._weights = _sums(call.weight_bytes for call in costs)
        self._gradients = _sums(call.gradient_bytes for call in costs)
        self._sum_bytes = _sums(call.sum_bytes for call in costs)
        self._optimizer_bytes = _sums(call.optimizer_bytes for call in costs)
        self._optimizer_bytes_per_s = min(machine.optimizer_bytes_per_s, machine.host_bytes_per_s)
        self._inputs = _sums(call.input_bytes for call in costs)
        links = machine.num_workers * (machine.h2d_bytes_per_s + machine.d2h_bytes_per_s)
        wanted = links + self._optimizer_bytes_per_s
        # What each gets of what it could use when all want host memory at once.
        self._crowded_share = machine.host_bytes_per_s / wanted if machine.host_bytes_per_s < wanted < inf else 1.0

    def step_s(self, schedule: Schedule) -> float:
        """Seconds of a step; at least what host memory needs for all that is moved, and the optimizer for its part."""
        groups = schedule.replica_groups
        equal = not self._machine.speeds and schedule.stage_workers is None and not (schedule.num_microbatches % groups)
        stages = self._stages(schedule)
        slowest = max(self._group_s(schedule, group, stages) for group in range(1 if equal else groups))
        on_cpu_s = sum(stage.sum_s + stage.update_s for stage in stages)
        return max(slowest, on_cpu_s, self._traffic(schedule) / self._machine.host_bytes_per_s)

    def deal(self, schedule: Schedule) -> Schedule:
        """Gives every stage to the worker of its group that would finish it first."""
        stages = self._stages(schedule)
        rows = []
        for group in range(schedule.replica_groups):
            row: list[int] = []
            self._group_s(schedule, group, stages, row)
            rows.append(tuple(row[: len(stages)]))
        return replace(schedule, stage_workers=tuple(rows))

    def _stages(self, schedule: Schedule) -> list[_StageSeconds]:
        copies = schedule.replica_groups * schedule.num_rounds
        num_microbatches = -(-schedule.num_microbatches // copies)
        machine, share = self._machine, self._crowded_share
        stages = []
        for stage in schedule.plan.stages:
            start, stop = stage.start, stage.stop
            is_forward, is_fused = stage.kind is StageKind.FORWARD, stage.kind is StageKind.FUSED
            forward_s = self._forward[stop] - self._forward[start]
            backward_s = self._backward[stop] - self._backward[start]
            weights = self._weights[stop] - self._weights[start]
            kept = 0.0 if is_fused else num_microbatches * (self._inputs[stop] - self._inputs[start])
            gradients = 0.0 if is_forward else self._gradients[stop] - self._gradients[start]
            sums = updates = 0.0
            if not is_forward:
                sums = copies * gradients + self._sum_bytes[stop] - self._sum_bytes[start] if copies > 1 else 0.0
                updates = self._optimizer_bytes[stop] - self._optimizer_bytes[start]
            # While a stage's weights come up, its neighbours' inputs and gradients move too, on every worker.
            moved = weights + kept + gradients
            upload_s = weights / machine.h2d_bytes_per_s
            if stage.index >= schedule.group_size:
                h2d = weights + (kept if stage.kind is StageKind.BACKWARD else 0.0)
                upload_s = max(h2d / machine.h2d_bytes_per_s, machine.num_workers * moved / machine.host_bytes_per_s)
            # The CPU gets less than it could use for as long as the links are busy.
            crowded_s = 0.0
            if share < 1:
                demand = machine.num_workers * (machine.h2d_bytes_per_s + machine.d2h_bytes_per_s)
                crowded_s = schedule.replica_groups * moved / (share * demand) * (1 - share)
            stages.append(
                _StageSeconds(
                    early_s=self._recompute[stop] - self._recompute[start] if not (is_forward or is_fused) else 0.0,
                    main_s=(forward_s if is_forward or is_fused else 0.0) + (0.0 if is_forward else backward_s),
                    upload_s=upload_s,
                    download_s=gradients / self._d2h_bytes_per_s,
                    sum_s=(sums / self._optimizer_bytes_per_s + crowded_s) if sums else 0.0,
                    update_s=(updates / self._optimizer_bytes_per_s + (0.0 if sums else crowded_s)) if updates else 0.0,
                )
            )
        return stages

    def _traffic(self, schedule: Schedule) -> float:
        """Bytes of host memory that a step reads and writes."""
        copies = schedule.replica_groups * schedule.num_rounds
        num_fused = schedule.plan.fused or 0
        once = self._weights[-1] - self._weights[len(self._weights) - 1 - num_fused]  # fused weights come up once
        moved = 2 * self._weights[-1] - once + self._gradients[-1]
        sums = copies * self._gradients[-1] + self._sum_bytes[-1] if copies > 1 else 0.0
        return copies * moved + sums + self._optimizer_bytes[-1]

    def _group_s(
        self,
        schedule: Schedule,
        group: int,
        stages: Sequence[_StageSeconds],
        deal: list[int] | None = None,
    ) -> float:
        """Seconds of a step for one replica group; fills ``deal`` with the best worker of every stage."""
        size = schedule.group_size
        speeds = [self._machine.speed(group * size + member) for member in range(size)]
        counts = [0] * schedule.num_rounds
        for microbatch in range(schedule.num_microbatches):
            if schedule.group_of(microbatch) == group:
                counts[schedule.round_of(microbatch)] += 1
        row = schedule.stage_workers[group] if schedule.stage_workers else None
        free, link, down = [0.0] * size, [0.0] * size, [0.0] * size
        slots = [(0.0, 0.0)] * size
        ends: list[float] = []
        turn = 0
        on_cpu = 0.0
        for step in range(self._num_steps):
            begin = ends[step - 2] if step >= 2 else 0.0
            for round_index, num_microbatches in enumerate(counts):
                arrived = [begin] * num_microbatches
                came_from = -1
                for index, stage in enumerate(stages):
                    if deal is not None:
                        options = list(range(size))
                    elif row is not None:
                        options = [row[index] - group * size]
                    else:
                        options = [turn % size]
                    turn += 1
                    best: tuple[float, int, list[float], float] | None = None
                    for member in options:
                        loaded = max(link[member], slots[member][0]) + stage.upload_s
                        start = max(free[member], loaded)
                        hop_s = self._machine.hop_s if came_from not in (-1, member) else 0.0
                        ended = self._tickets(start, arrived, hop_s, stage, speeds[member])
                        end = ended[-1] if ended else start
                        if best is None or (end, free[member]) < (best[0], free[best[1]]):
                            best = end, member, ended, loaded
                    assert best is not None
                    end, member, arrived, link[member] = best
                    if deal is not None:
                        deal.append(group * size + member)
                    free[member] = end
                    down[member] = max(down[member], end) + stage.download_s
                    slots[member] = slots[member][1], down[member]
                    came_from = member
                    if round_index == len(counts) - 1 and self._boundary is not Boundary.STALE:
                        update_s = stage.update_s if self._boundary is Boundary.EXACT else 0.0
                        on_cpu = max(on_cpu, down[member]) + stage.sum_s + update_s
            ends.append(max(*down, on_cpu))
        if self._boundary is Boundary.SYNC:
            return ends[0] + sum(stage.update_s for stage in stages)
        return (ends[-1] - ends[0]) / (self._num_steps - 1) if self._num_steps > 1 else ends[0]

    def _tickets(
        self, now: float, arrived: list[float], hop_s: float, stage: _StageSeconds, speed: float
    ) -> list[float]:
        """Ends of a stage's tickets that start not before ``now`` and their inputs, which are ``hop_s`` away."""
        ended = []
        early_s = stage.early_s / speed if self._early else 0.0
        main_s = (stage.early_s + stage.main_s) / speed - early_s
        for time in arrived:
            now += early_s
            if time + hop_s > now:
                now = time + hop_s
            now += main_s
            ended.append(now)
        return ended


def _sums(values: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(values)]
