"""Gradients of what user code between units uses are summed in micro-batch order, wherever stages are cut."""

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import train
from tests.helpers.models import StepModule, residual_batches, seeded


class Slow(nn.Module):
    """A layer that takes any time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(random.Random().random() / 500)
        return x + torch.tanh(self.layer(x))


class LooseEverywhere(StepModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Slow() for _ in range(5))
        self.scales = nn.Parameter(torch.randn(6, 16))
        self.head = nn.Linear(16, 32)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0]) * self.scales[0]
        for index, block in enumerate(self.blocks):
            x = block(x) * self.scales[index + 1]
        return F.cross_entropy(self.head(x).flatten(0, -2), batch[1].flatten())


@pytest.mark.parametrize("overlap", ["off", "exact"])
def test_same_bits_for_any_number_of_workers(overlap: str) -> None:
    states = []
    for workers in (1, 2, 3, 5, 7):
        strategy = RoundPipeStrategy(num_microbatches=5, optimizer_overlap=overlap)
        states.append(train(lambda: seeded(LooseEverywhere), residual_batches(), strategy, workers).state)
    for state in states[1:]:
        assert all(torch.equal(tensor, state[name]) for name, tensor in states[0].items())
