import pytest

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.files import load_schedule, save_schedule, schedule_from_dict, schedule_to_dict
from lightning_roundpipe.plan.picture import draw_timeline, plan_as_text, timeline_as_text
from lightning_roundpipe.plan.schedule import FixedOrder, FixedSchedule, Schedule, Ticket
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.plan.timeline import Span, Timeline

PLAN = Plan((2, 1), 1, (1, 1, 1))


def words(schedule):
    return [" ".join(map(str, queue)) for queue in schedule.tickets]


def test_stages_are_dealt_round_robin():
    assert words(Schedule(PLAN, 2, 2)) == ["s0m0 s0m1 s2m0 s2m1 s4m0 s4m1", "s1m0 s1m1 s3m0 s3m1 s5m0 s5m1"]


def test_replica_groups_have_workers_and_microbatches_of_their_own():
    schedule = Schedule(Plan((1,), 1, (1,)), 4, 4, replica_groups=2)
    assert words(schedule) == ["s0m0 s0m2 s2m0 s2m2", "s1m0 s1m2", "s0m1 s0m3 s2m1 s2m3", "s1m1 s1m3"]


def test_the_deal_goes_on_from_round_to_round_and_from_step_to_step():
    schedule = Schedule(Plan((1,), 1, (1,)), 2, 2, num_rounds=2)
    assert words(schedule) == ["s0m0 s2m0 s1m1", "s1m0 s0m1 s2m1"]
    assert schedule.following().first_worker == 0
    assert Schedule(Plan((1,), 1, (1,)), 2, 2).following().first_worker == 1


def test_explicit_placement():
    schedule = Schedule(Plan((1,), 1, (1,)), 3, 3, 2, stage_workers=((0, 1, 0), (0, 2, 2)), microbatch_groups=(0, 1, 0))
    assert words(schedule) == ["s0m0 s0m1 s0m2 s2m0 s2m2", "s1m0 s1m2", "s1m1 s2m1"]
    assert schedule.worker_of(Ticket(2, 1)) == 2


@pytest.mark.parametrize(
    "order, num_chunks, expected",
    [
        ("gpipe", 2, ["f0m0 f0m1 b0m0 b0m1", "f1m0 f1m1 x b1m0 x b1m1"]),
        ("1f1b", 2, ["f0m0 f0m1 b0m0 b0m1", "f1m0 x b1m0 f1m1 x b1m1"]),
        ("looped-bfs", 4, ["f0m0 f0m1 f2m0 f2m1 b2m0 b2m1 b0m0 b0m1", "f1m0 f1m1 f3m0 f3m1 x b3m0 x b3m1 b1m0 b1m1"]),
        (
            "interleaved-1f1b",
            4,
            ["f0m0 f0m1 f2m0 f2m1 b2m0 b2m1 b0m0 b0m1", "f1m0 f1m1 f3m0 x b3m0 f3m1 x b3m1 b1m0 b1m1"],
        ),
    ],
)
def test_orders_of_fixed_stages(order, num_chunks, expected):
    plan = Plan((1,) * num_chunks, 0, (1,) * num_chunks)
    schedule = FixedSchedule(plan, 2, 2, order=FixedOrder(order))
    names = [
        *(f"f{chunk}" for chunk in range(num_chunks)),
        "x",
        *(f"b{chunk}" for chunk in reversed(range(num_chunks))),
    ]
    found = [
        " ".join(names[t.stage] if names[t.stage] == "x" else f"{names[t.stage]}m{t.microbatch}" for t in queue)
        for queue in schedule.tickets
    ]
    assert found == expected
    assert not schedule.streams_weights


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Schedule(PLAN, 2, 2, num_rounds=0), "must be at least 1, but got 2, 2, 1 and 0"),
        (lambda: Schedule(PLAN, 3, 2, replica_groups=2), "must divide the number of workers"),
        (lambda: Schedule(PLAN, 2, 2, stage_workers=((0, 1),)), "`stage_workers` must name one of 2 workers"),
        (lambda: Schedule(PLAN, 2, 2, stage_workers=((0, 1, 2, 0, 0, 0),)), "`stage_workers` must name one of 2"),
        (lambda: Schedule(PLAN, 2, 2, microbatch_groups=(0, 1)), "`microbatch_groups` must name one of 1"),
        (lambda: FixedSchedule(PLAN, 2, 2), "must cut backward like forward"),
        (lambda: FixedSchedule(Plan((1,) * 3, 0, (1,) * 3), 2, 2), "needs one stage per worker, but got 3 for 2"),
        (
            lambda: FixedSchedule(Plan((1,) * 3, 0, (1,) * 3), 2, 2, order=FixedOrder.LOOPED_BFS),
            "needs the same number of stages on every worker",
        ),
        (
            lambda: FixedSchedule(Plan((1,) * 4, 0, (1,) * 4), 2, 3, order=FixedOrder.INTERLEAVED),
            r"needs a multiple of 2 micro-batches \(one per worker\), but got 3",
        ),
    ],
)
def test_schedules_that_cannot_be_are_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


