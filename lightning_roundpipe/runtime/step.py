"""What the micro-batches of one step share."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.runtime.compiled import CompiledUnits
from lightning_roundpipe.runtime.tickets import StepAbortedError, TicketGate
from lightning_roundpipe.runtime.traits import UnitTraits
from lightning_roundpipe.runtime.uses import UseCounter
from lightning_roundpipe.runtime.worker import Worker

__all__ = ["Objective", "Step", "StepFunction"]

StepFunction = Callable[[int, Worker], Any]
"""Runs the user's step for a micro-batch, given its number and the worker that it starts on."""


class Objective(Protocol):
    """How the losses of micro-batches become the loss of the batch."""

    scale: float
    """Factor on every loss before its backward (the loss scale of float16 training)."""

    def loss(self, output: Any) -> Tensor | None:
        """The loss in an output of the step function."""

    def observe(self, index: int, losses: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Hear which cross-entropies a micro-batch computed, each with the number of labels that it averages over."""

    def share(self, index: int) -> float:
        """The share of a micro-batch in the batch's loss; all sum to 1."""


class Abort:
    """Tells the threads of a step to stop, and keeps the first error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.requested = False

    def fail(self, error: BaseException) -> None:
        """Note ``error``, unless another one came first or it is only an echo of the abort."""
        with self._lock:
            if self.error is None and not isinstance(error, StepAbortedError):
                self.error = error
            self.requested = True


@dataclass(eq=False)
class Step:
    """One step, or that part of it whose micro-batches run together.

    Attributes:
        function: the user's step.
        objective: what its outputs amount to.
        trains: whether a backward pass follows.
        seed: base of all randomness of the step.
        schedule: stages, workers and micro-batches.
        order: index of the unit at each position of the plan.
        stage_units: the units of each stage.
        times_calls: whether to note when each call starts.
        workers: by number.
        traits: by index of the unit.
        parameters: all parameters of the model.
        silent_buffers: see `Scope.write_buffers`.
        abort: shared by the parts of a step.
        warn: tells the user a message, once for each topic.
        is_alone: whether the batch is a single micro-batch, which may then do as it likes with flags of the module.
        compiled: the compiled forms of units, if there are.
        uses: counts what may still add to gradients, if parameters are updated while the step runs.
        name_of: the name of a parameter, for messages.
        on_glue: called before each stretch of user code, with the micro-batch and the device on which it runs.
    """

    function: StepFunction
    objective: Objective
    trains: bool
    seed: int
    schedule: Schedule
    order: tuple[int, ...]
    times_calls: bool
    workers: Sequence[Worker]
    traits: Sequence[UnitTraits]
    parameters: Sequence[Tensor]
    silent_buffers: set[tuple[int, str]]
    abort: Abort
    warn: Callable[[str, str], None]
    on_glue: Callable[[int, torch.device], None]
    is_alone: bool
    compiled: CompiledUnits | None
    uses: UseCounter | None
    name_of: Callable[[Tensor], str]
    user_lock: threading.Lock = field(default_factory=threading.Lock)
    buffer_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gate = TicketGate(self.schedule)
        self._stage_parameters: dict[int, list[Tensor]] = {}
        self.last_of_part = {
            self.schedule.part_of(microbatch): microbatch for microbatch in range(self.schedule.num_microbatches)
        }
        self.masters = {id(parameter) for parameter in self.parameters}
        devices = [worker.device for worker in self.workers]
        self._device_shared = len(set(devices)) < len(devices)

    @property
    def shares_generator(self) -> bool:
        """Whether a worker's generator may be used by another thread at the same time."""
        return self._device_shared or self.workers[0].device.type == "cpu"

    def must_lock(self, draws: tuple[bool, ...]) -> bool:
        """Whether a unit that draws from (host, device) generators shares one with another thread."""
        host, *device = draws
        return host or (any(device) and self._device_shared)

    def stage_parameters(self, stage: int) -> list[Tensor]:
        """What ``stage`` is planned to need, without units that wait for their call; nothing after the last stage."""
        if stage >= self.schedule.plan.num_stages:
            return []
        units = dict.fromkeys(self.order[call] for call in self.schedule.plan.stages[stage].calls)
        planned = [self.traits[index].unit for index in units]
        return [parameter for unit in planned if not unit.on_call for parameter in unit.parameters]

    def add_uses(self, parameters: Sequence[Tensor]) -> None:
        """Parameters may get a gradient from a backward that is still to come."""
        if self.uses is not None:
            self.uses.add(parameters)

    def remove_uses(self, parameters: Sequence[Tensor]) -> None:
        """That backward has run."""
        if self.uses is not None:
            self.uses.remove(parameters)

    def forward_done(self) -> None:
        """A micro-batch will call no more units."""
        if self.uses is not None:
            self.uses.forward_done()

    def check_aborted(self) -> None:
        """Raise if another micro-batch has failed.

        Raises:
            StepAbortedError: it has.
        """
        if self.abort.requested:
            raise StepAbortedError
