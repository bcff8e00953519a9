"""A step before it is run: a deterministic discrete-event model of a schedule.

Each worker has a compute queue (its tickets, in the order of the schedule) and two links, from and to the host. Links,
optimizer and the sums of gradients share the bandwidth of host memory. The model knows no threads and no kernels:
a ticket is one or two stretches of time.

What is modelled for a worker that streams weights:

* The weights of its next stage are uploaded as soon as one of ``num_slots`` slots is free. A slot is free when the last
  micro-batch of its stage has run and the stage's gradients have been downloaded.
* Inputs kept from the forward pass go down after their ticket and come back while the ticket before is running, ahead
  of any weights.
* What a stage hands to a stage on another worker arrives ``Machine.hop_s`` later.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from heapq import heappop, heappush
from itertools import count, groupby
from math import inf

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.costs import CallCost, stage_seconds
from lightning_roundpipe.plan.devices import Machine
from lightning_roundpipe.plan.schedule import Schedule, Ticket
from lightning_roundpipe.plan.stages import StageKind
from lightning_roundpipe.plan.timeline import Lane, Span, Timeline, TransferSpan

__all__ = ["Boundary", "simulate"]


class Boundary(StrEnum):
    """What a step waits for."""

    SYNC = "sync"
    """The whole step before, its updates included; these begin when all gradients have landed."""
    EXACT = "exact"
    """Stage by stage, for the updates of its own weights by the step before; these begin call by call."""
    STALE = "stale"
    """Stage by stage, for the updates of its own weights by the step before the last."""


def simulate(
    schedule: Schedule,
    costs: Sequence[CallCost],
    machine: Machine,
    *,
    boundary: Boundary = Boundary.SYNC,
    num_steps: int = 1,
    early_recompute: bool = False,
    num_slots: int = 2,
) -> Timeline:
    """Runs steps of a schedule in simulated time.

    Args:
        schedule: the schedule of the first step; the next ones follow it (:meth:`Schedule.following`).
        costs: costs of the calls of one micro-batch.
        machine: the workers.
        boundary: what a step waits for.
        num_steps: number of steps.
        early_recompute: whether a backward stage recomputes before the gradient of its outputs has arrived.
        num_slots: number of stages whose weights fit on a worker at the same time.

    Raises:
        PlanError: ``costs`` or ``machine`` do not fit the schedule, or a ticket can never run.
    """
    if len(costs) != schedule.plan.num_calls or machine.num_workers != schedule.num_workers:
        raise PlanError(
            f"`costs` and `machine` must fit the schedule of {schedule.plan.num_calls} calls on {schedule.num_workers}"
            f" workers, but got {len(costs)} calls and {machine.num_workers} workers."
        )
    if not schedule.plan.num_stages:  # nothing to evaluate
        return Timeline(schedule.num_workers, [], step_ends=[0.0] * num_steps)
    return _Simulation(schedule, costs, machine, boundary, num_steps, early_recompute, num_slots).run()


class _Job:
    """One stage on one worker: its weights come once, its tickets run in turn, its gradients go once."""

    __slots__ = ("loaded", "num_left", "stage", "step")

    def __init__(self, step: int, stage: int, num_tickets: int) -> None:
        self.step = step
        self.stage = stage
        self.num_left = num_tickets
        self.loaded = False


class _Run:
    """One ticket of one step."""

    __slots__ = ("arrived", "ended", "job", "kept_here", "microbatch", "stage", "step", "worker")

    def __init__(self, job: _Job, ticket: Ticket, worker: int) -> None:
        self.job = job
        self.step = job.step
        self.stage, self.microbatch = ticket
        self.worker = worker
        self.arrived = inf  # when what the previous stage hands on is on this worker
        self.ended = inf
        self.kept_here = False


class _Worker:
    """Compute queue of a worker and the state of its slots."""

    __slots__ = ("busy", "jobs", "next_run", "next_upload", "num_freed", "num_kept", "runs", "waiting")

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.jobs: list[_Job] = []
        self.next_run = 0
        self.next_upload = 0
        self.num_freed = 0
        self.num_kept = 0  # runs whose kept inputs are here or on the way
        self.busy = False
        self.waiting: _Run | None = None  # recomputed, without the gradient to go on


class _Priority(IntEnum):
    """A lane's order; a waiting activation suspends weights that are on their way."""

    ACTIVATIONS = 0
    WEIGHTS = 1


