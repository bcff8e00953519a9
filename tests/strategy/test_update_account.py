"""How much of an update is hidden: layers and an optimizer that sleep, on virtual workers."""

import itertools
import statistics
import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime import pending, updater
from lightning_roundpipe.runtime.stats import StepStats
from tests.helpers.equivalence import BatchDealer, trainer_for

pytestmark = pytest.mark.timing

NUM_UNITS = 6
FORWARD_S = 0.002
BACKWARD_S = 0.004
NUM_MICROBATCHES = 2
UNIT_S = NUM_MICROBATCHES * (2 * FORWARD_S + BACKWARD_S)
"""Forward, recomputation and backward of one layer."""


class _Sleep(torch.autograd.Function):
    """Identity that takes its time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight)


class SleepyOptimizer(torch.optim.SGD):
    """Takes ``update_s`` for each parameter."""

    update_s = 0.0

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        time.sleep(self.update_s * sum(len(group["params"]) for group in self.param_groups))
        super().step()
        return loss


class Sleepers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Sleeper() for _ in range(NUM_UNITS))
        self.starts: dict[int, float] = {}
        self.stats: list[StepStats] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        if strategy.step_stats is not None and strategy.step_stats not in self.stats:
            self.stats.append(strategy.step_stats)  # Of the step before.
        self.starts.setdefault(batch_idx, time.perf_counter())
        for unit in self.units:
            batch = unit(batch)
        return batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SleepyOptimizer(self.parameters(), lr=0.1)


def fit(overlap: str, update_s: float, monkeypatch: pytest.MonkeyPatch, workers: int) -> tuple[float, list[StepStats]]:
    """Seconds from the start of one step to that of the next, and the account of the steps."""
    for part in (pending, updater):
        monkeypatch.setattr(part, "_BATCH_ELEMENTS", 1)
    monkeypatch.setattr(SleepyOptimizer, "update_s", update_s / NUM_UNITS)
    module = Sleepers()
    strategy = RoundPipeStrategy(NUM_MICROBATCHES, optimizer_overlap=overlap)
    trainer_for(strategy, workers).fit(module, BatchDealer([torch.ones(4, 4)] * 8))
    starts = list(module.starts.values())[4:]  # The first steps find the plan, and see what the optimizer does.
    # The least: other programs only make it longer.
    return min(after - before for before, after in itertools.pairwise(starts)), module.stats[4:]


@pytest.mark.parametrize(
    ("overlap", "workers", "share"), [("exact", 1, 0.5), ("exact", 2, 0.5), ("exact", 2, 1.5), ("stale", 2, 1.5)]
)
def test_a_step_takes_no_longer_than_its_parts(
    overlap: str, workers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``share``: of the time of an update in that of a step without."""
    compute_s, _ = fit(overlap, 0.0, monkeypatch, workers)
    update_s = share * compute_s
    step_s, stats = fit(overlap, update_s, monkeypatch, workers)
    assert step_s <= max(compute_s, update_s) + UNIT_S + update_s / NUM_UNITS
    # What of an update ran in the next step is counted there.
    assert 0.8 * update_s <= statistics.mean(each.update_s for each in stats) <= 2 * update_s
    if share == 0.5:
        assert min(each.update_exposed_s / each.update_s for each in stats) <= 0.2
    else:
        exposed_s = statistics.median(each.update_exposed_s for each in stats)
        assert exposed_s >= 0.5 * (update_s - compute_s)
        assert all(each.update_exposed_s < each.update_s for each in stats)
