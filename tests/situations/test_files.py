"""Situations around checkpoints and state that users of other systems met."""

from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import TrainResult, train
from tests.helpers.models import Residual, residual_batches, seeded


def ours(num_microbatches: int = 3) -> RoundPipeStrategy:
    return RoundPipeStrategy(num_microbatches=num_microbatches)


def test_saving_copies_no_weights() -> None:
    """What is written is read from the masters where they are."""

    class Saves(Residual):
        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.lightning_module_state_dict()
            assert {name: t.data_ptr() for name, t in state.items()} == {
                name: p.data_ptr() for name, p in self.named_parameters()
            }
            self.looked = True

    assert train(lambda: seeded(Saves), residual_batches(), ours(), 2).module.looked


def test_checkpoint_in_another_file_system() -> None:
    found = train(lambda: seeded(Residual), residual_batches(), ours(), 2)
    found.trainer.save_checkpoint("memory://situations/last.ckpt")
    assert fsspec.filesystem("memory").exists("situations/last.ckpt")
    resumed = train(
        lambda: seeded(Residual), residual_batches(), ours(), 3, max_epochs=2, ckpt_path="memory://situations/last.ckpt"
    )
    whole = train(lambda: seeded(Residual), residual_batches(), ours(), 1, max_epochs=2)
    for name, tensor in whole.state.items():
        assert torch.equal(resumed.state[name], tensor), name


def test_frozen_weights_left_out_of_a_checkpoint(tmp_path: Any) -> None:
    """Plain Lightning's way: drop them when saving, and load with ``strict_loading = False``."""

    class Adapted(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.embed.requires_grad_(False)
            self.blocks[:3].requires_grad_(False)
            self.strict_loading = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name, parameter in self.named_parameters():
                if not parameter.requires_grad:
                    del checkpoint["state_dict"][name]

    def fit(epochs: int, ckpt_path: str | None = None) -> TrainResult:
        return train(lambda: seeded(Adapted), residual_batches(), ours(), 2, max_epochs=epochs, ckpt_path=ckpt_path)

    fit(1).trainer.save_checkpoint(path := str(tmp_path / "adapted.ckpt"))
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved.keys() == {name for name, p in seeded(Adapted).named_parameters() if p.requires_grad}
    whole, resumed = fit(2), fit(2, path)
    for name, tensor in whole.state.items():
        assert torch.equal(resumed.state[name], tensor), name


class Int8Momentum(torch.optim.Optimizer):
    """Keeps its momentum in 8 bits with a scale, as low-memory optimizers do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state["bits"].float() * state["scale"] if state else torch.zeros_like(parameter)
                momentum = 0.9 * momentum + parameter.grad
                scale = momentum.abs().max().clamp(min=1e-12) / 127
                state["bits"], state["scale"] = (momentum / scale).round().to(torch.int8), scale
                parameter.sub_(group["lr"] * momentum)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["bits"] = state["bits"].to(torch.int8)  # torch casts state to the dtype of the parameter.


@pytest.mark.parametrize("overlap", ["off", "exact"])
def test_optimizer_with_state_in_few_bits(overlap: str, tmp_path: Any) -> None:
    def fit(epochs: int, strategy: Any = None, ckpt_path: str | None = None) -> TrainResult:
        strategy = strategy or RoundPipeStrategy(num_microbatches=1, optimizer_overlap=overlap)
        return train(
            lambda: seeded(lambda: Residual(optimizer=Int8Momentum)),
            residual_batches(),
            strategy,
            1 if strategy == "auto" else 2,
            max_epochs=epochs,
            ckpt_path=ckpt_path,
        )

    whole = fit(2)
    plain = fit(2, "auto")
    half = fit(1)
    half.trainer.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    resumed = fit(2, ckpt_path=path)

    def bits(result: TrainResult) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in result.optimizer.items() if name.endswith("bits")}

    assert all(tensor.dtype is torch.int8 for tensor in bits(resumed).values()) and bits(resumed)
    for other in (plain, resumed):
        for name, tensor in whole.state.items():
            assert torch.equal(other.state[name], tensor), name
