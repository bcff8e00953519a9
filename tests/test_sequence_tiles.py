"""``sequence_tiles``: the numbers of the whole sequence at once, the memory of a tile, or a refusal."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.sequence_tiles import tiled_over_the_sequence
from tests.helpers.equivalence import as_float64, assert_equivalent, assert_results_close, train
from tests.helpers.memory import PeakBytes
from tests.helpers.models import CASES, Block, Residual, residual_batches, seeded, token_batches


@pytest.mark.parametrize("tile", [1, 3, 8])
def test_equals_plain_training(tile: int) -> None:
    build = as_float64(CASES["qwen3_tied"].module)
    expected = train(build, token_batches(num=3))
    strategy = RoundPipeStrategy(num_microbatches=3, sequence_tiles={"Qwen3MLP": tile})
    found = train(build, token_batches(num=3), strategy, devices=2)
    assert_results_close(expected, found, rtol=1e-9)
    assert not any("forward" in vars(module) for module in found.module.modules())


def test_whole_blocks_as_units() -> None:
    """The tiled modules are units themselves, and the lookups of their second pass come from within autograd."""
    assert_equivalent(CASES["residual"], 2, 3, sequence_tiles={"Block": 2})


def peak_bytes(tile: int, positions: int, *, trains: bool) -> int:
    block = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8))
    x = torch.randn(1, positions, 8, requires_grad=trains)
    tiles = tiled_over_the_sequence(block, {"Sequential": tile}, set())
    with tiles, torch.set_grad_enabled(trains), PeakBytes() as counter:
        y = block(x)
        if trains:
            y.sum().backward()
    return counter.peak


@pytest.mark.parametrize("trains", [False, True])
def test_inner_activations_take_the_memory_of_a_tile(trains: bool) -> None:
    whole, tiled = peak_bytes(2048, 2048, trains=trains), peak_bytes(64, 2048, trains=trains)
    assert whole > 2048 * 512 * 4 * 2
    assert tiled < whole / 4
    longer = peak_bytes(64, 4096, trains=trains)
    assert longer - tiled < 2048 * 8 * 4 * 12  # inputs and outputs, not what lies between


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-2)


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Mask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        (Mixes(), 1, "depends on other positions"),
        (Two(), 1, "does not return one tensor"),
        (Mask(), 2, "takes more than one argument"),
        (Block(8, dropout=0.5), 1, "has dropout"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_treat_positions_alike_is_refused(module: nn.Module, arguments: int, reason: str) -> None:
    name = type(module).__name__
    with (
        tiled_over_the_sequence(module, {name: 2}, set()),
        pytest.raises(UnsupportedUseError, match=f"not for {name}: .*{reason}"),
    ):
        module(*[torch.randn(2, 6, 8)] * arguments)


def test_classes_that_are_not_there_are_refused() -> None:
    strategy = RoundPipeStrategy(num_microbatches=2, sequence_tiles={"Qwen3MLP": 4})
    with pytest.raises(UnsupportedUseError, match="there is none of class Qwen3MLP"):
        train(lambda: seeded(Residual), residual_batches(), strategy)


@pytest.mark.parametrize("tiles", [{"Block": 0}, ["Block"], {"Block": "4"}], ids=str)
def test_wrong_tiles_are_refused(tiles: Any) -> None:
    with pytest.raises(ValueError, match="`sequence_tiles` must map class names"):
        RoundPipeStrategy(sequence_tiles=tiles)
