"""One micro-batch of one step, in a thread of its own.

The thread runs the user's own step function. Calls of units are intercepted: there it waits for its ticket, goes on on
that stage's worker, and returns. User code between calls ("glue") runs on the worker that the thread holds. When the
step function has returned the loss, the thread walks its calls in reverse.

[Note: User lock]
One lock is held while glue runs, and released inside units and while waiting: user code never runs concurrently with
itself. A unit that draws random numbers from a generator which other threads use too keeps the lock, so that nobody
reseeds the generator in between; so does a unit that is watched for the first time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.plan.schedule import Ticket
from lightning_roundpipe.plan.stages import Stage, StageKind
from lightning_roundpipe.runtime.calls import CallRecord, InputArchive, KeptInput, Scope, border, is_differentiable
from lightning_roundpipe.runtime.captures import Captures
from lightning_roundpipe.runtime.host_store import UsePlace
from lightning_roundpipe.runtime.lookup import LookupDict, resolving, resolving_backward
from lightning_roundpipe.runtime.observation import GlueObservation, ParameterSubstitution
from lightning_roundpipe.runtime.randomness import counted_seed, generator_states, seed_generators
from lightning_roundpipe.runtime.thread_state import Autocast
from lightning_roundpipe.runtime.tickets import StepAbortedError
from lightning_roundpipe.runtime.traits import Attributes, Mode, UnitTraits, guard, has_graph, is_leaf_copy
from lightning_roundpipe.runtime.trees import flatten, hidden_tensors
from lightning_roundpipe.runtime.units import Unit

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.step import Step
    from lightning_roundpipe.runtime.worker import Mark, Worker

__all__ = ["GLUE", "MicroBatchRun"]

_LESS_MEMORY = (
    "To need less memory of the GPU: more micro-batches, a loss that never forms all logits (`chunked_loss=True` for"
    " language models of transformers), `recompute='all'`, smaller units. Where much was reserved but unallocated,"
    " start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)

GLUE = -1
"""In the place of a unit's index: user code between calls."""


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
        alone: whether it finds the order of calls: it then runs alone, on the first worker, without tickets.

    Attributes:
        output: what the step function returned, without graphs, on its way to host memory.
        loss: the loss in it, likewise.
        order: the units that were called, by index.
        spans: tickets, with the marks between which they ran and those at which calls started.
        graph_bytes: for calls that ran with a graph, by place in the plan, what it holds; only where calls are timed.
        writes_buffers: whether a forward pass has changed a buffer.
        kept_bytes: by call, host memory for inputs that were kept by then.
    """

    def __init__(self, step: "Step", index: int, *, alone: bool) -> None:
        self._step = step
        self._alone = alone
        self.index = index
        self.output: Any = None
        self.loss: Tensor | None = None
        self.order: list[int] = []
        self.spans: list[tuple[Worker, Stage, Mark, Mark, list[tuple[int, Mark]]]] = []
        self.graph_bytes: dict[int, int] = {}
        self.writes_buffers = False
        self.kept_bytes: list[int] = []
        self._position = _Position(() if alone else step.order)
        self._part = 0 if alone else step.schedule.part_of(index)
        self._ticket: Ticket | None = None
        self._holds_worker = False
        self._ticket_start: Mark = 0.0
        self._call_starts: list[tuple[int, Mark]] = []
        self._worker = step.workers[0]
        self._scope = Scope(self._worker, UsePlace(0, GLUE, 0))
        self._glue: list[Scope] = []
        self._records: list[CallRecord] = []
        self._occurrences: Counter[int] = Counter()
        self._archive = InputArchive()
        self._inside_unit: Unit | None = None
        self._swapped: dict[int, tuple[LookupDict, dict[str, Any]]] | None = None
        self._observation = GlueObservation(step.parameters, self.parameter, alone=step.is_alone)

    @property
    def is_alone(self) -> bool:
        """Whether the batch is this micro-batch alone."""
        return self._step.is_alone

    # ------------------------------------------------------------------ the thread

    def execute(self) -> None:
        """Run the step function, then the backward, and leave no ticket behind.

        Raises:
            BaseException: whatever user code raised, with a note that says where.
        """
        try:
            with resolving(self):
                self._go_to(0)
                self._worker.activate()
                with self._step.user_lock, self._observation:
                    self._begin_glue()
                    output = self._step.function(self.index, self._worker)
                    self._end_glue()
                self._step.forward_done()
                self._step.objective.observe(self.index, self._observation.losses)
                if self._step.trains:
                    self._backward(output)
                self.output, self.loss = self._worker.take_home((output, self.loss))
                self._let_go()
                self._retire(range(self._next_stage, self._step.schedule.plan.num_stages))
        except BaseException as error:
            if not isinstance(error, StepAbortedError):
                error.add_note(self._where())
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(_LESS_MEMORY)
            raise
        finally:
            self._archive.clear()
            for record in self._records:
                record.free()
            self._records.clear()
            self._glue.clear()

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

    @property
    def _is_fused(self) -> bool:
        return self._ticket is not None and self._step.schedule.plan.stages[self._ticket.stage].kind is StageKind.FUSED

    def _go_to(self, stage: int) -> None:
        """Hold the ticket of ``stage``; tickets in between are not needed."""
        self._step.check_aborted()
        if self._alone or (self._ticket is not None and self._ticket.stage == stage):
            return
        first = self._next_stage
        self._let_go()
        self._retire(range(first, stage))
        ticket = Ticket(stage, self.index)
        self._worker = self._step.workers[self._step.gate.acquire(ticket)]
        self._ticket, self._holds_worker = ticket, True
        self._worker.activate()
        self._archive.forget_restored()
        self._ticket_start, self._call_starts = self._worker.mark(), []
        after = self._step.schedule.stage_after(ticket)
        self._worker.enter(
            stage,
            self._step.stage_parameters(stage),
            self._step.stage_parameters(after),
            comes_again=self.index < self._step.last_of_part[self._part],
            part=self._part if after > stage else None,
        )

    def _let_go(self) -> None:
        if self._ticket is None or not self._holds_worker:
            return
        stage = self._step.schedule.plan.stages[self._ticket.stage]
        self.spans.append((self._worker, stage, self._ticket_start, self._worker.mark(), self._call_starts))
        self._holds_worker = False
        self._step.gate.release(self._ticket)

    def _retire(self, stages: range) -> None:
        if not self._alone and stages:
            self._step.gate.retire(self.index, stages)

    def _note_call(self, position: int) -> None:
        if self._step.times_calls and self._holds_worker:
            self._call_starts.append((position, self._worker.mark()))

    # ------------------------------------------------------------------ lookups (see `lookup.Resolver`)

    def parameter(self, host: Tensor) -> Tensor:
        """The running scope's copy of a parameter."""
        with torch._C.DisableTorchFunction():  # Or our own operations would be watched.
            return self._scope.parameter(host)

    def buffer(self, table: LookupDict, name: str) -> Tensor:
        """The running scope's copy of a buffer."""
        with torch._C.DisableTorchFunction():
            return self._scope.buffer(table, name)

    def assign_buffer(self, table: LookupDict, name: str, value: Tensor) -> None:
        """A buffer is assigned anew in the running scope."""
        self._scope.assign_buffer(table, name, value)

    def replace_parameter(self, table: LookupDict, name: str, value: Tensor | None) -> None:
        """A parameter is taken off its module, or put back; a unit may do so for as long as it runs.

        Raises:
            UnsupportedUseError: it is another one that is put there, or nobody expected it.
        """
        if self._swapped is None:
            raise table.refuse(name)
        self._swapped.setdefault(id(table), (table, dict(table.items())))
        if value is None:
            table.remove(name)
        elif (host := self._scope.host_of(value)) is not None:
            table.replace(name, host)
        else:
            raise table.refuse(name)

    @contextmanager
    def _swapping(self, traits: UnitTraits) -> Iterator[None]:
        """Let a unit take its parameters off and put them back.

        Raises:
            UnsupportedUseError: it did not put them back.
        """
        self._swapped = {}
        try:
            yield
        finally:
            swapped, self._swapped = self._swapped, None
            left = [(table, before, dict(table.items())) for table, before in swapped.values()]
            for table, before, _ in left:
                table.put_back(before)
        traits.swaps_parameters |= bool(swapped)
        for table, before, after in left:
            if changed := [name for name in before | after if before.get(name) is not after.get(name)]:
                raise table.refuse(changed[0])

    def _close(self, scope: Scope, *, learn: bool) -> dict[tuple[int, str], Tensor]:
        """End a scope of a forward pass: carry its buffers home, and see that no parameter was written."""
        # Values are compared in host memory only: on a GPU it would mean to upload everything twice.
        compare = (learn and self._worker.device.type == "cpu") or self._observation.data_taken
        self._observation.data_taken = False
        with torch._C.DisableTorchFunction():
            parameter = scope.changed_parameter(compare=compare)
        if parameter is not None:
            raise UnsupportedUseError(
                f"Parameter {self._step.name_of(parameter)} was changed in place while a step runs. Every micro-batch"
                " computes with the weights from before the step, so the change would be lost. Change it between steps"
                " (for example in `on_train_batch_end`); for `nn.Embedding(max_norm=...)`, clip its rows there."
            )
        with self._step.buffer_lock, torch._C.DisableTorchFunction():
            before = scope.write_buffers(self._step.silent_buffers, learn=learn)
        self.writes_buffers |= bool(before)
        if before and self._step.schedule.num_parts > 1:
            names = sorted({name for _, name in before})
            raise UnsupportedUseError(
                f"Buffers are updated in forward passes ({', '.join(names)}), but the schedule has"
                f" {self._step.schedule.replica_groups} replica groups in {self._step.schedule.num_rounds} round(s):"
                " micro-batches that run side by side would overwrite each other's updates. Use `replica_groups=1` and"
                " a plan with one round."
            )
        return before

    # ------------------------------------------------------------------ glue

    def _begin_glue(self) -> None:
        stretch = len(self.order)
        self._scope = Scope(self._worker, UsePlace(self._part, GLUE, stretch))
        self._seed(2 * stretch)
        self._step.on_glue(self.index, self._worker.device)

    def _end_glue(self) -> None:
        self._close(self._scope, learn=self._alone)
        if trainable := self._scope.trainable:
            self._step.add_uses(trainable)
            self._glue.append(self._scope)

    def _land_glue(self, after: int) -> None:
        """Give on the gradients of the stretches that no later backward can reach: those after call ``after``."""
        while self._glue and self._glue[-1].place.occurrence > after:
            scope = self._glue.pop()
            scope.accumulate(self._worker)
            self._step.remove_uses(scope.trainable)
            self._settle_sums()

    def _settle_sums(self) -> None:
        if self._alone:
            # This micro-batch runs through all stages: its gradients would not fit a GPU.
            self._worker.spill()

    def _seed(self, place: int) -> None:
        """Seed the generators for call ``place // 2`` or the glue before it; needs the user lock if they are shared."""
        seed_generators(self._worker.device, counted_seed(self._step.seed, self.index, place))

    # ------------------------------------------------------------------ forward

    def call(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of ``unit`` on the worker of its stage; the calling thread holds the user lock."""
        if self._inside_unit is not None:
            return forward(*args, **kwargs)
        if parametrize._cache_enabled:
            raise UnsupportedUseError(
                "`torch.nn.utils.parametrize.cached()` was entered around units. Its cache is one for all threads and"
                " places, so that a micro-batch would get weights of another, or without their graph. Enter it inside"
                " the forward of a unit, or not at all."
            )
        self._end_glue()
        number = len(self.order)
        self.order.append(unit.index)
        place = UsePlace(self._part, unit.index, self._occurrences[unit.index])
        self._occurrences[unit.index] += 1
        position = self._position.advance(unit.index)
        with self._observation.paused():
            self._step.user_lock.release()
            try:
                if position is not None:
                    self._go_to(self._step.schedule.plan.forward_stage(position))
                    self._note_call(position)
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
        glue_leaves, structure = flatten((args, kwargs))
        leaves = [self._worker.move(leaf) if isinstance(leaf, Tensor) else leaf for leaf in glue_leaves]
        mode = traits.mode
        learning = mode not in traits.draws
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
            if any(moved is not leaf for moved, leaf in zip(leaves, glue_leaves, strict=True)):
                args, kwargs = structure.unflatten(leaves)
            result = self._run(traits, forward, args, kwargs, scope, number, mode)
            traits.changes_buffers |= bool(self._close(scope, learn=learning))
            return result

        self._refuse_opaque(unit, leaves, "was given", lambda tensor: tensor.requires_grad)
        if learning and traits.has_forward_hooks:
            self._step.warn(
                f"Forward hooks are registered inside unit {unit}. They run again in recomputation, and a tensor that"
                " they keep for a loss carries no gradient: return it from the unit instead.",
                "forward hooks",
            )
        keeps_graph = self._is_fused
        copies = learning or traits.changes_inputs
        record = CallRecord(
            unit=unit,
            forward=forward,
            number=number,
            position=max(self._position.cursor - 1, 0),
            place=place,
            autocast=Autocast.capture(),
            structure=structure,
            leaves=[]
            if keeps_graph
            else [
                self._archive.keep(leaf, copy=learning or not self._worker.holds_inputs)
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in glue_leaves
            ],
            requires_grad=[isinstance(leaf, Tensor) and leaf.requires_grad for leaf in glue_leaves],
            edges=[
                (get_gradient_edge(leaf), leaf.device) if isinstance(leaf, Tensor) and leaf.requires_grad else None
                for leaf in glue_leaves
            ],
            captures=Captures.begin(),
            mode=mode,
        )
        self.kept_bytes.append(self._archive.copied_bytes)
        if keeps_graph:
            record.scope = scope
        # A unit that is watched runs with a graph even if it is dropped: it shows which tensors have one.
        with_graph = keeps_graph or learning
        inputs, arguments = _detached(
            leaves, record.requires_grad if with_graph else [False] * len(leaves), copies=copies
        )
        if keeps_graph:
            record.inputs = inputs
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in arguments]
        args, kwargs = structure.unflatten(arguments)
        watches_memory = with_graph and self._step.times_calls
        allocated = self._worker.allocated_bytes if watches_memory else 0
        with torch.set_grad_enabled(with_graph), record.autocast.entered(), record.captures.collecting():
            result = self._run(traits, forward, args, kwargs, scope, number, mode)
        if watches_memory:
            # The micro-batch that finds the order of calls has no places in it yet: they are those that it makes.
            call = number if self._alone else record.position
            self.graph_bytes[call] = self._worker.allocated_bytes - allocated
        self._check_arguments(traits, (args, kwargs), arguments, versions, learning=learning)
        record.buffers_before = self._close(scope, learn=learning)
        traits.changes_buffers |= bool(record.buffers_before)
        # Its own parameters, and what it reached elsewhere.
        own = [parameter for parameter in unit.parameters if parameter.requires_grad]
        record.trainable = list({id(parameter): parameter for parameter in [*own, *scope.trainable]}.values())
        self._step.add_uses(record.trainable)
        self._records.append(record)

        outputs, output_structure = flatten((result, record.captures.new))
        self._refuse_opaque(unit, outputs, "returned", is_differentiable)
        differentiable = [output for output in outputs if is_differentiable(output)]
        if keeps_graph:
            record.outputs = differentiable
        bordered = iter(border(record, differentiable) if differentiable else ())
        result, captured = output_structure.unflatten(
            [next(bordered) if is_differentiable(output) else output for output in outputs]
        )
        record.captures.pass_on(captured)
        return result

    def _check_arguments(
        self, traits: UnitTraits, passed: Any, arguments: list[Any], versions: list[int], *, learning: bool
    ) -> None:
        """See whether a unit changed its arguments: tensors may be, by units that are known to, containers not."""
        unit = traits.unit
        now, _ = flatten(passed)
        if len(now) != len(arguments) or any(new is not old for new, old in zip(now, arguments, strict=True)):
            raise UnsupportedUseError(
                f"Unit {unit} changed a list, dict or dataclass among its arguments. It works on a copy, and runs again"
                " for its backward, so the caller would not see the change, or see it twice. Return the new value"
                " instead."
            )
        changed = [
            argument
            for argument, version in zip(arguments, versions, strict=True)
            if isinstance(argument, Tensor) and argument._version != version
        ]
        if learning and not all(argument.requires_grad for argument in changed):
            # An activation that is overwritten is of no use to the caller any more; anything else may be an
            # accumulator.
            raise UnsupportedUseError(
                f"Unit {unit} changed a tensor among its arguments in place. It works on a copy, and runs again for its"
                " backward, so the caller would not see the change, or see it twice. Return the new value instead."
            )
        if not changed or traits.changes_inputs:
            return
        traits.changes_inputs = True
        self._step.warn(
            f"Unit {unit} changes its arguments in place. Such units work on private copies: the caller will not see"
            " the change.",
            type(unit.module).__qualname__,
        )
        if not learning:
            raise UnsupportedUseError(
                f"Unit {unit} changed an argument in place, which it had not done in its first call. Let it work on a"
                " copy (`x = x.clone()`)."
            )

    def _refuse_opaque(self, unit: Unit, leaves: Sequence[Any], did: str, matters: Callable[[Tensor], bool]) -> None:
        for leaf in leaves:
            if hasattr(leaf, "get_seq_length") and hasattr(leaf, "update"):
                raise UnsupportedUseError(
                    f"Unit {unit} {did} a key/value cache ({type(leaf).__name__}) in training. The cache is changed by"
                    " the forward pass, so recomputation would see it twice and its gradients would be lost. Do not"
                    " pass `past_key_values` or `use_cache=True` in `training_step`; instead of prefix tuning, which"
                    " does so, use prompt tuning or LoRA."
                )
            if names := hidden_tensors(leaf, matters):
                raise UnsupportedUseError(
                    f"Unit {unit} {did} an object of class {type(leaf).__name__} that holds tensors"
                    f" ({', '.join(names)}) in training. Gradients can not pass through it. Use tensors, tuples, lists,"
                    " dicts or dataclasses, or register the class with `torch.utils._pytree.register_pytree_node`."
                )

    # ------------------------------------------------------------------ running a unit's own code

    def _run(
        self,
        traits: UnitTraits,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scope: Scope,
        number: int,
        mode: Mode,
    ) -> Any:
        """Run ``forward`` of a unit as call ``number``: seeded, with its lookups in ``scope``.

        What it does besides returning a value is learned the first time, for each mode in which the unit runs.
        """
        step, unit, device = self._step, traits.unit, self._worker.device
        known = traits.draws.get(mode)
        learning = known is None
        locked = known is None or step.must_lock(known) or traits.swaps_parameters
        with ExitStack() as stack:
            if traits.changes_attributes:
                stack.enter_context(traits.lock)
            if locked:
                stack.enter_context(step.user_lock)
            if locked or not step.shares_generator:
                self._seed(2 * number + 1)
            substitution: ParameterSubstitution | None = None
            if learning or traits.swaps_parameters or step.is_alone:
                stack.enter_context(self._swapping(traits))
            if learning or traits.swaps_parameters or traits.hides_parameters:
                substitution = ParameterSubstitution(step.parameters, self.parameter)
                stack.enter_context(substitution)
            attributes = Attributes(unit.module) if learning or traits.changes_attributes else None
            states = generator_states(device) if learning else []
            cache = parametrize._cache  # Another one after `parametrize.cached()` has been left.
            outer, self._scope = self._scope, scope
            try:
                compiled = None if learning or step.compiled is None else step.compiled.get(traits, mode)
                if compiled is None:
                    result = forward(*args, **kwargs)
                else:
                    result = compiled(scope, args, kwargs, forward)
            finally:
                self._scope = outer
            if learning:
                after = generator_states(device)
                traits.draws[mode] = tuple(old != new for old, new in zip(states, after, strict=True))
                traits.hides_parameters |= substitution is not None and substitution.found
                traits.swaps_parameters |= parametrize._cache is not cache
            if attributes is not None:
                self._tidy(traits, attributes)
        return result

    def _tidy(self, traits: UnitTraits, attributes: Attributes) -> None:
        """Look after what a unit has stored on its modules."""
        for module, name in attributes.changed():
            traits.changes_attributes = True
            value = vars(module).get(name)
            if is_leaf_copy(value, self._step.masters):
                attributes.restore_one(module, name)  # `nn.LSTM` keeps a list of what it looked up.
            elif has_graph(value) or (module, name) in traits.stored:
                traits.stored.add((module, name))
                guard(module, name)

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
        self._differentiate_glue([self.loss], [weight])
        self.loss = self.loss.detach()
        plan = self._step.schedule.plan
        while self._records:
            record = self._records.pop()
            self._land_glue(after=record.number)
            runs = any(gradient is not None for gradient in record.output_grads)
            if runs:
                if not record.keeps_graph and not self._alone:
                    self._go_to(plan.backward_stage(record.position))
                self._note_call(record.position)
                with self._inside(record.unit):
                    self._run_backward(record)
            self._step.remove_uses(record.trainable)
            if runs and not self._alone and self.index == self._step.last_of_part[self._part]:
                # Nothing comes to these sums any more: their way home, and updates, need not wait for the stage's end.
                self._worker.land(record.place)
            record.free()
        self._land_glue(after=-1)

    def _differentiate_glue(self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
        # The glue's graph is entered once for every call: it must outlive each pass. It may run hooks of user code.
        with self._step.user_lock, resolving_backward(self, self._worker.device):
            torch.autograd.backward(roots, gradients, retain_graph=True)  # type: ignore[arg-type]

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
            with resolving_backward(self, self._worker.device):
                torch.autograd.backward(roots, gradients)
        finally:
            self._scope = outer
        scope.accumulate(self._worker)
        self._settle_sums()
        edges: list[GradientEdge] = []
        pushed = []
        for leaf, edge in zip(inputs, record.edges, strict=True):
            if edge is not None and leaf is not None and leaf.grad is not None:
                edges.append(edge[0])
                pushed.append(leaf.grad if leaf.device == edge[1] else leaf.grad.cpu().to(edge[1]))
                leaf.grad = None
        if edges:
            self._differentiate_glue(edges, pushed)

    def _recompute(self, record: CallRecord, scope: Scope) -> tuple[list[Tensor | None], list[Tensor]]:
        traits = self._step.traits[record.unit.index]
        leaves = [
            self._archive.restore(leaf, self._worker, record.unit) if isinstance(leaf, KeptInput) else leaf
            for leaf in record.leaves
        ]
        inputs, arguments = _detached(leaves, record.requires_grad, copies=traits.changes_inputs)
        args, kwargs = record.structure.unflatten(arguments)
        attributes = Attributes(record.unit.module) if traits.changes_attributes else None
        with (
            ExitStack() as stack,
            torch.enable_grad(),
            record.autocast.entered(),
            traits.lock if attributes is not None else nullcontext(),
            attributes.restored() if attributes is not None else nullcontext(),
        ):
            # As the call found them: modes and context variables may have changed since.
            stack.enter_context(self._mode_of(traits, record))
            result = record.context.run(self._run_again, traits, record, args, kwargs, scope)
        outputs = [output for output in flatten((result, record.captures.new))[0] if is_differentiable(output)]
        if len(outputs) != len(record.output_grads):
            raise self._path_changed(
                record.unit, f"{len(record.output_grads)} differentiable outputs became {len(outputs)}"
            )
        return inputs, outputs

    def _run_again(
        self, traits: UnitTraits, record: CallRecord, args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope
    ) -> Any:
        with record.captures.collecting():
            return self._run(traits, record.forward, args, kwargs, scope, record.number, record.mode)

    @contextmanager
    def _mode_of(self, traits: UnitTraits, record: CallRecord) -> Iterator[None]:
        """Let the unit run in the mode in which ``record`` was made, if that is another one by now."""
        if traits.mode == record.mode:
            yield
            return
        with traits.lock:
            now = traits.mode
            traits.set_mode(record.mode)
            try:
                yield
            finally:
                traits.set_mode(now)

    def _path_changed(self, unit: Unit, how: str) -> UnsupportedUseError:
        return UnsupportedUseError(
            f"Recomputing unit {unit} took another path than its first run: {how}. A unit's outputs must depend only on"
            " its arguments, parameters, buffers and torch's random numbers; pass other state (a routing decision, a"
            " counter) in as an argument."
        )


def _detached(
    leaves: Sequence[Any], requires_grad: Sequence[bool], *, copies: bool
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
