"""What the bubble ratio callback logs, and when it keeps quiet."""

import warnings
from typing import Any

import lightning as L
import pytest

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.callbacks import BubbleRatioMonitor
from lightning_roundpipe.runtime.stats import StepStats  # noqa: TC001
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded

STEP, EPOCH = "roundpipe/bubble_ratio", "roundpipe/bubble_ratio_epoch"


class Watching(L.Callback):
    """Keeps the record of every step and what was logged for it."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.logged: list[float | None] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        assert isinstance(trainer.strategy, RoundPipeStrategy)
        assert trainer.strategy.step_stats is not None
        self.steps.append(trainer.strategy.step_stats)
        value = trainer.callback_metrics.get(STEP)
        self.logged.append(None if value is None else float(value))


def fit(monitor: BubbleRatioMonitor, epochs: int = 1, **flags: Any) -> tuple[L.Trainer, Watching]:
    watching = Watching()
    trainer = trainer_for(
        RoundPipeStrategy(num_microbatches=2), 2, callbacks=[monitor, watching], max_epochs=epochs, **flags
    )
    trainer.fit(seeded(Residual), BatchDealer(residual_batches()))
    return trainer, watching


def test_each_step_but_the_learning_one_is_logged() -> None:
    _, watching = fit(BubbleRatioMonitor())
    assert [step.probed for step in watching.steps] == [True, False, False, False]
    # A logged value is seen from the next hook on.
    expected = [None, *(pytest.approx(step.bubble_ratio, rel=1e-5) for step in watching.steps[1:])]
    assert watching.logged == expected


def test_the_epochs_value_sums_times_first() -> None:
    trainer, watching = fit(BubbleRatioMonitor())
    measured = watching.steps[1:]
    busy = sum(sum(step.busy_s) for step in measured)
    assert trainer.callback_metrics[EPOCH].item() == pytest.approx(
        1 - busy / sum(2 * step.window_s for step in measured), rel=1e-5
    )
    assert 0 <= trainer.callback_metrics[EPOCH].item() < 1


def test_an_epoch_starts_anew() -> None:
    monitor = BubbleRatioMonitor()
    trainer, watching = fit(monitor, epochs=2)
    last = watching.steps[4:]
    assert not any(step.probed for step in last)
    assert monitor.epoch_ratio.busy_s.item() == pytest.approx(sum(sum(step.busy_s) for step in last))
    assert trainer.callback_metrics[EPOCH].item() == pytest.approx(monitor.epoch_ratio.compute().item(), rel=1e-5)


def test_an_epoch_of_nothing_but_the_learning_step_logs_nothing() -> None:
    trainer, _ = fit(BubbleRatioMonitor(), limit_train_batches=1)
    assert STEP not in trainer.callback_metrics
    assert EPOCH not in trainer.callback_metrics


@pytest.mark.parametrize("prog_bar", [True, False])
def test_the_progress_bar_shows_it_on_request(prog_bar: bool) -> None:
    trainer, _ = fit(BubbleRatioMonitor(prog_bar=prog_bar))
    assert (STEP in trainer.progress_bar_metrics) == prog_bar


def test_loggers_get_it() -> None:
    class Keeping(L.pytorch.loggers.CSVLogger):
        def __init__(self) -> None:
            super().__init__(".")
            self.seen: list[str] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.seen += metrics

    logger = Keeping()
    fit(BubbleRatioMonitor(), logger=logger, log_every_n_steps=1)
    assert logger.seen.count(STEP) == 3
    assert logger.seen.count(EPOCH) == 1


def test_another_strategy_is_told_once_and_trains_on() -> None:
    trainer = trainer_for(callbacks=[BubbleRatioMonitor()], max_epochs=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(seeded(Residual), BatchDealer(residual_batches()))
    [message] = [str(warning.message) for warning in told if "BubbleRatioMonitor" in str(warning.message)]
    assert "measures RoundPipeStrategy, but the strategy is SingleDeviceStrategy" in message
    assert trainer.global_step == 8
    assert STEP not in trainer.callback_metrics
