"""Runs steps: learns the order of calls, has a plan made for it, and starts a thread for each micro-batch."""

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.plan.costs import CallCost
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.runtime.collectives import GradientReducer, Reduction, ReductionRequest
from lightning_roundpipe.runtime.compiled import CompiledUnits
from lightning_roundpipe.runtime.gpu_worker import GpuWorker
from lightning_roundpipe.runtime.hardware import host_facts
from lightning_roundpipe.runtime.hazards import uncompiled
from lightning_roundpipe.runtime.host_budget import HostBudget
from lightning_roundpipe.runtime.host_store import HostStore
from lightning_roundpipe.runtime.lookup import installed
from lightning_roundpipe.runtime.manual_run import ManualRun
from lightning_roundpipe.runtime.microbatch_run import MicroBatchRun
from lightning_roundpipe.runtime.objective import BatchObjective
from lightning_roundpipe.runtime.partial_step import PartialStepper
from lightning_roundpipe.runtime.pending import PendingStep
from lightning_roundpipe.runtime.placement import WeightPlacement
from lightning_roundpipe.runtime.randomness import preserved_generators
from lightning_roundpipe.runtime.stats import StepStats, TicketSpan
from lightning_roundpipe.runtime.step import Abort, Objective, Step, StepFunction
from lightning_roundpipe.runtime.thread_state import ThreadState
from lightning_roundpipe.runtime.threads import ThreadPool
from lightning_roundpipe.runtime.traits import UnitTraits, unguard
from lightning_roundpipe.runtime.units import Unit, tensor_bytes
from lightning_roundpipe.runtime.updater import Updater, UpdateRequest
from lightning_roundpipe.runtime.uses import UseCounter
from lightning_roundpipe.runtime.worker import Worker

__all__ = ["Executor", "StepResult", "largest_unit_bytes"]

ScheduleMaker = Callable[[Sequence[CallCost], int], Schedule]
"""Makes a schedule from the calls in order (their bytes; their times are not known) and the number of micro-batches."""


_WEIGHT_SHARE = 0.3
"""Share of the usable GPU memory in which weights may stay; the rest is for activations and gradients. A guess."""


def _usable_bytes(device: torch.device, devices: Sequence[torch.device], gpu_memory_limit: float) -> int:
    """Memory of a GPU that each of its workers may use, beside what others and this process have in use already."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # torch 2.8
        allowed_bytes = torch.cuda.get_per_process_memory_fraction(device) * total_bytes
        free_bytes = min(free_bytes, int(allowed_bytes) - torch.cuda.memory_reserved(device))
    return int(max(0, free_bytes) * gpu_memory_limit / sum(other == device for other in devices))


def _weight_budget_bytes(device: torch.device, devices: Sequence[torch.device], gpu_memory_limit: float) -> int:
    return int(_usable_bytes(device, devices, gpu_memory_limit) * _WEIGHT_SHARE)


def largest_unit_bytes(
    devices: Sequence[torch.device], gpu_memory_limit: float, compute_dtype: torch.dtype | None
) -> float:
    """Bytes of a unit of which two fit a worker's memory for weights: one that runs, and the next on its way.

    Counted as the masters are; where float32 is converted for computation, an upload is smaller than that.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    uploaded = min((_weight_budget_bytes(gpu, devices, gpu_memory_limit) / 2 for gpu in gpus), default=math.inf)
    return uploaded if compute_dtype is None else uploaded * torch.float32.itemsize / compute_dtype.itemsize


@dataclass
class StepResult:
    """What a step gave.

    Attributes:
        outputs: the step function's output for each micro-batch, detached, in host memory.
        losses: the loss of each micro-batch (None where the output holds none); empty if the step only evaluated.
        gradients: parameters and their gradients, summed over the micro-batches.
        final: parameters with what their ``.grad`` is to become as it is: they were updated with it already, or it
            is complete.
        stats: what it took.
    """

    outputs: list[Any]
    losses: list[Tensor | None]
    gradients: list[tuple[Tensor, Tensor]]
    final: list[tuple[Tensor, Tensor]]
    stats: StepStats


@dataclass
class _Order:
    """The learned order of calls of one kind of step."""

    units: tuple[int, ...]
    schedule: Schedule


