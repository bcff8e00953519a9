"""Numbers of a step, by hand."""

import dataclasses
import math

import pytest

from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan, StageKind
from lightning_roundpipe.runtime.stats import StepStats, TicketSpan


def span(worker: int, start_s: float, stop_s: float) -> TicketSpan:
    return TicketSpan(worker, 0, StageKind.FORWARD, 0, start_s, stop_s)


def stats(*spans: TicketSpan, num_workers: int = 2) -> StepStats:
    schedule = Schedule(Plan((1,)), num_workers, num_microbatches=1)
    return StepStats(
        schedule=schedule,
        num_samples=3,
        start_s=0.0,
        stop_s=20.0,
        probed=False,
        update_s=0.0,
        update_exposed_s=0.0,
        spans=spans,
    )


def test_times() -> None:
    step = stats(span(0, 1.0, 3.0), span(1, 3.0, 4.0), span(0, 8.0, 11.0))
    assert step.busy_s == (5.0, 1.0)
    assert step.window_s == 10.0  # the step itself took longer: what is before and after the tickets is not counted
    assert step.bubble_ratio == pytest.approx(1 - 6 / 20)


def test_times_of_calls() -> None:
    forward = TicketSpan(0, 0, StageKind.FORWARD, 0, 1.0, 9.0, ((4, 2.0), (5, 6.0)))
    assert forward.call_seconds() == {4: 5.0, 5: 3.0}  # what comes before the first call is its own
    fused = TicketSpan(0, 0, StageKind.FUSED, 0, 0.0, 10.0, ((4, 0.0), (5, 1.0), (5, 4.0), (4, 7.0)))
    assert fused.call_seconds() == {4: 1.0 + 3.0, 5: 3.0 + 3.0}
    assert span(0, 0.0, 1.0).call_seconds() == {}


def test_idle_workers_count() -> None:
    assert stats(span(0, 0.0, 5.0), num_workers=4).bubble_ratio == pytest.approx(0.75)


def test_no_bubble() -> None:
    assert stats(span(0, 2.0, 4.0), span(1, 2.0, 4.0)).bubble_ratio == 0.0


def test_a_step_without_tickets() -> None:
    step = stats()
    assert step.busy_s == (0.0, 0.0)
    assert step.window_s == 0.0
    assert math.isnan(step.bubble_ratio)


@pytest.mark.parametrize("record", [span(0, 0.0, 1.0), stats()])
def test_records_are_frozen(record: TicketSpan | StepStats) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.start_s = 1.0


def test_printing_a_step_does_not_list_every_ticket() -> None:
    assert "TicketSpan" not in repr(stats(span(0, 0.0, 1.0)))
