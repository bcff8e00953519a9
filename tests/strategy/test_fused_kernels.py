"""Fused CPU kernels are chosen where the user said nothing, and leave no trace in checkpoints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded


def fit(optimizer: Callable[[Any], torch.optim.Optimizer], strategy: Any = None, **flags: Any) -> Any:
    module = seeded(lambda: Residual(optimizer=optimizer))
    trainer = trainer_for(strategy or RoundPipeStrategy(num_microbatches=2), 2 if strategy is None else 1, **flags)
    trainer.fit(module, BatchDealer(residual_batches()))
    return module


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_they_are_chosen_and_agree(name: str) -> None:
    cls = getattr(torch.optim, name)
    module = fit(lambda p: cls(p, lr=1e-2))
    assert all(group["fused"] for group in module.trainer.optimizers[0].param_groups)
    plain = fit(lambda p: cls(p, lr=1e-2), "auto")
    assert not any(group["fused"] for group in plain.trainer.optimizers[0].param_groups)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=False),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
        lambda p: torch.optim.RMSprop(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
    ],
)  # fmt: skip
def test_nothing_is_chosen_against_the_user_or_the_kernels(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    module = fit(optimizer)
    assert not any(group.get("fused") for group in module.trainer.optimizers[0].param_groups)


def test_a_loss_scale_stands_in_the_way() -> None:
    module = fit(
        lambda p: torch.optim.AdamW(p, lr=1e-2), plugins=[RoundPipePrecision("16-mixed")], gradient_clip_val=1.0
    )
    assert not any(group["fused"] for group in module.trainer.optimizers[0].param_groups)


def test_half_precision_weights_stand_in_the_way() -> None:
    module = fit(lambda p: torch.optim.SGD(p, lr=1e-1), precision="bf16-true")
    assert not any(group["fused"] for group in module.trainer.optimizers[0].param_groups)
    plain = fit(lambda p: torch.optim.SGD(p, lr=1e-1), "auto", precision="bf16-true")
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)


def test_sparse_gradients_stand_in_the_way() -> None:
    class Sparse(Residual):
        def __init__(self) -> None:
            super().__init__(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
            self.other = nn.Embedding(4, 4, sparse=True)

    module = seeded(Sparse)
    trainer_for(RoundPipeStrategy(num_microbatches=2), 2).fit(module, BatchDealer(residual_batches()))
    assert not any(group["fused"] for group in module.trainer.optimizers[0].param_groups)


def test_checkpoints_do_not_tell_and_are_resumed_from() -> None:
    module = fit(lambda p: torch.optim.AdamW(p, lr=1e-2))
    module.trainer.save_checkpoint("one.ckpt")
    state = torch.load("one.ckpt", weights_only=True)["optimizer_states"][0]
    assert all(group["fused"] is None for group in state["param_groups"])
    again = seeded(lambda: Residual(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)))
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2, max_epochs=2)
    trainer.fit(again, BatchDealer(residual_batches()), ckpt_path="one.ckpt")
    assert all(group["fused"] for group in trainer.optimizers[0].param_groups)
    through = fit(lambda p: torch.optim.AdamW(p, lr=1e-2), max_epochs=2)
    for one, other in zip(again.parameters(), through.parameters(), strict=True):
        assert torch.equal(one, other)
