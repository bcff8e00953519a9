"""Tickets are granted in the order of the schedule, and no order of events brings the micro-batches to a standstill."""

import threading
import time
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.exceptions import RoundPipeInternalError
from lightning_roundpipe.plan.schedule import Schedule, Ticket
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.runtime.tickets import StepAbortedError, TicketGate

TRAINING = Plan((1,), 1, (1,))  # three stages


class Crew:
    """Threads whose errors are kept, and which must end."""

    def __init__(self, gate: TicketGate) -> None:
        self.gate = gate
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, function: Callable[..., object], *args: object) -> None:
        def body() -> None:
            try:
                function(*args)
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=body, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
        stuck = any(thread.is_alive() for thread in self._threads)
        state = self.gate.describe()
        self.gate.abort()
        for thread in self._threads:
            thread.join(10)
        assert not stuck, state


def until_waiting(gate: TicketGate, microbatch: int) -> None:
    """Goes on when the thread of ``microbatch`` waits for a ticket."""
    deadline = time.monotonic() + 10
    while f"micro-batch {microbatch} waits" not in gate.describe():
        assert time.monotonic() < deadline, gate.describe()
        threading.Event().wait(1e-4)


def run_microbatch(
    gate: TicketGate, microbatch: int, stages: Iterable[int], num_stages: int, granted: Callable[[int, Ticket], None]
) -> None:
    """Takes the tickets of ``stages`` one after the other, and retires the others as it passes them."""
    following = 0
    for stage in stages:
        gate.retire(microbatch, range(following, stage))
        ticket = Ticket(stage, microbatch)
        worker = gate.acquire(ticket)
        granted(worker, ticket)
        gate.release(ticket)
        following = stage + 1
    gate.retire(microbatch, range(following, num_stages))
    gate.leave(microbatch)


def test_acquire_tells_the_worker() -> None:
    schedule = Schedule(TRAINING, num_workers=2, num_microbatches=1)
    gate = TicketGate(schedule)
    workers = []
    for stage in range(3):
        workers.append(gate.acquire(Ticket(stage, 0)))
        gate.release(Ticket(stage, 0))
    assert workers == [0, 1, 0]


def test_tickets_are_granted_in_the_order_of_the_schedule_whoever_comes_first() -> None:
    schedule = Schedule(TRAINING, num_workers=1, num_microbatches=3)
    gate, log = TicketGate(schedule), []
    crew = Crew(gate)
    for microbatch in (2, 1):
        crew.start(run_microbatch, gate, microbatch, range(3), 3, lambda _, ticket: log.append(ticket))
        until_waiting(gate, microbatch)
    crew.start(run_microbatch, gate, 0, range(3), 3, lambda _, ticket: log.append(ticket))
    crew.join()
    assert not crew.errors
    assert tuple(log) == schedule.tickets[0]


def test_a_held_worker_is_not_granted_again_before_its_release() -> None:
    gate, log = TicketGate(Schedule(TRAINING, num_workers=1, num_microbatches=2)), []
    crew = Crew(gate)
    gate.acquire(Ticket(0, 0))
    crew.start(run_microbatch, gate, 1, [0], 3, lambda *_: log.append("granted"))
    until_waiting(gate, 1)
    log.append("released")
    gate.release(Ticket(0, 0))
    crew.join()
    assert not crew.errors
    assert log == ["released", "granted"]


def test_retiring_lets_the_next_micro_batch_through() -> None:
    gate = TicketGate(Schedule(TRAINING, num_workers=1, num_microbatches=2))
    crew = Crew(gate)
    crew.start(gate.acquire, Ticket(0, 1))
    until_waiting(gate, 1)
    gate.retire(0, range(1))
    crew.join()
    assert not crew.errors


def test_retired_tickets_of_several_workers_are_passed_over() -> None:
    gate = TicketGate(Schedule(TRAINING, num_workers=2, num_microbatches=2))
    gate.retire(0, range(3))
    assert [gate.acquire(Ticket(stage, 1)) for stage in (0, 1)] == [0, 1]


def test_abort_wakes_those_who_wait() -> None:
    gate = TicketGate(Schedule(TRAINING, num_workers=1, num_microbatches=3))
    crew = Crew(gate)
    gate.acquire(Ticket(0, 0))
    for microbatch in (1, 2):
        crew.start(gate.acquire, Ticket(0, microbatch))
        until_waiting(gate, microbatch)
    gate.abort()
    crew.join()
    assert [type(error) for error in crew.errors] == [StepAbortedError] * 2
    assert "waits" not in gate.describe()


def test_after_abort_no_ticket_is_granted() -> None:
    gate = TicketGate(Schedule(TRAINING, num_workers=1, num_microbatches=1))
    gate.abort()
    with pytest.raises(StepAbortedError):
        gate.acquire(Ticket(0, 0))


