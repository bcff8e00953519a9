"""What the structure of a unit shows, and what a recomputation must put back."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.traits import Attributes, UnitTraits, guard, has_graph, unguard
from lightning_roundpipe.runtime.units import Unit


def traits(module: nn.Module) -> UnitTraits:
    return UnitTraits(Unit(0, "unit", module))


def holding(wrap: Callable[[nn.Parameter], object]) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module.kept = wrap(module[0].weight)
    return module


@pytest.mark.parametrize(
    "wrap",
    [
        lambda weight: [weight],
        lambda weight: (weight,),
        lambda weight: {"a": weight},
        lambda weight: [[None, weight]],
        lambda weight: [{"a": weight}],
    ],
)
def test_parameters_in_containers_are_hidden(wrap: Callable[[nn.Parameter], object]) -> None:
    assert traits(holding(wrap)).hides_parameters


@pytest.mark.parametrize("wrap", [lambda _: [torch.ones(1)], lambda weight: weight.detach(), lambda _: None])
def test_other_tensors_are_not(wrap: Callable[[nn.Parameter], object]) -> None:
    assert not traits(holding(wrap)).hides_parameters


@pytest.mark.parametrize(
    "module, hides",
    [
        (nn.LSTM(2, 2), True),
        (nn.Sequential(nn.GRU(2, 2)), True),
        (nn.Linear(2, 2), False),
        (nn.MultiheadAttention(2, 1), False),
        (nn.BatchNorm1d(2), False),
    ],
)
def test_recurrent_networks_hide_parameters(module: nn.Module, hides: bool) -> None:
    assert traits(module).hides_parameters == hides


def test_mode_is_all_that_switches_how_a_unit_runs() -> None:
    """A unit that draws nothing in one mode may do so in another."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.1))
    found = traits(module)
    modes = [found.mode]
    module[1].eval()
    modes.append(found.mode)
    module[1].train()
    module[1].p = 0.0
    modes.append(found.mode)
    module[2].p = 0.0
    modes.append(found.mode)
    module.eval()
    modes.append(found.mode)
    assert len(set(modes)) == 5
    module.train()
    module[1].p = module[2].p = 0.1
    assert found.mode == modes[0]


# ---------------------------------------------------------------------------------------------------------- attributes


@pytest.fixture
def module() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2))
    module.number, module[0].note = 1, "before"
    module.log, module.table, module.names = [1, torch.ones(2)], {"a": 1}, {"x"}
    module.recent = deque([1, 2], maxlen=2)
    return module


def set_number(module: nn.Sequential) -> None:
    module.number = 2


CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], list[str]]] = {
    "nothing": (lambda module: module(torch.ones(1, 2)), []),
    "attribute": (set_number, ["number"]),
    "attribute of a child": (lambda module: setattr(module[0], "note", "after"), ["note"]),
    "new attribute": (lambda module: setattr(module[0], "extra", torch.ones(1)), ["extra"]),
    "deleted attribute": (lambda module: delattr(module[0], "in_features"), ["in_features"]),
    "training": (lambda module: module[0].eval(), ["training"]),
    "list": (lambda module: module.log.append(torch.ones(2)), ["log"]),
    "item of a list": (lambda module: module.log.__setitem__(0, 2), ["log"]),
    "dict": (lambda module: module.table.update(b=torch.ones(2)), ["table"]),
    "set": (lambda module: module.names.add("y"), ["names"]),
    "deque": (lambda module: module.recent.append(3), ["recent"]),
    "shorter list": (lambda module: module.log.clear(), ["log"]),
    "parameter": (lambda module: setattr(module[0], "weight", nn.Parameter(torch.ones(2, 2))), []),
    "buffer": (lambda module: module[0].register_buffer("late", torch.ones(1)), []),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_named(module: nn.Sequential, change: str) -> None:
    run, expected = CHANGES[change]
    before = Attributes(module)
    assert before.changed() == []
    run(module)
    assert [name for _, name in before.changed()] == expected


def test_changes_come_with_the_module(module: nn.Sequential) -> None:
    before = Attributes(module)
    module.extra = 1
    del module[0].note
    assert before.changed() == [(module, "extra"), (module[0], "note")]


def test_one_attribute_is_put_back(module: nn.Sequential) -> None:
    before = Attributes(module)
    module.number, module.extra, module[0].note = 2, 3, "after"
    before.restore_one(module, "number")
    before.restore_one(module, "extra")
    assert module.number == 1
    assert not hasattr(module, "extra")
    assert module[0].note == "after"


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_are_put_back(module: nn.Sequential, change: str) -> None:
    log = module.log
    before = Attributes(module)
    with before.restored():
        CHANGES[change][0](module)
    assert before.changed() == []
    assert (module.number, module[0].note, module[0].in_features, module.training) == (1, "before", 2, True)
    assert module.log is log
    assert len(log) == 2
    assert log[0] == 1
    assert (module.table, module.names, module.recent) == ({"a": 1}, {"x"}, deque([1, 2]))
    assert module.recent.maxlen == 2
    assert not hasattr(module[0], "extra")


def test_attributes_are_put_back_after_an_error(module: nn.Sequential) -> None:
    with pytest.raises(KeyError), Attributes(module).restored():
        module.number = 2
        raise KeyError
    assert module.number == 1


def test_parameters_and_children_are_left_to_others(module: nn.Sequential) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with Attributes(module).restored():
        module[0].weight = weight
        module.add_module("late", nn.ReLU())
    assert module[0].weight is weight
    assert isinstance(module.late, nn.ReLU)


# ------------------------------------------------------------------------------------------- tensors kept by a unit


def product() -> Tensor:
    return torch.ones(2, requires_grad=True) * 2


@pytest.mark.parametrize(
    "value, graph",
    [
        (product(), True),
        ([1, product()], True),
        ((None, [product()]), True),
        (torch.ones(1, requires_grad=True), False),
        (product().detach(), False),
        ([torch.ones(1)], False),
        ("text", False),
        (None, False),
    ],
)
def test_what_was_computed_with_a_graph(value: object, graph: bool) -> None:
    assert has_graph(value) == graph


USES: dict[str, Callable[[Any], object]] = {
    "tensor": lambda value: value + 1,
    "list": sum,
    "tuple": torch.stack,
}


@pytest.mark.parametrize("kind", USES)
def test_a_guarded_tensor_can_not_be_used(kind: str) -> None:
    module, tensors = nn.Identity(), [product(), product()]
    module.kept = {"tensor": tensors[0], "list": tensors, "tuple": tuple(tensors)}[kind]
    guard(module, "kept")
    with pytest.raises(UnsupportedUseError, match="Return it from `forward`, or store it detached"):
        USES[kind](module.kept)
    unguard(module, "kept")
    USES[kind](module.kept)
    assert not has_graph(module.kept)


def test_the_form_of_a_guarded_tensor_may_be_looked_at() -> None:
    module = nn.Identity()
    module.kept = product()
    guard(module, "kept")
    assert module.kept.shape == (2,)
    assert module.kept.dtype is torch.float32
    assert not module.kept.requires_grad


@pytest.mark.parametrize("value", [1, None, "text", torch.ones(1, dtype=torch.int64)])
def test_other_values_are_not_guarded(value: object) -> None:
    module = nn.Identity()
    module.kept = value
    guard(module, "kept")
    assert module.kept is value
