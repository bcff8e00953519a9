"""Modules look their tensors up while a step runs, and are ordinary modules before, after and when copied."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.lookup import LookupDict, Resolver, current_resolver, installed, resolving
from lightning_roundpipe.runtime.units import Unit, find_units


class Doubling(Resolver):
    """Gives tensors that are twice the host's, and keeps a log."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.assigned: list[tuple[nn.Module, str, Tensor]] = []

    def parameter(self, host: Tensor) -> Tensor:
        return 2 * host.detach()

    def buffer(self, table: LookupDict, name: str) -> Tensor:
        host = table.host(name)
        assert host is not None
        return 2 * host

    def assign_buffer(self, table: LookupDict, name: str, value: Tensor) -> None:
        self.assigned.append((table.owner, name, value))

    def replace_parameter(self, table: LookupDict, name: str, value: Tensor | None) -> None:
        raise table.refuse(name)

    def call(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(unit.name)
        return forward(*args, **kwargs)


class Scale(nn.Module):
    """``x * weight + shift``; ``empty`` is a parameter that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))
        self.register_parameter("empty", None)
        self.register_buffer("shift", torch.tensor([1.0]))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Scale()
        self.act = nn.ReLU()
        self.second = nn.Sequential(Scale())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


@pytest.fixture
def model() -> Model:
    return Model()


@contextmanager
def stepping(model: nn.Module, resolver: Resolver) -> Iterator[None]:
    with installed(model, find_units(model, "Scale")), resolving(resolver):
        yield


def attributes(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Every module with its attributes and the contents of its tables."""
    return [
        (module, {**vars(module), "contents": [dict(vars(module)[name]) for name in ("_parameters", "_buffers")]})
        for module in model.modules()
    ]


def assert_untouched(model: nn.Module, before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    after = attributes(model)
    assert [module for module, _ in after] == [module for module, _ in before]
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert new.keys() == old.keys()
        for name in old.keys() - {"contents"}:
            assert new[name] is old[name], name
        for old_table, new_table in zip(old["contents"], new["contents"], strict=True):
            assert list(new_table) == list(old_table)
            assert all(new_table[name] is old_table[name] for name in old_table)


# ------------------------------------------------------------------------------------------------------------- reading


def test_attributes_come_from_the_resolver(model: Model) -> None:
    with stepping(model, Doubling()):
        assert model.first.weight.item() == 6
        assert model.first.shift.item() == 2
        assert getattr(model.second[0], "weight").item() == 6  # noqa: B009
        assert model(torch.tensor([1.0])).item() == (1 * 6 + 2) * 6 + 2


def test_what_is_none_stays_none(model: Model) -> None:
    with stepping(model, Doubling()):
        assert model.first.empty is None
        assert model.first.nothing is None


def test_iteration_sees_the_host(model: Model) -> None:
    parameters, buffers, state = list(model.parameters()), list(model.buffers()), model.state_dict(keep_vars=True)
    with stepping(model, Doubling()):
        assert [id(tensor) for tensor in model.parameters()] == [id(tensor) for tensor in parameters]
        assert [id(tensor) for tensor in model.buffers()] == [id(tensor) for tensor in buffers]
        inside = model.state_dict(keep_vars=True)
        assert list(inside) == list(state)
        assert all(inside[name] is state[name] for name in state)


def test_without_a_resolver_the_host_is_read(model: Model) -> None:
    with installed(model, find_units(model, "Scale")):
        assert current_resolver() is None
        assert model.first.weight is dict(model.first.named_parameters())["weight"]
        assert model(torch.tensor([1.0])).item() == (1 * 3 + 1) * 3 + 1


def test_a_resolver_belongs_to_its_thread(model: Model) -> None:
    seen: list[Any] = []
    with stepping(model, Doubling()):
        thread = threading.Thread(target=lambda: seen.extend([current_resolver(), model.first.weight.item()]))
        thread.start()
        thread.join()
        assert model.first.weight.item() == 6
    assert seen == [None, 3]


def test_two_threads_run_one_module_with_their_own_tensors(model: Model) -> None:
    class Fixed(Doubling):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def parameter(self, host: Tensor) -> Tensor:
            return torch.tensor([self.value])

    together, results = threading.Barrier(2, timeout=10), {}

    def body(value: float) -> None:
        with resolving(Fixed(value)):
            together.wait()
            results[value] = model.first(torch.tensor([1.0])).item()
            together.wait()

    with installed(model, find_units(model, "Scale")):
        threads = [threading.Thread(target=body, args=(value,)) for value in (10.0, 20.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {10.0: 12.0, 20.0: 22.0}


def test_the_resolver_before_comes_back_also_after_an_error() -> None:
    outer, inner = Doubling(), Doubling()
    with resolving(outer):
        with pytest.raises(KeyError), resolving(inner):
            assert current_resolver() is inner
            raise KeyError
        assert current_resolver() is outer
    assert current_resolver() is None


# --------------------------------------------------------------------------------------------------------------- calls


def test_calls_of_units_are_intercepted_with_their_hooks_inside(model: Model) -> None:
    log: list[str] = []

    class Logging(Doubling):
        def call(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            log.append(f"enter {unit.name}")
            result = forward(*args, **kwargs)
            log.append(f"leave {unit.name}")
            return result

    model.first.register_forward_pre_hook(lambda *_: log.append("before"))
    model.first.register_forward_hook(lambda *_: log.append("after"))
    with stepping(model, Logging()):
        model(torch.ones(1))
    assert log == ["enter first", "before", "after", "leave first", "enter second.0", "leave second.0"]


def test_calls_get_their_arguments_and_only_units_are_intercepted(model: Model) -> None:
    resolver = Doubling()
    with stepping(model, resolver):
        assert model.first(x=torch.ones(1)).item() == 8
        model.act(torch.ones(1))
    assert resolver.calls == ["first"]


# ------------------------------------------------------------------------------------------------------------- writing


def test_an_assigned_buffer_goes_to_the_resolver(model: Model) -> None:
    resolver, value, host = Doubling(), torch.tensor([5.0]), model.first.shift
    with stepping(model, resolver):
        model.first.shift = value
        assert resolver.assigned == [(model.first, "shift", value)]
    assert model.first.shift is host


def test_an_assigned_buffer_reaches_the_host_outside_of_micro_batches(model: Model) -> None:
    value = torch.tensor([5.0])
    with installed(model, ()):
        model.first.shift = value
    assert model.first.shift is value


def test_what_the_runtime_replaces_stays(model: Model) -> None:
    value = torch.tensor([5.0])
    with stepping(model, Doubling()):
        table = model.first._buffers
        assert isinstance(table, LookupDict)
        table.replace("shift", value)
        assert table.host("shift") is value
        assert table.host("missing") is None
    assert model.first.shift is value


def test_registrations_outside_of_micro_batches_stay(model: Model) -> None:
    parameter, replaced, buffer = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1)), torch.zeros(2)
    with installed(model, find_units(model, "Scale")):
        model.first.register_parameter("late", parameter)
        model.act.register_parameter("late", parameter)
        model.first.weight = replaced
        model.first.register_buffer("late_buffer", buffer)
    assert model.first.late is parameter
    assert model.act.late is parameter
    assert model.first.weight is replaced
    assert model.first.late_buffer is buffer
    assert list(model.first._parameters) == ["weight", "empty", "late"]
    assert type(model.first._parameters) is dict


def test_a_buffer_registered_in_a_micro_batch_goes_to_the_resolver(model: Model) -> None:
    """Also in a module that had none: the table that all share gets a home for it, in host memory of its own."""
    resolver, buffer = Doubling(), torch.zeros(2)
    with stepping(model, resolver):
        model.act.register_buffer("late", buffer)
    assert resolver.assigned == [(model.act, "late", buffer)]
    assert model.act.late is not buffer
    assert torch.equal(model.act.late, buffer)


@pytest.mark.parametrize(
    "change",
    [
        lambda scale: setattr(scale, "weight", nn.Parameter(torch.zeros(1))),
        lambda scale: scale.register_parameter("late", nn.Parameter(torch.zeros(1))),
        lambda scale: delattr(scale, "weight"),
        lambda scale: torch.func.functional_call(scale, {"weight": torch.zeros(1)}, (torch.ones(1),)),
    ],
    ids=["assigned", "registered", "deleted", "functional_call"],
)
def test_parameters_stay_as_they_are_during_a_step(model: Model, change: Callable[[Scale], object]) -> None:
    """All micro-batches share the module, so one of them cannot replace its parameters."""
    before = attributes(model)
    with (
        stepping(model, Doubling()),
        pytest.raises(UnsupportedUseError, match="of Scale was replaced while a step runs"),
    ):
        change(model.first)
    assert_untouched(model, before)


def test_removals_outside_of_micro_batches_stay(model: Model) -> None:
    with installed(model, ()):
        del model.first.weight
        del model.first.shift
    assert [name for name, _ in model.first.named_parameters()] == []
    assert not hasattr(model.first, "shift")


# ----------------------------------------------------------------------------------------------------------- afterwards


def test_everything_is_as_before(model: Model) -> None:
    before = attributes(model)
    with stepping(model, Doubling()):
        model(torch.ones(1))
    assert_untouched(model, before)
    assert model(torch.tensor([1.0])).item() == (1 * 3 + 1) * 3 + 1


def test_everything_is_as_before_after_an_error(model: Model) -> None:
    before = attributes(model)
    with pytest.raises(ZeroDivisionError), stepping(model, Doubling()):
        raise ZeroDivisionError
    assert_untouched(model, before)
    assert current_resolver() is None


def test_everything_is_as_before_for_shared_modules_and_tensors() -> None:
    shared = Scale()
    model = nn.ModuleList([shared, nn.Sequential(shared), Scale()])
    model[2].weight = shared.weight
    before = attributes(model)
    with installed(model, find_units(model)), resolving(Doubling()):
        assert model[2].weight.item() == 6
    assert_untouched(model, before)


def test_steps_can_follow_each_other(model: Model) -> None:
    for _ in range(2):
        with stepping(model, Doubling()):
            assert model.first.weight.item() == 6
        assert model.first.weight.item() == 3


def test_a_replaced_table_does_not_stop_the_others_from_being_put_back(model: Model) -> None:
    before, weight = attributes(model), nn.Parameter(torch.zeros(1))
    with installed(model, ()):
        model.first.__dict__["_parameters"] = {"weight": weight, "empty": None}
    assert model.first.weight is weight
    model.first.weight = before[1][1]["contents"][0]["weight"]
    assert_untouched(model, before)


# -------------------------------------------------------------------------------------------------------------- copies


def check_is_ordinary(copied: Model, model: Model) -> None:
    for module in copied.modules():
        assert type(module._parameters) is dict
        assert type(module._buffers) is dict
    for one, other in zip(copied.parameters(), model.parameters(), strict=True):
        assert type(one) is nn.Parameter
        assert one is not other
        assert torch.equal(one, other)
    with torch.no_grad():
        copied.first.weight.fill_(100)
    assert copied.first(torch.ones(1)).item() == 101
    assert next(model.parameters()).item() == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("inside_micro_batch", [True, False])
def test_a_copy_made_in_the_middle_is_an_ordinary_module(
    model: Model, duplicate: Callable[[Model], Model], inside_micro_batch: bool
) -> None:
    resolver, before = Doubling(), attributes(model)
    context = resolving(resolver) if inside_micro_batch else nullcontext()
    with installed(model, find_units(model, "Scale")), context:
        copied = duplicate(model)
        later = duplicate(copied)
        check_is_ordinary(copied, model)
    check_is_ordinary(later, model)
    assert resolver.calls == []
    assert_untouched(model, before)


def test_a_copy_made_in_the_middle_can_be_stepped_itself(model: Model) -> None:
    with stepping(model, Doubling()):
        copied = copy.deepcopy(model)
    resolver = Doubling()
    with stepping(copied, resolver):
        assert copied(torch.tensor([1.0])).item() == (1 * 6 + 2) * 6 + 2
    assert resolver.calls == ["first", "second.0"]
    assert copied(torch.tensor([1.0])).item() == (1 * 3 + 1) * 3 + 1


def test_one_unit_can_be_copied_alone(model: Model) -> None:
    with stepping(model, Doubling()):
        copied = copy.deepcopy(model.second)
    assert copied(torch.tensor([1.0])).item() == 4
