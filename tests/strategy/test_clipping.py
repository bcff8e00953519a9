"""Clipping sees complete gradients, once per optimizer step, and what it does to them is what the optimizer uses."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, assert_results_close, train, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Recording(Residual):
    """Keeps the gradient norms before and after clipping."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: list[dict[str, float]] = []
        self.after: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.before.append({name: float(norm) for name, norm in grad_norm(self, 2).items()})

    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        super().configure_gradient_clipping(*args, **options)
        self.after.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_plain_lightning(algorithm: str, accumulate: int) -> None:
    value = {"norm": 0.1, "value": 0.003}[algorithm]
    flags: dict[str, Any] = {
        "gradient_clip_val": value,
        "gradient_clip_algorithm": algorithm,
        "accumulate_grad_batches": accumulate,
    }

    def module() -> L.LightningModule:
        return seeded(lambda: Recording(tied=True, optimizer=adamw)).double()

    expected = train(module, residual_batches(), **flags)
    found = train(module, residual_batches(), RoundPipeStrategy(num_microbatches=3), 3, **flags)
    assert_results_close(expected, found, rtol=1e-10)
    assert len(found.module.before) == 4 // accumulate
    for one, two in zip(expected.module.before, found.module.before, strict=True):
        assert two == pytest.approx(one)
    assert found.module.after == pytest.approx(expected.module.after)
    if algorithm == "norm":
        assert found.module.after == pytest.approx([value] * len(found.module.after), rel=1e-4)


class ZeroesGradients(Residual):
    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0
            parameter.grad.mul_(0)


def test_edits_of_an_overridden_hook_are_used() -> None:
    before = seeded(ZeroesGradients).state_dict()
    found = train(lambda: seeded(ZeroesGradients), residual_batches(), RoundPipeStrategy(num_microbatches=2), 2)
    for name, parameter in found.module.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_gradients_replaced_in_a_hook_are_used(hook: str) -> None:
    class Replaces(Residual):
        pass

    def replace(module: L.LightningModule, *args: Any) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)

    setattr(Replaces, hook, replace)
    before = seeded(Replaces).state_dict()
    batches = residual_batches(num=2)
    found = train(lambda: seeded(Replaces), batches, RoundPipeStrategy(num_microbatches=2), 2)
    for name, parameter in found.module.named_parameters():
        torch.testing.assert_close(parameter, before[name] - 0.1 * len(batches), msg=name)


class PlantsInfinity(Residual):
    """Makes one gradient infinite, then clips with ``error_if_nonfinite``."""

    def loss(self, batch: Any) -> Tensor:
        weight = self.blocks[1].up.weight
        return super().loss(batch) + torch.sqrt(weight - weight.detach()).sum()  # The slope of the root at zero.

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)


def test_nonfinite_norm_raises_before_the_update() -> None:
    module = seeded(PlantsInfinity)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2)
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.fit(module, BatchDealer(residual_batches()))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_fused_optimizers_are_clipped_without_a_loss_scale() -> None:
    """Lightning refuses that for every mixed precision, though only a loss scale would be in the way."""

    def fit(fused: bool) -> dict[str, Tensor]:
        module = seeded(lambda: Residual(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=fused)))
        strategy = RoundPipeStrategy(num_microbatches=2)
        trainer_for(strategy, 2, precision="bf16-mixed", gradient_clip_val=0.1).fit(
            module, BatchDealer(residual_batches())
        )
        return module.state_dict()

    torch.testing.assert_close(fit(fused=True), fit(fused=False), rtol=1e-3, atol=1e-4)
