"""One call of a unit: what it looked up, what is kept for its backward, and its border to the user's graph.

[Note: Border of a call]
User code between calls ("glue") keeps an ordinary autograd graph. A call cuts it: the unit gets detached inputs, and
its outputs enter the glue through a border node that only collects gradients.

    glue graph -> [edges of the inputs] | detached inputs -> unit (graph kept, or recomputed later) -> outputs | [border
    node] -> glue graph

Backward is driven call by call, never from inside an autograd thread: when all later calls and the loss are done, the
border node holds the complete gradient of the outputs; the unit's own graph turns it into gradients of its inputs, and
those are pushed into the glue through the edges, down to the border nodes of earlier calls. The same steps run whether
a graph was kept or recomputed, so the numbers do not depend on how the calls were cut into stages.
"""

import contextvars
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.captures import Captures
from lightning_roundpipe.runtime.host_store import UsePlace
from lightning_roundpipe.runtime.lookup import LookupDict
from lightning_roundpipe.runtime.thread_state import Autocast
from lightning_roundpipe.runtime.trees import Structure
from lightning_roundpipe.runtime.units import Unit, tensor_bytes
from lightning_roundpipe.runtime.worker import Worker

__all__ = ["CallRecord", "InputArchive", "KeptInput", "Scope", "border", "is_differentiable"]

_WHILE_RUNNING = (
    "while `training_step` was still running (`torch.autograd.grad` or `backward` inside it). Streamed units are"
    " differentiated after `training_step` returns. Compute such terms with modules that are one unit together with"
    " what they differentiate, or train this model without RoundPipeStrategy."
)


