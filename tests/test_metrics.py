"""The metrics, by hand."""

import copy
import pickle

import pytest
import torch

from lightning_roundpipe.metrics import BubbleRatio
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan, StageKind
from lightning_roundpipe.runtime.stats import StepStats, TicketSpan


def step(num_workers: int, *spans: tuple[int, float, float]) -> StepStats:
    """A step with spans (worker, start, stop)."""
    return StepStats(
        schedule=Schedule(Plan((1,)), num_workers, num_microbatches=1),
        num_samples=1,
        start_s=0.0,
        stop_s=100.0,
        probed=False,
        spans=tuple(TicketSpan(worker, 0, StageKind.FORWARD, 0, start, stop) for worker, start, stop in spans),
    )


HALF_IDLE = step(2, (0, 0.0, 10.0))
BUSY = step(2, (0, 5.0, 7.0), (1, 5.0, 7.0))


def test_one_step() -> None:
    metric = BubbleRatio()
    metric.update(HALF_IDLE)
    assert metric.compute() == HALF_IDLE.bubble_ratio == 0.5


def test_times_are_summed_before_they_are_divided() -> None:
    metric = BubbleRatio()
    for stats in (HALF_IDLE, BUSY):
        metric.update(stats)
    assert metric.compute().item() == pytest.approx(1 - (10 + 4) / (20 + 4))  # and not the mean of 0.5 and 0


def test_workers_may_differ_in_number() -> None:
    metric = BubbleRatio()
    metric.update(HALF_IDLE)
    metric.update(step(4, (0, 0.0, 1.0)))
    assert metric.compute().item() == pytest.approx(1 - 11 / 24)


def test_calling_it_gives_the_value_of_the_step() -> None:
    metric = BubbleRatio()
    metric.update(HALF_IDLE)
    assert metric(BUSY) == 0.0
    assert metric.compute().item() == pytest.approx(1 - 14 / 24)


def test_reset() -> None:
    metric = BubbleRatio()
    metric.update(HALF_IDLE)
    metric.reset()
    metric.update(BUSY)
    assert metric.compute() == 0.0


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric BubbleRatio was called before")
def test_nothing_was_measured() -> None:
    assert torch.isnan(BubbleRatio().compute())


def test_many_short_steps_do_not_lose_precision() -> None:
    """Times are summed in float64: a step of milliseconds after hours of training still counts."""
    metric = BubbleRatio()
    metric.update(step(1, (0, 0.0, 1e5)))
    for _ in range(1000):
        metric.update(step(2, (0, 0.0, 1e-4)))
    assert metric.busy_s.item() == pytest.approx(1e5 + 0.1, rel=1e-12)
    assert metric.compute().item() == pytest.approx(0.1 / (1e5 + 0.2), rel=1e-6)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_copies_go_on(duplicate: object) -> None:
    metric = BubbleRatio()
    metric.update(HALF_IDLE)
    copied = duplicate(metric)  # type: ignore[operator]
    copied.update(BUSY)
    assert copied.compute().item() == pytest.approx(1 - 14 / 24)
    assert metric.compute() == 0.5