def test_code_that_catches_every_exception_lets_the_abort_pass() -> None:
    assert not issubclass(StepAbortedError, Exception)


def test_a_standstill_is_reported_with_the_state() -> None:
    gate = TicketGate(Schedule(TRAINING, num_workers=2, num_microbatches=1))
    with pytest.raises(RoundPipeInternalError) as caught:
        gate.acquire(Ticket(2, 0))  # stage 0, before it on worker 0, was neither run nor retired
    assert str(caught.value).splitlines() == [
        "No micro-batch can move any more; please report this.",
        "worker 0: held by nobody, next s0m0, s2m0",
        "worker 1: held by nobody, next s1m0",
        "micro-batch 0 waits for s2m0",
    ]


def test_a_ticket_that_is_not_in_the_schedule_any_more_is_a_standstill() -> None:
    gate = TicketGate(Schedule(TRAINING, num_workers=1, num_microbatches=1))
    gate.acquire(Ticket(0, 0))
    gate.release(Ticket(0, 0))
    with pytest.raises(RoundPipeInternalError, match="micro-batch 0 waits for s0m0"):
        gate.acquire(Ticket(0, 0))


def test_a_thread_that_ends_without_retiring_is_noticed_by_the_one_that_waits() -> None:
    gate = TicketGate(Schedule(TRAINING, num_workers=1, num_microbatches=2))
    crew = Crew(gate)
    crew.start(gate.acquire, Ticket(0, 1))
    until_waiting(gate, 1)
    gate.leave(0)
    crew.join()
    assert [type(error) for error in crew.errors] == [RoundPipeInternalError]


def test_waiting_for_a_micro_batch_that_runs_is_no_standstill() -> None:
    """Micro-batch 0 holds a worker and is not waiting: it will release."""
    gate = TicketGate(Schedule(TRAINING, num_workers=1, num_microbatches=2))
    crew = Crew(gate)
    gate.acquire(Ticket(0, 0))
    crew.start(gate.acquire, Ticket(0, 1))
    until_waiting(gate, 1)
    assert "worker 0: held by s0m0, next s0m1" in gate.describe()
    gate.release(Ticket(0, 0))
    crew.join()
    assert not crew.errors


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Schedules of training and of evaluation, with replica groups, rounds or an explicit placement."""
    forward = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    num_calls = sum(forward)
    if draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(1, num_calls - 1), max_size=3))) if num_calls > 1 else []
        bounds = [0, *cuts, num_calls]
        backward = tuple(stop - start for start, stop in pairwise(bounds))
        plan = Plan(tuple(forward), draw(st.integers(0, 2)), backward)
    else:
        plan = Plan(tuple(forward))
    groups, group_size = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    num_workers = groups * group_size
    placed = draw(st.booleans())
    rows = st.lists(st.integers(0, num_workers - 1), min_size=plan.num_stages, max_size=plan.num_stages).map(tuple)
    return Schedule(
        plan,
        num_workers=num_workers,
        num_microbatches=draw(st.integers(1, 5)),
        replica_groups=groups,
        num_rounds=1 if placed else draw(st.integers(1, 2)),
        first_worker=draw(st.integers(0, group_size - 1)),
        stage_workers=draw(st.lists(rows, min_size=groups, max_size=groups).map(tuple)) if placed else None,
    )


@settings(max_examples=60, deadline=None)
@given(schedules(), st.data())
def test_no_plan_and_no_choice_of_skipped_stages_ends_in_a_standstill(schedule: Schedule, data: st.DataObject) -> None:
    """Also: what was not skipped is granted in order, and one ticket at a time holds a worker."""
    num_stages = schedule.plan.num_stages
    skipped = data.draw(
        st.lists(
            st.sets(st.integers(0, num_stages - 1)),
            min_size=schedule.num_microbatches,
            max_size=schedule.num_microbatches,
        ),
        label="skipped",
    )
    gate = TicketGate(schedule)
    log: list[list[Ticket]] = [[] for _ in range(schedule.num_workers)]
    busy = [threading.Lock() for _ in range(schedule.num_workers)]

    def granted(worker: int, ticket: Ticket) -> None:
        assert busy[worker].acquire(blocking=False), f"{ticket} was granted while worker {worker} is held"
        log[worker].append(ticket)
        busy[worker].release()

    crew = Crew(gate)
    for microbatch in data.draw(st.permutations(range(schedule.num_microbatches)), label="start"):
        stages = [stage for stage in range(num_stages) if stage not in skipped[microbatch]]
        crew.start(run_microbatch, gate, microbatch, stages, num_stages, granted)
    crew.join()
    assert not crew.errors
    for worker, queue in enumerate(schedule.tickets):
        assert log[worker] == [ticket for ticket in queue if ticket.stage not in skipped[ticket.microbatch]]
