"""One micro-batch of one step, in a thread of its own.

The thread runs the user's own step function. Calls of units are intercepted: there it waits for its ticket, goes on on
that stage's worker, and returns. User code between calls ("glue") runs on the worker that the thread holds. When the
step function has returned the loss, the thread walks its calls in reverse.

[Note: User lock]
One lock is held while glue runs, and released inside units and while waiting: user code never runs concurrently with
itself. A unit that draws random numbers from a generator which other threads use too keeps the lock, so that nobody
reseeds the generator in between.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.plan.schedule import Ticket
from lightning_roundpipe.plan.stages import Stage, StageKind
from lightning_roundpipe.runtime.calls import CallRecord, InputArchive, KeptInput, Scope, border, is_differentiable
from lightning_roundpipe.runtime.host_store import UsePlace
from lightning_roundpipe.runtime.lookup import LookupDict, resolving, resolving_backward
from lightning_roundpipe.runtime.observation import ParameterSubstitution, StepObservation
from lightning_roundpipe.runtime.randomness import counted_seed, generator_states, seed_generators
from lightning_roundpipe.runtime.thread_state import Autocast
from lightning_roundpipe.runtime.tickets import StepAbortedError
from lightning_roundpipe.runtime.traits import module_attributes, restored_attributes
from lightning_roundpipe.runtime.units import Unit

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.step import Step
    from lightning_roundpipe.runtime.worker import Mark, Worker

__all__ = ["MicroBatchRun"]

_GLUE = -1


@dataclass
class _Position:
    """Where the thread is in the order of calls that the plan was made for."""

    order: tuple[int, ...]
    cursor: int = 0
    places: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {}
        for position, unit in enumerate(self.order):
            self.places.setdefault(unit, []).append(position)

    def advance(self, unit: int) -> int | None:
        """The next planned call of ``unit``, or None if none is left: then the call was not planned."""
        position = next((place for place in self.places.get(unit, ()) if place >= self.cursor), None)
        if position is not None:
            self.cursor = position + 1
        return position


class MicroBatchRun:
    """Runs one micro-batch of ``step``; `execute` is the body of its thread.

    Args:
        step: what the micro-batches share.
        index: number of the micro-batch in the batch.
        lane: number of the micro-batch in the schedule, or None for the one that finds the order of calls: it runs
        alone,
            on the first worker, without tickets.
    """

    def __init__(self, step: "Step", index: int, lane: int | None) -> None:
        self._step = step
        self._lane = lane
        self.index = index
        self.output: Any = None
        self.loss: Tensor | None = None
        self.order: list[int] = []
        self.spans: list[tuple[Worker, Stage, Mark, Mark]] = []
        self._position = _Position(() if lane is None else step.order)
        self._group = 0 if lane is None else step.schedule.group_of(lane)
        self._ticket: Ticket | None = None
        self._holds_worker = False
        self._ticket_start: Mark = 0.0
        self._worker = step.workers[0]
        self._scope = Scope(self._worker, UsePlace(0, _GLUE, 0))
        self._glue: list[Scope] = []
        self._records: list[CallRecord] = []
        self._occurrences: Counter[int] = Counter()
        self._archive = InputArchive()
        self._inside_unit: Unit | None = None
        self._observation: StepObservation | None = None

    # ------------------------------------------------------------------ the thread

    def execute(self) -> None:
        """Run the step function, then the backward, and leave no ticket behind.

        Raises:
            BaseException: whatever user code raised, with a note that says where.
        """
        try:
            with resolving(self), self._watching():
                self._go_to(0)
                self._worker.activate()
                with self._step.user_lock:
                    self._begin_glue()
                    output = self._step.function(self.index, self._worker)
                    self._end_glue()
                if self._observation is not None:
                    self._step.objective.observe(self.index, self._observation.losses)
                if self._step.trains:
                    self._backward(output)
                self.output = self._worker.take_home(output)
                self._let_go()
                self._retire(range(self._next_stage, self._step.schedule.plan.num_stages))
        except BaseException as error:
            if not isinstance(error, StepAbortedError):
                error.add_note(self._where())
            raise
        finally:
            self._archive.clear()
            for record in self._records:
                record.free()
            self._records.clear()
            self._glue.clear()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        parameters = self._step.parameters
        if self._lane is None or self._step.wants_observation:
            self._observation = StepObservation(parameters, self._lookup, self._found_hidden_parameter)
            with self._observation:
                yield
        elif self._step.glue_hides_parameters:
            with ParameterSubstitution(parameters, self._lookup):
                yield
        else:
            yield

    def _lookup(self, host: Tensor) -> Tensor:
        return self._scope.parameter(host)

    def _found_hidden_parameter(self) -> None:
        if self._inside_unit is not None:
            self._step.traits[self._inside_unit.index].hides_parameters = True
        else:
            self._step.glue_hides_parameters = True

    def _where(self) -> str:
        place = f"in unit {self._inside_unit}" if self._inside_unit is not None else "in user code between units"
        doing = "running alone to find the order of calls"
        if self._ticket is not None:
            stage = self._step.schedule.plan.stages[self._ticket.stage]
            doing = f"in {stage.kind} stage {stage.index}"
        return f"While running micro-batch {self.index}, {place}, {doing}, on {self._worker}."

    # ------------------------------------------------------------------ tickets

    @property
    def _next_stage(self) -> int:
        return 0 if self._ticket is None else self._ticket.stage + 1

    def _go_to(self, stage: int) -> None:
        """Hold the ticket of ``stage``; tickets in between are not needed."""
        self._step.check_aborted()
        if self._lane is None or (self._ticket is not None and self._ticket.stage == stage):
            return
        first = self._next_stage
        self._let_go()
        self._retire(range(first, stage))
        ticket = Ticket(stage, self._lane)
        self._worker = self._step.workers[self._step.gate.acquire(ticket)]
        self._ticket, self._holds_worker = ticket, True
        self._worker.activate()
        self._archive.forget_restored()
        self._ticket_start = self._worker.mark()
        upcoming = self._step.stage_parameters(stage + self._step.schedule.group_size)
        self._worker.enter(stage, self._step.stage_parameters(stage), upcoming)

    def _let_go(self) -> None:
        if self._ticket is None or not self._holds_worker:
            return
        stage = self._step.schedule.plan.stages[self._ticket.stage]
        self.spans.append((self._worker, stage, self._ticket_start, self._worker.mark()))
        self._holds_worker = False
        self._step.gate.release(self._ticket)

    def _retire(self, stages: range) -> None:
        if self._lane is not None and stages:
            self._step.gate.retire(self._lane, stages)

    # ------------------------------------------------------------------ lookups (see `lookup.Resolver`)

    def parameter(self, host: Tensor) -> Tensor:
        """The running scope's copy of a parameter."""
        return self._scope.parameter(host)

    def buffer(self, table: LookupDict, name: str) -> Tensor:
        """The running scope's copy of a buffer."""
        return self._scope.buffer(table, name)

    def assign_buffer(self, table: LookupDict, name: str, value: Tensor) -> None:
        """A buffer is assigned anew in the running scope."""
        self._scope.assign_buffer(table, name, value)

    def _write_buffers(self, scope: Scope) -> dict[tuple[int, str], Tensor]:
        return scope.write_buffers(self._step.silent_buffers, learn=self._lane is None)

    # ------------------------------------------------------------------ glue

    def _begin_glue(self) -> None:
        stretch = len(self.order)
        self._scope = Scope(self._worker, UsePlace(self._group, _GLUE, stretch))
        seed_generators(self._worker.device, counted_seed(self._step.seed, self.index, 2 * stretch))
        self._step.on_glue(self._worker.device)

    def _end_glue(self) -> None:
        self._write_buffers(self._scope)
        if self._scope.has_trainable:
            self._glue.append(self._scope)

    def _land_glue(self, after: int) -> None:
        """Give on the gradients of the stretches that no later backward can reach: those after call ``after``."""
        while self._glue and self._glue[-1].place.occurrence > after:
            self._glue.pop().accumulate()
            if self._lane is None:
                self._worker.spill()

    # ------------------------------------------------------------------ forward

    def call(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of ``unit`` on the worker of its stage; the calling thread holds the user lock."""
        if self._inside_unit is not None:
            return forward(*args, **kwargs)
        self._end_glue()
        number = len(self.order)
        self.order.append(unit.index)
        place = UsePlace(self._group, unit.index, self._occurrences[unit.index])
        self._occurrences[unit.index] += 1
        position = self._position.advance(unit.index)
        self._step.user_lock.release()
        try:
            if position is not None:
                self._go_to(self._step.schedule.plan.forward_stage(position))
            else:
                self._step.check_aborted()
            with self._inside(unit):
                result = self._run_forward(unit, forward, args, kwargs, number, place)
        finally:
            self._step.user_lock.acquire()
        self._begin_glue()
        return result

    @contextmanager
    def _inside(self, unit: Unit) -> Iterator[None]:
        self._inside_unit = unit
        yield  # On an error the unit stays noted, for the message.
        self._inside_unit = None

    def _run_forward(
        self,
        unit: Unit,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: int,
        place: UsePlace,
    ) -> Any:
        traits = self._step.traits[unit.index]
        leaves, structure = tree_flatten((args, kwargs))
        self._refuse_caches(unit, leaves)
        glue_leaves = leaves
        leaves = [self._worker.move(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        probing = self._lane is None
        scope = Scope(self._worker, place)
        tracked = (
            self._step.trains
            and torch.is_grad_enabled()
            and (
                any(parameter.requires_grad for parameter in unit.parameters)
                or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
            )
        )
        if not tracked:
            args, kwargs = tree_unflatten(leaves, structure)
            result = self._run(unit, lambda: forward(*args, **kwargs), scope, number)
            self._write_buffers(scope)
            return result

        keeps_graph = self._ticket is not None and self._kind is StageKind.FUSED
        copies = probing or traits.changes_inputs
        record = CallRecord(
            unit=unit,
            forward=forward,
            number=number,
            position=max(self._position.cursor - 1, 0),
            place=place,
            autocast=Autocast.capture(),
            structure=structure,
            leaves=[
                self._archive.keep(leaf, copy=probing or not self._worker.holds_inputs)
                if isinstance(leaf, Tensor) and not keeps_graph
                else leaf
                for leaf in glue_leaves
            ],
            requires_grad=[isinstance(leaf, Tensor) and leaf.requires_grad for leaf in glue_leaves],
            edges=[
                (get_gradient_edge(leaf), leaf.device) if isinstance(leaf, Tensor) and leaf.requires_grad else None
                for leaf in glue_leaves
            ],
        )
        if keeps_graph:
            record.leaves, record.scope = [], scope
            record.inputs, arguments = _detached(leaves, record.requires_grad, copies)
        else:
            arguments = [
                (leaf.detach().clone() if copies else leaf.detach()) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in arguments]
        args, kwargs = tree_unflatten(arguments, structure)
        with torch.set_grad_enabled(keeps_graph), record.autocast.entered():
            result = self._run(unit, lambda: forward(*args, **kwargs), scope, number)
        self._check_inputs(unit, arguments, versions)
        record.buffers_before = self._write_buffers(scope)
        self._records.append(record)

        outputs, output_structure = tree_flatten(result)
        differentiable = [output for output in outputs if is_differentiable(output)]
        if keeps_graph:
            record.outputs = differentiable
        bordered = iter(border(record, differentiable) if differentiable else ())
        return tree_unflatten(
            [next(bordered) if is_differentiable(output) else output for output in outputs], output_structure
        )

    @property
    def _kind(self) -> StageKind:
        assert self._ticket is not None
        return self._step.schedule.plan.stages[self._ticket.stage].kind

    def _check_inputs(self, unit: Unit, arguments: list[Any], versions: list[int]) -> None:
        traits = self._step.traits[unit.index]
        changed = any(
            isinstance(argument, Tensor) and argument._version != version
            for argument, version in zip(arguments, versions, strict=True)
        )
        if changed and not traits.changes_inputs:
            traits.changes_inputs = True
            self._step.warn(
                f"Unit {unit} changes its arguments in place. Such units work on private copies: the caller will not"
                " see the change.",
                type(unit.module).__qualname__,
            )
            if self._lane is not None:
                raise UnsupportedUseError(
                    f"Unit {unit} changed an argument in place, which it had not done in the first micro-batch. Let it"
                    " work on a copy (`x = x.clone()`)."
                )

    def _refuse_caches(self, unit: Unit, leaves: Sequence[Any]) -> None:
        if not self._step.trains or not torch.is_grad_enabled():
            return
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and hasattr(leaf, "get_seq_length") and hasattr(leaf, "update"):
                raise UnsupportedUseError(
                    f"Unit {unit} was given a key/value cache ({type(leaf).__name__}) in training. The cache is changed"
                    " by the forward pass, so recomputation would see it twice and its gradients would be lost. Do not"
                    " pass `past_key_values` or `use_cache=True` in `training_step`."
                )

    # ------------------------------------------------------------------ running a unit's own code

    def _run(self, unit: Unit, code: Callable[[], Any], scope: Scope, number: int) -> Any:
        """Run ``code`` of ``unit`` as call ``number``: seeded, with its lookups in ``scope``."""
        step, traits = self._step, self._step.traits[unit.index]
        device = self._worker.device
        flags = traits.training_flags
        draws = traits.draws.get(flags, ())
        learning = not draws
        watching = self._lane is None and self._observation is not None
        with ExitStack() as stack:
            if traits.changes_attributes:
                stack.enter_context(traits.lock)
            if learning or step.must_lock(draws):
                stack.enter_context(step.user_lock)
            if learning or any(draws):
                seed_generators(device, counted_seed(step.seed, self.index, 2 * number + 1))
            if traits.hides_parameters and not watching:
                stack.enter_context(ParameterSubstitution(step.parameters, self._lookup))
            states = generator_states(device) if learning else []
            attributes = module_attributes(unit.module) if watching else {}
            outer, self._scope = self._scope, scope
            try:
                result = code()
            finally:
                self._scope = outer
            if learning:
                after = generator_states(device)
                traits.draws[flags] = tuple(old != new for old, new in zip(states, after, strict=True))
            if watching and _attributes_changed(attributes, module_attributes(unit.module)):
                traits.changes_attributes = True
        return result

    # ------------------------------------------------------------------ backward

    def _backward(self, output: Any) -> None:
        objective = self._step.objective
        self.loss = objective.loss(output)
        share = objective.share(self.index)
        if self.loss is None or share == 0.0:
            # A micro-batch in which every label is ignored has the loss 0 / 0; it stands for nothing.
            return
        for record in self._records:
            record.ready = True
        if self.loss.numel() != 1:
            raise ValueError(f"`training_step` must return a scalar loss, but its shape is {list(self.loss.shape)}.")
        weight = torch.full_like(self.loss, share * objective.scale, requires_grad=False)
        # The glue's graph is entered once for every call: it must outlive each pass.
        self._differentiate([self.loss], [weight], retain_graph=True)
        self.loss = self.loss.detach()
        plan = self._step.schedule.plan
        while self._records:
            record = self._records.pop()
            self._land_glue(after=record.number)
            if any(gradient is not None for gradient in record.output_grads):
                if not record.keeps_graph and self._lane is not None:
                    self._go_to(plan.backward_stage(record.position))
                with self._inside(record.unit):
                    self._run_backward(record)
            record.free()
        self._land_glue(after=-1)

    def _differentiate(
        self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], *, retain_graph: bool = False
    ) -> None:
        with resolving_backward(self, self._worker.device):
            torch.autograd.backward(roots, gradients, retain_graph=retain_graph)  # type: ignore[arg-type]

    def _run_backward(self, record: CallRecord) -> None:
        inputs, outputs, scope = record.inputs, record.outputs, record.scope
        if scope is None:
            scope = Scope(self._worker, record.place, record.buffers_before)
            inputs, outputs = self._recompute(record, scope)
        roots: list[Tensor] = []
        gradients = []
        for output, gradient in zip(outputs, record.output_grads, strict=True):
            if gradient is None or not output.requires_grad:
                continue
            if output.shape != gradient.shape:
                raise self._path_changed(
                    record.unit, f"an output of shape {list(gradient.shape)} became {list(output.shape)}"
                )
            roots.append(output)
            gradients.append(self._worker.move(gradient))
        if not roots:
            return
        outer, self._scope = self._scope, scope
        try:
            self._differentiate(roots, gradients)
        finally:
            self._scope = outer
        scope.accumulate()
        if self._lane is None:
            # This micro-batch runs through all stages: its gradients would not fit a GPU.
            self._worker.spill()
        edges: list[GradientEdge] = []
        pushed = []
        for leaf, edge in zip(inputs, record.edges, strict=True):
            if edge is not None and leaf is not None and leaf.grad is not None:
                edges.append(edge[0])
                pushed.append(leaf.grad if leaf.device == edge[1] else leaf.grad.cpu().to(edge[1]))
                leaf.grad = None
        if edges:
            self._differentiate(edges, pushed, retain_graph=True)

    def _recompute(self, record: CallRecord, scope: Scope) -> tuple[list[Tensor | None], list[Tensor]]:
        traits = self._step.traits[record.unit.index]
        leaves = [
            self._archive.restore(leaf, self._worker, record.unit) if isinstance(leaf, KeptInput) else leaf
            for leaf in record.leaves
        ]
        inputs, arguments = _detached(leaves, record.requires_grad, traits.changes_inputs)
        args, kwargs = tree_unflatten(arguments, record.structure)
        attributes = restored_attributes(record.unit.module) if traits.changes_attributes else nullcontext()
        with torch.enable_grad(), record.autocast.entered(), attributes:
            result = self._run(record.unit, lambda: record.forward(*args, **kwargs), scope, record.number)
        outputs = [output for output in tree_flatten(result)[0] if is_differentiable(output)]
        if len(outputs) != len(record.output_grads):
            raise self._path_changed(
                record.unit, f"{len(record.output_grads)} differentiable outputs became {len(outputs)}"
            )
        return inputs, outputs

    def _path_changed(self, unit: Unit, how: str) -> UnsupportedUseError:
        return UnsupportedUseError(
            f"Recomputing unit {unit} took another path than its first run: {how}. A unit's outputs must depend only on"
            " its arguments, parameters, buffers and torch's random numbers; pass other state (a routing decision, a"
            " counter) in as an argument."
        )


def _detached(
    leaves: Sequence[Any], requires_grad: Sequence[bool], copies: bool
) -> tuple[list[Tensor | None], list[Any]]:
    """Cut ``leaves`` off the graph that they come from.

    Returns:
        For each leaf the tensor in which its gradient will appear, or None; and the arguments to call with. They differ
        for a unit that writes to its arguments, which a leaf of a graph does not allow.
    """
    inputs: list[Tensor | None] = []
    arguments: list[Any] = []
    for leaf, differentiable in zip(leaves, requires_grad, strict=True):
        if not isinstance(leaf, Tensor):
            inputs.append(None)
            arguments.append(leaf)
            continue
        tensor = leaf.detach().requires_grad_(differentiable)
        inputs.append(tensor if differentiable else None)
        arguments.append(tensor.clone() if copies else tensor)
    return inputs, arguments


def _attributes_changed(before: dict[Any, dict[str, Any]], after: dict[Any, dict[str, Any]]) -> bool:
    return before.keys() != after.keys() or any(
        attributes.keys() != after[module].keys()
        or any(value is not after[module][name] for name, value in attributes.items())
        for module, attributes in before.items()
    )
