"""What every ``precision`` string means: dtypes of weights, gradients, activations, and numbers like Lightning's."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, assert_results_close, train, trainer_for
from tests.helpers.models import CASES, Block, Residual, residual_batches, seeded

# precision: dtypes of parameters, of activations after a linear layer, and of gradients.
DTYPES = {
    "32-true": (torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


class RecordingBlock(Block):
    """Notes dtypes and the autocast state of every call."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seen: list[tuple[torch.dtype, bool, torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        state = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        self.seen.append((hidden.dtype, *state, torch.is_grad_enabled()))
        return x + self.down(torch.relu(hidden))


class Recording(Residual):
    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(RecordingBlock(16) for _ in range(6))
        self.gradient_dtypes: set[torch.dtype] = set()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradient_dtypes |= {p.grad.dtype for p in self.parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", DTYPES)
def test_dtypes(precision: str) -> None:
    """Also: recomputation sees the autocast state of the forward pass, although Lightning's context is closed then."""
    strategy = RoundPipeStrategy(num_microbatches=2)
    found = train(lambda: seeded(Recording), residual_batches(num=2), strategy, 2, precision=precision)
    parameter, activation, gradient = DTYPES[precision]
    assert {p.dtype for p in found.module.parameters()} == {parameter}
    assert found.module.gradient_dtypes == {gradient}
    for block in found.module.blocks:
        assert {dtype for dtype, *_ in block.seen} == {activation}
        assert len({(enabled, dtype) for _, enabled, dtype, _ in block.seen}) == 1
        assert block.seen[0][1] == (precision == "bf16-mixed")
    assert {with_graph for block in found.module.blocks for *_, with_graph in block.seen} == {True, False}


@pytest.mark.parametrize("name", ["qwen3_tied", "bert_mlm", "residual", "cnn", "lstm"])
@pytest.mark.parametrize(("precision", "rtol"), [("bf16-mixed", 0.02), ("bf16-true", 0.05)])
def test_numbers_are_near_those_of_plain_lightning(name: str, precision: str, rtol: float) -> None:
    """Splitting a batch changes the order of rounding, by no more than a few units in the last of bfloat16's 8 bits."""
    case = CASES[name]
    expected = train(case.module, case.batches(), precision=precision)
    found = train(case.module, case.batches(), RoundPipeStrategy(num_microbatches=3), 2, precision=precision)
    for one, two in zip(expected.losses, found.losses, strict=True):
        assert one is not None and two is not None
        torch.testing.assert_close(two.float(), one.float(), rtol=rtol, atol=0)
    for parameter, tensor in expected.state.items():
        assert found.state[parameter].dtype == tensor.dtype
        scale = float(tensor.float().abs().max())
        difference = float((found.state[parameter].float() - tensor.float()).abs().max())
        assert difference <= rtol * scale + 2e-2, f"{parameter}: {difference} of {scale}"


def test_one_microbatch_in_bfloat16_is_bitwise_plain() -> None:
    """Without a split there is nothing to round differently."""
    expected = train(lambda: seeded(Residual), residual_batches(), precision="bf16-mixed")
    strategy = RoundPipeStrategy(num_microbatches=1)
    found = train(lambda: seeded(Residual), residual_batches(), strategy, 2, precision="bf16-mixed")
    assert_results_close(expected, found, rtol=1e-6)


def test_masters_keep_their_bits_in_mixed_precision() -> None:
    """Under ``bf16-mixed`` a fit with learning rate 0 leaves the float32 values untouched, and tiny updates arrive."""

    def fit(learning_rate: float, num: int) -> L.LightningModule:
        module = seeded(lambda: Residual(optimizer=lambda p: torch.optim.SGD(p, lr=learning_rate)))
        trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2, precision="bf16-mixed")
        trainer.fit(module, BatchDealer(residual_batches(num=num)))
        return module

    before = seeded(Residual).state_dict()
    for name, tensor in fit(0.0, 2).state_dict().items():
        assert torch.equal(tensor, before[name]), name
    moved = fit(1e-4, 8).head.weight.detach()  # Less than bfloat16 can add to weights of this size.
    assert not torch.equal(moved, before["head.weight"])
    assert float((moved - before["head.weight"]).abs().max()) < 2**-9 * float(before["head.weight"].abs().max())


def test_user_autocast_inside_the_model() -> None:
    """A model that switches autocast on by itself is recomputed under it."""

    class OwnAutocast(Recording):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for number, block in enumerate(self.blocks):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 0):
                    x = block(x)
            return self.head(x)

    expected = train(lambda: seeded(OwnAutocast), residual_batches())
    found = train(lambda: seeded(OwnAutocast), residual_batches(), RoundPipeStrategy(num_microbatches=1), 2)
    assert_results_close(expected, found, rtol=1e-5)
    for number, block in enumerate(found.module.blocks):
        assert {enabled for _, enabled, *_ in block.seen} == {number % 2 == 0}


def test_double_precision_equals_plain_lightning() -> None:
    expected = train(lambda: seeded(Residual), residual_batches(), precision="64-true")
    found = train(
        lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(num_microbatches=3), 2, precision="64-true"
    )
    assert found.state["head.weight"].dtype is torch.float64
    assert_results_close(expected, found, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:You passed `Trainer.*16-mixed.*` but AMP with fp16 is not supported on CPU")
def test_half_precision_on_cpu_is_bfloat16_as_in_lightning() -> None:
    """Lightning itself turns ``16-mixed`` into ``bf16-mixed`` on the CPU, with a warning."""
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2, precision="16-mixed")
    assert trainer.precision == "bf16-mixed"
    trainer.fit(seeded(Residual), BatchDealer(residual_batches(num=1)))
