"""The main job on a GPU: the same numbers as plain training there, whatever streams and slots do."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import TrainResult, assert_results_close, train
from tests.helpers.models import CASES, Case

pytestmark = pytest.mark.gpu

ON_HOST_ONLY = {"sparse_adam"}  # fills a host buffer by hand
BY_NAME = {name: case for name, case in CASES.items() if name not in ON_HOST_ONLY}


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def fit(case: Case, strategy: Any = "auto", **flags: Any) -> TrainResult:
    result = train(case.module, case.batches(), strategy, 1, accelerator="gpu", **flags)
    result.losses[:] = [None if loss is None else loss.cpu() for loss in result.losses]
    result.metrics.update({name: value.cpu() for name, value in result.metrics.items()})
    return result


@pytest.mark.parametrize("name", BY_NAME)
def test_equals_plain_training(name: str) -> None:
    case = BY_NAME[name]
    found = fit(case, RoundPipeStrategy(num_microbatches=3))
    # Adapters start at zero, so all of them is update: rounding shows a little more. cuDNN sums otherwise than we do.
    loose = {"llama_lora": 3e-5, "lstm": 1e-4, "gru": 1e-4}
    assert_results_close(fit(case), found, rtol=loose.get(name, 1e-5))


@pytest.mark.parametrize("name", ["qwen3_tied", "llama_lora", "gpt2"])
def test_exact_overlap_gives_the_same_bits(name: str) -> None:
    case = BY_NAME[name]
    after, along = (fit(case, RoundPipeStrategy(num_microbatches=3, optimizer_overlap=o)) for o in ("off", "exact"))
    for key, tensor in after.state.items():
        assert torch.equal(tensor, along.state[key]), key


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_that_share_a_gpu_give_the_same_bits(workers: int) -> None:
    case = BY_NAME["qwen3_tied"]
    one = fit(case, RoundPipeStrategy(num_microbatches=3))
    several = fit(case, RoundPipeStrategy(num_microbatches=3, workers_per_device=workers))
    for name, tensor in one.state.items():
        assert torch.equal(tensor, several.state[name]), name


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_half_precision_is_near_plain(precision: str) -> None:
    case = BY_NAME["qwen3_tied"]
    expected, found = (
        fit(case, precision=precision),
        fit(case, RoundPipeStrategy(num_microbatches=3), precision=precision),
    )
    for plain, ours in zip(expected.losses, found.losses, strict=True):
        assert plain is not None and ours is not None
        assert float(ours) == pytest.approx(float(plain), rel=2e-2)


def test_nothing_stays_on_the_gpu() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    fit(BY_NAME["qwen3_tied"], RoundPipeStrategy(num_microbatches=3))
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**16