SCHEDULES = [
    Schedule(PLAN, 4, 6, replica_groups=2, num_rounds=3, first_worker=1),
    Schedule(Plan((3, 4)), 2, 2),
    Schedule(Plan((1,), 1, (1,)), 3, 3, 2, stage_workers=((0, 1, 0), (0, 2, 2)), microbatch_groups=(0, 1, 0)),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["roundpipe", "evaluation", "placed"])
def test_a_file_gives_back_the_schedule(schedule, tmp_path):
    save_schedule(schedule, tmp_path / "plan.json")
    assert load_schedule(tmp_path / "plan.json") == schedule


@pytest.mark.parametrize(
    "text, message",
    [
        ("no json", "must be JSON, but"),
        ("[1]", "must hold a JSON object, but .* holds a list"),
        ('{"version": 2}', "must be of version 1, but this one is of 2"),
        ('{"version": 1, "forward": [1]}', "must hold forward, num_microbatches, num_workers"),
        ('{"version": 1, "forward": [1], "num_workers": 1, "num_microbatches": 1, "x": 0}', "may hold .*, but"),
        ('{"version": 1, "forward": 1, "num_workers": 1, "num_microbatches": 1}', "whole numbers and lists"),
        ('{"version": 1, "forward": [0], "num_workers": 1, "num_microbatches": 1}', "at least one call"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text, message, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        load_schedule(tmp_path / "plan.json")


def test_a_file_holds_only_what_is_not_default():
    assert schedule_to_dict(Schedule(Plan((2,), 1, (1, 1)), 2, 4)) == {
        "version": 1,
        "forward": [2],
        "fused": 1,
        "backward": [1, 1],
        "num_workers": 2,
        "num_microbatches": 4,
    }
    assert schedule_from_dict(schedule_to_dict(SCHEDULES[0])) == SCHEDULES[0]


def test_plan_as_text_folds_equal_stages():
    assert (
        plan_as_text(Plan((7, 7), 1, (3, 3, 3, 3, 2))) == "forward: 2 x 7 calls; fused: 1; backward: 4 x 3, 1 x 2 calls"
    )
    assert plan_as_text(Plan((), 2)) == "forward: nothing; fused: 2; backward: nothing"
    assert plan_as_text(Plan((4,))) == "forward: 1 x 4 calls"


TIMELINE = Timeline(
    2,
    [Span(0, 0, 0, 0, 0.0, 1.0, 0.0), Span(0, 0, 2, 0, 3.0, 4.0, 3.0), Span(1, 0, 1, 0, 1.0, 3.0, 1.0)],
    step_ends=[4.0],
)


def test_timeline_as_text():
    lines = timeline_as_text(TIMELINE, Plan((1,), 1, (1,)), width=8).splitlines()
    assert lines == ["worker  0 |ff....bb|", "worker  1 |..XXXX..|"]


def test_draw_timeline(tmp_path):
    pytest.importorskip("matplotlib")
    draw_timeline(TIMELINE, Plan((1,), 1, (1,)), tmp_path / "step.svg")
    assert "<svg" in (tmp_path / "step.svg").read_text()


def test_bubble_of_a_window():
    bubble = TIMELINE.bubble()
    assert (bubble.fill, bubble.drain, bubble.steady, bubble.stall) == (1 / 8, 1 / 8, 2 / 8, 0)
    assert TIMELINE.bubble((1.0, 3.0)).total == pytest.approx(1 / 2)
    assert Timeline(2, []).bubble().total == 0
