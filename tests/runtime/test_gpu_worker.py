"""What the worker of GPUs keeps account of: slots, landings, sums that it brings back."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime.gpu_worker import GpuWorker
from tests.helpers.equivalence import TrainResult, assert_results_close, train
from tests.helpers.models import CASES, Case, StepModule, seeded, vector_batches
from tests.helpers.shim import gpu_workers_on_the_host


def fit(case: Case, num_workers: int, overlap: str = "exact", **flags: Any) -> TrainResult:
    strategy = RoundPipeStrategy(num_microbatches=3, optimizer_overlap=overlap)
    return train(case.module, case.batches(), strategy, num_workers, **flags)


def assert_same_bits(one: TrainResult, other: TrainResult) -> None:
    for name, tensor in one.state.items():
        assert torch.equal(tensor, other.state[name]), name


class Watched(GpuWorker):
    """Counts what it brings back ahead of need, and what of it goes back unused."""

    brought = 0
    unused = 0

    def _bring_sums(self, parameters: Any, part: int) -> None:
        before = len(self._brought)
        super()._bring_sums(parameters, part)
        Watched.brought += len(self._brought) - before

    def _send_unused(self, used: Any) -> None:
        before = len(self._brought)
        super()._send_unused(used)
        Watched.unused += before - len(self._brought)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    Watched.brought = Watched.unused = 0
    gpu_workers_on_the_host(monkeypatch, make=Watched)
    return Watched


MODELS = ["residual_tied", "qwen3_tied", "called_twice", "llama_lora", "residual"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_same_bits_as_workers_of_the_host(name: str, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fit(CASES[name], num_workers)
    gpu_workers_on_the_host(monkeypatch)
    assert_same_bits(expected, fit(CASES[name], num_workers))


@pytest.mark.parametrize(
    "flags", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str
)
def test_same_bits_with(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fit(CASES["residual_tied"], 1, **flags)
    gpu_workers_on_the_host(monkeypatch)
    assert_same_bits(expected, fit(CASES["residual_tied"], 1, **flags))


def test_same_bits_where_one_unit_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fit(CASES["residual_tied"], 1)
    gpu_workers_on_the_host(monkeypatch, budget_bytes=1)
    assert_same_bits(expected, fit(CASES["residual_tied"], 1))


@pytest.mark.parametrize("overlap", ["off", "exact"])
def test_sum_of_a_tied_weight_is_there_before_its_last_use(overlap: str, watched: type[Watched]) -> None:
    fit(CASES["residual_tied"], 1, overlap)
    assert watched.brought > 0
    assert watched.unused == 0


class SometimesDetached(StepModule):
    """The first use of a shared weight gets a gradient in every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.num_batches = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.first(batch[0])
        if batch_idx % 2:
            x = x.detach()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.last(x), batch[1])


@pytest.mark.parametrize("overlap", ["off", "exact"])
def test_sum_that_was_brought_back_for_nothing_is_not_lost(overlap: str, watched: type[Watched]) -> None:
    case = Case("detached", lambda: seeded(SometimesDetached), lambda: vector_batches(16))
    strategy = RoundPipeStrategy(num_microbatches=3, optimizer_overlap=overlap, units=["Linear"])
    found = train(case.module, case.batches(), strategy, 1)
    assert watched.unused > 0
    expected = train(case.module, case.batches(), "auto", 1)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["residual_tied", "llama_lora"])
def test_fused_stage_grows_where_memory_is_free(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    expected = train(case.module, case.batches(), "auto", 1, max_epochs=3)
    gpu_workers_on_the_host(monkeypatch)
    in_use = itertools.count(step=1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(in_use))
    strategy = RoundPipeStrategy(num_microbatches=3)
    found = train(case.module, case.batches(), strategy, 1, max_epochs=3)
    assert strategy.schedule is not None
    # A frozen embedding runs without a graph.
    assert strategy.schedule.plan.fused == strategy.schedule.plan.num_calls - (name == "llama_lora")
    assert_results_close(expected, found, rtol=3e-5)


@pytest.mark.parametrize("recompute", ["all", "none"])
def test_recomputation_may_be_said(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["residual_tied"]
    expected = train(case.module, case.batches(), "auto", 1)
    for on_host in (True, False):
        if not on_host:
            gpu_workers_on_the_host(monkeypatch)
        strategy = RoundPipeStrategy(num_microbatches=3, recompute=recompute)
        assert_results_close(expected, train(case.module, case.batches(), strategy, 1), rtol=1e-5)
        assert strategy.schedule is not None
        plan = strategy.schedule.plan
        assert plan.fused == (1 if recompute == "all" else plan.num_calls)


class SometimesSkipped(SometimesDetached):
    """The first use of a shared weight is left out in every second batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0] if batch_idx % 2 else self.first(batch[0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.last(x), batch[1])


def test_sum_that_is_complete_is_left_to_its_update(watched: type[Watched]) -> None:
    case = Case("skipped", lambda: seeded(SometimesSkipped), lambda: vector_batches(16))
    strategy = RoundPipeStrategy(num_microbatches=3, units=["Linear"])
    found = train(case.module, case.batches(), strategy, 1, max_epochs=2)
    expected = train(case.module, case.batches(), "auto", 1, max_epochs=2)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-5, atol=1e-6)