@dataclass(eq=False)
class Executor:
    """Runs the steps of one model on a set of workers.

    Args:
        root: the model.
        units: what to stream.
        devices: one for each worker; virtual workers repeat a device.
        plan_training: makes schedules with a fused stage and backward stages.
        plan_evaluation: makes schedules of forward stages only.
        warn: tells the user something.
        compute_dtype: dtype to which float32 parameters are converted for computation; None to leave them.
        gpu_memory_limit: share of the GPU memory that is free at the start which may be used.
        placement: where weights lie in host memory.
        budget: of host memory, to be checked again when the inputs that are kept are known.
        compile_options: keyword arguments of `torch.compile` for units; None to run them eagerly.
        delays_updates: whether steps may lack the update before them (see [Note: Delayed updates]).
        reducer: averages gradients over machines; None if there is one machine.

    Attributes:
        writes_buffers: whether forward passes of training were seen to change a buffer.
    """

    root: nn.Module
    units: tuple[Unit, ...]
    devices: Sequence[torch.device]
    plan_training: ScheduleMaker
    plan_evaluation: ScheduleMaker
    warn: Callable[[str], None]
    compute_dtype: torch.dtype | None = None
    gpu_memory_limit: float = 0.9
    placement: WeightPlacement = field(default_factory=WeightPlacement)
    budget: HostBudget | None = None
    compile_options: Mapping[str, Any] | None = None
    delays_updates: bool = False
    reducer: GradientReducer | None = None
    poison_masters: bool = field(default=False, init=False)
    times_calls: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        pin = any(device.type == "cuda" for device in self.devices)
        self.store = HostStore(
            self.compute_dtype,
            pin=pin,
            warn=self.warn_once,
            delays=self.delays_updates,
            placement=self.placement,
        )
        self._warned: set[str] = set()
        self._threads = ThreadPool("roundpipe-microbatch")
        self.store.adopt(self.root, self.units)
        self.workers = [self._make_worker(index, device) for index, device in enumerate(self.devices)]
        self._stale = True
        self._traits = [UnitTraits(unit) for unit in self.units]
        self._compiled: CompiledUnits | None = None
        if self.compile_options is not None:
            self._compiled = CompiledUnits(self.units, self._traits, self.compile_options, self.warn_once)
        self._orders: dict[str, _Order] = {}
        self._training_order: tuple[int, ...] = ()
        self._silent_buffers: set[tuple[int, str]] = set()
        self.writes_buffers = False
        self._manual_trace: list[int] = []

    def _make_worker(self, index: int, device: torch.device) -> Worker:
        if device.type != "cuda":
            return Worker(index, device, self.store)
        budget = _weight_budget_bytes(device, self.devices, self.gpu_memory_limit)
        usable = _usable_bytes(device, self.devices, self.gpu_memory_limit) + torch.cuda.memory_allocated(device)
        worker = GpuWorker(index, device, self.store, budget, usable)
        worker.holds_inputs = len(self.devices) == 1
        return worker

    def invalidate(self) -> None:
        """Declare that weights or buffers may have changed since the last step, in whatever way."""
        self._stale = True

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return self.store.pinned_bytes + sum(worker.pinned_bytes for worker in self.workers)

    @property
    def weight_budget_bytes(self) -> float:
        """Memory for weights that every worker has."""
        return min(worker.weight_budget_bytes for worker in self.workers)

    @property
    def free_bytes(self) -> float:
        """Memory that a larger fused stage may use on every worker; 0 without GPUs."""
        return min(worker.free_bytes / self.devices.count(worker.device) for worker in self.workers)

    def adopt(self, kind: str, schedule: Schedule) -> None:
        """Run steps of ``kind``, whose order of calls is known, by another schedule from now on."""
        for worker in self.workers:
            worker.tidy()
        self._orders[kind] = _Order(self._orders[kind].units, schedule)

    def update_later(self, stepper: PartialStepper) -> None:
        """Take what is left of an optimizer step in the background, in the order in which the next step needs it.

        With `delays_updates` the next step does not wait for it.
        """
        self.finish_updates()
        needed = self._needed()
        # What no unit owns comes first: user code may ask for it at once.
        rest = sorted(stepper.remaining(), key=lambda parameter: needed.get(id(parameter), -1))
        self.store.pending = PendingStep(stepper, rest, self.store, delays=self.delays_updates)
        self.store.pending.start()

    def _needed(self) -> dict[int, int]:
        """When a forward pass of training needs a parameter, by its id."""
        needed: dict[int, int] = {}
        for unit in self._training_order:
            for parameter in self.units[unit].parameters:
                needed.setdefault(id(parameter), len(needed))
        return needed

    def finish_updates(self) -> None:
        """Wait until no update is under way.

        Raises:
            BaseException: what the optimizer raised.
        """
        pending = self.store.pending
        if pending is not None:
            try:
                pending.join()
            finally:
                self.store.pending = None

    def wait_for_updates(self) -> None:
        """Wait until no update is under way; an error is kept for `finish_updates`."""
        if self.store.pending is not None:
            self.store.pending.wait()

    def close(self) -> None:
        """Give all memory back; the model is an ordinary one again."""
        self._threads.close()
        self.wait_for_updates()
        for worker in self.workers:
            worker.close()
        self.store.close()

    def run(
        self,
        kind: str,
        function: StepFunction,
        num_samples: Sequence[int],
        objective: Objective,
        *,
        trains: bool,
        seed: int,
        overwrites_grad: bool = False,
        on_glue: Callable[[int, torch.device], None] = lambda index, device: None,
        update: UpdateRequest | None = None,
        reduction: ReductionRequest | None = None,
    ) -> StepResult:
        """Run one step and wait for its end.

        Args:
            kind: steps of one kind are expected to make the same calls; their order is learned once.
            function: runs the user's step for one micro-batch, in a thread of its own.
            num_samples: samples in each micro-batch.
            objective: what the outputs amount to.
            trains: whether to run the backward, too.
            seed: base of all randomness of the step.
            overwrites_grad: whether the parameters' ``.grad`` is of no use any more when the new gradients land.
            on_glue: called before each stretch of user code, with the micro-batch and the device on which it runs.
            update: the optimizer step to take meanwhile, parameter by parameter.
            reduction: how to average gradients over machines meanwhile; None to leave them as they are.

        Raises:
            BaseException: the first error of any micro-batch, after all threads have ended, unchanged but for a note
                that names unit, stage, micro-batch and worker; or `KeyboardInterrupt` of the calling thread.
        """
        start = time.perf_counter()
        before = self.store.pending
        if self._stale or not trains or self.poison_masters:
            self.finish_updates()
        exposed_s = time.perf_counter() - start
        count = len(num_samples)
        state = ThreadState.capture()
        abort = Abort()
        parameters = list(self.root.parameters())
        learned = self._orders.get(kind)
        probed = learned is None
        uses = UseCounter(count) if update is not None or reduction is not None else None
        take, on_complete = self.store.take_gradient, None
        reducing: Reduction | None = None
        if reduction is not None:
            assert self.reducer is not None
            reducing = Reduction(self.reducer, reduction, take)
            take, on_complete = reducing.take, reducing.submit
        updater: Updater | None = None
        if update is not None:
            updater = Updater(update, self.store, take, before, self._needed())
            if reducing is None:
                on_complete = updater.submit
            else:
                reducing.then = updater.submit

        def make_step(schedule: Schedule, order: tuple[int, ...]) -> Step:
            return Step(
                function=function,
                objective=objective,
                trains=trains,
                seed=seed,
                schedule=schedule,
                order=order,
                times_calls=self.times_calls,
                workers=self.workers,
                traits=self._traits,
                parameters=parameters,
                silent_buffers=self._silent_buffers,
                abort=abort,
                warn=self.warn_once,
                on_glue=on_glue,
                is_alone=count == 1,
                compiled=self._compiled,
                uses=uses,
                name_of=self._name_of,
            )

        runs: list[MicroBatchRun] = []
        with ExitStack() as stack:
            stack.callback(self._clear)
            stack.enter_context(preserved_generators(self.devices))
            stack.enter_context(uncompiled(self.root, self.warn_once))
            stack.enter_context(installed(self.root, self.units))
            stack.enter_context(self._guarded_grads(parameters, updater))
            if self.poison_masters:
                stack.enter_context(self.store.poisoned(parameters))
            self._prepare(overwrites_grad)
            self.store.uses, self.store.on_complete = uses, on_complete
            for background in (updater, reducing):
                if background is not None:
                    stack.callback(background.abandon)
                    background.start()
            if learned is None:
                first = make_step(Schedule(Plan((), 0), len(self.workers), 1), ())
                runs = [MicroBatchRun(first, 0, alone=True)]
                self._run_threads(first, runs, state)
                self.workers[0].clear()
                self.writes_buffers |= trains and runs[0].writes_buffers
                learned = self._orders[kind] = self._plan(runs[0].order, count, trains)
                if trains:
                    self._check_kept_inputs(runs[0], learned.schedule.plan, sum(num_samples) / num_samples[0])
            if trains:
                self._training_order = learned.units
            schedule = learned.schedule.with_microbatches(count)
            if len(runs) < count:
                step = make_step(schedule, learned.units)
                for run in runs:
                    step.gate.retire(run.index, range(schedule.plan.num_stages))
                    step.gate.leave(run.index)
                rest = [MicroBatchRun(step, index, alone=False) for index in range(len(runs), count)]
                self._run_threads(step, rest, state)
                runs += rest
                self._relearn(kind, rest, trains)
            for worker in self.workers:
                worker.end_step()
            if reducing is not None:
                reducing.finish(writes_buffers=self.writes_buffers)
            ended = time.perf_counter()
            self.finish_updates()
            if updater is not None:
                updater.finish()
            exposed_s += time.perf_counter() - ended
            gradients = self.store.collect() if reducing is None else reducing.collect()
            final = updater.updated if updater is not None else []
            if reducing is not None and reducing.completes:
                gradients, final = [], [*final, *gradients]
            for worker in self.workers:
                worker.synchronize()
        stats = StepStats(
            schedule=schedule,
            num_samples=sum(num_samples),
            start_s=start,
            stop_s=time.perf_counter(),
            probed=probed,
            update_s=sum(part.update_s for part in (before, updater) if part is not None),
            update_exposed_s=exposed_s + (before.waited_s / len(self.workers) if before is not None else 0.0),
            reduce_s=reducing.reduce_s if reducing is not None else 0.0,
            reduce_exposed_s=reducing.exposed_s if reducing is not None else 0.0,
            spans=tuple(
                TicketSpan(
                    worker.index,
                    stage.index,
                    stage.kind,
                    run.index,
                    worker.seconds(begin),
                    worker.seconds(end),
                    tuple((call, worker.seconds(mark)) for call, mark in call_starts),
                )
                for run in runs
                for worker, stage, begin, end, call_starts in run.spans
            ),
            transfers=tuple(span for worker in self.workers for span in worker.transfer_spans()),
            graph_bytes=_middle([run.graph_bytes for run in runs]),
        )
        return StepResult(
            outputs=[run.output for run in runs],
            losses=[run.loss for run in runs] if trains else [],
            gradients=gradients,
            final=final,
            stats=stats,
        )

    @contextmanager
    def manual_run(
        self,
        seed: int,
        publish: Callable[[Sequence[tuple[Tensor, Tensor]]], None],
        recomputing: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[ManualRun]:
        """Get ready for a step that calls backward and optimizers itself, to be run inside.

        Args:
            seed: base of all randomness of the step.
            publish: adds gradients to ``.grad`` of parameters.
            recomputing: entered while units run again for their backward.
        """
        step = Step(
            function=lambda index, worker: None,  # `ManualRun.run` is given it.
            objective=BatchObjective("samples", (), self.root),
            trains=True,
            seed=seed,
            schedule=Schedule(Plan((), 0), len(self.workers), 1),
            order=(),
            times_calls=False,
            workers=self.workers,
            traits=self._traits,
            parameters=list(self.root.parameters()),
            silent_buffers=self._silent_buffers,
            abort=Abort(),
            warn=self.warn_once,
            on_glue=lambda index, device: None,
            is_alone=True,
            compiled=self._compiled,
            uses=None,
            name_of=self._name_of,
        )
        with ExitStack() as stack:
            stack.callback(self._clear)
            stack.enter_context(preserved_generators(self.devices))
            stack.enter_context(uncompiled(self.root, self.warn_once))
            stack.enter_context(installed(self.root, self.units))
            self._prepare(overwrites_grad=False)
            run = ManualRun(step, self.store, publish, recomputing, self._manual_trace)
            yield run
            self._manual_trace = run.trace

    @contextmanager
    def _guarded_grads(self, parameters: Sequence[Tensor], updater: Updater | None) -> Iterator[None]:
        """See that no gradient went straight to a host parameter, where `zero_grad` would wipe it out.

        Raises:
            UnsupportedUseError: one did.
        """
        before = [
            # An update that is still under way may clip its gradient.
            (
                gradient := parameter.grad,
                None if gradient is None or self.store.is_updating([parameter]) else gradient._version,
            )
            for parameter in parameters
        ]
        yield
        updated = {id(parameter) for parameter, _ in updater.updated} if updater is not None else set()
        for parameter, (gradient, version) in zip(parameters, before, strict=True):
            if parameter.grad is None or (parameter.grad is gradient and version in (None, gradient._version)):
                continue
            if id(parameter) not in updated and not self.store.owns(parameter.grad):
                raise UnsupportedUseError(
                    f"Parameter {self._name_of(parameter)} was reached in a unit without being looked up on its module,"
                    " which had not happened in the unit's first call: the gradient would be lost. Reach it as"
                    " `module.parameter`."
                )

    def _name_of(self, parameter: Tensor) -> str:
        names = (name for name, known in self.root.named_parameters() if known is parameter)
        return f"`{next(names, 'of shape ' + str(list(parameter.shape)))}`"

    def _prepare(self, overwrites_grad: bool) -> None:
        self.store.refresh(everything=self._stale)
        if self._stale:
            for worker in self.workers:
                worker.invalidate()
            self._stale = False
        for worker in self.workers:
            # A delayed update still uses ``.grad``.
            worker.overwrites_grad = overwrites_grad and not self.delays_updates
            worker.begin_step()
        if self._compiled is not None:
            self._compiled.begin_step()

    def _plan(self, order: Sequence[int], num_microbatches: int, trains: bool) -> _Order:
        make = self.plan_training if trains else self.plan_evaluation
        return _Order(tuple(order), make([self._call_size(self.units[unit]) for unit in order], num_microbatches))

    def _check_kept_inputs(self, run: MicroBatchRun, plan: Plan, share: float) -> None:
        """Refuse a batch whose kept inputs do not fit into host memory.

        Args:
            run: the first micro-batch.
            plan: which calls keep inputs.
            share: the size of the batch, in micro-batches like the first.
        """
        calls = min(sum(plan.forward), len(run.kept_bytes))
        if self.budget is not None and calls and not any(worker.holds_inputs for worker in self.workers):
            kept_bytes = int(share * run.kept_bytes[calls - 1])
            self.budget.with_kept_inputs(kept_bytes, self.store.partial_bytes, host_facts()).check(self.warn_once)

    def _call_size(self, unit: Unit) -> CallCost:
        uploaded = sum(self.store.uploaded_bytes(p) for p in unit.parameters)
        landed = sum(tensor_bytes(p) for p in unit.parameters if p.requires_grad)
        return CallCost(
            forward_s=0.0,
            backward_s=0.0,
            weight_bytes=uploaded,
            gradient_bytes=landed,
            copy_bytes=sum(p.numel() * self.store.dtype_of(p).itemsize for p in unit.parameters),
            accumulator_bytes=sum(p.numel() * max(4, p.itemsize) for p in unit.parameters if p.requires_grad),
        )

    def _relearn(self, kind: str, runs: Sequence[MicroBatchRun], trains: bool) -> None:
        """Plan anew if all micro-batches agree on another order than the planned one."""
        orders = {tuple(run.order) for run in runs}
        if len(orders) == 1 and (order := orders.pop()) != self._orders[kind].units:
            self._orders[kind] = self._plan(order, self._orders[kind].schedule.num_microbatches, trains)

    def _run_threads(self, step: Step, runs: Sequence[MicroBatchRun], state: ThreadState) -> None:
        done = threading.Semaphore(0)

        def body(run: MicroBatchRun) -> None:
            try:
                state.run(run.execute)
            except BaseException as error:  # raised by the main thread below
                step.abort.fail(error)
                step.gate.abort()
            finally:
                step.gate.leave(run.index)
                done.release()

        started = finished = 0
        try:
            for run in runs:
                self._threads.submit(run.index, partial(body, run))
                started += 1
            while finished < started:
                done.acquire()
                finished += 1
        except BaseException as error:
            # Ctrl-C: stop the others first, so that nothing runs when the caller goes on.
            step.abort.fail(error)
            step.gate.abort()
            while finished < started:
                done.acquire()
                finished += 1
            raise
        if step.abort.error is not None:
            raise step.abort.error

    def _clear(self) -> None:
        for traits in self._traits:
            for module, name in traits.stored:
                unguard(module, name)
        for worker in self.workers:
            worker.clear()
        self.store.clear()

    def warn_once(self, message: str, topic: str | None = None) -> None:
        """Tell the user ``message``, the first time that ``topic`` (by default the message itself) comes up."""
        if (topic or message) not in self._warned:
            self._warned.add(topic or message)
            self.warn(message)


def _middle(samples: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """For each key the middle one of its values: the first micro-batch may have brought weights, too."""
    keys = dict.fromkeys(key for sample in samples for key in sample)
    return {key: statistics.median_low(sample[key] for sample in samples if key in sample) for key in keys}
