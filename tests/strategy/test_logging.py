"""``self.log`` from every place gives what one call on the whole batch would have given."""

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.models import CASES, Residual, residual_batches, seeded, token_batches

UNEVEN = [batch for rows in (6, 7, 5, 2, 1) for batch in residual_batches(num=1, rows=rows)]


class MemoryLogger(Logger):
    """Keeps every call in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, dict(metrics)))


Seen = tuple[list[tuple[int | None, dict[str, float]]], dict[str, float], list[dict[str, float]]]


def run(build: Any, strategy: Any, devices: int, batches: Any = None, **flags: Any) -> Seen:
    """Fits and returns the calls of the logger, the callback metrics, and the progress-bar metrics of every batch."""

    class ProgressBarMetrics(L.Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.seen.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})

    logger, bar = MemoryLogger(), ProgressBarMetrics()
    flags = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **flags}
    trainer = trainer_for(strategy, devices, logger=logger, callbacks=[bar], **flags)
    batches = UNEVEN if batches is None else batches
    trainer.fit(seeded(build).double(), BatchDealer(batches), BatchDealer(batches[:3]))
    return logger.calls, {name: float(value) for name, value in trainer.callback_metrics.items()}, bar.seen


def assert_same_logs(build: Any, num_microbatches: int = 3, devices: int = 2, **options: Any) -> Seen:
    expected = run(build, "auto", 1, **options)
    found = run(build, RoundPipeStrategy(num_microbatches=num_microbatches), devices, **options)
    assert len(found[0]) == len(expected[0])
    for (step, metrics), (found_step, found_metrics) in zip(expected[0], found[0], strict=True):
        assert found_step == step
        assert found_metrics == pytest.approx(metrics, rel=1e-6, nan_ok=True), f"step {step}"
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    for one, two in zip(expected[2], found[2], strict=True):
        assert two == pytest.approx(one, rel=1e-6)
    return found


class LogsEverywhere(Residual):
    """Logs in ``training_step``, in the model's own forward, in hooks, in validation; plain and as metric objects."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=32)
        self.val_accuracy = torchmetrics.Accuracy("multiclass", num_classes=32)
        self.mean = torchmetrics.MeanMetric()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if self.training:
            self.log("logits_mean", logits.detach().mean(), on_step=True, on_epoch=True)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        self.log("loss_both", loss, on_step=True, on_epoch=True)
        self.log("loss_epoch_only", loss, on_step=False, on_epoch=True)
        self.log("rows", float(len(tokens)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("least", logits.detach().min(), reduce_fx="min", on_step=False, on_epoch=True)
        self.log("greatest", logits.detach().max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log("batch_idx", batch_idx)
        self.log_dict({"a": loss * 2, "b": 1.0}, on_step=True, on_epoch=False)
        self.accuracy(logits.argmax(-1), targets)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.mean.update(loss.detach(), weight=len(tokens))
        self.log("mean_metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from_hook", float(batch_idx), on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        logits = self(tokens)
        self.log("val_loss", nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), prog_bar=True)
        self.log("val_rows", float(len(tokens)), reduce_fx="sum")
        self.val_accuracy(logits.argmax(-1), targets)
        self.log("val_accuracy", self.val_accuracy)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_number", float(self.current_epoch))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
def test_values_and_steps_equal_plain_lightning(num_microbatches: int) -> None:
    calls, metrics, _ = assert_same_logs(LogsEverywhere, num_microbatches)
    assert metrics["rows"] == 21
    per_step = [call for _, call in calls if "loss" in call]
    assert len(per_step) == 2 * len(UNEVEN), "a key must be logged once for every batch"


def test_logging_interval_and_accumulation() -> None:
    assert_same_logs(LogsEverywhere, log_every_n_steps=2, accumulate_grad_batches=2)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_logged_loss_of_padded_batches_is_the_loss_of_the_batch() -> None:
    """Weighted by valid labels, as the loss itself is; the epoch mean is still weighted by rows."""
    assert_same_logs(CASES["gpt2"].module, 3, batches=token_batches(ignored=True))


def test_log_with_explicit_batch_size() -> None:
    class SaysBatchSize(Residual):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
            return loss

    assert_same_logs(SaysBatchSize)


def test_log_in_some_microbatches_only() -> None:
    """A key that only some micro-batches log is the mean over those; nobody waits for the others."""

    class LogsSometimes(Residual):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if batch[0][0, 0] == 31:
                self.log("first_token_is_31", loss)
            return loss

    tokens, targets = residual_batches(num=1)[0]
    tokens = tokens.clone()
    tokens[:, 0] = torch.tensor([31, 31, 0, 0, 0, 0])

    strategy, batches = RoundPipeStrategy(num_microbatches=3), [(tokens, targets)] * 3
    calls, _, _ = run(LogsSometimes, strategy, 2, batches=batches, max_epochs=1)
    logged = [call["first_token_is_31"] for _, call in calls if "first_token_is_31" in call]
    with torch.no_grad():
        expected = seeded(Residual).double().loss((tokens[:2], targets[:2]))
    assert logged[0] == pytest.approx(float(expected), rel=1e-6)


def test_metric_objects_and_device_agree() -> None:
    """``self.device`` is where metrics, batches and new tensors live."""

    class ChecksDevices(LogsEverywhere):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert batch[0].device == self.device == torch.zeros(1, device=self.device).device
            assert self.accuracy.device == self.device
            return super().training_step(batch, batch_idx)

    assert_same_logs(ChecksDevices)


def test_error_of_log_is_lightnings_own() -> None:
    class LogsNonsense(Residual):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("bad", torch.zeros(2))
            return self.loss(batch)

    with pytest.raises(ValueError, match="bad"):
        trainer_for(RoundPipeStrategy(num_microbatches=2), 2).fit(seeded(LogsNonsense), BatchDealer(residual_batches()))
