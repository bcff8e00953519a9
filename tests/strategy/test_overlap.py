"""``optimizer_overlap="exact"``: updates run along with the backward pass, and give the same bits."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import TrainResult, train
from tests.helpers.models import CASES, Case, Residual, residual_batches, seeded

OVERLAPPED = [name for name in CASES if "sparse" not in name]


def fit(case: Case, overlap: str, **flags: Any) -> TrainResult:
    strategy = RoundPipeStrategy(num_microbatches=3, optimizer_overlap=overlap)
    return train(case.module, case.batches(), strategy, 3, **flags)


def assert_same_bits(one: TrainResult, other: TrainResult) -> None:
    assert one.state.keys() == other.state.keys()
    for name, tensor in one.state.items():
        assert torch.equal(tensor, other.state[name]), name
    for name, tensor in one.optimizer.items():
        assert torch.equal(tensor, other.optimizer[name]), name
    assert one.learning_rates == other.learning_rates
    assert one.trainer.global_step == other.trainer.global_step


@pytest.mark.parametrize("name", OVERLAPPED)
def test_same_bits_as_updating_afterwards(name: str) -> None:
    along = fit(CASES[name], "exact")
    assert_same_bits(fit(CASES[name], "off"), along)
    stats = along.trainer.strategy.step_stats
    assert stats is not None and stats.update_s > 0


@pytest.mark.parametrize(
    "flags", [{"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.1}], ids=str
)
def test_with_accumulation_and_clipping(flags: dict[str, Any]) -> None:
    case = CASES["residual_tied"]
    assert_same_bits(fit(case, "off", **flags), fit(case, "exact", **flags))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    case = Case(name, lambda: seeded(lambda: Residual(optimizer=OPTIMIZERS[name])), residual_batches)
    assert_same_bits(fit(case, "off"), fit(case, "exact"))


def test_parameter_groups_and_a_schedule_per_step() -> None:
    class Groups(Residual):
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": self.embed.parameters(), "lr": 0.1, "weight_decay": 0.0},
                {"params": [*self.blocks.parameters(), *self.head.parameters()], "lr": 0.01, "weight_decay": 0.1},
            ]
            optimizer = torch.optim.AdamW(groups)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=10)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    case = Case("groups", lambda: seeded(Groups), residual_batches)
    assert_same_bits(fit(case, "off"), fit(case, "exact"))


def test_gradients_are_there_after_the_step() -> None:
    class Keeps(L.Callback):
        def __init__(self) -> None:
            self.gradients: list[list[Tensor]] = []

        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            self.gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])

    case, seen = CASES["residual"], {}
    for overlap in ("off", "exact"):
        keeps = Keeps()
        fit(case, overlap, callbacks=[keeps])
        seen[overlap] = keeps.gradients
    for one, other in zip(seen["off"], seen["exact"], strict=True):
        assert len(one) == len(other) > 0
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class SeesGradients(L.Callback):
    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"gradient_clip_val": 0.1}, "clipping"),
        ({"callbacks": [SeesGradients()]}, "on_before_optimizer_step"),
    ],
    ids=["clipping", "callback"],
)
def test_what_needs_all_gradients_is_said_once(
    flags: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(CASES["residual"], "exact", **flags)
    messages = [record.getMessage() for record in caplog.records if "steps after the backward" in record.getMessage()]
    assert len(messages) == 1
    assert reason in messages[0]


def test_lbfgs_steps_as_a_whole() -> None:
    case = Case(
        "lbfgs",
        lambda: seeded(lambda: Residual(optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))),
        residual_batches,
    )
    assert_same_bits(fit(case, "off"), fit(case, "exact"))


def test_error_of_the_optimizer_arrives() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            if len(self.param_groups[0]["params"]) < 3:
                raise ArithmeticError("no step")
            return loss

    case = Case("fails", lambda: seeded(lambda: Residual(optimizer=lambda p: Fails(p, lr=0.1))), residual_batches)
    with pytest.raises(ArithmeticError, match="no step"):
        fit(case, "exact")
