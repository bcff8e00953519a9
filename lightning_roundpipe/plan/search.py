"""The plan with the shortest step, found by trying.

Two models of a step share the work. A quick one (:class:`_Estimator`) follows the tickets stage by stage, with every
link at an equal share of the host's bandwidth, and tries a thousand plans. The simulator then judges the best of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.costs import CallCost
from lightning_roundpipe.plan.devices import Machine
from lightning_roundpipe.plan.memory import host_bytes, worker_bytes
from lightning_roundpipe.plan.partition import cut_evenly
from lightning_roundpipe.plan.schedule import FixedOrder, FixedSchedule, Schedule
from lightning_roundpipe.plan.simulator import Boundary, simulate
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.plan.timeline import Timeline

__all__ = ["Choice", "judge", "search", "search_fixed"]

# Steps to simulate where neighbouring steps overlap: the later ones are then as all that follow.
_NUM_STEPS = {Boundary.SYNC: 1, Boundary.EXACT: 4, Boundary.STALE: 10}

# What the search may spend. Numbers rather than seconds, so that it finds the same plan on every machine.
_GRID_RATIO = 1.25
_NUM_DESCENTS = 2
_NUM_CUT_MOVES = 160
_NUM_SIMULATED = 5

# Estimates above the best by more than this are not simulated.
_PROMISING = 1.03


@dataclass(frozen=True)
class Choice:
    """A schedule and what is expected of it.

    Args:
        schedule: the schedule.
        timeline: its simulated step, or several steps if these overlap.
        worker_bytes: memory that every worker needs.
        host_bytes: host memory of a step.
    """

    schedule: Schedule
    timeline: Timeline
    worker_bytes: int
    host_bytes: int

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.timeline.step_time


def search(
    costs: Sequence[CallCost],
    machine: Machine,
    num_microbatches: int,
    *,
    boundary: Boundary = Boundary.SYNC,
    replica_groups: int | None = None,
    max_fused: int | None = None,
    early_recompute: bool = False,
) -> Choice:
    """Finds stage cuts, the fused stage, rounds and replica groups with the shortest step.

    Args:
        costs: costs of the calls of one micro-batch.
        machine: the workers, with the limits of their memory and links.
        num_microbatches: number of micro-batches of a step.
        boundary: what a step waits for.
        replica_groups: number of replica groups; None to try every divisor of the number of workers.
        max_fused: most calls in the fused stage; None for as many as fit.
        early_recompute: whether a backward stage recomputes before the gradient of its outputs has arrived.

    Raises:
        PlanError: no plan fits the memory of the workers or of the host.
    """
    finder = _Finder(costs, machine, num_microbatches, boundary, max_fused, early_recompute)
    if replica_groups is None:
        divisors = [n for n in range(1, machine.num_workers + 1) if machine.num_workers % n == 0]
        groups = [n for n in divisors if n <= num_microbatches]
    else:
        groups = [replica_groups]
    return finder.best(groups)


@dataclass(frozen=True)
class _Shape:
    """What is searched: numbers of stages, from which cuts follow."""

    replica_groups: int
    num_rounds: int
    fused: int
    num_forward: int
    num_backward: int


@dataclass(frozen=True)
class _Candidate:
    estimate_s: float
    schedule: Schedule


class _Estimator:
    """A quick model of a step: no queues, every link at a fixed share of the host's bandwidth."""

    def __init__(self, costs: Sequence[CallCost], machine: Machine, early_recompute: bool, num_steps: int) -> None:
        share = machine.host_bytes_per_s / machine.num_workers
        self._machine = machine
        self.h2d_bytes_per_s = min(machine.h2d_bytes_per_s, share)
        self._d2h_bytes_per_s = min(machine.d2h_bytes_per_s, share)
        self._early = early_recompute
        self._num_steps = num_steps
        self._forward = _sums(call.forward_s for call in costs)
        self._backward = _sums(call.backward_s for call in costs)
        self._recompute = _sums(call.forward_s if call.recompute_s is None else call.recompute_s for call in costs)
        self._weights = _sums(call.weight_bytes for call in costs)
        self._gradients = _sums(call.gradient_bytes for call in costs)
        self._sum_bytes = sum(call.sum_bytes + call.gradient_bytes for call in costs)
        self._optimizer_bytes = sum(call.optimizer_bytes for call in costs)

    def step_s(self, schedule: Schedule) -> float:
        """Seconds of a step; at least what host memory needs for all that is moved."""
        groups = schedule.replica_groups
        equal = not self._machine.speeds and schedule.stage_workers is None and not (schedule.num_microbatches % groups)
        stages = self._stages(schedule.plan)
        slowest = max(self._group_s(schedule, group, stages) for group in range(1 if equal else groups))
        return max(slowest, self._traffic(schedule, stages) / self._machine.host_bytes_per_s)

    def deal(self, schedule: Schedule) -> Schedule:
        """Gives every stage to the worker of its group that would finish it first."""
        stages = self._stages(schedule.plan)
        rows = []
        for group in range(schedule.replica_groups):
            row: list[int] = []
            self._group_s(schedule, group, stages, row)
            rows.append(tuple(row[: len(stages)]))
        return replace(schedule, stage_workers=tuple(rows))

    def _stages(self, plan: Plan) -> list[tuple[float, float, float, float]]:
        """For every stage the seconds that recompute, the other seconds, seconds of upload and of download."""
        stages = []
        h2d, d2h = self.h2d_bytes_per_s, self._d2h_bytes_per_s
        for stage in plan.stages:
            start, stop = stage.start, stage.stop
            upload = (self._weights[stop] - self._weights[start]) / h2d
            forward = self._forward[stop] - self._forward[start]
            if stage.index < plan.fused_stage:
                stages.append((0.0, forward, upload, 0.0))
                continue
            download = (self._gradients[stop] - self._gradients[start]) / d2h
            backward = self._backward[stop] - self._backward[start]
            if stage.index == plan.fused_stage:
                stages.append((0.0, forward + backward, upload, download))
            else:
                stages.append((self._recompute[stop] - self._recompute[start], backward, upload, download))
        return stages

    def _traffic(self, schedule: Schedule, stages: Sequence[tuple[float, float, float, float]]) -> float:
        """Bytes of host memory that a step reads and writes."""
        copies = schedule.replica_groups * schedule.num_rounds
        up = sum(stage[2] for stage in stages) * self.h2d_bytes_per_s if self.h2d_bytes_per_s < inf else 0.0
        down = sum(stage[3] for stage in stages) * self._d2h_bytes_per_s if self._d2h_bytes_per_s < inf else 0.0
        sums = copies * self._gradients[-1] + self._sum_bytes if copies > 1 else 0.0
        return copies * (up + down) + sums + self._optimizer_bytes

    def _group_s(
        self,
        schedule: Schedule,
        group: int,
        stages: Sequence[tuple[float, float, float, float]],
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
        for step in range(self._num_steps):
            begin = ends[step - 2] if step >= 2 else 0.0
            for num_microbatches in counts:
                arrived = [begin] * num_microbatches
                came_from = -1
                for index, (early_s, main_s, upload_s, download_s) in enumerate(stages):
                    if deal is not None:
                        options = list(range(size))
                    elif row is not None:
                        options = [row[index] - group * size]
                    else:
                        options = [turn % size]
                    turn += 1
                    best: tuple[float, int, list[float], float] | None = None
                    for member in options:
                        loaded = max(link[member], slots[member][0]) + upload_s
                        start = max(free[member], loaded)
                        hop_s = self._machine.hop_s if came_from not in (-1, member) else 0.0
                        ended = self._tickets(start, arrived, hop_s, early_s / speeds[member], main_s / speeds[member])
                        end = ended[-1] if ended else start
                        if best is None or (end, free[member]) < (best[0], free[best[1]]):
                            best = end, member, ended, loaded
                    assert best is not None
                    end, member, arrived, link[member] = best
                    if deal is not None:
                        deal.append(group * size + member)
                    free[member] = end
                    down[member] = max(down[member], end) + download_s
                    slots[member] = slots[member][1], down[member]
                    came_from = member
            ends.append(max(down))
        return (ends[-1] - ends[0]) / (self._num_steps - 1) if self._num_steps > 1 else ends[0]

    def _tickets(self, now: float, arrived: list[float], hop_s: float, early_s: float, main_s: float) -> list[float]:
        """Ends of a stage's tickets that start not before ``now`` and their inputs, which are ``hop_s`` away."""
        ended = []
        if not (self._early and early_s):
            early_s, main_s = 0.0, main_s + early_s
        for time in arrived:
            now += early_s
            if time + hop_s > now:
                now = time + hop_s
            now += main_s
            ended.append(now)
        return ended


class _Finder:
    def __init__(
        self,
        costs: Sequence[CallCost],
        machine: Machine,
        num_microbatches: int,
        boundary: Boundary,
        max_fused: int | None,
        early_recompute: bool,
    ) -> None:
        self._costs = costs
        self._machine = machine
        self._num_microbatches = num_microbatches
        self._boundary = boundary
        self._early_recompute = early_recompute
        self._max_fused = min(len(costs), max(1, max_fused if max_fused is not None else len(costs)))
        # A step that overlaps with the next one is judged by the time from end to end, on weights of the last but one.
        self._estimator = _Estimator(costs, machine, early_recompute, 5 if boundary is Boundary.STALE else 1)
        self._cuts: dict[tuple[bool, int, int, int], tuple[int, ...]] = {}
        self._estimates: dict[_Shape, _Candidate | None] = {}

    def best(self, groups: Sequence[int]) -> Choice:
        """The best choice with one of the numbers of replica groups."""
        candidates = [candidate for count in groups for candidate in self._of_groups(count)]
        if not candidates:
            self._report_no_fit()
        candidates.sort(key=lambda candidate: candidate.estimate_s)
        candidates += [self._estimated(self._estimator.deal(c.schedule)) for c in candidates[:2] if self._may_deal(c)]
        candidates = [self._move_cuts(candidate) for candidate in candidates[:2]] + candidates
        candidates.sort(key=lambda candidate: candidate.estimate_s)
        limit = _PROMISING * candidates[0].estimate_s
        distinct = {candidate.schedule: None for candidate in candidates if candidate.estimate_s <= limit}
        return min(map(self._choice, list(distinct)[:_NUM_SIMULATED]), key=lambda choice: choice.step_s)

    # Shapes

    def _of_groups(self, replica_groups: int) -> list[_Candidate]:
        """The best candidates with a number of replica groups, by estimate."""
        per_group = -(-self._num_microbatches // replica_groups)
        group_size = self._machine.num_workers // replica_groups
        rounds = {1, -(-per_group // group_size)} if group_size > 1 else {1}
        found = []
        for num_rounds in sorted(rounds):
            grid = [shape for shape in self._grid(replica_groups, num_rounds) if self._try(shape) is not None]
            grid.sort(key=self._estimate_of)
            descended = {self._descend(shape) for shape in grid[:_NUM_DESCENTS]}
            found += [candidate for shape in descended if (candidate := self._try(shape)) is not None]
        found.sort(key=lambda candidate: (candidate.estimate_s, str(candidate.schedule.plan)))
        return found[:_NUM_DESCENTS]

    def _grid(self, replica_groups: int, num_rounds: int) -> Iterator[_Shape]:
        """Shapes from coarse to fine, with stages about equally long."""
        costs = self._costs
        fused_sizes = sorted({1, 2, max(1, self._max_fused // 4), self._max_fused}) if costs else [0]
        for fused in fused_sizes:
            if fused > self._max_fused:
                continue
            num_calls = len(costs) - fused
            if num_calls <= 0:
                yield _Shape(replica_groups, num_rounds, len(costs), 0, 0)
                continue
            forward_s = sum(call.forward_s for call in costs[:num_calls])
            backward_s = forward_s + sum(call.backward_s for call in costs[:num_calls])
            share = forward_s / backward_s if backward_s else 1.0
            for num_backward in _geometric(num_calls):
                counts = {round(num_backward * share * factor) for factor in (0.75, 1.0, 1.4, 3.0)}
                for num_forward in sorted({min(num_calls, max(1, count)) for count in counts}):
                    yield _Shape(replica_groups, num_rounds, fused, num_forward, num_backward)

    def _descend(self, shape: _Shape) -> _Shape:
        """Changes one number at a time for as long as that helps."""
        while True:
            better = min(self._neighbours(shape), key=self._estimate_of, default=shape)
            if self._estimate_of(better) >= self._estimate_of(shape):
                return shape
            shape = better

    def _neighbours(self, shape: _Shape) -> Iterator[_Shape]:
        for name in ("num_forward", "num_backward", "fused"):
            for change in (-1, 1):
                near = replace(shape, **{name: getattr(shape, name) + change})
                num_calls = len(self._costs) - near.fused
                counts = near.num_forward, near.num_backward
                if 1 <= near.fused <= self._max_fused and min(num_calls, 1) <= min(counts) <= max(counts) <= num_calls:
                    yield near

    def _estimate_of(self, shape: _Shape) -> float:
        candidate = self._try(shape)
        return inf if candidate is None else candidate.estimate_s

    def _try(self, shape: _Shape) -> _Candidate | None:
        """The candidate of a shape, or None if it does not fit."""
        if shape not in self._estimates:
            plan = Plan(
                self._cut(shape, shape.num_forward, backward=False),
                shape.fused,
                self._cut(shape, shape.num_backward, backward=True),
            )
            schedule = Schedule(
                plan,
                self._machine.num_workers,
                self._num_microbatches,
                shape.replica_groups,
                shape.num_rounds,
                microbatch_groups=self._shares(shape.replica_groups),
            )
            self._estimates[shape] = self._estimated(schedule) if self._fits(schedule) else None
        return self._estimates[shape]

    def _cut(self, shape: _Shape, num_stages: int, *, backward: bool) -> tuple[int, ...]:
        num_microbatches = -(-self._num_microbatches // (shape.replica_groups * shape.num_rounds))
        key = backward, num_microbatches, shape.fused, num_stages
        if key not in self._cuts:
            calls = self._costs[: len(self._costs) - shape.fused]
            weights = [
                # A stage takes as long as its micro-batches, or as its weights.
                max(
                    call.forward_s + backward * call.backward_s,
                    call.weight_bytes / self._estimator.h2d_bytes_per_s / num_microbatches,
                )
                for call in calls
            ]
            self._cuts[key] = cut_evenly(weights[::-1] if backward else weights, num_stages)
        return self._cuts[key]

    def _shares(self, replica_groups: int) -> tuple[int, ...] | None:
        """Replica groups of the micro-batches: each goes to the group that would be through with it first."""
        if not self._machine.speeds:
            return None
        size = self._machine.num_workers // replica_groups
        speeds = [
            sum(self._machine.speed(group * size + member) for member in range(size)) for group in range(replica_groups)
        ]
        counts = [0] * replica_groups
        shares = []
        for _ in range(self._num_microbatches):
            group = min(range(replica_groups), key=lambda group: ((counts[group] + 1) / speeds[group], group))
            counts[group] += 1
            shares.append(group)
        return tuple(shares)

    # Candidates

    def _estimated(self, schedule: Schedule) -> _Candidate:
        return _Candidate(self._estimator.step_s(schedule), schedule)

    def _may_deal(self, candidate: _Candidate) -> bool:
        return candidate.schedule.num_rounds == 1 and candidate.schedule.group_size > 1

    def _move_cuts(self, candidate: _Candidate) -> _Candidate:
        """Moves single calls between neighbouring stages for as long as that helps."""
        left = _NUM_CUT_MOVES
        improved = True
        while improved and left > 0:
            improved = False
            for plan in _moved(candidate.schedule.plan):
                left -= 1
                schedule = replace(candidate.schedule, plan=plan)
                if left < 0 or not self._fits(schedule):
                    continue
                other = self._estimated(schedule)
                if other.estimate_s < candidate.estimate_s * (1 - 1e-9):
                    candidate, improved = other, True
                    break
        return candidate

    def _choice(self, schedule: Schedule) -> Choice:
        return judge(
            schedule,
            self._costs,
            self._machine,
            boundary=self._boundary,
            early_recompute=self._early_recompute,
        )

    # Limits

    def _fits(self, schedule: Schedule) -> bool:
        return (
            worker_bytes(self._costs, schedule.plan) <= self._machine.worker_memory_bytes
            and host_bytes(self._costs, schedule) <= self._machine.host_memory_bytes
        )

    def _report_no_fit(self) -> None:
        ones = (1,) * (len(self._costs) - 1)
        finest = Schedule(Plan(ones, 1, ones), self._machine.num_workers, self._num_microbatches)
        raise PlanError(
            f"A plan must fit in {self._machine.worker_memory_bytes / 2**30:.1f} GiB on each worker and"
            f" {self._machine.host_memory_bytes / 2**30:.1f} GiB on the host, but stages of one call need"
            f" {worker_bytes(self._costs, finest.plan) / 2**30:.1f} GiB and"
            f" {host_bytes(self._costs, finest) / 2**30:.1f} GiB. Use more and smaller micro-batches, shorter sequences,"
            " or fewer trained weights."
        )


def _sums(values: Iterator[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _geometric(largest: int) -> list[int]:
    """1, 2, 3, ... with growing gaps, up to ``largest``."""
    values = [1]
    while values[-1] < largest:
        values.append(min(largest, max(values[-1] + 1, int(values[-1] * _GRID_RATIO))))
    return values


def _moved(plan: Plan) -> Iterator[Plan]:
    """Plans in which one call has moved to the neighbouring stage of the same direction."""
    for forward in _moved_sizes(plan.forward):
        yield replace(plan, forward=forward)
    for backward in _moved_sizes(plan.backward):
        yield replace(plan, backward=backward)


def _moved_sizes(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for index in range(len(sizes) - 1):
        for change in (-1, 1):
            moved = (*sizes[:index], sizes[index] + change, sizes[index + 1] - change, *sizes[index + 2 :])
            if min(moved) >= 1:
                yield moved


def judge(
    schedule: Schedule,
    costs: Sequence[CallCost],
    machine: Machine,
    *,
    boundary: Boundary = Boundary.SYNC,
    early_recompute: bool = False,
) -> Choice:
    """Simulates a schedule for as many steps as its boundary needs to settle, and adds up its memory.

    Args:
        schedule: the schedule.
        costs: costs of the calls of one micro-batch.
        machine: the workers.
        boundary: what a step waits for.
        early_recompute: whether a backward stage recomputes before the gradient of its outputs has arrived.
    """
    timeline = simulate(
        schedule,
        costs,
        machine,
        boundary=boundary,
        num_steps=_NUM_STEPS[boundary],
        early_recompute=early_recompute,
    )
    on_worker = worker_bytes(costs, schedule.plan, streams_weights=schedule.streams_weights)
    return Choice(schedule, timeline, on_worker, host_bytes(costs, schedule))


def search_fixed(
    costs: Sequence[CallCost],
    machine: Machine,
    num_microbatches: int,
    order: FixedOrder,
    *,
    boundary: Boundary = Boundary.SYNC,
) -> Choice:
    """Finds the cut into equally long fixed stages with the shortest step; for comparison.

    Args:
        costs: costs of the calls of one micro-batch.
        machine: the workers.
        num_microbatches: number of micro-batches of a step.
        order: the order of forward and backward.
        boundary: what a step waits for.

    Raises:
        PlanError: there are fewer calls than workers, or the order does not suit the number of micro-batches.
    """
    loops = 1 if order in (FixedOrder.GPIPE, FixedOrder.ONE_F_ONE_B) else len(costs) // machine.num_workers
    choices = []
    for num_loops in range(1, max(1, loops) + 1):
        cut = cut_evenly([_busy_s(call) for call in costs], num_loops * machine.num_workers)
        plan = Plan(cut, 0, cut[::-1])
        schedule = FixedSchedule(plan, machine.num_workers, num_microbatches, order=order)
        choices.append(judge(schedule, costs, machine, boundary=boundary))
    return min(choices, key=lambda choice: choice.step_s)


def _busy_s(call: CallCost) -> float:
    recompute_s = call.forward_s if call.recompute_s is None else call.recompute_s
    return call.forward_s + recompute_s + call.backward_s
