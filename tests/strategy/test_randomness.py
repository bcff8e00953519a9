"""Randomness is counted: it depends on seed, step, micro-batch and call, and on nothing else."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, TrainResult, assert_results_equal, train, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded

MANY_WORKERS = [2, 4, 7]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Noisy(Residual):
    """Dropout in every block, and noise drawn in the user's own code around the units."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5, optimizer=adamw)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) + 0.1 * torch.rand_like(x)
        return self.head(nn.functional.dropout(self.lstm(x)[0], 0.2, self.training))


def fit(devices: int, num_microbatches: int, seed: int = 0, **flags: Any) -> TrainResult:
    strategy = RoundPipeStrategy(num_microbatches=num_microbatches)

    class SetsSeed(L.Callback):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            torch.manual_seed(seed)

    return train(lambda: seeded(Noisy), residual_batches(), strategy, devices, callbacks=[SetsSeed()], **flags)


@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
def test_bits_do_not_depend_on_the_number_of_workers(num_microbatches: int) -> None:
    expected = fit(1, num_microbatches, max_epochs=2, accumulate_grad_batches=2)
    for devices in MANY_WORKERS:
        found = fit(devices, num_microbatches, max_epochs=2, accumulate_grad_batches=2)
        assert_results_equal(expected, found)


def test_bits_repeat_with_the_seed_and_change_with_it() -> None:
    first = fit(3, 3)
    assert_results_equal(first, fit(3, 3))
    other = fit(3, 3, seed=1)
    assert not torch.equal(first.state["head.weight"], other.state["head.weight"])


class RecordsMasks(nn.Module):
    """Dropout that keeps every mask it drew, by the rows it drew it for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.dropout = nn.Dropout(0.5)
        self.masks: dict[int, list[Tensor]] = {}

    def forward(self, x: Tensor, row: int) -> Tensor:
        mask = self.dropout(torch.ones_like(x))
        self.masks.setdefault(row, []).append(mask.detach().clone())
        return x * mask * self.weight


class MaskedModel(Residual):
    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(RecordsMasks() for _ in range(6))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets, rows = batch
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, int(rows[0]))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_recomputation_draws_the_mask_again() -> None:
    """Same mask in forward and recomputation; another one in another block, micro-batch and step."""
    batches = [(*batch, torch.arange(6) + 6 * step) for step, batch in enumerate(residual_batches(num=2))]
    module = seeded(MaskedModel)
    trainer_for(RoundPipeStrategy(num_microbatches=3), 2).fit(module, BatchDealer(batches))
    drawn = [masks for block in module.blocks for masks in block.masks.values()]
    assert len(drawn) == 6 * 3 * 2
    assert any(len(masks) > 1 for masks in drawn), "no block was recomputed"
    for masks in drawn:
        assert all(torch.equal(masks[0], mask) for mask in masks)
    assert len({tuple(masks[0].flatten().tolist()) for masks in drawn}) == len(drawn)


def test_evaluation_leaves_the_random_stream_of_training_alone() -> None:
    """Validation inside an epoch must not change the dropout of the steps after it."""
    flags: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    alone = fit(2, 3)
    validated = fit(2, 3, val_batches=residual_batches(num=2), **flags)
    for name, tensor in alone.state.items():
        assert torch.equal(tensor, validated.state[name]), name


def test_eval_mode_of_a_part_is_honoured() -> None:
    """A frozen part kept in ``eval()`` has no dropout, while gradients flow through it."""

    class PartInEval(Noisy):
        def on_train_epoch_start(self) -> None:
            self.blocks.eval()
            self.lstm.eval()

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.lstm(x)[0])

    first = train(lambda: seeded(PartInEval), residual_batches())
    found = train(lambda: seeded(PartInEval), residual_batches(), RoundPipeStrategy(num_microbatches=2), 2)
    for name, tensor in first.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    assert not found.module.blocks[0].training


def test_global_stream_is_left_to_the_user() -> None:
    """Shuffling and numbers drawn in hooks are those of plain Lightning: steps draw nothing from that generator."""
    tokens, targets = residual_batches(num=1, rows=24)[0]
    rows = list(zip(tokens, targets, strict=True))

    class Draws(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.drawn: list[float] = []
            self.first_tokens: list[list[int]] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.first_tokens.append(batch[0][:, 0].tolist())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.drawn.append(float(torch.rand(())))

    def fit(strategy: Any, devices: int) -> Draws:
        module = seeded(Draws)
        torch.manual_seed(5)
        trainer_for(strategy, devices, max_epochs=3).fit(module, DataLoader(rows, batch_size=6, shuffle=True))
        return module

    expected, found = fit("auto", 1), fit(RoundPipeStrategy(num_microbatches=3), 2)
    assert found.first_tokens == expected.first_tokens
    assert found.drawn == expected.drawn
