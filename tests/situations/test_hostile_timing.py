"""Whatever the timing: the same bits, the original error soon, and nothing that grows.

``HOSTILE_RUNS=300 pytest tests/situations/test_hostile_timing.py -k delays --timeout 1000`` looks longer.
"""

import os
import threading
import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime import pending, updater
from lightning_roundpipe.runtime.host_store import HostStore
from lightning_roundpipe.runtime.partial_step import PartialStepper
from lightning_roundpipe.runtime.pending import PendingStep
from lightning_roundpipe.runtime.testing import executor_of
from lightning_roundpipe.runtime.updater import Updater
from lightning_roundpipe.runtime.worker import Worker
from tests.helpers.delays import delays
from tests.helpers.equivalence import TrainResult, assert_results_equal, train, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded

RUNS = int(os.environ.get("HOSTILE_RUNS", "50"))


class Quick(Residual):
    """Small, with dropout; user code around the units can be delayed, too.

    Attributes:
        reached: how often an update was under way when a micro-batch began.
    """

    reached = 0

    def __init__(self) -> None:
        super().__init__(num_blocks=3, dropout=0.2, tied=True, width=8)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        Quick.reached += executor_of(self.trainer.strategy).store.pending is not None
        self.pause()
        loss = super().loss(batch)
        self.pause()
        return loss

    def pause(self) -> None:
        """A place for `delays` in user code."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


DELAYED: list[tuple[type, str]] = [
    (Worker, "enter"),
    (Worker, "upload"),
    (Worker, "upload_weight"),
    (Worker, "accumulate"),
    (Worker, "land"),
    (Worker, "take_home"),
    (Updater, "_update"),
    (Updater, "submit"),
    (PartialStepper, "step"),
    (PendingStep, "_work"),
    (PendingStep, "_release"),
    (HostStore, "refresh_parameters"),
    (HostStore, "take_gradient"),
    (nn.LayerNorm, "forward"),
    (Quick, "pause"),
]
MODES: list[tuple[str, dict[str, Any]]] = [
    ("off", {}),
    ("exact", {}),
    ("exact", {"gradient_clip_val": 0.05}),
    ("exact", {"accumulate_grad_batches": 2}),
    ("stale", {}),
]


def fit(overlap: str, devices: int, **options: Any) -> TrainResult:
    strategy = RoundPipeStrategy(num_microbatches=3, optimizer_overlap=overlap)
    batches = residual_batches(num=2 * options.get("accumulate_grad_batches", 1) + 1, positions=3)
    return train(lambda: seeded(Quick), batches, strategy, devices, looks=False, **options)


@pytest.mark.parametrize(("overlap", "flags"), MODES, ids=str)
def test_same_bits_with_delays(overlap: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates on one to four workers; they run parameter by parameter, and reach into the next step."""
    expected = fit("off" if overlap == "exact" else overlap, 1, **flags)
    monkeypatch.setattr(Quick, "reached", 0)
    monkeypatch.setattr(pending, "_BATCH_ELEMENTS", 1)
    monkeypatch.setattr(updater, "_BATCH_ELEMENTS", 1)
    for seed in range(RUNS // len(MODES)):
        with delays(seed, DELAYED):
            found = fit(overlap, 1 + seed % 4, **flags)
        assert_results_equal(expected, found)
    if overlap != "off":
        assert Quick.reached, "no update reached into a step: the test shows nothing"


class Rows(Dataset[Any]):
    """Fails in the worker process of the dataloader at one row."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.tokens, self.targets = residual_batches(num=1, rows=24)[0]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if row == self.fails_at:
            raise KeyError("mine")
        return self.tokens[row], self.targets[row]


@pytest.mark.filterwarnings("ignore:.*os.fork")
def test_error_in_a_worker_of_the_dataloader() -> None:
    def fit(strategy: Any, devices: int, fails_at: int) -> L.LightningModule:
        module = seeded(Residual)
        loader = DataLoader(Rows(fails_at), batch_size=6, num_workers=1)
        trainer_for(strategy, devices).fit(module, loader)
        return module

    started = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        fit(RoundPipeStrategy(num_microbatches=3), 2, fails_at=13)
    assert time.monotonic() - started < 5
    expected, found = fit("auto", 1, -1), fit(RoundPipeStrategy(num_microbatches=3), 2, -1)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, msg=name)


class Resources(L.Callback):
    """Threads, open files and resident memory, every hundred steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if i % 100 == 99:
            with open("/proc/self/statm") as file:
                resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            self.seen.append((threading.active_count(), len(os.listdir("/proc/self/fd")), resident))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["automatic", "manual"])
def test_nothing_grows_over_five_hundred_steps(kind: str) -> None:
    class Steps(Quick):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = kind == "automatic"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if kind == "manual":
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    resources = Resources()
    strategy = RoundPipeStrategy(num_microbatches="auto" if kind == "manual" else 2)
    train(lambda: seeded(Steps), residual_batches(num=500, positions=2), strategy, 2, callbacks=[resources])
    threads, files, resident = zip(*resources.seen[1:], strict=True)
    assert len(set(threads)) == len(set(files)) == 1
    assert resident[-1] - resident[0] < 4 * 2**20
