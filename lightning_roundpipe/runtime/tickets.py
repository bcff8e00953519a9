"""Tickets: the right of one stage of one micro-batch to run on its worker.

The tickets of a worker are granted in the order of the schedule, one at a time. A micro-batch's thread moves through
its tickets in stage order and may leave some out (a layer that was skipped): those are retired. Both orders agree with
(stage, micro-batch), so a wait always ends; should it not, the thread that would complete the standstill reports it.
"""

import threading
from collections import deque

from lightning_roundpipe.exceptions import RoundPipeInternalError
from lightning_roundpipe.plan.schedule import Schedule, Ticket

__all__ = ["StepAbortedError", "TicketGate"]


class StepAbortedError(BaseException):
    """Raised in waiting micro-batches after another one has failed.

    Not an `Exception`, so that user code which catches everything lets it pass.
    """


class TicketGate:
    """Grants the tickets of one step.

    Threading: every method may be called from any micro-batch's thread; only `acquire` blocks.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._queues = [deque(queue) for queue in schedule.tickets]
        self._holders: list[Ticket | None] = [None] * schedule.num_workers
        self._retired: set[Ticket] = set()
        self._lock = threading.Lock()
        self._wakeups = [threading.Condition(self._lock) for _ in range(schedule.num_microbatches)]
        self._waiting: dict[int, Ticket] = {}
        self._live = set(range(schedule.num_microbatches))
        self._aborted = False

    def acquire(self, ticket: Ticket) -> int:
        """Wait for ``ticket`` and return the worker that it holds.

        Raises:
            StepAbortedError: the step was aborted.
            RoundPipeInternalError: nobody can move any more.
        """
        worker = self._schedule.worker_of(ticket)
        with self._lock:
            self._waiting[ticket.microbatch] = ticket
            try:
                while not self._grantable(worker, ticket):
                    self._check_progress()
                    self._wakeups[ticket.microbatch].wait()
                self._queues[worker].popleft()
                self._holders[worker] = ticket
            finally:
                del self._waiting[ticket.microbatch]
        return worker

    def release(self, ticket: Ticket) -> None:
        """Give the worker on: ``ticket`` is done."""
        with self._lock:
            worker = self._schedule.worker_of(ticket)
            self._holders[worker] = None
            self._wake(worker)

    def retire(self, microbatch: int, stages: range) -> None:
        """Declare that ``microbatch`` will not run ``stages``."""
        with self._lock:
            tickets = [Ticket(stage, microbatch) for stage in stages]
            self._retired.update(tickets)
            for worker in {self._schedule.worker_of(ticket) for ticket in tickets}:
                self._wake(worker)

    def leave(self, microbatch: int) -> None:
        """Declare that the thread of ``microbatch`` has ended; it holds no ticket any more."""
        with self._lock:
            self._live.discard(microbatch)
            if len(self._waiting) == len(self._live):
                for waiting in self._waiting:
                    self._wakeups[waiting].notify_all()

    def abort(self) -> None:
        """Make every present and future wait raise."""
        with self._lock:
            self._aborted = True
            for wakeup in self._wakeups:
                wakeup.notify_all()

    def _grantable(self, worker: int, ticket: Ticket) -> bool:
        if self._aborted:
            raise StepAbortedError
        return self._holders[worker] is None and self._head(worker) == ticket

    def _head(self, worker: int) -> Ticket | None:
        queue = self._queues[worker]
        while queue and queue[0] in self._retired:
            queue.popleft()
        return queue[0] if queue else None

    def _wake(self, worker: int) -> None:
        head = self._head(worker)
        if head is not None and self._holders[worker] is None:
            self._wakeups[head.microbatch].notify_all()

    def _check_progress(self) -> None:
        if len(self._waiting) < len(self._live):
            return
        if any(self._grantable(self._schedule.worker_of(ticket), ticket) for ticket in self._waiting.values()):
            return
        raise RoundPipeInternalError(f"No micro-batch can move any more; please report this.\n{self.describe()}")

    def describe(self) -> str:
        """Who holds what, who waits for what, and what each worker would grant next."""
        lines = [
            f"worker {worker}: held by {holder or 'nobody'}, next {', '.join(map(str, list(queue)[:4])) or 'nothing'}"
            for worker, (holder, queue) in enumerate(zip(self._holders, self._queues, strict=True))
        ]
        lines += [f"micro-batch {m} waits for {ticket}" for m, ticket in sorted(self._waiting.items())]
        return "\n".join(lines)
