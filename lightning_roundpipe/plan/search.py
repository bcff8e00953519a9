"""The plan with the shortest step, found by trying.

Two models of a step share the work: a quick one tries a thousand plans, and the simulator judges the best of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.costs import CallCost
from lightning_roundpipe.plan.devices import Machine
from lightning_roundpipe.plan.estimate import Estimator
from lightning_roundpipe.plan.memory import combined_bytes, host_bytes, stage_bytes, worker_bytes
from lightning_roundpipe.plan.partition import cut_evenly
from lightning_roundpipe.plan.schedule import FixedOrder, FixedSchedule, Schedule
from lightning_roundpipe.plan.simulator import Boundary, simulate
from lightning_roundpipe.plan.stages import Plan, Stage, StageKind
from lightning_roundpipe.plan.timeline import Timeline

__all__ = ["Case", "Choice", "better_choice", "judge", "search", "search_cases", "search_fixed"]

# Steps to simulate where neighbouring steps overlap: the later ones are then as all that follow.
_NUM_STEPS = {Boundary.SYNC: 1, Boundary.EXACT: 4, Boundary.STALE: 10}

# What the search may spend. Numbers rather than seconds, so that it finds the same plan on every machine.
_GRID_RATIO = 1.25
_NUM_DESCENTS = 2
_NUM_CUT_MOVES = 160
_NUM_KEPT = 8
_NUM_SIMULATED = 10_000  # tickets

# Estimates above the best by more than this are not simulated.
_PROMISING = 1.1

# What a switch of stages counts for, as a share of the step.
_SWITCH = 1e-5

# A gain below this is not worth a new plan.
_WORTHWHILE = 1.03


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


@dataclass(frozen=True)
class Case:
    """One way to cut a batch into micro-batches.

    Args:
        costs: costs of the calls of one micro-batch.
        machine: the workers, with the limits of their memory and links.
        num_microbatches: number of micro-batches of a step.
    """

    costs: Sequence[CallCost]
    machine: Machine
    num_microbatches: int


def search(
    costs: Sequence[CallCost],
    machine: Machine,
    num_microbatches: int,
    *,
    boundary: Boundary = Boundary.SYNC,
    replica_groups: int | None = None,
    num_rounds: int | None = None,
    min_fused: int = 1,
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
        num_rounds: number of rounds; None to try what may help.
        min_fused: fewest calls in the fused stage.
        max_fused: most calls in the fused stage; None for as many as fit.
        early_recompute: whether a backward stage recomputes before the gradient of its outputs has arrived.

    Raises:
        PlanError: no plan fits the memory of the workers or of the host.
    """
    finder = _Finder(Case(costs, machine, num_microbatches), boundary, max_fused, early_recompute, min_fused)
    return _best([(finder, candidate) for candidate in finder.candidates(replica_groups, num_rounds)])[1]


def search_cases(
    cases: Sequence[Case], *, boundary: Boundary = Boundary.SYNC, max_fused: int | None = None
) -> tuple[Case, Choice]:
    """Finds the case, and its plan, with the shortest step; all cases are of the same batch.

    Args:
        cases: the cases, at least one.
        boundary: what a step waits for.
        max_fused: most calls in the fused stage; None for as many as fit.

    Raises:
        PlanError: no plan fits the memory of the workers or of the host, in any of the cases.
    """
    found: list[tuple[_Finder, _Candidate]] = []
    refusal: PlanError | None = None
    for case in cases:
        finder = _Finder(case, boundary, max_fused, early_recompute=False)
        try:
            found += [(finder, candidate) for candidate in finder.candidates(None, None)]
        except PlanError as error:
            refusal = refusal or error
    if refusal is not None and not found:
        raise refusal
    return _best(found)


@dataclass(frozen=True)
class _Shape:
    """What is searched: numbers of stages, from which cuts follow.

    The first upload and the last download hide behind nothing; a tapered shape has them for a single call.
    """

    replica_groups: int
    num_rounds: int
    fused: int
    num_forward: int
    num_backward: int
    tapered: bool = False


@dataclass(frozen=True)
class _Candidate:
    estimate_s: float
    schedule: Schedule


