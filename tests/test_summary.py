"""The tables after the first steps of a fit."""

import io
import logging
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import rich
import rich.console
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy, summary
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan, StageKind
from lightning_roundpipe.plan.timeline import Lane, TransferSpan
from lightning_roundpipe.runtime.stats import StepStats, TicketSpan
from lightning_roundpipe.summary import limit_rows, schedule_rows, update_text
from tests.helpers.equivalence import BatchDealer, trainer_for

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
FLOAT = 4


class Layers(L.LightningModule):
    """Four layers of 20 parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ByHand(Layers):
    """The same, with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.fixture
def tables(caplog: pytest.LogCaptureFixture) -> Callable[..., dict[str, list[dict[str, str]]]]:
    """Fits, and gives the rows of the logged tables, by title."""

    def fit(module: L.LightningModule, *, shows: bool = True, **flags: Any) -> dict[str, list[dict[str, str]]]:
        caplog.clear()
        strategy = RoundPipeStrategy(**{"num_microbatches": 4, **flags.pop("strategy", {})})
        trainer = trainer_for(strategy, devices=2, enable_model_summary=shows, **flags)
        with caplog.at_level(logging.INFO):
            trainer.fit(module, BatchDealer(BATCHES))
        found: dict[str, list[dict[str, str]]] = {}
        for message in caplog.messages:
            title, *lines = message.splitlines() or [""]
            if title.startswith("RoundPipe: "):
                rows = dict((part.strip() for part in line.strip().split("  ", 1)) for line in lines)
                found.setdefault(title, []).append(rows)
        return found

    return fit


def test_both_tables_come_once_in_a_fit(tables: Callable[..., Any]) -> None:
    found = tables(Layers(), max_epochs=2)
    assert {title: len(shown) for title, shown in found.items()} == {
        "RoundPipe: what runs": 1,
        "RoundPipe: what limits the step": 1,
    }
    (runs,) = found["RoundPipe: what runs"]
    assert runs["units"] == "4: 4 Linear"
    assert runs["workers"] == "2 on cpu"
    assert runs["replica groups"] == "1 of 2 workers"
    assert runs["micro-batches"] == "4"
    size = f"{4 * 20 * FLOAT} B"
    assert (runs["host: weights"], runs["host: gradients"], runs["host: optimizer state"]) == (size, size, size)
    assert runs["GPU memory, peak"].startswith("n/a")
    assert runs["updates"].startswith("each weight when its gradient is complete; the rest while the next step")
    (limits,) = found["RoundPipe: what limits the step"]
    assert list(limits) == ["step", "compute", "uploads", "downloads", "update", "idle", "limit"]


def test_no_model_summary_no_tables(tables: Callable[..., Any]) -> None:
    assert tables(Layers(), shows=False) == {}


def test_callback_is_gone_after_the_fit() -> None:
    trainer = trainer_for(RoundPipeStrategy(), devices=2, enable_model_summary=True)
    before = list(trainer.callbacks)  # type: ignore[attr-defined]
    trainer.fit(Layers(), BatchDealer(BATCHES))
    assert trainer.callbacks == before  # type: ignore[attr-defined]


def test_reasons_and_copies_are_told(tables: Callable[..., Any]) -> None:
    (runs,) = tables(Layers(), gradient_clip_val=1.0)["RoundPipe: what runs"]
    assert runs["updates"].startswith(
        "after the backward pass, because gradient clipping needs all gradients; the rest"
    )
    (runs,) = tables(Layers(), strategy={"optimizer_overlap": "stale"})["RoundPipe: what runs"]
    assert runs["host: weights"] == f"{4 * 20 * FLOAT} B (and {4 * 20 * FLOAT} B of copies to compute with)"
    (runs,) = tables(Layers(), strategy={"recompute": "none", "replica_groups": 2})["RoundPipe: what runs"]
    assert runs["recomputed"] == "0 of 4 calls; the others (4) keep their graph"


def test_manual_optimization_has_no_stages(tables: Callable[..., Any]) -> None:
    found = tables(ByHand(), strategy={"num_microbatches": 1})
    assert list(found) == ["RoundPipe: what runs"]
    (runs,) = found["RoundPipe: what runs"]
    assert runs["stages"].startswith("none: with manual optimization")
    assert "updates" not in runs


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_rich_table(tables: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    console = rich.console.Console(file=screen, width=150)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    # Without rich, text is logged there, too.
    assert tables(Layers(), max_steps=2) == {}
    assert "│ units" in screen.getvalue()
    assert "│ limit" in screen.getvalue()
    monkeypatch.setattr(summary.importlib.util, "find_spec", lambda name: None)
    assert len(tables(Layers(), max_steps=2)) == 2


def _step(compute_s: float, upload_s: float, download_s: float, update_s: float) -> StepStats:
    """A step of one second on two workers."""
    spans = (
        TicketSpan(0, 0, StageKind.FUSED, 0, 0.0, compute_s),
        TicketSpan(1, 0, StageKind.FUSED, 1, 0.0, compute_s / 2),
    )
    lanes = ((Lane.H2D, upload_s), (Lane.D2H, download_s))
    return StepStats(
        schedule=Schedule(Plan((), 1), num_workers=2, num_microbatches=2, replica_groups=2),
        num_samples=2,
        start_s=0.0,
        stop_s=1.0,
        probed=False,
        spans=spans,
        transfers=tuple(TransferSpan(lane, 1, 0.0, stop_s, 10) for lane, stop_s in lanes),
        update_s=update_s,
        update_exposed_s=update_s / 4,
    )


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ((0.9, 0.2, 0.1, 0.3), "compute"),
        ((0.6, 0.8, 0.1, 0.3), "uploads"),
        ((0.6, 0.2, 0.7, 0.3), "downloads"),
        ((0.6, 0.2, 0.1, 0.8), "update"),
        ((0.4, 0.2, 0.1, 0.3), "waiting: nothing is in use for half of the step"),
    ],
)
def test_limit_is_what_was_in_use_longest(times: tuple[float, float, float, float], limit: str) -> None:
    rows = dict(limit_rows(_step(*times)))
    assert rows["limit"] == limit
    assert rows["compute"] == f"{1000 * times[0]:.1f} ms, {times[0]:.0%} of the step"
    assert rows["idle"] == "25.0% of the workers' time"
    assert rows["update"].endswith(f"waited for: {250 * times[3]:.1f} ms")


def test_updates_after_the_step_are_not_counted() -> None:
    assert dict(limit_rows(_step(0.9, 0.0, 0.0, 0.0)))["update"] == "after the step, or none: not counted"


def test_stages_are_counted_by_kind() -> None:
    rows = dict(schedule_rows(Schedule(Plan((2, 2), 3, (1, 1, 2)), num_workers=2, num_microbatches=4)))
    assert rows["stages"] == "6: 2 forward, 1 fused, 3 backward (calls: 2-2|3-1-1-2)"
    assert rows["recomputed"] == "4 of 7 calls; the others (3) keep their graph"


def test_updates_name_mode_and_reason() -> None:
    assert update_text("off", None, None) == "after the backward pass (optimizer_overlap='off')"
    assert "one step late" in update_text("stale", None, None)
    assert update_text("exact", None, "it looks") == (
        "each weight when its gradient is complete; done before the next step, because it looks"
    )
