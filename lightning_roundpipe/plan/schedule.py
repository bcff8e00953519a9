"""The order of tickets: which worker runs which stage of which micro-batch, and after what.

Simulator and runtime both take the order from here, so that what is predicted is what runs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.stages import Plan

__all__ = ["FixedOrder", "FixedSchedule", "Schedule", "Ticket"]


class Ticket(NamedTuple):
    """The right of one stage of one micro-batch to run on its worker; printed as ``s3m1``."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"s{self.stage}m{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """A plan, dealt round-robin to workers.

    Workers form ``replica_groups`` groups of equal size; micro-batch ``m`` belongs to group ``m % replica_groups``.
    Within a group of ``n`` workers, stage ``s`` runs on the group's worker ``s % n``, for the group's micro-batches in
    turn, and stage ``s + n`` follows on the same worker. All tickets of a group are therefore granted in the order
    (round, stage, micro-batch), of which every worker takes a part: a micro-batch never waits for a ticket that comes
    after one it holds, so the schedule cannot deadlock.

    Source: RoundPipe (arXiv 2604.27085), section on round-robin dispatch, with replica groups added.

    Args:
        plan: the stages.
        num_workers: number of workers.
        num_microbatches: number of micro-batches of a step.
        replica_groups: number of replica groups.
        num_rounds: a group's micro-batches are split into as many rounds, which run one after the other, each through
            all stages. The deal of stages to workers goes on from round to round without a gap.
        first_worker: the worker of each group to which stage 0 is dealt; lets a step go on where the last one stopped.
        stage_workers: for every replica group the worker of every stage, in place of the deal; for workers of unequal
            speed. Needs ``num_rounds=1``.
        microbatch_groups: the replica group of every micro-batch, in place of ``m % replica_groups``.

    Raises:
        PlanError: a count is below 1, ``replica_groups`` does not divide ``num_workers``, or an explicit placement
            does not fit the other arguments.
    """

    plan: Plan
    num_workers: int
    num_microbatches: int
    replica_groups: int = 1
    num_rounds: int = 1
    first_worker: int = 0
    stage_workers: tuple[tuple[int, ...], ...] | None = None
    microbatch_groups: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.num_workers, self.num_microbatches, self.replica_groups, self.num_rounds) < 1:
            raise PlanError(
                "`num_workers`, `num_microbatches`, `replica_groups` and `num_rounds` must be at least 1, but got"
                f" {self.num_workers}, {self.num_microbatches}, {self.replica_groups} and {self.num_rounds}."
            )
        if self.stage_workers is None and self.num_workers % self.replica_groups:
            raise PlanError(
                f"`replica_groups` must divide the number of workers, but got {self.replica_groups} groups for"
                f" {self.num_workers} workers."
            )
        self._check_placement()

    def _check_placement(self) -> None:
        rows = self.stage_workers
        if rows is not None and not (
            self.num_rounds == 1
            and len(rows) == self.replica_groups
            and all(len(row) == self.plan.num_stages for row in rows)
            and all(0 <= worker < self.num_workers for row in rows for worker in row)
        ):
            raise PlanError(
                f"`stage_workers` must name one of {self.num_workers} workers for each of {self.plan.num_stages} stages"
                f" in each of {self.replica_groups} replica groups, in one round, but got {rows} in {self.num_rounds}"
                " rounds."
            )
        groups = self.microbatch_groups
        if groups is not None and not (
            len(groups) == self.num_microbatches and all(0 <= group < self.replica_groups for group in groups)
        ):
            raise PlanError(
                f"`microbatch_groups` must name one of {self.replica_groups} replica groups for each of"
                f" {self.num_microbatches} micro-batches, but got {groups}."
            )

    @property
    def streams_weights(self) -> bool:
        """Whether weights come from the host for every stage; otherwise they stay on the worker."""
        return True

    @property
    def group_size(self) -> int:
        """Number of workers in each replica group."""
        return self.num_workers // self.replica_groups

    def group_of(self, microbatch: int) -> int:
        """The replica group that runs ``microbatch``."""
        if self.microbatch_groups is not None:
            return self.microbatch_groups[microbatch]
        return microbatch % self.replica_groups

    def round_of(self, microbatch: int) -> int:
        """The round in which ``microbatch`` runs."""
        return self._rounds[microbatch]

    @property
    def num_parts(self) -> int:
        """Number of parts into which the micro-batches fall, each a round of a replica group."""
        return self.replica_groups * self.num_rounds

    def part_of(self, microbatch: int) -> int:
        """The part to which ``microbatch`` belongs; the micro-batches of a part run through a stage in their order."""
        return self.group_of(microbatch) * self.num_rounds + self.round_of(microbatch)

    @cached_property
    def _rounds(self) -> tuple[int, ...]:
        groups = [self.group_of(microbatch) for microbatch in range(self.num_microbatches)]
        totals = Counter(groups)
        seen: Counter[int] = Counter()
        rounds = []
        for group in groups:
            rounds.append(seen[group] * min(self.num_rounds, totals[group]) // totals[group])
            seen[group] += 1
        return tuple(rounds)

    def worker_of(self, ticket: Ticket) -> int:
        """The worker on which ``ticket`` runs."""
        group = self.group_of(ticket.microbatch)
        if self.stage_workers is not None:
            return self.stage_workers[group][ticket.stage]
        deal = self.first_worker + self.round_of(ticket.microbatch) * self.plan.num_stages + ticket.stage
        return group * self.group_size + deal % self.group_size

    @cached_property
    def tickets(self) -> tuple[tuple[Ticket, ...], ...]:
        """For every worker its tickets, in the order in which they are granted."""
        queues: list[list[Ticket]] = [[] for _ in range(self.num_workers)]
        for round_index in range(self.num_rounds):
            for stage in range(self.plan.num_stages):
                for microbatch in range(self.num_microbatches):
                    if self.round_of(microbatch) == round_index:
                        ticket = Ticket(stage, microbatch)
                        queues[self.worker_of(ticket)].append(ticket)
        return tuple(map(tuple, queues))

    def stage_after(self, ticket: Ticket) -> int:
        """The stage that the worker of ``ticket`` runs next; the number of stages if there is none."""
        key = self.worker_of(ticket), self.round_of(ticket.microbatch), ticket.stage
        return self._stages_after.get(key, self.plan.num_stages)

    @cached_property
    def _stages_after(self) -> dict[tuple[int, int, int], int]:
        stages_after = {}
        for worker, tickets in enumerate(self.tickets):
            for ticket, later in pairwise(tickets):
                if ticket.stage != later.stage:
                    stages_after[worker, self.round_of(ticket.microbatch), ticket.stage] = later.stage
        return stages_after

    def with_microbatches(self, num_microbatches: int) -> "Schedule":
        """The schedule of a batch that makes another number of micro-batches."""
        groups = self.microbatch_groups
        if groups is not None:
            groups = tuple(groups[microbatch % len(groups)] for microbatch in range(num_microbatches))
        return replace(self, num_microbatches=num_microbatches, microbatch_groups=groups)

    def following(self) -> "Schedule":
        """The schedule of the next step if the deal of stages to workers goes on where this step stops."""
        deal = self.first_worker + self.num_rounds * self.plan.num_stages
        return replace(self, first_worker=deal % self.group_size)


class FixedOrder(StrEnum):
    """The order in which schedules with fixed stages run forward and backward; for comparison."""

    GPIPE = "gpipe"
    """All forward, then all backward; one stage for each worker."""
    ONE_F_ONE_B = "1f1b"
    """As few micro-batches in flight as fill the pipeline, then one forward and one backward in turn."""
    INTERLEAVED = "interleaved-1f1b"
    """1F1B with several stages for each worker, micro-batches in groups of the number of workers."""
    LOOPED_BFS = "looped-bfs"
    """All micro-batches through a stage before the next one, with several stages for each worker."""


@dataclass(frozen=True)
class FixedSchedule(Schedule):
    """Stages that stay on their workers: chunk ``c`` of the model, forward and backward, on worker ``c % num_workers``.

    Sources: GPipe (arXiv 1811.06965), PipeDream-Flush and interleaved 1F1B (arXiv 2104.04473), breadth-first pipeline
    parallelism (arXiv 2211.05953).

    Args:
        order: the order of forward and backward.

    Raises:
        PlanError: backward is not cut like forward, the number of forward stages does not suit the order, or
            interleaved 1F1B gets micro-batches that are not a multiple of the workers.
    """

    order: FixedOrder = FixedOrder.GPIPE

    def __post_init__(self) -> None:
        super().__post_init__()
        plan, chunks = self.plan, len(self.plan.forward)
        if plan.backward != plan.forward[::-1] or plan.fused != 0:
            raise PlanError(
                f"`{self.order}` must cut backward like forward, with an empty fused stage, but got {plan}."
            )
        if self.order in (FixedOrder.GPIPE, FixedOrder.ONE_F_ONE_B):
            if chunks != self.num_workers:
                raise PlanError(f"`{self.order}` needs one stage per worker, but got {chunks} for {self.num_workers}.")
        elif chunks % self.num_workers:
            raise PlanError(
                f"`{self.order}` needs the same number of stages on every worker, but got {chunks} for"
                f" {self.num_workers}."
            )
        if self.order is FixedOrder.INTERLEAVED and self.num_microbatches % self.num_workers:
            raise PlanError(
                f"`{self.order}` needs a multiple of {self.num_workers} micro-batches (one per worker), but got"
                f" {self.num_microbatches}."
            )

    @property
    def streams_weights(self) -> bool:
        """False: a worker keeps the weights of its stages."""
        return False

    def following(self) -> Schedule:
        """The same schedule again."""
        return self

    def worker_of(self, ticket: Ticket) -> int:
        """The worker on which ``ticket`` runs, the same forward and backward."""
        num_chunks = len(self.plan.forward)
        stage = ticket.stage
        if stage < num_chunks:
            chunk = stage
        elif stage == num_chunks:  # the loss, where the last chunk is
            chunk = num_chunks - 1
        else:
            chunk = 2 * num_chunks - stage
        return chunk % self.num_workers

    @cached_property
    def tickets(self) -> tuple[tuple[Ticket, ...], ...]:
        """For every worker its tickets, in the order in which they are granted."""
        return tuple(tuple(self._tickets_of(worker)) for worker in range(self.num_workers))

    def _tickets_of(self, worker: int) -> Iterator[Ticket]:
        forward = list(self._pairs(range(worker, len(self.plan.forward), self.num_workers)))
        backward = list(self._pairs(range(worker, len(self.plan.forward), self.num_workers)[::-1]))
        num_ahead = min(self._num_ahead(worker), len(forward))
        for position in range(len(forward) + num_ahead):
            if position < len(forward):
                yield Ticket(*forward[position])
            if position >= num_ahead:
                chunk, microbatch = backward[position - num_ahead]
                if chunk == len(self.plan.forward) - 1:
                    yield Ticket(self.plan.fused_stage, microbatch)
                yield Ticket(2 * len(self.plan.forward) - chunk, microbatch)

    def _pairs(self, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Chunk and micro-batch in the order of one direction."""
        width = self.num_workers if self.order is FixedOrder.INTERLEAVED else self.num_microbatches
        for first in range(0, self.num_microbatches, width):
            for chunk in chunks:
                for microbatch in range(first, first + width):
                    yield chunk, microbatch

    def _num_ahead(self, worker: int) -> int:
        """Number of forward tickets before the first backward one, less one."""
        rest = self.num_workers - 1 - worker
        num_chunks = len(self.plan.forward) // self.num_workers
        match self.order:
            case FixedOrder.ONE_F_ONE_B:
                return rest
            case FixedOrder.INTERLEAVED:
                return 2 * rest + (num_chunks - 1) * self.num_workers
            case _:
                return num_chunks * self.num_microbatches