def is_differentiable(value: Any) -> bool:
    """Whether ``value`` is a tensor that can carry a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class _Leaf(NamedTuple):
    """What stands for a parameter in a scope.

    Attributes:
        host: the parameter.
        leaf: what running code gets.
        version: of the leaf when it was made.
        pointer: to its memory then.
    """

    host: Tensor
    leaf: nn.Parameter
    version: int
    pointer: int


class Scope:
    """What one call, or one stretch of glue, looked up.

    Parameters get a leaf of their own per scope, so that gradients are told apart by the place of use. A buffer that
    was written is carried to the host when the scope ends; in a recomputation it is dropped instead, and reads give
    what the first run saw.

    Args:
        worker: the worker on which the code runs.
        place: the name under which gradients land.
        buffers_before: for a recomputation, the values of buffers that the first run changed, by (table, name).
    """

    def __init__(
        self, worker: Worker, place: UsePlace, buffers_before: dict[tuple[int, str], Tensor] | None = None
    ) -> None:
        self.worker = worker
        self.place = place
        self._leaves: dict[int, _Leaf] = {}
        self._buffers: dict[tuple[int, str], tuple[LookupDict, Tensor, int]] = {}
        self._assigned: dict[tuple[int, str], tuple[LookupDict, Tensor]] = {}
        self._buffers_before = buffers_before

    def parameter(self, host: Tensor) -> Tensor:
        """This scope's leaf for the parameter ``host``."""
        entry = self._leaves.get(id(host))
        if entry is None:
            weight = self.worker.weight(host)
            if torch.is_inference_mode_enabled():
                return weight
            leaf = nn.Parameter(weight.detach(), requires_grad=host.requires_grad)
            if vars(host):
                vars(leaf).update(vars(host))  # What libraries hang on parameters.
            entry = self._leaves[id(host)] = _Leaf(host, leaf, leaf._version, leaf.data_ptr())
        return entry.leaf

    def changed_parameter(self, *, compare: bool) -> Tensor | None:
        """A host parameter whose leaf was written to in place; the write would be lost.

        Args:
            compare: also compare values: writes through ``.data`` leave no trace.
        """
        for host, leaf, version, pointer in self._leaves.values():
            if self.worker.shares_memory(host):
                if leaf._version != version:
                    return host
                continue  # There is no other copy to compare with.
            moved = leaf._version != version or leaf.data_ptr() != pointer
            # Memory may be laid out anew (cuDNN's recurrent layers do that): what counts is the values.
            if (moved or compare) and not torch.equal(leaf.detach(), self.worker.upload_weight(host)):
                return host
        return None

    def buffer(self, table: LookupDict, name: str) -> Tensor:
        """The buffer ``name`` of the module that owns ``table``."""
        key = id(table), name
        if key in self._assigned:
            return self._assigned[key][1]
        if key in self._buffers:
            return self._buffers[key][1]
        host = table.host(name)
        assert host is not None
        if self._buffers_before is not None:
            before = self._buffers_before.get(key)
            # The first run left this buffer alone, so reading the worker's copy is safe.
            copy = self.worker.buffer(host) if before is None else self.worker.upload(before)
        else:
            copy = self.worker.buffer(host)
        self._buffers[key] = table, copy, _version(copy)
        return copy

    def assign_buffer(self, table: LookupDict, name: str, value: Tensor) -> None:
        """Running code assigned the buffer anew.

        Raises:
            UnsupportedUseError: the value carries a gradient.
        """
        if value.grad_fn is not None:
            raise UnsupportedUseError(
                f"Buffer `{name}` of {type(table.owner).__name__} was assigned a tensor with a gradient while a step"
                " runs. Buffers are carried to the host, where the gradient would be lost. Return the tensor instead,"
                " or assign it detached."
            )
        self._assigned[id(table), name] = table, value

    def write_buffers(self, silent: set[tuple[int, str]], *, learn: bool) -> dict[tuple[int, str], Tensor]:
        """Carry written buffers to the host.

        Args:
            silent: buffers, by (module, name), that are written without a trace in their version counter, as those of
                batch normalisation are.
            learn: look for such buffers and add them.

        Returns:
            The host values before, by (table, name).
        """
        before = {}
        for key, (table, copy, version) in self._buffers.items():
            if key in self._assigned:
                continue
            host = table.host(key[1])
            assert host is not None
            if _version(copy) == version:
                name = id(table.owner), key[1]
                if learn and not torch.equal(copy, self.worker.move(host)):
                    silent.add(name)
                if name not in silent:
                    continue
            before[key] = host.detach().clone()
            with torch.no_grad():
                host.copy_(copy)
            self.worker.keep_buffer(host, copy)
        for key, (table, value) in self._assigned.items():
            host = table.host(key[1])
            if host is not None and host.shape == value.shape and host.dtype == value.dtype:
                before[key] = host.detach().clone()
                with torch.no_grad():
                    host.copy_(value)
            else:
                if host is not None:
                    before[key] = host.detach()
                table.replace(key[1], value.detach().cpu())
        self._buffers.clear()
        self._assigned.clear()
        return before

    def accumulate(self, holder: Worker) -> None:
        """Give the gradients of the leaves to ``holder``, the worker whose ticket the calling thread holds.

        It need not be the one on which the code ran: what glue used is known to be complete stages later.
        """
        for parameter, leaf, _, _ in self._leaves.values():
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                holder.accumulate(parameter, self.place, holder.move(gradient))

    def host_of(self, leaf: Tensor) -> Tensor | None:
        """The host parameter as whose leaf ``leaf`` was handed out."""
        return next((host for host, known, _, _ in self._leaves.values() if known is leaf or host is leaf), None)

    @property
    def trainable(self) -> list[Tensor]:
        """Host parameters of which a leaf that requires grad was handed out."""
        return [host for host, leaf, _, _ in self._leaves.values() if leaf.requires_grad]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class KeptInput:
    """An input of a call, kept for its backward.

    Attributes:
        tensor: a host copy, or the input itself where it may stay on its worker.
        version: of the input, where no copy was taken.
    """

    tensor: Tensor
    version: int | None = None


