"""What the structure of a unit shows, and what a recomputation must put back."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_roundpipe.runtime.traits import UnitTraits, module_attributes, restored_attributes
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


def test_training_flags_name_the_combination_of_all_modules() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    found = traits(module)
    training = found.training_flags
    module[1].eval()
    partly = found.training_flags
    module.eval()
    evaluating = found.training_flags
    module.train()
    assert len({training, partly, evaluating}) == 3
    assert found.training_flags == training


# ----------------------------------------------------------------------------------------------------------- attributes


@pytest.fixture
def module() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2))
    module.number, module[0].note = 1, "before"
    return module


def test_snapshots_hold_plain_attributes_of_all_modules(module: nn.Sequential) -> None:
    snapshot = module_attributes(module)
    module.number = 2
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert list(snapshot) == [module, module[0]]
    assert snapshot[module]["number"] == 1
    assert snapshot[module[0]]["note"] == "before"
    assert snapshot[module]["training"] is True
    assert not {"_parameters", "_buffers", "_modules"} & snapshot[module].keys()


def test_attributes_are_put_back(module: nn.Sequential) -> None:
    before = module_attributes(module)
    with restored_attributes(module):
        module.number = 2
        module[0].note = "after"
        module[0].extra = torch.ones(1)
        module.eval()
        del module[0].in_features
    assert module_attributes(module) == before
    assert module.training
    assert not hasattr(module[0], "extra")


def test_attributes_are_put_back_after_an_error(module: nn.Sequential) -> None:
    with pytest.raises(KeyError), restored_attributes(module):
        module.number = 2
        raise KeyError
    assert module.number == 1


def test_parameters_and_children_are_left_to_others(module: nn.Sequential) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with restored_attributes(module):
        module[0].weight = weight
        module.add_module("late", nn.ReLU())
    assert module[0].weight is weight
    assert isinstance(module.late, nn.ReLU)
