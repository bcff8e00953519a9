"""What a call looks up, what is kept for its backward, and how gradients cross its border."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.calls import CallRecord, InputArchive, Scope, border, is_differentiable
from lightning_roundpipe.runtime.host_store import HostStore, UsePlace
from lightning_roundpipe.runtime.lookup import LookupDict
from lightning_roundpipe.runtime.thread_state import Autocast
from lightning_roundpipe.runtime.trees import flatten
from lightning_roundpipe.runtime.units import Unit
from lightning_roundpipe.runtime.worker import Worker

PLACE = UsePlace(0, 0, 0)
UNIT = Unit(0, "layers.0", nn.Linear(1, 1))


def no_warning(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture
def store() -> HostStore:
    return HostStore(compute_dtype=None, pin=False, warn=no_warning)


@pytest.fixture
def worker(store: HostStore) -> Worker:
    return Worker(0, torch.device("cpu"), store)


def record(**fields: Any) -> CallRecord:
    values: dict[str, Any] = {
        "unit": UNIT,
        "forward": UNIT.module,
        "number": 0,
        "position": 0,
        "place": PLACE,
        "autocast": Autocast.capture(),
        "structure": flatten(())[1],
        "leaves": [],
        "requires_grad": [],
        "edges": [],
    }
    return CallRecord(**{**values, **fields})


def test_only_floating_tensors_carry_gradients() -> None:
    assert is_differentiable(torch.ones(1, dtype=torch.bfloat16))
    assert is_differentiable(torch.ones(1, dtype=torch.complex64))
    assert not any(map(is_differentiable, [torch.ones(1, dtype=torch.int64), torch.ones(1) > 0, 1.0, None]))


# ---------------------------------------------------------------------------------------------------- scope: parameters


def test_a_scope_gives_one_leaf_for_each_parameter(worker: Worker) -> None:
    host, scope = nn.Parameter(torch.ones(2)), Scope(worker, PLACE)
    leaf = scope.parameter(host)
    assert scope.parameter(host) is leaf
    assert leaf is not host
    assert leaf.is_leaf
    assert isinstance(leaf, nn.Parameter)
    assert torch.equal(leaf, host)
    assert leaf.data_ptr() != host.data_ptr()
    assert Scope(worker, PLACE).parameter(host) is not leaf


@pytest.mark.parametrize("trainable", [True, False])
def test_a_leaf_requires_grad_as_its_parameter_does(worker: Worker, trainable: bool) -> None:
    scope = Scope(worker, PLACE)
    assert not bool(scope.trainable)
    assert scope.parameter(nn.Parameter(torch.ones(2), requires_grad=trainable)).requires_grad == trainable
    assert bool(scope.trainable) == trainable


def test_a_leaf_has_what_libraries_hang_on_parameters(worker: Worker) -> None:
    host = nn.Parameter(torch.ones(2))
    host.quantised = "nf4"  # type: ignore[attr-defined]
    assert Scope(worker, PLACE).parameter(host).quantised == "nf4"  # type: ignore[attr-defined]


def test_gradients_go_to_the_worker_by_place(worker: Worker, store: HostStore) -> None:
    host = nn.Parameter(torch.tensor([1.0, 2.0]))
    for occurrence in (0, 1):
        scope = Scope(worker, UsePlace(0, 0, occurrence))
        (scope.parameter(host) ** 2).sum().backward()
        scope.accumulate(worker)
    assert host.grad is None
    worker.land()
    [(parameter, gradient)] = store.collect()
    assert parameter is host
    assert gradient.tolist() == [4.0, 8.0]


def test_unused_and_frozen_parameters_have_no_gradient(worker: Worker, store: HostStore) -> None:
    scope = Scope(worker, PLACE)
    used, unused, frozen = (nn.Parameter(torch.ones(1)) for _ in range(3))
    frozen.requires_grad_(False)
    scope.parameter(unused)
    (scope.parameter(used) * scope.parameter(frozen)).backward()
    scope.accumulate(worker)
    worker.land()
    assert [parameter is used for parameter, _ in store.collect()] == [True]


def test_inference_mode_needs_no_leaves(worker: Worker) -> None:
    host, scope = nn.Parameter(torch.ones(2)), Scope(worker, PLACE)
    with torch.inference_mode():
        assert torch.equal(scope.parameter(host), host)
    assert not bool(scope.trainable)


WRITES = {
    "in place": lambda leaf: leaf.mul_(2),
    "assigned data": lambda leaf: setattr(leaf, "data", torch.zeros(2)),
    "through data": lambda leaf: leaf.data.mul_(2),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_parameter_is_noticed(worker: Worker, write: str) -> None:
    """It would be lost: the leaf is dropped when the scope ends."""
    one, other, scope = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), Scope(worker, PLACE)
    scope.parameter(other)
    leaf = scope.parameter(one)
    assert scope.changed_parameter(compare=True) is None
    with torch.no_grad():
        WRITES[write](leaf)
    assert scope.changed_parameter(compare=True) is one
    assert (scope.changed_parameter(compare=False) is one) == (write != "through data")


# ------------------------------------------------------------------------------------------------------- scope: buffers


def table(**buffers: Tensor) -> LookupDict:
    return LookupDict(dict(buffers), nn.Identity(), is_buffers=True)


def test_an_untouched_buffer_is_not_written(worker: Worker) -> None:
    buffers, scope = table(mean=torch.ones(2)), Scope(worker, PLACE)
    copy = scope.buffer(buffers, "mean")
    assert copy is scope.buffer(buffers, "mean")
    assert copy.data_ptr() != buffers.host("mean").data_ptr()  # type: ignore[union-attr]
    assert scope.write_buffers(set(), learn=True) == {}
    assert buffers.host("mean")._version == 0  # type: ignore[union-attr]


def test_a_buffer_written_in_place_reaches_the_host_when_the_scope_ends(worker: Worker) -> None:
    host = torch.zeros(2)
    buffers, scope = table(mean=host), Scope(worker, PLACE)
    scope.buffer(buffers, "mean").add_(1)
    assert host.tolist() == [0, 0]
    before = scope.write_buffers(set(), learn=False)
    assert host.tolist() == [1, 1]
    assert buffers.host("mean") is host
    assert [value.tolist() for value in before.values()] == [[0, 0]]
    assert Scope(worker, PLACE).buffer(buffers, "mean").tolist() == [1, 1]


def test_a_buffer_written_without_a_trace_is_learned(worker: Worker) -> None:
    """As batch normalisation does, whose kernels do not count their writes."""
    host, silent = torch.zeros(2), set[tuple[int, str]]()
    buffers = table(mean=host)

    def run(learn: bool) -> None:
        scope = Scope(worker, PLACE)
        scope.buffer(buffers, "mean").data.add_(1)
        scope.write_buffers(silent, learn=learn)

    run(learn=True)
    assert silent == {(id(buffers.owner), "mean")}
    run(learn=False)
    assert host.tolist() == [2, 2]


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.float64)])
def test_an_assigned_buffer_reaches_the_host_when_the_scope_ends(worker: Worker, value: Tensor) -> None:
    """In the host's own memory if it fits."""
    host = torch.zeros(2)
    buffers, scope = table(mean=host), Scope(worker, PLACE)
    scope.assign_buffer(buffers, "mean", value)
    assert scope.buffer(buffers, "mean") is value
    assert buffers.host("mean") is host
    scope.write_buffers(set(), learn=False)
    found = buffers.host("mean")
    assert found is not None
    assert torch.equal(found, value)
    assert found.dtype == value.dtype
    fits = value.shape == host.shape and value.dtype == host.dtype
    assert (found is host) == fits


