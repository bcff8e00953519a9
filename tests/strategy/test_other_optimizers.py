"""Optimizers that are not elementwise, and those with states in few bits: the same bits in every mode of overlap."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime.testing import executor_of
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.late import Late


class Layers(L.LightningModule):
    """Wide enough for states in 8 bits."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.optimizer = optimizer
        self.overlapped: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        self.overlapped.append(executor_of(strategy).store.pending is not None)
        for layer in self.layers:
            batch = batch + torch.tanh(layer(batch))
        return (batch - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class LateLayers(Late, Layers):
    """The reference for delayed updates."""


def fit(overlap: str, module: Layers) -> Layers:
    generator = torch.Generator().manual_seed(1)
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2, optimizer_overlap=overlap), 2)
    trainer.fit(module, BatchDealer([torch.randn(4, 64, generator=generator) for _ in range(5)]))
    return module


def assert_same_bits(overlap: str, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    expected = fit("off", (LateLayers if overlap == "stale" else Layers)(optimizer))
    found = fit(overlap, Layers(optimizer))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has it")
@pytest.mark.parametrize("overlap", ["exact", "stale"])
def test_muon(overlap: str) -> None:
    """For matrices only; each update is that of a whole matrix."""

    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=1e-2)

    assert_same_bits(overlap, muon)


@pytest.mark.parametrize("overlap", ["exact", "stale"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_states_in_few_bits(name: str, overlap: str) -> None:
    optimizers = pytest.importorskip("torchao.optim", exc_type=ImportError)
    with torch.compiler.set_stance("force_eager"):  # They compile their updates, which takes long.
        assert_same_bits(overlap, lambda parameters: getattr(optimizers, name)(parameters, lr=1e-2))
