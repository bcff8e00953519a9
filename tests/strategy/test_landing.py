"""Gradients of a long stage go home call by call, and are updated while it still runs."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.plan.files import save_schedule
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.plan.timeline import Lane

pytestmark = pytest.mark.timing

BACKWARD_S, UPDATE_S, NUM_LAYERS = 0.02, 0.01, 8


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return grad


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return SlowBackward.apply(self.linear(x))  # type: ignore[no-any-return, no-untyped-call]


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(UPDATE_S * sum(p.ndim == 2 for group in self.param_groups for p in group["params"]))
        return super().step(closure)


class Stack(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Slow() for _ in range(NUM_LAYERS)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        """Keeps updates from reaching into the next step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowSGD(self.parameters(), lr=0.01)


def test_updates_run_along_with_a_single_stage(tmp_path: Path) -> None:
    save_schedule(Schedule(Plan((), NUM_LAYERS, ()), 1, 2), str(tmp_path / "plan.json"))
    strategy = RoundPipeStrategy(plan=tmp_path / "plan.json", units=["Slow"])
    flags: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, **flags
    )
    trainer.fit(Stack(), DataLoader(torch.randn(6, 4), batch_size=2))
    stats = strategy.step_stats
    assert stats is not None
    # The first micro-batch's backward shows nothing; the last one's hides all but the update of the last layer.
    assert stats.update_s >= NUM_LAYERS * UPDATE_S
    assert stats.update_exposed_s < 3 * UPDATE_S
    landed = [transfer.stop for transfer in stats.transfers if transfer.lane is Lane.D2H]
    assert max(landed) - min(landed) > (NUM_LAYERS - 2) * BACKWARD_S