def test_a_new_buffer_is_entered(worker: Worker) -> None:
    buffers, scope = table(), Scope(worker, PLACE)
    with pytest.raises(UnsupportedUseError, match="Buffer `late`"):
        scope.assign_buffer(buffers, "late", torch.ones(1, requires_grad=True) * 2)
    scope.assign_buffer(buffers, "late", torch.full((1,), 2.0))
    assert scope.write_buffers(set(), learn=False) == {}
    assert buffers.host("late") is not None
    assert torch.equal(buffers.host("late"), torch.full((1,), 2.0))


def test_a_recomputation_reads_what_the_first_run_saw_and_writes_nothing(worker: Worker) -> None:
    host = torch.zeros(1)
    buffers, first = table(mean=host, other=torch.full((1,), 7.0)), Scope(worker, PLACE)
    first.buffer(buffers, "mean").add_(1)
    before = first.write_buffers(set(), learn=False)

    again = Scope(worker, PLACE, before)
    assert again.buffer(buffers, "mean").item() == 0
    assert again.buffer(buffers, "other").item() == 7
    again.buffer(buffers, "mean").add_(5)
    assert host.item() == 1
    assert Scope(worker, PLACE).buffer(buffers, "mean").item() == 1


# ------------------------------------------------------------------------------------------------------- kept inputs


def test_an_input_is_kept_once_until_it_changes() -> None:
    archive, x = InputArchive(), torch.ones(2)
    kept = archive.keep(x, copy=True)
    assert archive.keep(x, copy=True) is kept
    x.add_(1)
    later = archive.keep(x, copy=True)
    assert kept.tensor.tolist() == [1, 1]
    assert later.tensor.tolist() == [2, 2]


