"""On a GPU: adapters of packed experts, quantised weights, and the peak memory of head and loss."""

import pytest
import torch
import torch.nn.functional as F

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.losses import linear_cross_entropy
from tests.gpu.test_training import fit, full_precision
from tests.helpers.equivalence import assert_results_close
from tests.helpers.models import Case, seeded, token_batches
from tests.models.test_peft import adapted
from tests.test_quantised import DTYPES, Quantised, residual_batches

pytestmark = pytest.mark.gpu
__all__ = ["full_precision"]

MIB = 2**20


@pytest.mark.parametrize("name", ["llama-lora", "llama-dora", "llama-prompt", "moe-experts"])
def test_adapters_equal_plain_training(name: str) -> None:
    case = Case(name, adapted(name), lambda: token_batches(num=3))
    assert_results_close(fit(case), fit(case, RoundPipeStrategy(num_microbatches=3)), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_weights_equal_plain_training(dtype: torch.dtype) -> None:
    case = Case(f"quantised_{dtype}", lambda: seeded(lambda: Quantised(dtype)), residual_batches)
    assert_results_close(fit(case), fit(case, RoundPipeStrategy(num_microbatches=3)), rtol=1e-4)


def test_layers_that_do_not_fit_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("moe-attention", adapted("moe-attention"), lambda: token_batches(num=3))
    monkeypatch.setattr("lightning_roundpipe.strategy.largest_unit_bytes", lambda devices, limit, dtype: 60_000)
    assert_results_close(fit(case), fit(case, RoundPipeStrategy(num_microbatches=3)), rtol=1e-6)


@pytest.mark.parametrize("tokens", [2048, 16384])
def test_peak_memory_of_the_head(tokens: int) -> None:
    """A head of 64,000 x 1,024 under autocast: the peak beside weights and gradients does not grow with the tokens."""
    vocabulary, width = 64_000, 1024
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        linear_cross_entropy(hidden, weight, labels).backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * hidden.numel() + 4 * weight.numel()
    half_weight, chunk = 2 * weight.numel(), 512 * MIB
    assert peak < gradients + 2 * hidden.numel() + half_weight + 2 * chunk

    small = slice(0, 512)
    with torch.autocast("cuda", torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden[small], weight).float(), labels[small])
        found = linear_cross_entropy(hidden[small], weight, labels[small], chunk_tokens=100)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
