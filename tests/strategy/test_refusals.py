"""What can not be right is refused by name, before it trains anything wrong."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.exceptions import UnsupportedUseError
from tests.helpers.equivalence import assert_results_close, train
from tests.helpers.models import Residual, residual_batches, seeded


def fit(build: Any, num_microbatches: int = 3) -> None:
    train(lambda: seeded(build), residual_batches(), RoundPipeStrategy(num_microbatches=num_microbatches), 2)


class Accumulates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total += x.detach().mean()
        return x + self.layer(x)


class WithAccumulator(Residual):
    def loss(self, batch: Any) -> Tensor:
        total = torch.zeros(())
        hidden = self.embed(batch[0])
        for block in self.blocks:
            hidden = block(hidden, total)
        return self.head(hidden).square().mean() + total

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Accumulates() for _ in range(3))


def test_accumulator_argument() -> None:
    with pytest.raises(UnsupportedUseError, match=r"`blocks\.0` changed a tensor among its arguments"):
        fit(WithAccumulator)


class StoresInBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("aux", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.layer(x)
        self.aux = y.square().mean()
        return y


def test_buffer_with_a_gradient() -> None:
    def build() -> L.LightningModule:
        module = Residual()
        module.blocks = nn.ModuleList(StoresInBuffer() for _ in range(3))
        return module

    with pytest.raises(UnsupportedUseError, match="Buffer `aux` of StoresInBuffer"):
        fit(build, num_microbatches=1)


class HalvesItsWeight(nn.Module):
    """Puts half of its weight in the place of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = nn.Parameter(self.layer.weight / 2)
        return x + self.layer(x)


class DropsItsBias(HalvesItsWeight):
    """Takes its bias off and does not put it back."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.layer(x)
        del self.layer.bias
        return y


@pytest.mark.parametrize(("block", "name"), [(HalvesItsWeight, "weight"), (DropsItsBias, "bias")])
def test_parameters_replaced_in_a_unit(block: type[HalvesItsWeight], name: str) -> None:
    """Only what is put back before the unit returns may be taken off; the module is left as it was."""
    module = seeded(Residual)
    module.blocks = nn.ModuleList(block() for _ in range(3))
    before = dict(module.named_parameters())
    with pytest.raises(UnsupportedUseError, match=rf"Parameter `{name}` of Linear was replaced"):
        train(lambda: module, residual_batches(), RoundPipeStrategy(num_microbatches=2), 2)
    after = dict(module.named_parameters())
    assert list(after) == list(before)
    assert all(after[key] is parameter for key, parameter in before.items())


class CachesComputedWeights(Residual):
    """Computes its parametrized weights once for a whole forward pass, as recurrent models do."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)

    def loss(self, batch: Any) -> Tensor:
        with nn.utils.parametrize.cached():
            return super().loss(batch)


def test_cache_of_computed_parameters_around_units() -> None:
    with pytest.raises(UnsupportedUseError, match=r"`torch\.nn\.utils\.parametrize\.cached\(\)`"):
        fit(CachesComputedWeights)


class CachingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return x + self.layer(self.layer(x).relu())


@pytest.mark.parametrize("replica_groups", [1, 2])
def test_cache_of_computed_parameters_inside_a_unit(replica_groups: int) -> None:
    def build() -> L.LightningModule:
        module = Residual()
        module.blocks = nn.ModuleList(CachingBlock() for _ in range(3))
        return module.double()

    expected = train(lambda: seeded(build), residual_batches())
    strategy = RoundPipeStrategy(num_microbatches=6, replica_groups=replica_groups)
    assert_results_close(expected, train(lambda: seeded(build), residual_batches(), strategy, 4), rtol=1e-9)


class FreezesForAWhile(Residual):
    def loss(self, batch: Any) -> Tensor:
        self.blocks[0].requires_grad_(False)
        with torch.no_grad():
            target = self(batch[0])
        self.blocks[0].requires_grad_(True)
        return super().loss(batch) + (self(batch[0]) - target).square().mean()


def test_freezing_inside_a_step() -> None:
    with pytest.raises(UnsupportedUseError, match="num_microbatches=1"):
        fit(FreezesForAWhile)


def test_freezing_inside_a_step_with_one_microbatch() -> None:
    expected = train(lambda: seeded(FreezesForAWhile), residual_batches())
    found = train(lambda: seeded(FreezesForAWhile), residual_batches(), RoundPipeStrategy(num_microbatches=1), 2)
    assert_results_close(expected, found, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_microbatches": "3"}, "num_microbatches"),
        ({"num_microbatches": True}, "num_microbatches"),
        ({"workers_per_device": 1.5}, "workers_per_device"),
        ({"gpu_memory_limit": "10GB"}, "gpu_memory_limit"),
        ({"units": [nn.Linear]}, "units"),
        ({"loss_weight": 2.0}, "loss_weight"),
        ({"split_rules": ["x"]}, "split_rules"),
        ({"split_rules": {0: 0}}, "split_rules"),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_type(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        RoundPipeStrategy(**arguments)


def test_off_as_yaml_reads_it() -> None:
    RoundPipeStrategy(optimizer_overlap=False)