def _best(found: Sequence[tuple["_Finder", _Candidate]]) -> tuple[Case, Choice]:
    """Simulates the most promising candidates, first the best of each kind.

    Replica groups and sizes of micro-batches trade computation for traffic, in which the estimate is least sure.
    """
    ranked = sorted(found, key=lambda pair: pair[1].estimate_s)
    limit = _PROMISING * ranked[0][1].estimate_s
    seen: set[tuple[int, int]] = set()
    first: list[tuple[_Finder, Schedule]] = []
    others: list[tuple[_Finder, Schedule]] = []
    for finder, candidate in ranked:
        if candidate.estimate_s > limit:
            break
        kind = finder.case.num_microbatches, candidate.schedule.replica_groups
        (others if kind in seen else first).append((finder, candidate.schedule))
        seen.add(kind)
    left = _NUM_SIMULATED
    judged: list[tuple[Case, Choice]] = []
    for finder, schedule in first + others:
        if judged and left <= 0:
            break
        left -= finder.num_simulated(schedule)
        judged.append((finder.case, finder.judge(schedule)))
    return min(judged, key=lambda pair: _penalized(pair[1].step_s, pair[1].schedule))


class _Finder:
    def __init__(
        self, case: Case, boundary: Boundary, max_fused: int | None, early_recompute: bool, min_fused: int = 1
    ) -> None:
        self.case = case
        self._costs = case.costs
        self._machine = case.machine
        self._num_microbatches = case.num_microbatches
        self._boundary = boundary
        self._early_recompute = early_recompute
        self._max_fused = min(len(case.costs), max(1, max_fused if max_fused is not None else len(case.costs)))
        self._min_fused = min(self._max_fused, min_fused)
        self._estimator = Estimator(case.costs, case.machine, early_recompute, boundary)
        self._cuts: dict[tuple[bool, int, int, int, bool], tuple[int, ...]] = {}
        self._estimates: dict[_Shape, _Candidate | None] = {}
        self._needs: dict[tuple[StageKind, int, int], tuple[int, int]] = {}

    def candidates(self, replica_groups: int | None, num_rounds: int | None) -> list[_Candidate]:
        """The best candidates by estimate, the best first, each once."""
        num_workers = self._machine.num_workers
        counts = [n for n in range(1, min(num_workers, self._num_microbatches) + 1) if num_workers % n == 0]
        groups = counts if replica_groups is None else [replica_groups]
        found = sorted((c for count in groups for c in self._of_groups(count, num_rounds)), key=lambda c: c.estimate_s)
        if not found:
            self._report_no_fit()
        found += [self._estimated(self._estimator.deal(c.schedule)) for c in found[:2] if self._may_deal(c)]
        found += [self._move_cuts(candidate) for candidate in found[:2]]
        return sorted({c.schedule: c for c in found}.values(), key=lambda candidate: candidate.estimate_s)

    def num_simulated(self, schedule: Schedule) -> int:
        """Number of tickets that are simulated to judge a schedule."""
        return _NUM_STEPS[self._boundary] * schedule.plan.num_stages * schedule.num_microbatches

    def judge(self, schedule: Schedule) -> Choice:
        """Simulates a schedule."""
        return judge(
            schedule, self._costs, self._machine, boundary=self._boundary, early_recompute=self._early_recompute
        )

    # Shapes

    def _of_groups(self, replica_groups: int, wanted_rounds: int | None) -> list[_Candidate]:
        """The best candidates with a number of replica groups, by estimate."""
        per_group = -(-self._num_microbatches // replica_groups)
        group_size = self._machine.num_workers // replica_groups
        rounds = {1, -(-per_group // group_size)} if group_size > 1 else {1}
        if wanted_rounds is not None:
            rounds = {wanted_rounds}
        for num_rounds in sorted(rounds):
            grid = [shape for shape in self._grid(replica_groups, num_rounds) if self._try(shape) is not None]
            grid.sort(key=self._estimate_of)
            for shape in grid[:_NUM_DESCENTS]:
                self._descend(shape)
        tried = [
            candidate
            for shape, candidate in self._estimates.items()
            if candidate is not None and shape.replica_groups == replica_groups
        ]
        tried.sort(key=lambda candidate: (candidate.estimate_s, str(candidate.schedule.plan)))
        return tried[:_NUM_KEPT]

    def _grid(self, replica_groups: int, num_rounds: int) -> Iterator[_Shape]:
        """Shapes from coarse to fine, with stages about equally long."""
        costs = self._costs
        for fused in _geometric(self._max_fused, 4.0) if costs else [0]:
            if fused < self._min_fused:
                continue
            num_calls = len(costs) - fused
            if num_calls <= 0:
                yield _Shape(replica_groups, num_rounds, len(costs), 0, 0)
                continue
            forward_s = sum(call.forward_s for call in costs[:num_calls])
            backward_s = forward_s + sum(call.backward_s for call in costs[:num_calls])
            share = forward_s / backward_s if backward_s else 1.0
            for num_backward in _geometric(num_calls, _GRID_RATIO):
                counts = {round(num_backward * share * factor) for factor in (0.75, 1.0, 1.4, 3.0)}
                for num_forward in sorted({min(num_calls, max(1, count)) for count in counts}):
                    yield _Shape(replica_groups, num_rounds, fused, num_forward, num_backward)

    def _descend(self, shape: _Shape) -> None:
        """Changes one number at a time for as long as that helps; all that is tried is remembered."""
        while True:
            better = min(self._neighbours(shape), key=self._estimate_of, default=shape)
            if self._estimate_of(better) >= self._estimate_of(shape):
                return
            shape = better

    def _neighbours(self, shape: _Shape) -> Iterator[_Shape]:
        yield replace(shape, tapered=not shape.tapered)
        for name in ("num_forward", "num_backward", "fused"):
            for change in (-1, 1):
                near = replace(shape, **{name: getattr(shape, name) + change})
                if not self._min_fused <= near.fused <= self._max_fused:
                    continue
                num_calls = len(self._costs) - near.fused
                yield replace(
                    near,
                    num_forward=min(num_calls, max(1, near.num_forward)),
                    num_backward=min(num_calls, max(1, near.num_backward)),
                )

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
        key = backward, num_microbatches, shape.fused, num_stages, shape.tapered
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
            if shape.tapered and num_stages > 1:
                rest = cut_evenly(weights[:0:-1] if backward else weights[1:], num_stages - 1)
                self._cuts[key] = (*rest, 1) if backward else (1, *rest)
            else:
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
        return _Candidate(_penalized(self._estimator.step_s(schedule), schedule), schedule)

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

    # Limits

    def _fits(self, schedule: Schedule) -> bool:
        # Without a limit there is nothing to add up, which would take as long as an estimate.
        plan, on_worker, on_host = schedule.plan, self._machine.worker_memory_bytes, self._machine.host_memory_bytes
        if on_worker < inf and combined_bytes([self._need(stage) for stage in plan.stages], plan) > on_worker:
            return False
        return on_host == inf or host_bytes(self._costs, schedule) <= on_host

    def _need(self, stage: Stage) -> tuple[int, int]:
        key = stage.kind, stage.start, stage.stop
        if key not in self._needs:
            self._needs[key] = stage_bytes(self._costs, stage)
        return self._needs[key]

    def _report_no_fit(self) -> None:
        ones = (1,) * (len(self._costs) - 1)
        finest = Schedule(Plan(ones, 1, ones), self._machine.num_workers, self._num_microbatches)
        raise PlanError(
            f"A plan must fit in {self._machine.worker_memory_bytes / 2**30:.1f} GiB on each worker and"
            f" {self._machine.host_memory_bytes / 2**30:.1f} GiB on the host, but stages of one call need"
            f" {worker_bytes(self._costs, finest.plan) / 2**30:.1f} GiB and"
            f" {host_bytes(self._costs, finest) / 2**30:.1f} GiB. Use more and smaller micro-batches, shorter"
            " sequences, or fewer trained weights."
        )


def _penalized(step_s: float, schedule: Schedule) -> float:
    """Of plans that are about equally fast, the one with fewer stages comes first: each costs a switch."""
    return step_s * (1 + _SWITCH * schedule.plan.num_stages)


def _geometric(largest: int, ratio: float) -> list[int]:
    """1, 2, 3, ... with growing gaps, up to ``largest``."""
    values = [1]
    while values[-1] < largest:
        values.append(min(largest, max(values[-1] + 1, int(values[-1] * ratio))))
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


def better_choice(
    schedule: Schedule,
    costs: Sequence[CallCost],
    machine: Machine,
    *,
    boundary: Boundary = Boundary.SYNC,
    replica_groups: int | None = None,
    num_rounds: int | None = None,
    min_fused: int = 1,
    max_fused: int | None = None,
) -> tuple[Choice, Choice] | None:
    """Searches anew for costs that have been measured meanwhile.

    Args:
        schedule: the schedule in use.
        costs: the costs as they are known now.
        machine: the workers.
        boundary: what a step waits for.
        replica_groups: see :func:`search`.
        num_rounds: see there.
        min_fused: see there.
        max_fused: see there.

    Returns:
        The schedule in use and one whose step is shorter by more than 3 %, which is worth a new plan, with what is
        expected of each; None if there is no such schedule.

    Raises:
        PlanError: no plan fits the memory of the workers or of the host.
    """
    now = judge(schedule, costs, machine, boundary=boundary)
    found = search(
        costs,
        machine,
        schedule.num_microbatches,
        boundary=boundary,
        replica_groups=replica_groups,
        num_rounds=num_rounds,
        min_fused=min_fused,
        max_fused=max_fused,
    )
    return (now, found) if found.step_s * _WORTHWHILE < now.step_s else None


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
