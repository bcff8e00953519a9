"""Wherever weights lie in host memory, a GPU computes the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from lightning_roundpipe.runtime import slab as slab_module
from lightning_roundpipe.runtime.slab import Slab
from lightning_roundpipe.runtime.staging import RING_BYTES
from lightning_roundpipe.runtime.units import tensor_bytes
from tests.helpers.equivalence import TrainResult, assert_results_close, assert_results_equal, train
from tests.helpers.models import LanguageModel, Residual, llama_from_files, residual_batches, seeded, token_batches

pytest.importorskip("peft")
pytestmark = pytest.mark.gpu


class Notes(L.Callback):
    """Bytes by place, within the fit."""

    pinned = mapped = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        self.pinned, self.mapped = strategy.pinned_bytes, strategy.mapped_bytes


def fit(folder: Path, kind: str, overlap: str = "exact", *, half: bool, workers: int = 1) -> tuple[TrainResult, Notes]:
    def build() -> LanguageModel:
        module = llama_from_files(folder, tied=True)
        module.validation_step = lambda batch, batch_idx: module.log("validated", module.loss(batch))
        return module

    strategy = RoundPipeStrategy(3, host_weights=kind, optimizer_overlap=overlap, workers_per_device=workers)
    precision = RoundPipePrecision("bf16-mixed", half_weights=half)
    notes = Notes()
    found = train(
        build, token_batches(num=4), strategy, 1, accelerator="gpu", callbacks=[notes], plugins=[precision],
        val_batches=token_batches(num=2),
    )  # fmt: skip
    return found, notes


@pytest.mark.parametrize("overlap", ["exact", "stale"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_same_bits(tmp_path: Path, half: bool, overlap: str, workers: int) -> None:
    expected, pinned = fit(tmp_path, "pinned", overlap, half=half, workers=workers)
    frozen = sum(tensor_bytes(p) for p in expected.module.parameters() if not p.requires_grad)
    assert pinned.mapped == frozen * half  # What computes in half precision is pinned as a copy.
    for kind in ("pageable", "mmap", "auto"):
        found, notes = fit(tmp_path, kind, overlap, half=half, workers=workers)
        assert_results_equal(expected, found)
        if kind == "auto":
            assert (notes.mapped, notes.pinned) == (pinned.mapped, pinned.pinned)
        else:
            assert notes.mapped == frozen * (kind == "mmap")
            assert RING_BYTES <= notes.pinned <= pinned.pinned + workers * RING_BYTES


@pytest.mark.parametrize("overlap", ["off", "exact", "stale"])
def test_trained_weights_that_are_not_pinned(overlap: str) -> None:
    one, two = (
        train(
            lambda: seeded(Residual), residual_batches(),
            RoundPipeStrategy(3, host_weights=kind, optimizer_overlap=overlap), 1, accelerator="gpu", max_epochs=3,
        )
        for kind in ("pinned", "pageable")
    )  # fmt: skip
    assert_results_equal(one, two)


class Reluctant:
    """The driver, which registers so many pieces of memory, and fails for real at the next."""

    def __init__(self, num_pieces: int) -> None:
        self._driver: Any = torch.cuda.cudart()
        self.left = num_pieces

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def cudaHostRegister(self, start: int, size: int, flags: int) -> Any:  # noqa: N802
        self.left -= 1
        error = self._driver.cudaHostRegister(start, size, flags)
        if self.left < 0:
            error = self._driver.cudaHostRegister(start, size, flags)  # It is registered already.
            assert int(error) != 0
            self._driver.cudaHostUnregister(start)
        return error


@pytest.fixture
def reluctant(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Reluctant]:
    def make(num_pieces: int) -> Reluctant:
        driver = Reluctant(num_pieces)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        return driver

    return make


def test_a_failed_pin_leaves_no_error_behind(reluctant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_CHUNK_BYTES", 2**20)
    told: list[str] = []
    reluctant(2)
    slab = Slab([(torch.Size([4 * 2**20]), torch.uint8)], pin=True, warn=told.append)
    assert not slab.pinned and len(told) == 1
    # The next kernel would report it as its own.
    assert float(torch.ones(1000, device="cuda").sum()) == 1000
    torch.cuda.synchronize()
    slab.tensors[0].fill_(3)
    assert int(slab.tensors[0].cuda().min()) == 3


@pytest.mark.filterwarnings("ignore:Host memory could not be page-locked")
@pytest.mark.parametrize("num_pieces", [0, 2])
def test_training_goes_on_without_pinned_memory(reluctant: Any, num_pieces: int) -> None:
    expected = train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(3), 1, accelerator="gpu")
    reluctant(num_pieces)
    found = train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(3), 1, accelerator="gpu")
    assert_results_equal(expected, found)


def test_against_plain_training(tmp_path: Path) -> None:
    def build() -> LanguageModel:
        return llama_from_files(tmp_path, tied=False)

    expected = train(build, token_batches(num=4), accelerator="gpu")
    found = train(build, token_batches(num=4), RoundPipeStrategy(3, host_weights="mmap"), 1, accelerator="gpu")
    for result in (expected, found):
        result.losses[:] = [None if loss is None else loss.cpu() for loss in result.losses]
    assert_results_close(expected, found, rtol=3e-5, metrics=False)
