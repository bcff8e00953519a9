"""A training step that calls backward and steps optimizers itself (manual optimization).

It runs once on the whole batch, in the thread that called it, on the first worker. Calls of units are streamed as in
any step. Each ``backward`` walks the recorded calls at once, and leaves the gradients in ``.grad`` of the masters; an
optimizer steps the masters, and what was uploaded before is forgotten.

[Note: Masters in a manual step]
In a step that the strategy drives, weights stay as they are, and all that user code does to a parameter is done to a
worker's copy. Here weights may change at any time. Outside of units, operations without a graph (``torch.no_grad()``,
``p.data``) work on the masters themselves: weight clipping, moving averages, optimizers that are stepped without
Lightning. Operations with a graph work on the worker's copy, and gradients reach the master when ``backward`` ends.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.calls import CallRecord, Scope
from lightning_roundpipe.runtime.host_store import HostStore, UsePlace
from lightning_roundpipe.runtime.lookup import resolving
from lightning_roundpipe.runtime.microbatch_run import GLUE, MicroBatchRun
from lightning_roundpipe.runtime.observation import GlueObservation
from lightning_roundpipe.runtime.step import Step
from lightning_roundpipe.runtime.units import Unit

__all__ = ["ManualRun"]

T = TypeVar("T")

_WEIGHTS_CHANGE = -1
"""In a trace of units, in the place of a unit: here an optimizer stepped."""

_BY_ANOTHER_WAY = (
    "by something else than `self.manual_backward(loss)` or `loss.backward()`. Streamed units are differentiated by"
    " these alone; for `torch.autograd.grad` and gradient penalties make one unit of what is differentiated"
    " (`RoundPipeStrategy(units=[...])`) and call it inside its forward."
)
_SECOND_TIME = (
    "a second time, but what it needs was freed by the first `backward`. Use `self.manual_backward(loss,"
    " retain_graph=True)` for all but the last."
)


class ManualRun(MicroBatchRun):
    """Runs one manual step; `run` is its body.

    Args:
        step: the step, with a single micro-batch.
        store: the masters and their gradients.
        publish: adds gradients to ``.grad`` of parameters.
        recomputing: entered while units run again for their backward.
        expected: the units in the order in which the last step used them, as `trace` gave it.

    Attributes:
        trace: the units in the order in which this step used them, in forward and backward passes.
    """

    def __init__(
        self,
        step: Step,
        store: HostStore,
        publish: Callable[[Sequence[tuple[Tensor, Tensor]]], None],
        recomputing: Callable[[], AbstractContextManager[None]],
        expected: Sequence[int],
    ) -> None:
        super().__init__(step, 0, alone=True)
        self._observation = _ManualObservation(step.parameters, self)
        self._store = store
        self._publish = publish
        self._recomputing = recomputing
        self._expected = expected
        self.trace: list[int] = []
        # A record lives as long as the graph that can reach it.
        self._calls: list[weakref.ref[CallRecord]] = []
        self._found: weakref.WeakKeyDictionary[CallRecord, list[tuple[Tensor, bool, int]]] = weakref.WeakKeyDictionary()
        self._masters = WeakIdKeyDictionary()
        self._changed: dict[int, Tensor] = {}
        self._exposed: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self._worker.device

    def run(self, function: Callable[[], Any]) -> Any:
        """Run the user's step and return its output, without graphs, in host memory.

        Raises:
            BaseException: whatever user code raised, with a note that says where.
        """
        try:
            with resolving(self):
                self._worker.activate()
                with self._step.user_lock, self._observation:
                    self._begin_glue()
                    output = function()
                    self._end_glue()
                output = self._worker.take_home(output)
                self._worker.synchronize()
        except BaseException as error:
            error.add_note(self._where())
            raise
        else:
            return output
        finally:
            self._archive.clear()
            for record in self._alive():
                record.free()
                record.ready, record.refusal = False, "after its training step was over."
            self._calls.clear()
            self._glue.clear()

    def _where(self) -> str:
        place = f"in unit {self._inside_unit}" if self._inside_unit is not None else "in user code between units"
        return f"While running a step with manual optimization, {place}, on {self._worker}."

    def _alive(self) -> list[CallRecord]:
        return [record for reference in self._calls if (record := reference()) is not None]

    # ------------------------------------------------------------------ weights that change during the step

    def parameter(self, host: Tensor) -> Tensor:
        """The running scope's copy of a parameter, as the parameter is now."""
        if self._inside_unit is not None:
            return super().parameter(host)
        if self._changed:
            self._renew_glue()
        leaf = super().parameter(host)
        if not leaf.is_inference() and leaf.requires_grad != host.requires_grad:
            self._renew_glue()  # It was frozen or unfrozen since.
            leaf = super().parameter(host)
        self._masters[leaf] = host
        return leaf

    def master_of(self, tensor: Tensor) -> Tensor:
        """The parameter as whose copy user code was given ``tensor``; the tensor itself if it is none."""
        master: Tensor = self._masters.get(tensor, tensor)
        return master

    def on_masters(self, parameters: Sequence[Tensor], operation: Callable[[], T], *, exposes: bool) -> T:
        """Let ``operation`` work on ``parameters`` where they are.

        Args:
            parameters: masters.
            operation: reads or writes them.
            exposes: whether they can be written by what it returns, at any later time.
        """
        self._worker.synchronize()  # No upload may read what is being written.
        versions = [parameter._version for parameter in parameters]
        result = operation()
        written = [p for p, version in zip(parameters, versions, strict=True) if exposes or p._version != version]
        self._changed.update((id(parameter), parameter) for parameter in written)
        if exposes:
            self._exposed.update((id(parameter), parameter) for parameter in written)
        return result

    def _forget(self, parameters: Iterable[Tensor]) -> None:
        """Use no copy of ``parameters``, which were written, any more."""
        with torch._C.DisableTorchFunction():
            self._store.refresh_parameters(parameters)
        self._worker.forget_weights()

    def _renew_glue(self) -> None:
        """Begin another scope in the same stretch of user code."""
        self._end_glue()
        self._open_glue()

    def _open_glue(self) -> None:
        if self._changed:
            self._forget([*self._changed.values(), *self._exposed.values()])
            self._changed = dict(self._exposed)
        self._scope = Scope(self._worker, UsePlace(self._part, GLUE, len(self.order)))

    def _begin_glue(self) -> None:
        super()._begin_glue()
        if self._exposed:
            self._worker.synchronize()

    def _end_glue(self) -> None:
        self._carry_written_copies()
        super()._end_glue()

    @torch.no_grad()
    def _carry_written_copies(self) -> None:
        """Carry to the masters what user code wrote to its copies (``self.layer.weight.data.clamp_(...)``)."""
        with torch._C.DisableTorchFunction():
            compare = self._worker.device.type == "cpu" or self._observation.data_taken
            while (host := self._scope.changed_parameter(compare=compare)) is not None:
                leaf = self._scope.parameter(host)
                if leaf.dtype != host.dtype:
                    return  # The write would round all other elements; it is refused when the scope ends.
                self._worker.synchronize()
                host.copy_(leaf.detach())
                self._forget([host])

    @contextmanager
    def outside(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Step aside while an optimizer steps ``parameters``: the model is an ordinary one inside."""
        self._end_glue()
        self._worker.synchronize()
        self.trace.append(_WEIGHTS_CHANGE)
        with self._observation.paused(), resolving(None):
            self._step.user_lock.release()
            try:
                yield
            finally:
                self._step.user_lock.acquire()
                self._forget(parameters)
                self._store.refresh(everything=False)  # Hooks of the optimizer may have written others.
                self._open_glue()

    def inside(self, closure: Callable[[], T], parameters: Sequence[Tensor]) -> Callable[[], T]:
        """``closure`` of an optimizer, as a part of the step; ``parameters`` may have changed before each call."""

        def call() -> T:
            self._forget(parameters)
            with resolving(self), self._step.user_lock, self._observation:
                self._open_glue()
                result = closure()
                self._end_glue()
            self._worker.synchronize()
            return result

        return call

    # ------------------------------------------------------------------ forward

    def call(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of ``unit``."""
        if self._changed and self._inside_unit is None:
            self._renew_glue()
        return super().call(unit, forward, args, kwargs)

    def _run_forward(
        self,
        unit: Unit,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: int,
        place: UsePlace,
    ) -> Any:
        with self._at_work(unit):
            result = super()._run_forward(unit, forward, args, kwargs, number, place)
        for record in self._records:
            record.refusal = _BY_ANOTHER_WAY
            used = {id(p): p for p in (*unit.parameters, *record.trainable)}.values()
            self._found[record] = [(p, p.requires_grad, p._version) for p in used]
            self._calls.append(weakref.ref(record))
        self._records.clear()
        return result

    @contextmanager
    def _at_work(self, unit: Unit) -> Iterator[None]:
        """Bring the weights of ``unit`` and, once it is at work, those of the unit that came next in the last step."""
        place = len(self.trace)
        self.trace.append(unit.index)
        upcoming: list[Tensor] = []
        if not self._exposed and self._expected[place : place + 1] == [unit.index]:
            upcoming = self._weights_of(next(iter(self._expected[place + 1 : place + 2]), _WEIGHTS_CHANGE))
        weights = self._weights_of(unit.index)
        self._worker.enter(place, weights, upcoming, comes_again=True)
        yield
        self._worker.enter(place, weights, upcoming, comes_again=False)

    def _weights_of(self, index: int) -> list[Tensor]:
        if index == _WEIGHTS_CHANGE or (unit := self._step.traits[index].unit).on_call:
            return []
        return list(unit.parameters)

    # ------------------------------------------------------------------ backward

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """What ``loss.backward(...)`` does in the user's step.

        Raises:
            UnsupportedUseError: a graph of the backward pass, or the gradients of some tensors only, were asked for;
                weights were changed between a call and its backward.
            BaseException: whatever user code raised.
        """
        if create_graph or inputs is not None:
            raise UnsupportedUseError(
                "`backward(create_graph=True)` and `backward(inputs=...)` do not work through streamed units. Make one"
                " unit of what is differentiated twice (`RoundPipeStrategy(units=[...])`) and call"
                " `torch.autograd.grad` inside its forward; freeze what shall get no gradient"
                " (`self.toggle_optimizer(...)`, `requires_grad_(False)`)."
            )
        self._end_glue()
        records = self._alive()
        for record in records:
            record.ready = record.refusal != _SECOND_TIME
        self._step.user_lock.release()
        try:
            self._walk(loss, gradient, records, retains=bool(retain_graph))
            gradients = self._store.collect()
        finally:
            for record in records:
                record.ready = False
            self._step.user_lock.acquire()
        versions = [parameter._version for parameter, _ in gradients]
        self._publish(gradients)
        for (parameter, _), version in zip(gradients, versions, strict=True):
            if parameter._version != version:
                self._changed[id(parameter)] = parameter  # A hook of the parameter has stepped it.
        self._open_glue()

    def _walk(self, loss: Tensor, gradient: Tensor | None, records: list[CallRecord], *, retains: bool) -> None:
        self._differentiate_glue([loss], [gradient])
        for record in reversed(records):
            if all(collected is None for collected in record.output_grads):
                continue
            self._refuse_changed_weights(record)
            with self._at_work(record.unit), self._inside(record.unit):
                self._run_backward(record)
            if retains:
                record.output_grads = [None] * len(record.output_grads)
            else:
                record.free()
                record.ready, record.refusal = False, _SECOND_TIME
        for scope in self._glue:
            scope.accumulate(self._worker)
        self._worker.land()

    def _settle_sums(self) -> None:
        """Gradients land when the next unit is entered, and at the end of the walk."""

    def _refuse_changed_weights(self, record: CallRecord) -> None:
        for parameter, _, version in self._found[record]:
            if parameter._version != version:
                raise UnsupportedUseError(
                    f"Parameter {self._step.name_of(parameter)} was changed (by `optimizer.step()`?) between a call of"
                    f" unit {record.unit} and the backward pass through it. Call `backward` before weights change, or"
                    " compute the loss anew afterwards."
                )

    def _recompute(self, record: CallRecord, scope: Scope) -> tuple[list[Tensor | None], list[Tensor]]:
        """Run a call again, with those parameters frozen that were when it was made."""
        now = [(parameter, parameter.requires_grad) for parameter, _, _ in self._found[record]]
        try:
            for parameter, required, _ in self._found[record]:
                parameter.requires_grad_(required)
            with self._recomputing():
                return super()._recompute(record, scope)
        finally:
            for parameter, required in now:
                parameter.requires_grad_(required)


class _ManualObservation(GlueObservation):
    """Sends ``backward`` to the run, and operations on parameters to the master or the copy; see the module's note."""

    def __init__(self, parameters: Sequence[Tensor], run: ManualRun) -> None:
        super().__init__(parameters, run.parameter, alone=True)
        self._run = run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Watch one operation."""
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._run.backward(*args, **kwargs)
        name = ""
        if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if name in ("grad", "requires_grad") or func is Tensor.requires_grad_:
            # What a copy has of these is of no use to anybody.
            return func(self._run.master_of(args[0]), *args[1:], **kwargs)
        if name == "data" or not torch.is_grad_enabled():
            tensors = _tensors(args) + _tensors(tuple(kwargs.values()))
            masters = [tensor for tensor in tensors if id(tensor) in self._parameters]
            if masters and all(tensor.device.type == "cpu" for tensor in tensors):
                return self._run.on_masters(masters, lambda: func(*args, **kwargs), exposes=name == "data")
        return super().__torch_function__(func, types, args, kwargs)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Tensors among arguments; those of optimizers' own operations come in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
