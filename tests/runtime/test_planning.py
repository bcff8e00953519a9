"""When training gets another schedule, from what measurements, and what stays as it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.costs import CallCost
from lightning_roundpipe.plan.devices import Machine
from lightning_roundpipe.plan.files import save_schedule
from lightning_roundpipe.plan.schedule import Schedule, Ticket
from lightning_roundpipe.plan.search import judge
from lightning_roundpipe.plan.stages import Plan, StageKind
from lightning_roundpipe.runtime import planning
from lightning_roundpipe.runtime.planning import TrainingPlanner, evaluation_schedule, given_schedule, measured_machine
from lightning_roundpipe.runtime.stats import StepStats, TicketSpan

NUM_WORKERS = 4
NUM_MICROBATCHES = 8
# Bytes mislead: the first half of the calls takes nearly all of the time.
SIZES = [CallCost(forward_s=0.0, backward_s=0.0, weight_bytes=100, gradient_bytes=100)] * 24
TRUE_S = [0.010] * 12 + [0.001] * 12


def planner(
    *,
    replica_groups: int | None = 1,
    given: Schedule | None = None,
    grows_fused: bool = True,
    machine: Callable[[], Machine] = lambda: Machine(num_workers=NUM_WORKERS),
    show: bool = False,
    recompute: str = "auto",
    free_bytes: float = 0.0,
    num_workers: int = NUM_WORKERS,
) -> tuple[TrainingPlanner, list[str]]:
    told: list[str] = []
    made = TrainingPlanner(
        num_workers,
        given=given,
        replica_groups=replica_groups,
        machine=machine,
        grows_fused=grows_fused,
        recompute=recompute,
        free_bytes=lambda: free_bytes,
        notify=told.append,
        show=show,
    )
    return made, told


def step(schedule: Schedule, *, slow_first: float = 0.0, probed: bool = False) -> StepStats:
    """Statistics of a step whose calls take `TRUE_S` forward and twice that backward, and the first of a stage more."""
    spans = []
    for stage in schedule.plan.stages:
        for microbatch in range(schedule.num_microbatches):
            now = 100.0 + slow_first * (microbatch == 0)
            calls = []
            factors = {StageKind.FORWARD: [1], StageKind.FUSED: [1, 2], StageKind.BACKWARD: [3]}[stage.kind]
            for factor in factors:
                for call in stage.calls if factor != 2 else stage.calls[::-1]:
                    calls.append((call, now))
                    now += factor * TRUE_S[call]
            worker = schedule.worker_of(Ticket(stage.index, microbatch))
            spans.append(TicketSpan(worker, stage.index, stage.kind, microbatch, 100.0, now, tuple(calls)))
    return StepStats(
        schedule=schedule,
        num_samples=NUM_MICROBATCHES,
        start_s=100.0,
        stop_s=200.0,
        probed=probed,
        update_s=0.0,
        update_exposed_s=0.0,
        spans=tuple(spans),
    )


TRUE_COSTS = [CallCost(forward_s=s, backward_s=2 * s) for s in TRUE_S]


def simulated_s(schedule: Schedule) -> float:
    return judge(schedule, TRUE_COSTS, Machine(num_workers=NUM_WORKERS)).step_s


@pytest.mark.parametrize("slow_first", [0.0, 0.5])
def test_measured_times_lead_to_a_faster_plan(slow_first: float) -> None:
    training, told = planner()
    first = training.make(SIZES, NUM_MICROBATCHES)
    assert training.schedule == first
    for _ in range(2):
        training.observe(step(first, slow_first=slow_first))
        assert training.improve(one_part=False) is None, "too early"
    training.observe(step(first, slow_first=slow_first))
    better = training.improve(one_part=False)
    assert better is not None
    assert better == training.schedule
    assert simulated_s(better) < 0.97 * simulated_s(first)
    assert len(told) == 1
    assert f"ms instead of {1e3 * simulated_s(first):.1f} ms" in told[0]
    assert (better.replica_groups, better.num_rounds, better.plan.fused) == (1, 1, first.plan.fused)
    assert training.improve(one_part=False) is None, "once is enough until more has been measured"


def test_it_ends_after_a_few_searches() -> None:
    training, _ = planner()
    training.make(SIZES, NUM_MICROBATCHES)
    searches = 0
    for _ in range(100):
        assert training.schedule is not None
        training.observe(step(training.schedule))
        before = len(training._searches)
        training.improve(one_part=False)
        searches += before - len(training._searches)
    assert searches == 3
    assert not training.is_measuring


def test_steps_that_say_little_are_not_counted() -> None:
    training, _ = planner()
    first = training.make(SIZES, NUM_MICROBATCHES)
    for _ in range(10):
        training.observe(step(first, probed=True))
        training.observe(step(first.with_microbatches(3)))
    assert training.improve(one_part=False) is None


def test_replica_groups_are_chosen_if_they_are_free() -> None:
    for one_part, expected in ((False, True), (True, False)):
        training, told = planner(replica_groups=None)
        first = training.make(SIZES, NUM_MICROBATCHES)
        assert first.replica_groups == 1
        for _ in range(3):
            training.observe(step(first))
        better = training.improve(one_part=one_part)
        assert better is not None
        assert (better.replica_groups > 1) == expected
        assert ("replica groups" in told[0]) == expected


def test_a_free_fused_stage_does_not_grow_where_memory_is_short() -> None:
    training, _ = planner(replica_groups=None, grows_fused=False)
    first = training.make(SIZES, NUM_MICROBATCHES)
    for _ in range(3):
        training.observe(step(first))
    better = training.improve(one_part=False)
    assert better is not None
    assert better.plan.fused is not None and first.plan.fused is not None
    assert better.plan.fused <= first.plan.fused


def test_what_does_not_fit_is_left_alone() -> None:
    tight = Machine(num_workers=NUM_WORKERS, worker_memory_bytes=1)
    training, told = planner(machine=lambda: tight)
    first = training.make(SIZES, NUM_MICROBATCHES)
    for _ in range(3):
        training.observe(step(first))
    assert training.improve(one_part=False) is None
    assert (training.schedule, told) == (first, [])


@pytest.mark.parametrize("name, value", [("_MOST_CALLS", 23), ("_LONGEST_SEARCH_S", 0.0)])
def test_searches_that_take_too_long_are_not_repeated(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, name, value)
    training, _ = planner()
    first = training.make(SIZES, NUM_MICROBATCHES)
    for _ in range(3):
        training.observe(step(first))
    training.improve(one_part=False)
    assert not training.is_measuring


def test_a_given_schedule_runs_as_it_is() -> None:
    given = Schedule(Plan((12, 11), 1, (23,)), NUM_WORKERS, NUM_MICROBATCHES)
    training, told = planner(given=given, show=True)
    assert training.make(SIZES, NUM_MICROBATCHES) == given
    assert not training.is_measuring
    training.observe(step(given))
    assert training.improve(one_part=False) is None
    assert "forward: 1 x 12, 1 x 11 calls; fused: 1; backward: 1 x 23 calls" in told[0]
    assert told[0].count("\nworker") == NUM_WORKERS


def test_a_given_schedule_of_another_model_is_refused() -> None:
    training, _ = planner(given=Schedule(Plan((2,), 1, (2,)), NUM_WORKERS, NUM_MICROBATCHES))
    with pytest.raises(PlanError, match="makes 24 in a micro-batch, but the one in the file covers 3"):
        training.make(SIZES, NUM_MICROBATCHES)


@pytest.mark.parametrize("replica_groups", [1, 2, 4])
def test_the_first_guess_suits_the_replica_groups(replica_groups: int) -> None:
    training, _ = planner(replica_groups=replica_groups)
    schedule = training.make(SIZES, NUM_MICROBATCHES)
    assert schedule.replica_groups == replica_groups
    assert schedule.plan.num_calls == len(SIZES)


def test_a_model_without_calls() -> None:
    training, _ = planner()
    schedule = training.make([], NUM_MICROBATCHES)
    for _ in range(3):
        training.observe(step(schedule))
    training.improve(one_part=False)
    assert training.schedule == schedule


def test_evaluation_has_no_backward() -> None:
    schedule = evaluation_schedule(NUM_WORKERS, SIZES, 3)
    assert not schedule.plan.trains
    assert (schedule.num_workers, schedule.num_microbatches) == (NUM_WORKERS, 3)


def test_a_given_file(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    save_schedule(Schedule(Plan((2,), 1, (2,)), 4, 8, 2), path)
    schedule = given_schedule(path, 1, 4, None)
    assert schedule is not None and schedule.replica_groups == 2
    assert given_schedule(path, 1, 4, 8) == schedule
    with pytest.raises(PlanError, match=r"is for 4 workers, but there are 2\. Use `Trainer\(devices=4\)`"):
        given_schedule(path, 1, 2, None)
    with pytest.raises(PlanError, match="is for 8 micro-batches, but `num_microbatches` is 4"):
        given_schedule(path, 1, 4, 4)
    save_schedule(Schedule(Plan((2,)), 4, 8), path)
    with pytest.raises(PlanError, match="must have a fused stage"):
        given_schedule(path, 1, 4, None)
    with pytest.raises(PlanError, match="there is no file"):
        given_schedule(str(tmp_path / "none.json"), 1, 4, None)


def test_replica_groups_must_divide_the_workers() -> None:
    assert given_schedule("auto", 2, 4, None) is None
    assert given_schedule("auto", None, 3, None) is None
    with pytest.raises(PlanError, match="`replica_groups` must divide the number of workers"):
        given_schedule("auto", 3, 4, None)


def test_virtual_workers_have_no_links() -> None:
    assert measured_machine([torch.device("cpu")] * 3, 10.0) == Machine(num_workers=3)


@pytest.mark.gpu
def test_links_of_a_gpu_are_measured() -> None:
    machine = measured_machine([torch.device("cuda", 0)] * 2, 1e9)
    assert 1e8 < machine.h2d_bytes_per_s < 1e12
    assert 1e8 < machine.d2h_bytes_per_s < 1e12
    assert 1e8 < machine.host_bytes_per_s < 1e13
    assert machine.worker_memory_bytes == 1e9


def test_costs_come_from_the_kind_of_stage_in_which_they_were_measured() -> None:
    training, _ = planner()
    first = training.make(SIZES, NUM_MICROBATCHES)
    training.observe(step(first))
    assert training._measured is not None
    for call, cost in enumerate(training._measured.costs):
        assert cost.forward_s == pytest.approx(TRUE_S[call])
        assert cost.backward_s == pytest.approx(2 * TRUE_S[call])
        assert cost.recompute_s in (None, pytest.approx(TRUE_S[call]))
        assert cost.weight_bytes == 100


def with_graphs(schedule: Schedule, graph_bytes: int) -> StepStats:
    fused = schedule.plan.stages[schedule.plan.fused_stage].calls
    return replace(step(schedule), graph_bytes=dict.fromkeys(fused, graph_bytes))


def after_three_steps(made: TrainingPlanner, sizes: tuple[int, int, int] = (1000, 1000, 1010)) -> Schedule:
    schedule = made.make(SIZES, NUM_MICROBATCHES)
    for size in sizes:
        made.observe(with_graphs(schedule, size))
    made.improve(one_part=False)
    assert made.schedule is not None
    return made.schedule


def test_the_fused_stage_grows_into_free_memory() -> None:
    made, told = planner(num_workers=1, machine=lambda: Machine(num_workers=1), free_bytes=9 * 1010)
    before = made.make(SIZES, NUM_MICROBATCHES).plan.fused
    assert before is not None
    schedule = after_three_steps(made)
    assert schedule.plan.fused == before + 5  # six tenths of what is free
    assert any("5 more calls need not be recomputed" in message for message in told)
    for _ in range(40):
        made.observe(with_graphs(schedule, 1000))
        schedule = made.improve(one_part=False) or schedule
    assert schedule.plan.fused == before + 3 * 5  # at each new plan


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"free_bytes": 0.0}, (1000, 1000, 1000)),
        ({"num_workers": 2}, (1000, 1000, 1000)),
        ({"recompute": "all"}, (1000, 1000, 1000)),
        ({}, (1000, 1500, 1000)),  # Lengths vary.
        ({}, (0, 0, 0)),  # Nobody counted.
    ],
    ids=str,
)
def test_it_stays_as_it_is(given: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    arguments: dict[str, Any] = {"num_workers": 1, "free_bytes": 1e9, **given}
    made, _ = planner(machine=lambda: Machine(num_workers=arguments["num_workers"]), **arguments)
    before = made.make(SIZES, NUM_MICROBATCHES).plan.fused
    assert after_three_steps(made, sizes).plan.fused == before


@pytest.mark.parametrize(("recompute", "fused"), [("all", 1), ("none", len(SIZES))])
def test_what_is_recomputed_may_be_said(recompute: str, fused: int) -> None:
    made, _ = planner(recompute=recompute, replica_groups=4 if recompute == "none" else 1)
    schedule = made.make(SIZES, NUM_MICROBATCHES)
    assert schedule.plan.fused == fused
    for _ in range(40):
        made.observe(step(schedule))
        schedule = made.improve(one_part=False) or schedule
    assert schedule.plan.fused == fused


def test_without_recomputation_every_worker_has_micro_batches_of_its_own() -> None:
    made, _ = planner(recompute="none", replica_groups=None)
    assert made.make(SIZES, NUM_MICROBATCHES).replica_groups == NUM_WORKERS
    with pytest.raises(PlanError, match="replica_groups=4"):
        given_schedule("auto", 2, 4, None, "none")
