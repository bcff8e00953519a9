"""Costs before the first step: a model's calls counted on fake tensors, without memory and without a GPU.

Every call of a unit runs once forward and once backward on tensors that have shapes and no values. Counted are the
operations of its matrix products and attention, the bytes that all other operations move (they are bound by memory),
and the bytes that are alive. Calls of units that are built alike are counted once.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from lightning_roundpipe.plan.costs import CallCount, Work
from lightning_roundpipe.runtime.units import Unit, find_units, tensor_bytes

__all__ = ["count_calls"]


def count_calls(
    build: Callable[[], nn.Module],
    batch: Callable[[], Mapping[str, Any]],
    *,
    units: str | Sequence[str] = "auto",
    causal: bool = False,
) -> tuple[CallCount, ...]:
    """Counts the calls of one forward pass of a model.

    Args:
        build: makes the model; it runs where tensors have no memory (on the meta device).
        batch: makes the keyword arguments of its forward pass, likewise (as fake tensors of the CPU).
        units: what is a unit, see :func:`find_units`.
        causal: whether the masks that attention gets are causal, so that a fused kernel skips half of it.

    Returns:
        Counts of every call, in the order of the calls.
    """
    with torch.device("meta"):
        model = build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        _pretend_memory(model)
        recorded: list[_Recorded] = []
        with _recording(find_units(model, units), recorded), torch.no_grad():
            model(**batch())
        known: dict[str, CallCount] = {}
        counts = []
        first_use: set[int] = set()
        for call in recorded:
            signature = call.signature()
            if signature not in known:
                known[signature] = _count(call, causal)
            counts.append(known[signature].with_stored(_new_weights(call.unit, first_use)))
        return tuple(counts)


def _pretend_memory(model: nn.Module) -> None:
    """Replaces meta tensors by fake ones of the CPU, on which attention takes its fused form; ties stay."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in parameters:
                    empty = torch.empty_like(parameter, device="cpu")
                    parameters[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _new_weights(unit: Unit, seen: set[int]) -> tuple[int, int]:
    """Numbers of weights, and of trained ones, that no call before has used: what the host stores for a call."""
    new = [parameter for parameter in unit.parameters if id(parameter) not in seen]
    seen.update(map(id, new))
    return sum(p.numel() for p in new), sum(p.numel() for p in new if p.requires_grad)


@dataclass(frozen=True)
class _Recorded:
    """A call of a unit and its arguments."""

    unit: Unit
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def signature(self) -> str:
        """Equal for calls that cost the same."""
        tensors = [tuple(leaf.shape) for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        parameters = [
            (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in self.unit.module.named_parameters()
        ]
        # Layers of a kind differ in plain attributes, such as a sliding window, but also in their number.
        plain = [
            (name, value)
            for module in self.unit.submodules
            for name, value in sorted(vars(module).items())
            if isinstance(value, (bool, float, int, str)) and name != "layer_idx"
        ]
        return repr((type(self.unit.module), tensors, parameters, plain))


@contextmanager
def _recording(units: Sequence[Unit], recorded: list[_Recorded]) -> Iterator[None]:
    def record(unit: Unit) -> Callable[..., None]:
        return lambda _, args, kwargs: recorded.append(_Recorded(unit, args, kwargs))

    handles = [unit.module.register_forward_pre_hook(record(unit), with_kwargs=True) for unit in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _count(call: _Recorded, causal: bool) -> CallCount:
    module = call.unit.module

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() and tensor.ndim > 1)

    args, kwargs = tree_map_only(Tensor, leaf, (call.args, call.kwargs))
    # What is handed from stage to stage: the arguments by position, or the largest one by name.
    moved = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    named = [t for t in tree_leaves(kwargs) if isinstance(t, Tensor)]
    input_bytes = sum(map(tensor_bytes, moved)) or max(map(tensor_bytes, named), default=0)

    forward, backward = _Counter(causal), _Counter(causal)
    with forward, torch.enable_grad():
        outputs = module(*args, **kwargs)
    graph_bytes = forward.live_bytes
    roots = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    if roots:
        gradients = [torch.empty_like(root) for root in roots]
        backward.live_bytes = backward.peak_bytes = graph_bytes
        forward.heir = backward
        with backward:
            torch.autograd.backward(roots, gradients)
    module.zero_grad(set_to_none=True)
    trained = [p for p in call.unit.parameters if p.requires_grad]
    gradient_bytes = sum(map(tensor_bytes, trained))
    peak = max(forward.peak_bytes, backward.peak_bytes - gradient_bytes)
    return CallCount(
        forward=forward.work,
        backward=backward.work,
        weight_bytes=call.unit.num_bytes,
        gradient_bytes=gradient_bytes,
        input_bytes=input_bytes,
        output_bytes=sum(tensor_bytes(t) for t in tree_leaves(outputs) if isinstance(t, Tensor)),
        graph_bytes=graph_bytes,
        working_bytes=max(0, peak - graph_bytes),
    )


class _Counter(TorchDispatchMode):
    """Counts the work of the operations that run in it, and the bytes that they keep alive."""

    def __init__(self, causal: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()
        self._causal = causal
        self.live_bytes = 0
        self.peak_bytes = 0
        self.heir: _Counter | None = None  # counts what ends after this counter has ended
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if outputs and not _is_view(inputs, outputs, func):
            self.work += self._work_of(func, args, kwargs, out, inputs, outputs)
        known = {_key(tensor) for tensor in inputs}
        for tensor in outputs:
            if _key(tensor) not in known | self._storages:
                self._allocate(tensor)
        return out

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = _key(tensor), storage.nbytes()
        self._storages.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, key, num_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        self._storages.discard(key)
        (self.heir or self).live_bytes -= num_bytes

    def _work_of(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Work:
        packet, name = func.overloadpacket, func.name()
        if "grouped_mm" in name:  # the experts of a mixture; every row meets one expert's matrix
            return Work(product_flops=2 * inputs[0].numel() * inputs[1].shape[-1], num_operations=1)
        if "scaled_dot_product" in name:
            flops = _attention_flops(func, args, kwargs)
            return Work(attention_flops=flops / 2 if self._causal else flops, num_operations=1)
        if packet in flop_registry:
            return Work(product_flops=flop_registry[packet](*args, **kwargs, out_val=out), num_operations=1)
        if packet is torch.ops.aten.embedding:  # reads the rows that it writes, not the whole table
            return Work(moved_bytes=2 * sum(map(tensor_bytes, outputs)), num_operations=1)
        return Work(moved_bytes=sum(map(tensor_bytes, (*inputs, *outputs))), num_operations=1)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the identity of memory that has no address
    return key


def _is_view(inputs: Sequence[Tensor], outputs: Sequence[Tensor], func: Any) -> bool:
    """Whether an operation moves nothing."""
    known = {_key(tensor) for tensor in inputs}
    return not _schema(func).is_mutable and all(_key(tensor) in known for tensor in outputs)


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Two products of (query, key) and (weights, value); five in backward, which forms the weights again."""
    named = dict(zip((argument.name for argument in _schema(func).arguments), args, strict=False)) | kwargs
    query, key, value = named["query"], named["key"], named["value"]
    batch, heads, length, width = query.shape
    products: int = batch * heads * length * key.shape[-2] * (width + value.shape[-1])
    return 5 * products if "backward" in func.name() else 2 * products


def _schema(func: Any) -> Any:
    return func._schema  # noqa: SLF001 - torch documents it for dispatch modes, under this name
