"""The chunked head and loss: the numbers of the plain ones, and memory that grows with the chunk alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.losses import chunk_size, linear_cross_entropy
from tests.helpers.equivalence import assert_results_close, train
from tests.helpers.memory import PeakBytes
from tests.helpers.models import CASES, StepModule, seeded, token_batches


def inputs(tokens: int, vocabulary: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[::3] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 100])
def test_equals_cross_entropy(dtype: torch.dtype, with_bias: bool, chunk_tokens: int | None) -> None:
    hidden, weight, bias, labels = inputs(20, 50, 8, dtype)
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    expected = F.cross_entropy(F.linear(hidden, weight, bias if with_bias else None), labels)
    found = linear_cross_entropy(hidden, weight, labels, bias=bias if with_bias else None, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(found, expected)
    pairs = zip(torch.autograd.grad(3 * found, leaves), torch.autograd.grad(3 * expected, leaves), strict=True)
    for one, two in pairs:
        torch.testing.assert_close(one, two, rtol=1e-5 if dtype is torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("large", [1.0, 1e3])
def test_compiled(large: float) -> None:
    """Two chunks of different sizes, frozen and trained heads."""
    hidden, weight, _, labels = inputs(20, 50, 8)
    for leaves in ((hidden, weight), (hidden,)):
        weight.requires_grad_(len(leaves) == 2)
        expected = F.cross_entropy(F.linear(large * hidden, weight), labels)
        found = linear_cross_entropy(large * hidden, weight, labels, chunk_tokens=13, compiled=True)
        torch.testing.assert_close(found, expected)
        pairs = zip(torch.autograd.grad(3 * found, leaves), torch.autograd.grad(3 * expected, leaves), strict=True)
        for one, two in pairs:
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6 * large)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, _, labels = inputs(20, 50, 8)
    expected = F.cross_entropy(F.linear(1e3 * hidden, weight), labels)
    torch.testing.assert_close(linear_cross_entropy(1e3 * hidden, weight, labels), expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast(frozen: bool) -> None:
    """Products in bfloat16, the loss in float32, gradients in the dtype of the leaves; a frozen head gets none."""
    hidden, weight, _, labels = inputs(40, 50, 16)
    weight.requires_grad_(not frozen)
    leaves = [hidden] if frozen else [hidden, weight]
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight).float(), labels)
        found = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected)
    for one, two in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-3)


def test_scaled_losses_in_float16() -> None:
    """A gradient of one in 20,000 tokens lives of the loss scale; it must not vanish before that comes in."""
    hidden, weight, _, labels = inputs(20_000, 50, 4)
    scaled = 2.0**16 * F.cross_entropy(F.linear(hidden, weight), labels)
    expected = torch.autograd.grad(scaled, [hidden, weight])
    with torch.autocast("cpu", torch.float16):
        found = torch.autograd.grad(2.0**16 * linear_cross_entropy(hidden, weight, labels), [hidden, weight])
    for one, two in zip(found, expected, strict=True):
        assert (one - two).abs().max() < 5e-3 * two.abs().max()
        assert (one - two).norm() < 2e-3 * two.norm()


def test_without_labels_the_loss_is_nan_and_the_gradient_zero_as_in_torch() -> None:
    hidden, weight, _, labels = inputs(6, 10, 4)
    labels.fill_(-100)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad is not None and not hidden.grad.any()


def peak_bytes(tokens: int, vocabulary: int, chunk_tokens: int, *, trains_weight: bool = True) -> int:
    hidden, weight, _, labels = inputs(tokens, vocabulary, 8)
    weight.requires_grad_(trains_weight)
    with PeakBytes() as counter, torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    return counter.peak


def test_peak_memory_grows_with_the_chunk_only() -> None:
    """6 bytes a logit: one tensor in float32, one in bfloat16. The plain loss holds more than that for every token."""
    vocabulary = 10_000
    few, many = peak_bytes(512, vocabulary, 32), peak_bytes(2048, vocabulary, 32)
    assert many - few < 1536 * 100  # the gradient of the inputs and the labels; a token's logits are 60,000 bytes
    assert 5.9 * 32 * vocabulary < peak_bytes(512, vocabulary, 64) - few < 6.5 * 32 * vocabulary
    hidden, weight, _, labels = inputs(512, vocabulary, 8)
    with PeakBytes() as plain, torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(F.linear(hidden, weight).float(), labels)
    assert plain.peak > 512 * vocabulary * 6 > 5 * few


def test_gradients_are_handed_on_once() -> None:
    """Without a copy: the gradient is the very sum that was formed along with the loss."""
    hidden, weight, _, labels = inputs(64, 10_000, 8)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16)
    with PeakBytes() as counter:
        loss.backward(retain_graph=True)
    assert counter.peak < 1.1 * 4 * weight.numel()
    with pytest.raises(RuntimeError, match="can run only once"):
        loss.backward()


def test_a_frozen_head_costs_no_gradient() -> None:
    trained, frozen = (peak_bytes(64, 10_000, 16, trains_weight=trains) for trains in (True, False))
    assert trained - frozen >= 4 * 10_000 * 8


def test_chunks_by_bytes() -> None:
    assert chunk_size(151_936) == 832
    assert chunk_size(10**9) == 1
    assert chunk_size(32_000) % 64 == 0


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_chunks_must_hold_a_token(chunk_tokens: int) -> None:
    hidden, weight, _, labels = inputs(6, 10, 4)
    with pytest.raises(ValueError, match="`chunk_tokens` must be at least 1"):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)


def test_unflattened_inputs_are_refused() -> None:
    hidden, weight, _, labels = inputs(6, 10, 4)
    with pytest.raises(ValueError, match="Flatten batch and sequence first"):
        linear_cross_entropy(hidden.view(2, 3, 4), weight, labels)


class ByHand(StepModule):
    """Calls the loss itself, on labels that are not shifted, some of which are ignored."""

    def __init__(self, chunked: bool) -> None:
        super().__init__()
        self.model = CASES["qwen3_tied"].module().model
        self.chunked = chunked

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.model.model(input_ids=batch["input_ids"]).last_hidden_state.flatten(0, 1)
        head, labels = self.model.lm_head, batch["labels"].flatten()
        if self.chunked:
            return linear_cross_entropy(hidden, head.weight, labels, chunk_tokens=5)
        return F.cross_entropy(head(hidden), labels)


def test_by_hand_under_the_strategy() -> None:
    """Micro-batches are weighted by the labels that the loss averages over: they are seen as those of torch's own."""
    batches = token_batches(num=3, ignored=True)
    expected = train(lambda: seeded(lambda: ByHand(False)), batches)
    found = train(lambda: seeded(lambda: ByHand(True)), batches, RoundPipeStrategy(num_microbatches=3), devices=2)
    assert_results_close(expected, found, rtol=1e-5)
