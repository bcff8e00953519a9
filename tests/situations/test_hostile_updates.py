"""Updates in the background, under hostile timing: never a different bit, never a hang.

``ROUNDPIPE_STRESS_RUNS`` says how many fits to run.
"""

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from lightning_roundpipe.runtime import pending, updater
from lightning_roundpipe.runtime.gpu_worker import GpuWorker
from lightning_roundpipe.runtime.host_store import HostStore
from lightning_roundpipe.runtime.partial_step import PartialStepper
from lightning_roundpipe.runtime.testing import executor_of
from lightning_roundpipe.runtime.worker import Worker
from tests.helpers.delays import delays
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.late import Late
from tests.helpers.shim import gpu_workers_on_the_host

RUNS = int(os.environ.get("ROUNDPIPE_STRESS_RUNS", "28"))

DELAYED: list[tuple[type, str]] = [
    (HostStore, "land"),
    (HostStore, "close_sums"),
    (HostStore, "take_gradient"),
    (HostStore, "refresh_parameters"),
    (HostStore, "note_update"),
    (HostStore, "await_update"),
    (PartialStepper, "step"),
    (PartialStepper, "measure"),
    (Worker, "upload_weight"),
    (Worker, "enter"),
    (GpuWorker, "_load"),
    (GpuWorker, "land"),
    (nn.Linear, "forward"),
]


class Small(L.LightningModule):
    """Layers, a tied weight, a loose parameter, a layer that only every other step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.sometimes = nn.Linear(4, 4)
        self.overlapped = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if batch_idx % 2:
            x = x + self.sometimes(x)
        return (x.float() - 1).square().mean()

    def on_fit_start(self) -> None:
        strategy: Any = self.trainer.strategy
        executor = executor_of(strategy)
        update_later = executor.update_later

        def counted(stepper: PartialStepper) -> None:
            self.overlapped += 1
            update_later(stepper)

        executor.update_later = counted  # type: ignore[method-assign]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class LateSmall(Late, Small):
    """The reference for delayed updates."""


KINDS: list[dict[str, Any]] = [
    {"overlap": "exact"},
    {"overlap": "stale"},
    {"overlap": "exact", "gradient_clip_val": 0.05},
    {"overlap": "stale", "gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    {"overlap": "exact", "accumulate_grad_batches": 2},
    {"overlap": "exact", "precision": "16-mixed"},
    {"overlap": "stale", "precision": "bf16-mixed"},
]


def fit(
    module: Small, overlap: str, devices: int, *, precision: str = "32-true", **flags: Any
) -> tuple[Small, dict[str, Any]]:
    strategy = RoundPipeStrategy(num_microbatches=3, optimizer_overlap=overlap)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if precision == "16-mixed" else None
    flags["plugins"] = [RoundPipePrecision(precision, half_weights=precision == "bf16-mixed", scaler=scaler)]
    generator = torch.Generator().manual_seed(1)
    trainer = trainer_for(strategy, devices, **flags)
    trainer.fit(module, BatchDealer([torch.randn(6, 4, generator=generator) for _ in range(7)]))
    state = trainer.optimizers[0].state
    found = dict(module.state_dict())
    for name, parameter in module.named_parameters():
        found |= {f"{name}.{key}": value for key, value in state.get(parameter, {}).items()}
    return module, found


@pytest.mark.timeout(60 + RUNS)
@pytest.mark.parametrize("workers", ["of the host", "of GPUs"])
def test_updates_under_delays(workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (pending, updater):
        monkeypatch.setattr(part, "_BATCH_ELEMENTS", 1)  # Each parameter by itself: more orders of events.
    references = []
    for kind in KINDS:
        reference = LateSmall() if kind["overlap"] == "stale" else Small()
        references.append(fit(reference, **{**kind, "overlap": "off"}, devices=1)[1])
    if workers == "of GPUs":
        gpu_workers_on_the_host(monkeypatch, budget_bytes=200)  # Some weights stay, others come and go.
    for seed in range(RUNS // 2):
        kind, expected = KINDS[seed % len(KINDS)], references[seed % len(KINDS)]
        with delays(seed, DELAYED, most_s=3e-3, probability=0.05):
            module, found = fit(Small(), devices=1 + seed % 4, **kind)
        assert module.overlapped > 1, "no update reached into a step: the test shows nothing"
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"run {seed}, {kind}: {name}"