def test_a_kept_input_has_no_graph() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    for copy in (True, False):
        assert not InputArchive().keep(x, copy=copy).tensor.requires_grad


def test_another_tensor_at_the_same_address_is_not_taken_for_the_first() -> None:
    archive = InputArchive()
    for value in range(20):
        assert archive.keep(torch.full((2,), float(value)), copy=True).tensor.tolist() == [value, value]


def test_an_inference_tensor_can_be_kept() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    assert InputArchive().keep(x, copy=True).tensor.tolist() == [1, 1]


def test_an_input_is_brought_back_once_for_each_worker(worker: Worker) -> None:
    archive = InputArchive()
    kept = archive.keep(torch.ones(2), copy=True)
    assert archive.restore(kept, worker, UNIT) is archive.restore(kept, worker, UNIT)
    archive.forget_restored()
    assert archive.restore(kept, worker, UNIT).tolist() == [1, 1]


def test_an_input_that_stayed_must_not_have_changed(worker: Worker) -> None:
    archive, x = InputArchive(), torch.ones(2)
    kept = archive.keep(x, copy=False)
    assert archive.restore(kept, worker, UNIT).data_ptr() == x.data_ptr()
    x.add_(1)
    with pytest.raises(UnsupportedUseError, match="An input of unit `layers.0` was changed in place after the call"):
        archive.restore(kept, worker, UNIT)


def test_a_copy_goes_when_its_last_call_has_run_backward(worker: Worker) -> None:
    archive, x = InputArchive(), torch.ones(2)
    calls = [record(leaves=[archive.keep(x, copy=True)]) for _ in range(2)]
    copy = weakref.ref(calls[0].leaves[0].tensor)
    archive.restore(calls[0].leaves[0], worker, UNIT)
    archive.forget_restored()
    for call in calls:
        assert copy() is not None
        call.free()
    assert copy() is None


# ------------------------------------------------------------------------------------------------------------- border


def crossed(call: CallRecord, *outputs: Tensor) -> Sequence[Tensor]:
    return border(call, list(outputs))


def test_outputs_cross_without_the_graph_of_the_unit() -> None:
    weight = torch.ones(2, requires_grad=True)
    call = record()
    one, two = crossed(call, weight * 2, weight * 3)
    assert one.requires_grad and two.requires_grad
    assert one.tolist() == [2, 2]
    call.ready = True
    (one * 5 + two).sum().backward()
    assert weight.grad is None
    assert [gradient.tolist() for gradient in call.output_grads if gradient is not None] == [[5, 5], [1, 1]]


def test_an_unused_output_has_no_gradient() -> None:
    call = record(ready=True)
    one, _ = crossed(call, torch.ones(2), torch.ones(3))
    one.sum().backward()
    assert call.output_grads[0] is not None
    assert call.output_grads[1] is None


def test_gradients_of_several_passes_add_up() -> None:
    """The glue's graph is entered once for every later call."""
    call = record(ready=True)
    (output,) = crossed(call, torch.ones(2))
    for factor in (2.0, 3.0):
        (factor * output).sum().backward(retain_graph=True)
    assert call.output_grads[0] is not None
    assert call.output_grads[0].tolist() == [5, 5]


def test_user_code_may_change_outputs_in_place() -> None:
    call = record(ready=True)
    (output,) = crossed(call, torch.ones(2))
    output += 1
    output.relu_()
    (3 * output).sum().backward()
    assert output.tolist() == [2, 2]
    assert call.output_grads[0] is not None
    assert call.output_grads[0].tolist() == [3, 3]


def test_a_gradient_that_comes_too_early_is_refused() -> None:
    call = record()
    (output,) = crossed(call, torch.ones(2))
    with pytest.raises(
        UnsupportedUseError, match="unit `layers.0` was asked for while `training_step` was still running"
    ):
        output.sum().backward()


def test_free_drops_everything() -> None:
    x = torch.ones(2, requires_grad=True)
    call = record(leaves=[x], edges=[None], inputs=[x], outputs=[x], buffers_before={(0, "a"): x})
    crossed(call, x)
    call.free()
    assert not call.keeps_graph
    assert not any(
        [call.leaves, call.edges, call.inputs, call.outputs, call.output_grads, call.buffers_before, call.scope]
    )


def test_a_record_with_a_scope_keeps_the_graph(worker: Worker) -> None:
    assert record(scope=Scope(worker, PLACE)).keeps_graph