class _Transfer:
    """Bytes on a lane, and what to do when they are through."""

    __slots__ = ("first_moved", "left", "num_bytes", "then")

    def __init__(self, num_bytes: float, then: Callable[[], None]) -> None:
        self.num_bytes = self.left = num_bytes
        self.then = then
        self.first_moved = inf


class _Lanes:
    """Links and CPU: one transfer at a time on each, together within the bandwidth of host memory.

    If they would take more than that, all are slowed down alike.
    """

    def __init__(self, machine: Machine) -> None:
        workers = range(machine.num_workers)
        self._names = [*((Lane.H2D, w) for w in workers), *((Lane.D2H, w) for w in workers), (Lane.CPU, -1)]
        limits = {
            Lane.H2D: machine.h2d_bytes_per_s,
            Lane.D2H: machine.d2h_bytes_per_s,
            Lane.CPU: machine.optimizer_bytes_per_s,
        }
        self._limits = [min(limits[lane], machine.host_bytes_per_s) for lane, _ in self._names]
        self._host = machine.host_bytes_per_s
        self._queues: list[list[tuple[int, int, _Transfer]]] = [[] for _ in self._names]
        self._rates = [0.0] * len(self._names)
        self._sequence = count()
        self._now = 0.0
        self._active: list[int] = []
        self.done: list[TransferSpan] = []

    def index(self, lane: Lane, worker: int) -> int:
        return {Lane.H2D: worker, Lane.D2H: len(self._names) // 2 + worker, Lane.CPU: len(self._names) - 1}[lane]

    def add(self, now: float, index: int, priority: int, transfer: _Transfer) -> bool:
        """Queues a transfer; returns False, and forgets it, if it takes no time."""
        if transfer.num_bytes <= 0 or self._limits[index] == inf:
            return False
        self._advance(now)
        heappush(self._queues[index], (priority, next(self._sequence), transfer))
        self._share()
        return True

    def next_end(self) -> float:
        """When the next transfer ends if nothing is added."""
        return min((self._now + self._queues[i][0][2].left / self._rates[i] for i in self._active), default=inf)

    def finish(self, now: float) -> list[_Transfer]:
        """Takes out the transfers that end now."""
        self._advance(now)
        ended = []
        for index in self._active:
            transfer = self._queues[index][0][2]
            # What is left is rounding: of the bytes, or of the clock, which cannot tell times closer than this apart.
            if transfer.left <= max(1e-9 * transfer.num_bytes, 1e-12 * now * self._rates[index]):
                heappop(self._queues[index])
                lane, worker = self._names[index]
                self.done.append(TransferSpan(lane, worker, transfer.first_moved, now, transfer.num_bytes))
                ended.append(transfer)
        self._share()
        return ended

    def _advance(self, now: float) -> None:
        for index in self._active:
            transfer = self._queues[index][0][2]
            if now > self._now:
                transfer.first_moved = min(transfer.first_moved, self._now)
                transfer.left -= self._rates[index] * (now - self._now)
        self._now = now

    def _share(self) -> None:
        self._active = [index for index, queue in enumerate(self._queues) if queue]
        wanted = sum(self._limits[index] for index in self._active)
        share = self._host / wanted if wanted > self._host else 1.0
        for index in self._active:
            self._rates[index] = share * self._limits[index]


class _Simulation:
    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[CallCost],
        machine: Machine,
        boundary: Boundary,
        num_steps: int,
        early_recompute: bool,
        num_slots: int,
    ) -> None:
        self._plan = plan = schedule.plan
        self._costs = costs
        self._machine = machine
        self._boundary = boundary
        self._early_recompute = early_recompute
        self._streams = schedule.streams_weights
        # Fixed stages need no slot: their weights are there, whatever else is.
        self._num_slots = num_slots if self._streams else 10**9
        self._num_steps = num_steps
        self._num_microbatches = schedule.num_microbatches

        self._seconds = [stage_seconds(costs, stage) for stage in plan.stages]
        calls_of = [costs[stage.start : stage.stop] for stage in plan.stages]
        self._backward = [stage.kind is not StageKind.FORWARD for stage in plan.stages]
        weighs = int(self._streams)
        self._weight_bytes = [weighs * sum(call.weight_bytes for call in calls) for calls in calls_of]
        self._gradient_bytes = [
            weighs * backward * sum(call.gradient_bytes for call in calls)
            for calls, backward in zip(calls_of, self._backward, strict=True)
        ]
        self._kept_bytes = [
            0 if stage.kind is StageKind.FUSED else weighs * sum(call.input_bytes for call in calls)
            for stage, calls in zip(plan.stages, calls_of, strict=True)
        ]

        self._now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._sequence = count()
        self._lanes = _Lanes(machine)
        self._spans: list[Span] = []
        self._step_ends: list[float] = []
        self._num_released = 0

        self._workers = [_Worker() for _ in range(schedule.num_workers)]
        self._run_of: dict[tuple[int, int, int], _Run] = {}
        self._num_landings = [0] * plan.num_stages  # gradients of a stage that reach the host in a step
        for step in range(num_steps):
            self._enqueue(step, schedule)
            schedule = schedule.following()
        # What is still missing in each step: gradients of a stage, updates before a stage's weights are right,
        # forward inputs on their way to the host for a micro-batch, and things without which the step is not complete.
        self._landings = [list(self._num_landings) for _ in range(num_steps)]
        self._updates = [[0] * plan.num_stages for _ in range(num_steps)]
        self._kept_on_the_way = [[0] * self._num_microbatches for _ in range(num_steps)]
        self._unsummed = [sum(map(bool, self._num_landings))] * num_steps
        self._incomplete = [self._unsummed[0] + plan.num_calls] * num_steps
        if not plan.trains:
            self._incomplete = [self._num_microbatches] * num_steps
        self._delay = {Boundary.SYNC: 0, Boundary.EXACT: 1, Boundary.STALE: 2}[boundary]
        if self._delay and plan.trains:
            for step in range(self._delay, num_steps):
                self._updates[step] = [len(stage) for stage in plan.stages]

    def _enqueue(self, step: int, schedule: Schedule) -> None:
        for worker, tickets in enumerate(schedule.tickets):
            queue = self._workers[worker]

            def stretch(ticket: Ticket) -> tuple[int, int]:
                return ticket.stage, schedule.round_of(ticket.microbatch)

            # Fixed stages alternate forward and backward; all their micro-batches are still one job.
            jobs: dict[tuple[int, int], _Job] = {}
            for key, grouped in groupby(tickets, key=stretch):
                run_tickets = list(grouped)
                if self._streams or key not in jobs:
                    jobs[key] = _Job(step, key[0], 0)
                    queue.jobs.append(jobs[key])
                jobs[key].num_left += len(run_tickets)
                for ticket in run_tickets:
                    run = _Run(jobs[key], ticket, worker)
                    queue.runs.append(run)
                    self._run_of[step, ticket.stage, ticket.microbatch] = run
            if step == 0:
                for stage, _ in jobs:
                    self._num_landings[stage] += self._backward[stage]

    # Time

    def run(self) -> Timeline:
        self._release_steps()
        while True:
            transfer_end = self._lanes.next_end()
            if self._events and self._events[0][0] <= transfer_end:
                self._now, _, _, act = heappop(self._events)
                act()
            elif transfer_end < inf:
                self._now = transfer_end
                for transfer in self._lanes.finish(transfer_end):
                    transfer.then()
            else:
                break
        if len(self._step_ends) < self._num_steps:
            self._report_deadlock()
        spans = sorted(self._spans, key=lambda span: (span.worker, span.start, span.stop))
        return Timeline(len(self._workers), spans, self._lanes.done, self._step_ends)

    def _at(self, time: float, priority: int, act: Callable[[], None]) -> None:
        heappush(self._events, (time, priority, next(self._sequence), act))

    def _move(self, lane: Lane, worker: int, priority: int, num_bytes: float, then: Callable[[], None]) -> None:
        if not self._lanes.add(self._now, self._lanes.index(lane, worker), priority, _Transfer(num_bytes, then)):
            then()

    def _report_deadlock(self) -> None:
        waiting = [
            f"worker {index} waits for s{run.stage}m{run.microbatch} of step {run.step}"
            for index, worker in enumerate(self._workers)
            for run in worker.runs[worker.next_run : worker.next_run + 1]
        ]
        raise PlanError(f"The schedule must let every ticket run, but nothing can move: {'; '.join(waiting)}.")

    # Steps

    def _release_steps(self) -> None:
        """Lets the next step begin, or all of them if steps overlap."""
        last = self._num_steps if self._boundary is not Boundary.SYNC else len(self._step_ends) + 1
        first, self._num_released = self._num_released, min(last, self._num_steps)
        for step in range(first, self._num_released):
            for microbatch in range(self._num_microbatches):
                self._run_of[step, 0, microbatch].arrived = self._now
        for worker in range(len(self._workers)):
            self._upload(worker)
            self._keep_ahead(worker)
            self._try_run(worker)

    def _complete(self, step: int) -> None:
        """Counts one of the things that a step needs to be complete."""
        self._incomplete[step] -= 1
        if self._incomplete[step] == 0:
            self._step_ends.append(self._now)
            if self._boundary is Boundary.SYNC and step + 1 < self._num_steps:
                self._at(self._now, 1, self._release_steps)

    # Weights and gradients

    def _upload(self, index: int) -> None:
        worker = self._workers[index]
        while worker.next_upload < min(len(worker.jobs), worker.num_freed + self._num_slots):
            job = worker.jobs[worker.next_upload]
            stale = self._updates[job.step][job.stage] > 0
            if job.step >= self._num_released or (stale and self._streams):
                return
            worker.next_upload += 1
            if stale:  # streamed weights wait in line for their update, fixed ones where they are
                continue

            def then(job: _Job = job) -> None:
                job.loaded = True
                self._try_run(index)

            self._move(Lane.H2D, index, _Priority.WEIGHTS, self._weight_bytes[job.stage], then)

    def _finish_job(self, index: int, job: _Job) -> None:
        def landed() -> None:
            self._workers[index].num_freed += 1
            self._upload(index)
            if self._backward[job.stage] and self._plan.trains:
                self._land(job)

        self._move(Lane.D2H, index, _Priority.WEIGHTS, self._gradient_bytes[job.stage], landed)

    def _land(self, job: _Job) -> None:
        """Counts the landed gradients of a stage; the last ones are summed with those of the other groups.

        One pass over all of them reads each once, and its order, hence its result, does not depend on who was first.
        """
        self._landings[job.step][job.stage] -= 1
        if self._landings[job.step][job.stage]:
            return
        calls = self._costs[slice(self._plan.stages[job.stage].start, self._plan.stages[job.stage].stop)]
        landings = self._num_landings[job.stage]
        sum_bytes = sum(landings * call.gradient_bytes + call.sum_bytes for call in calls) if landings > 1 else 0
        self._move(Lane.CPU, 0, _Priority.WEIGHTS, self._streams * sum_bytes, lambda: self._sum(job))

    def _sum(self, job: _Job) -> None:
        """Gradients of a stage are complete: their updates may begin, at once or when all others are complete."""
        self._complete(job.step)
        self._unsummed[job.step] -= 1
        if self._boundary is not Boundary.SYNC:
            for call in self._plan.stages[job.stage].calls:
                self._update(job.step, call)
        elif self._unsummed[job.step] == 0:
            for call in range(self._plan.num_calls):
                self._update(job.step, call)

    def _update(self, step: int, call: int) -> None:
        def updated() -> None:
            self._complete(step)
            later = step + self._delay
            if not self._delay or later >= self._num_steps:
                return
            for stage in {self._plan.forward_stage(call), self._plan.backward_stage(call)}:
                self._updates[later][stage] -= 1
                if self._updates[later][stage] == 0:
                    self._refresh(later, stage)

        self._move(Lane.CPU, 0, _Priority.WEIGHTS, self._costs[call].optimizer_bytes, updated)

    def _refresh(self, step: int, stage: int) -> None:
        """The weights of a stage are right for a step: workers that waited for them go on."""
        for microbatch in range(self._num_microbatches):
            run = self._run_of[step, stage, microbatch]
            if self._streams:
                self._upload(run.worker)
            else:
                run.job.loaded = True
                self._try_run(run.worker)

    # Kept inputs

    def _keep_ahead(self, index: int) -> None:
        """Brings back the kept inputs of the run that is on and of the next one."""
        worker = self._workers[index]
        while worker.num_kept < min(len(worker.runs), worker.next_run + 2):
            run = worker.runs[worker.num_kept]
            backward = self._plan.stages[run.stage].kind is StageKind.BACKWARD
            if backward and (self._kept_on_the_way[run.step][run.microbatch] or run.step >= self._num_released):
                return
            worker.num_kept += 1

            def then(run: _Run = run) -> None:
                run.kept_here = True
                self._try_run(index)

            self._move(Lane.H2D, index, _Priority.ACTIVATIONS, self._kept_bytes[run.stage] if backward else 0, then)

    def _keep(self, run: _Run) -> None:
        """Sends the inputs of a forward ticket to the host."""
        if self._backward[run.stage]:
            return
        on_the_way = self._kept_on_the_way[run.step]
        on_the_way[run.microbatch] += 1

        def landed() -> None:
            on_the_way[run.microbatch] -= 1
            if on_the_way[run.microbatch] == 0:
                for index in range(len(self._workers)):
                    self._keep_ahead(index)

        self._move(Lane.D2H, run.worker, _Priority.ACTIVATIONS, self._kept_bytes[run.stage], landed)

    # Computation

    def _try_run(self, index: int) -> None:
        """Starts the worker's next ticket if everything that it needs is there."""
        worker = self._workers[index]
        if worker.busy or worker.next_run == len(worker.runs):
            return
        run = worker.runs[worker.next_run]
        early_s, main_s = self._seconds[run.stage]
        if not (run.job.loaded and run.kept_here) or run.step >= self._num_released:
            return
        speed = self._machine.speed(index)
        if run.arrived <= self._now:
            worker.busy = True
            self._span(run, (early_s + main_s) / speed, run.arrived, lambda: self._end(run))
        elif self._early_recompute and early_s and (forward_end := self._forward_end(run)) < inf:
            worker.busy = True

            def recomputed() -> None:
                if run.arrived <= self._now:
                    self._span(run, main_s / speed, run.arrived, lambda: self._end(run))
                else:
                    worker.waiting = run

            self._span(run, early_s / speed, forward_end, recomputed)
            return
        else:
            return
        self._keep_ahead(index)

    def _forward_end(self, run: _Run) -> float:
        """When the forward pass was through a backward stage's calls."""
        last_call = self._plan.stages[run.stage].stop - 1
        return self._run_of[run.step, self._plan.forward_stage(last_call), run.microbatch].ended

    def _span(self, run: _Run, seconds: float, ready: float, then: Callable[[], None]) -> None:
        stop = self._now + seconds
        self._spans.append(Span(run.worker, run.step, run.stage, run.microbatch, self._now, stop, ready))
        self._at(stop, 0, then)

    def _end(self, run: _Run) -> None:
        worker = self._workers[run.worker]
        worker.busy = False
        worker.next_run += 1
        run.ended = self._now
        self._hand_on(run)
        self._keep(run)
        if self._early_recompute and not self._backward[run.stage]:
            for index in range(len(self._workers)):
                self._try_run(index)
        run.job.num_left -= 1
        if run.job.num_left == 0:
            self._finish_job(run.worker, run.job)
        self._keep_ahead(run.worker)
        self._try_run(run.worker)

    def _hand_on(self, run: _Run) -> None:
        if run.stage + 1 == self._plan.num_stages:
            if not self._plan.trains:
                self._complete(run.step)
            return
        successor = self._run_of[run.step, run.stage + 1, run.microbatch]

        def arrive() -> None:
            successor.arrived = self._now
            worker = self._workers[successor.worker]
            if worker.waiting is successor:
                worker.waiting = None
                _, main_s = self._seconds[successor.stage]
                seconds = main_s / self._machine.speed(successor.worker)
                self._span(successor, seconds, self._now, lambda: self._end(successor))
            else:
                self._try_run(successor.worker)

        if successor.worker == run.worker:
            arrive()
        else:
            self._at(self._now + self._machine.hop_s, 0, arrive)