class InputArchive:
    """The inputs of one micro-batch's calls, each tensor once.

    Masks, rotary tables and encoder states go into many calls; they are kept, and brought back, once. In host memory a
    copy is taken even if the input lies there already: user code may change it in place after the call.

    Attributes:
        copied_bytes: of all copies of dense tensors so far.
    """

    def __init__(self) -> None:
        self.copied_bytes = 0
        # Weak: a copy goes when the last call that needs it has run backward.
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[KeptInput]]] = {}
        self._restored: weakref.WeakKeyDictionary[KeptInput, Tensor] = weakref.WeakKeyDictionary()

    def keep(self, tensor: Tensor, *, copy: bool) -> KeptInput:
        """Keep ``tensor``: a host copy of it, or what it is now."""
        version = _version(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version and (kept := known[2]()) is not None:
            return kept
        if not copy:
            kept = KeptInput(tensor.detach(), version)
        else:
            kept = KeptInput(tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu())
            self.copied_bytes += tensor_bytes(kept.tensor) if tensor.layout is torch.strided else 0
        self._known[id(tensor)] = weakref.ref(tensor), version, weakref.ref(kept)
        return kept

    def restore(self, kept: KeptInput, worker: Worker, unit: Unit) -> Tensor:
        """The ``kept`` input on ``worker``; the same object until `forget_restored`.

        Raises:
            UnsupportedUseError: user code has changed it since.
        """
        if kept.version is not None and _version(kept.tensor) != kept.version:
            raise UnsupportedUseError(
                f"An input of unit {unit} was changed in place after the call, before its backward. Change a copy"
                " instead (`x = x + y`, not `x += y`)."
            )
        restored = self._restored.get(kept)
        if restored is None:
            restored = self._restored[kept] = worker.move(kept.tensor)
        return restored

    def forget_restored(self) -> None:
        """Drop what was brought back: the micro-batch goes on to another worker."""
        self._restored.clear()

    def clear(self) -> None:
        """Drop everything."""
        self._known.clear()
        self._restored.clear()


@dataclass(eq=False)
class CallRecord:
    """What the backward of one call needs.

    Attributes:
        unit: the unit that was called.
        forward: its ordinary call.
        number: how many calls came before it in the micro-batch; seeds its randomness.
        position: place in the plan's order of calls, or of the last planned call before an unplanned one.
        place: the name under which its gradients land.
        autocast: autocast settings at the call.
        leaves: flattened arguments, with `KeptInput` for tensors; empty if the graph is kept.
        structure: how to put ``leaves`` together as (args, kwargs).
        requires_grad: for each leaf, whether it carries a gradient.
        edges: for each leaf that does, its edge into the glue graph and the device of that graph.
        scope: of a call whose graph is kept, what it looked up.
        inputs: of a call whose graph is kept, the detached inputs.
        outputs: of a call whose graph is kept, the differentiable outputs.
        output_grads: for each differentiable output, the gradient collected by the border node so far.
        buffers_before: values of buffers which the call changed, from before.
        captures: what transformers captured inside the call.
        mode: the mode (see `UnitTraits.mode`) in which it ran.
        context: context variables as they were.
        trainable: host parameters that may get a gradient from it.
        ready: whether gradients may come, that is, whether `training_step` has returned.
        refusal: when or how a gradient came that must not.
    """

    unit: Unit
    forward: Callable[..., Any]
    number: int
    position: int
    place: UsePlace
    autocast: Autocast
    structure: Structure
    leaves: list[Any]
    requires_grad: list[bool]
    edges: list[tuple[GradientEdge, torch.device] | None]
    scope: Scope | None = None
    inputs: list[Tensor | None] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    output_grads: list[Tensor | None] = field(default_factory=list)
    buffers_before: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    captures: Captures = field(default_factory=Captures)
    mode: tuple[Any, ...] = ()
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    trainable: list[Tensor] = field(default_factory=list)
    ready: bool = False
    refusal: str = _WHILE_RUNNING

    @property
    def keeps_graph(self) -> bool:
        """Whether the call ran with a graph (in the fused stage)."""
        return self.scope is not None

    def collect(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of the outputs, from one pass over the glue."""
        if not self.ready:
            raise UnsupportedUseError(f"The gradient of unit {self.unit} was asked for {self.refusal}")
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                known = self.output_grads[index]
                self.output_grads[index] = gradient if known is None else known + gradient

    def free(self) -> None:
        """Drop all tensors and graph references: the call's backward is done."""
        self.leaves, self.edges, self.inputs, self.outputs, self.output_grads = [], [], [], [], []
        self.scope = None
        self.buffers_before = {}
        self.captures = Captures()


class _Border(torch.autograd.Function):
    """Gives outputs of a call to the glue and collects their gradients in the call's record."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, record: CallRecord, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.record = record
        # In a list, not as inputs: autograd would make views of them, which user code could not change in place.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.record.collect(gradients)
        return None, None, None


def border(record: CallRecord, outputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The differentiable ``outputs`` of a call as the glue sees them: without the unit's graph, requiring grad."""
    record.output_grads = [None] * len(outputs)
    anchor = torch.empty(0, requires_grad=True)
    return _Border.apply(anchor, record, outputs)  # type: ignore[no-any-return, no-untyped-call]
