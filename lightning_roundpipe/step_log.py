"""Logging of a step that runs once per micro-batch, as if it had run once on the whole batch.

The user's ``training_step`` runs once per micro-batch, so every ``self.log`` in it is called M times, and every
torchmetrics object sees M small batches. Lightning would take the M calls for M batches: a step value would be that of
whichever micro-batch came last, and an epoch mean would give each micro-batch the weight of the whole batch.
:class:`StepLog` keeps the calls back and passes each key on once.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from math import isnan
from numbers import Number
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

__all__ = ["StepLog"]

# The parameters of `LightningModule.log` after `self`, `name` and `value`, for those who pass options by position.
_LOG_OPTIONS = tuple(signature(LightningModule.log).parameters)[3:]

# Everything that Lightning accepts as `reduce_fx` (strings in any case), by the reduction over micro-batches.
_REDUCTIONS = {
    **dict.fromkeys(("mean", "avg", torch.mean), "mean"),
    **dict.fromkeys(("sum", torch.sum, sum), "sum"),
    **dict.fromkeys(("max", torch.max, max), "max"),
    **dict.fromkeys(("min", torch.min, min), "min"),
}


class StepLog:
    """Collects what the micro-batches of one step log and hands it to Lightning once per key.

    While :meth:`capture` is entered, ``module.log`` (and so ``module.log_dict``) records, and the ``forward`` and
    ``update`` of every torchmetrics object inside the module are watched. :meth:`flush` then calls the real
    ``module.log`` once per key; a key that a micro-batch logs several times is passed on as often. What is passed on:

    * *Numbers and one-element tensors*: reduced over the micro-batches by the call's own ``reduce_fx``. A mean is
      weighted by ``batch_size`` where the user gave it (the sum is passed on) and by the micro-batch's samples
      elsewhere (then Lightning finds the size of the whole batch itself). A value that is the loss in every micro-batch
      is weighted as the loss is, so that ``self.log("loss", loss)`` shows the loss that is optimized.
    * *torchmetrics objects*: the object itself, once, with the step value of the whole batch: per call of ``forward``
      in a micro-batch, a blank copy of the metric is updated with the inputs of all micro-batches and computed once.
    * *The tensor that a torchmetrics object's* ``forward`` *returned*, logged as it is: the same whole-batch value.

    The options of a key are those of the first micro-batch that logged it. Keys come in the order in which
    micro-batch 0 logged them, then those that only micro-batch 1 logged, and so on. Everything passed on depends on the
    order of the micro-batches and never on the order in which their threads ran. The epoch state of a torchmetrics
    object is updated at once, as user code may read it; its sums may be rounded in another order.

    Lightning refuses ``log`` on a LightningModule that is a child of the trained one; that is left as it is.

    Threading:
        :meth:`capture` and :meth:`flush` belong to one thread, the main thread. A micro-batch's thread enters
        :meth:`micro_batch` around the user's step and nothing else. What is logged or fed into a metric outside of it
        is the recomputation of what was seen before, and has no effect. All micro-batch threads must be done with user
        code, recomputation too, when ``capture`` ends. It may be left open for that after ``flush``: from then on the
        main thread logs as ever.

    Args:
        module: the module whose step is run once per micro-batch.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._real_log: Callable[..., None] = module.log
        self._lock = threading.RLock()  # guards the metrics and all fields but `_thread`; reentrant: metrics nest
        self._thread = threading.local()
        self._main_thread = threading.get_ident()
        self._flushed = False
        self._begin()

    def _begin(self) -> None:
        self._micro_batches: dict[int, _MicroBatchLog] = {}
        self._batch_values: dict[tuple[int, int], _BatchValue] = {}  # by id of the metric and number of the call
        self._turn = 0  # the lowest micro-batch that is not done: its metric calls need not wait

    @contextmanager
    def capture(self, *, direct: bool = False) -> Iterator[None]:
        """Intercept logging and metrics of the module; entered by the main thread around all micro-batches of a step.

        Everything is put back as it was at the end, also after an exception; what was recorded then waits for
        :meth:`flush`, or is dropped by the next ``capture``.

        Args:
            direct: the step runs once, in the main thread: nothing is kept back, except in :meth:`recomputing`.
        """
        self._begin()
        self._flushed = direct
        self._main_thread = threading.get_ident()
        self._real_log = self._module.log

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            self._log(name, value, *args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(_instance_attribute(self._module, "log", log))
            for metric in self._module.modules():
                if isinstance(metric, Metric):
                    stack.enter_context(_intercepted(metric, "forward", self._metric_forward))
                    stack.enter_context(_intercepted(metric, "update", self._metric_update))
            yield

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """In a direct ``capture``: what runs inside has run before, and is not logged again."""
        self._flushed = False
        try:
            yield
        finally:
            self._flushed = True

    @contextmanager
    def micro_batch(self, index: int, num_samples: int) -> Iterator[None]:
        """Attribute what the calling thread logs to a micro-batch; entered by its thread around the user's step.

        Args:
            index: the position of the micro-batch in the batch, from 0. Each is entered once per ``capture``.
            num_samples: the weight of the micro-batch in a mean whose ``log`` call gives no ``batch_size``.
        """
        micro_batch = _MicroBatchLog(index, num_samples)
        with self._lock:
            self._micro_batches[index] = micro_batch
        self._thread.micro_batch = micro_batch
        try:
            yield
        finally:
            self._thread.micro_batch = None
            with self._lock:
                micro_batch.finish()
                self._let_in_turn()

    def flush(self, losses: Sequence[Tensor | None], loss_weights: Sequence[float]) -> None:
        """Log each recorded key through the real ``module.log`` and give each metric its whole-batch step value.

        To be called once after all micro-batches, on the main thread, while the hook that logged is still the
        module's current one (inside ``strategy.training_step``). Whether ``capture`` has ended does not matter.

        Args:
            losses: by micro-batch, the loss that the user's step returned, or None; what is not one number counts as
                None. Must be readable from this thread.
            loss_weights: by micro-batch, the weight of its loss in the mean that is optimized; of any scale.
        """
        self._flushed = True
        with self._lock, torch.no_grad():
            micro_batches = [self._micro_batches[index] for index in sorted(self._micro_batches)]
            try:
                for micro_batch in micro_batches:
                    micro_batch.apply_metric_calls()
                loss_numbers = [
                    float(loss.detach()) if loss is not None and loss.numel() == 1 else None for loss in losses
                ]
                for records in _by_key(micro_batches):
                    self._pass_on(records, loss_numbers, loss_weights)
                # A metric called again after it was logged, or logged by a later hook, shows its last call.
                for batch_value in self._batch_values.values():
                    batch_value.publish()
            finally:
                self._begin()

    def _pass_on(self, records: list["_Record"], losses: Sequence[float | None], loss_weights: Sequence[float]) -> None:
        first = records[0]
        options = dict(first.options)
        batch_sizes = [record.options.get("batch_size") for record in records]
        if any(batch_size is not None for batch_size in batch_sizes):
            options["batch_size"] = sum(
                record.num_samples if batch_size is None else batch_size
                for record, batch_size in zip(records, batch_sizes, strict=True)
            )

        value: Tensor | Metric
        if isinstance(first.value, Metric):
            value = first.value
            called = next((record.batch_value for record in records if record.batch_value is not None), None)
            if called is not None:
                called.publish()
        elif first.batch_value is not None and all(record.batch_value is first.batch_value for record in records):
            value = first.batch_value.value
        else:
            value = _merge(records, losses, loss_weights)
        self._real_log(first.name, value, **options)

    # What the intercepted methods do.

    @property
    def _running(self) -> "_MicroBatchLog | None":
        """The micro-batch that the calling thread runs; None outside of the user's step."""
        micro_batch: _MicroBatchLog | None = getattr(self._thread, "micro_batch", None)
        return micro_batch

    @property
    def _passes_through(self) -> bool:
        """Whether the calling thread is back in Lightning's hooks, where logging is not ours."""
        return self._flushed and threading.get_ident() == self._main_thread

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        micro_batch = self._running
        options = dict(zip(_LOG_OPTIONS, args, strict=False)) | kwargs
        if micro_batch is None:
            if self._passes_through:
                self._real_log(name, value, **options)
        elif _is_loggable(value) and _reduction(options) is not None:
            micro_batch.record(name, value, options)
        else:
            self._real_log(name, value, **options)  # Lightning's own refusal, raised in the line that is at fault

    def _metric_forward(self, metric: Metric, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        micro_batch = self._running
        inputs = _move((args, kwargs), metric.device)
        args, kwargs = inputs
        with self._lock:
            if micro_batch is None:
                # Recomputation needs the value again, and the state is up to date already.
                return (forward if self._passes_through else _blank_copy(metric))(*args, **kwargs)
            value = forward(*args, **kwargs)
            # A metric that publishes no step value, as `Running`, has none to correct.
            if value is not None and metric._forward_cache is value:
                batch_value = self._batch_values.setdefault(
                    (id(metric), micro_batch.count_call(metric)), _BatchValue(metric)
                )
                micro_batch.latest[id(metric)] = batch_value
                if isinstance(value, Tensor):
                    micro_batch.returned[id(value)] = (value, batch_value)
                micro_batch.metric_calls.append((batch_value, apply_to_collection(inputs, Tensor, Tensor.detach)))
                self._let_in_turn()
                if micro_batch.index != self._turn:
                    micro_batch.keep_latest_inputs()
            return value

    def _metric_update(self, metric: Metric, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._running is None and not self._passes_through:
            return
        args, kwargs = _move((args, kwargs), metric.device)
        with self._lock:
            update(*args, **kwargs)

    def _let_in_turn(self) -> None:
        """Feed the whole-batch copies in micro-batch order, as far as that is possible now: it frees the inputs."""
        while (micro_batch := self._micro_batches.get(self._turn)) is not None:
            micro_batch.apply_metric_calls()
            if not micro_batch.done:
                break
            self._turn += 1


class _BatchValue:
    """What the ``forward`` of a metric would have returned for the whole batch."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    @cached_property
    def _copy(self) -> Metric:
        return _blank_copy(self._metric)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Add the inputs of one micro-batch."""
        # Where a class has its own `forward`, only that knows what to do with the arguments.
        uses_update = type(self._metric).forward is Metric.forward
        with torch.no_grad():
            (self._copy.update if uses_update else self._copy.forward)(*args, **kwargs)

    @cached_property
    def value(self) -> Any:
        return self._copy.compute()

    def publish(self) -> None:
        """Put the value where Lightning reads the step value of a metric; it offers no public way."""
        self._metric._forward_cache = self.value


@dataclass(slots=True)
class _Record:
    """One call of ``self.log`` in one micro-batch."""

    name: str
    occurrence: int
    """How often the micro-batch had logged this name before."""
    micro_batch: int
    num_samples: int
    value: Tensor | Metric | float
    options: dict[str, Any]
    batch_value: _BatchValue | None
    """The metric call whose value this is, if it is one."""
    ready: torch.cuda.Event | None
    """Passed when `value` was written, for a value on a GPU: the main thread does not share its stream."""

    def number(self) -> float:
        if self.ready is not None:
            self.ready.synchronize()
        return float(self.value)  # type: ignore[arg-type]

    def weight(self) -> float:
        batch_size = self.options.get("batch_size")
        return float(self.num_samples if batch_size is None else batch_size)


@dataclass(slots=True)
class _MicroBatchLog:
    """What one micro-batch logged, and the metric calls that the whole-batch copies have not seen yet."""

    index: int
    num_samples: int
    done: bool = False
    records: list[_Record] = field(default_factory=list)
    metric_calls: list[tuple[_BatchValue, Any]] = field(default_factory=list)
    latest: dict[int, _BatchValue] = field(default_factory=dict)
    """By id of the metric, its latest call: what Lightning would read if the metric were logged now."""
    returned: dict[int, tuple[Tensor, _BatchValue]] = field(default_factory=dict)
    """By id of a tensor that a metric returned; holds the tensor, so that the id stays taken."""
    _name_counts: dict[str, int] = field(default_factory=dict)
    _call_counts: dict[int, int] = field(default_factory=dict)

    def count_call(self, metric: Metric) -> int:
        """Return how often `metric` was called before in this micro-batch."""
        count = self._call_counts.get(id(metric), 0)
        self._call_counts[id(metric)] = count + 1
        return count

    def record(self, name: str, value: Any, options: dict[str, Any]) -> None:
        batch_value, ready = None, None
        if isinstance(value, Metric):
            batch_value = self.latest.get(id(value))
        elif isinstance(value, Tensor):
            _, batch_value = self.returned.get(id(value), (None, None))
            value = value.detach().clone()
            if value.is_cuda:
                # Read at the flush: reading here would stop this thread, and who waits for user code, until the GPU
                # has caught up.
                ready = torch.cuda.current_stream(value.device).record_event()
        else:
            value = float(value)
        if isinstance(options.get("batch_size"), Tensor):
            options["batch_size"] = options["batch_size"].item()

        occurrence = self._name_counts.get(name, 0)
        self._name_counts[name] = occurrence + 1
        self.records.append(_Record(name, occurrence, self.index, self.num_samples, value, options, batch_value, ready))

    def keep_latest_inputs(self) -> None:
        """Copy the inputs of the latest metric call, which must wait: the user may change them in place until then."""
        batch_value, inputs = self.metric_calls[-1]
        self.metric_calls[-1] = batch_value, apply_to_collection(inputs, Tensor, Tensor.clone)

    def apply_metric_calls(self) -> None:
        for batch_value, (args, kwargs) in self.metric_calls:
            batch_value.add(*args, **kwargs)
        self.metric_calls.clear()

    def finish(self) -> None:
        self.done = True
        self.returned.clear()  # what a metric returned may hold the graph of the micro-batch


def _by_key(micro_batches: Sequence[_MicroBatchLog]) -> list[list[_Record]]:
    """Group the records by name and occurrence, in the order of first appearance by micro-batch."""
    groups: dict[tuple[str, int], list[_Record]] = {}
    for micro_batch in micro_batches:
        for record in micro_batch.records:
            groups.setdefault((record.name, record.occurrence), []).append(record)
    return list(groups.values())


def _merge(records: Sequence[_Record], losses: Sequence[float | None], loss_weights: Sequence[float]) -> Tensor:
    """Reduce the values of one key over the micro-batches to a scalar on the host."""
    numbers = [record.number() for record in records]
    values = torch.tensor(numbers, dtype=torch.float64)
    match _reduction(records[0].options):
        case "sum":
            merged = values.sum()
        case "max":
            merged = values.max()
        case "min":
            merged = values.min()
        case _:
            weights = _loss_weights(records, numbers, losses, loss_weights) or [record.weight() for record in records]
            merged = _weighted_mean(values, torch.tensor(weights, dtype=torch.float64))
    dtypes = {record.value.dtype for record in records if isinstance(record.value, Tensor)}
    # Lightning keeps float64 and stores all else in at least float32.
    is_double = torch.float64 in {*dtypes, torch.get_default_dtype()}
    return merged.to(torch.float64 if is_double else torch.float32)


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of `values` (n,), plain if no weight (n,) is positive."""
    # What has no weight is left out before it is multiplied: its value is often 0 / 0, and NaN times 0 is NaN.
    kept = weights > 0
    if not kept.any():
        return values.mean()
    return (values[kept] * weights[kept]).sum() / weights[kept].sum()


def _loss_weights(
    records: Sequence[_Record],
    numbers: Sequence[float],
    losses: Sequence[float | None],
    loss_weights: Sequence[float],
) -> list[float] | None:
    """Return the weight of each record if the values are the losses of their micro-batches, else None."""
    weights = [0.0] * len(records)
    for position, (record, number) in enumerate(zip(records, numbers, strict=True)):
        loss, weight = losses[record.micro_batch], loss_weights[record.micro_batch]
        if loss is None or weight == 0:
            continue
        if number != loss and not (isnan(number) and isnan(loss)):
            return None
        weights[position] = weight
    return weights if any(weights) else None


def _is_loggable(value: Any) -> bool:
    return isinstance(value, (Metric, Number)) or (isinstance(value, Tensor) and value.numel() == 1)


def _reduction(options: dict[str, Any]) -> str | None:
    """Return the name of the reduction that a ``log`` call asks for, or None if Lightning does not know it either."""
    reduce_fx = options.get("reduce_fx", "mean")
    return _REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)


def _move(inputs: Any, device: torch.device) -> Any:
    """Move all tensors to the metric's device, through the host: copies from GPU to GPU are not to be trusted."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.cpu().to(device)

    return apply_to_collection(inputs, Tensor, move)


def _blank_copy(metric: Metric) -> Metric:
    """Copy a metric as it was before its first update, without our interception.

    Epoch-long list states are not copied only to be thrown away, and the parameters of a metric that holds a network
    (as feature extractor) are shared: no metric changes them.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in metric.parameters()}

    def without_graph(tensor: Tensor) -> None:
        if not tensor.is_leaf:  # as the value of the latest `forward`; deepcopy refuses it
            memo[id(tensor)] = tensor.detach()

    for part in metric.modules():
        apply_to_collection(vars(part), Tensor, without_graph)
        if isinstance(part, Metric):
            memo.update({id(state): [] for state in part.metric_state.values() if isinstance(state, list)})
    copy = deepcopy(metric, memo)
    for part in copy.modules():
        if isinstance(part, Metric):
            part.__dict__.pop("forward", None)
            if not part.dist_sync_on_step:
                # A step value is that of this process alone, as in the metric's own `forward`.
                part.distributed_available_fn = _never
    copy.reset()
    return copy


def _never() -> bool:
    return False


@contextmanager
def _instance_attribute(module: Module, name: str, value: object) -> Iterator[None]:
    """Set an attribute of this instance alone, past ``Module.__setattr__``, and leave no trace of it afterwards."""
    attributes = module.__dict__
    was_set, previous = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if was_set:
            attributes[name] = previous
        else:
            del attributes[name]


@contextmanager
def _intercepted(metric: Metric, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Let ``metric.name(...)`` call ``method(metric, the real method, ...)``."""
    real = getattr(metric, name)

    def intercepted(receiver: Metric, *args: Any, **kwargs: Any) -> Any:
        if receiver is not metric:  # a copy that the user made in the step: nobody will clean it up
            return getattr(type(receiver), name)(receiver, *args, **kwargs)
        return method(metric, real, *args, **kwargs)

    # A bound method, since copying the metric binds it to the copy.
    with _instance_attribute(metric, name, MethodType(intercepted, metric)):
        yield
