"""Learning rates follow the trace of plain Lightning, and the rate of step n is the one of update n."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim import lr_scheduler

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import assert_results_close, train
from tests.helpers.models import Residual, residual_batches, seeded

Schedule = Callable[[torch.optim.Optimizer], dict[str, Any]]

SCHEDULES: dict[str, Schedule] = {
    "step": lambda optimizer: {"scheduler": lr_scheduler.StepLR(optimizer, 2, gamma=0.5), "interval": "step"},
    "every_second_step": lambda optimizer: {
        "scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": 2,
    },
    "epoch": lambda optimizer: {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"},
    "plateau": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0), "monitor": "loss",
    },
    "one_cycle": lambda optimizer: {
        "scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20), "interval": "step",
    },
}  # fmt: skip


class Scheduled(Residual):
    """Two parameter groups of different learning rate and weight decay, and a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_trace_equals_plain_lightning(name: str, accumulate: int) -> None:
    def module() -> L.LightningModule:
        return seeded(lambda: Scheduled(SCHEDULES[name])).double()

    flags: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    expected = train(module, residual_batches(), **flags)
    found = train(module, residual_batches(), RoundPipeStrategy(num_microbatches=3), 2, **flags)
    assert len(set(expected.learning_rates)) > 1
    assert_results_close(expected, found, rtol=1e-10)


class ManualOptimizer(torch.optim.SGD):
    """Updates with its own loop over ``param_groups``, as optimizers outside torch do."""

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
                        self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return loss


@pytest.mark.parametrize(
    "build", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adam, ManualOptimizer]
)
def test_optimizers_are_the_users_own(build: Any) -> None:
    """Any optimizer class trains, and the trainer keeps the object that ``configure_optimizers`` returned."""
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(build(parameters, lr=1e-3))
        return made[-1]

    def module() -> L.LightningModule:
        return seeded(lambda: Residual(optimizer=make)).double()

    expected = train(module, residual_batches())
    found = train(module, residual_batches(), RoundPipeStrategy(num_microbatches=2), 2)
    assert_results_close(expected, found, rtol=1e-8)
    assert found.trainer.optimizers[0] is made[-1]
