"""How a plan numbers its stages and finds the stage of a call."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.stages import Plan, Stage, StageKind

FORWARD, FUSED, BACKWARD = StageKind.FORWARD, StageKind.FUSED, StageKind.BACKWARD


def test_a_training_plan() -> None:
    plan = Plan((2, 1), 2, (1, 2))
    assert plan.stages == (
        Stage(0, FORWARD, 0, 2),
        Stage(1, FORWARD, 2, 3),
        Stage(2, FUSED, 3, 5),
        Stage(3, BACKWARD, 2, 3),
        Stage(4, BACKWARD, 0, 2),
    )
    assert plan.trains
    assert (plan.num_calls, plan.num_stages, plan.fused_stage) == (5, 5, 2)
    assert [plan.forward_stage(call) for call in range(5)] == [0, 0, 1, 2, 2]
    assert [plan.backward_stage(call) for call in range(5)] == [4, 4, 3, 2, 2]
    assert str(plan) == "2-1|2-1-2"


def test_an_evaluating_plan() -> None:
    plan = Plan((2, 1))
    assert plan.stages == (Stage(0, FORWARD, 0, 2), Stage(1, FORWARD, 2, 3))
    assert not plan.trains
    assert (plan.num_calls, plan.num_stages, plan.fused_stage) == (3, 2, 2)
    assert [plan.forward_stage(call) for call in range(3)] == [0, 0, 1]
    assert str(plan) == "2-1"


@pytest.mark.parametrize("plan, stages", [(Plan((), 0), 1), (Plan((), 3), 1), (Plan(()), 0)])
def test_plans_without_forward_stages(plan: Plan, stages: int) -> None:
    """A model without a call still has a loss; all calls may be fused."""
    assert plan.num_stages == stages
    assert plan.num_calls == (plan.fused or 0)


def test_order_of_calls_in_a_stage() -> None:
    assert list(Stage(0, FORWARD, 2, 5).calls) == [2, 3, 4]
    assert list(Stage(0, FUSED, 2, 5).calls) == [2, 3, 4]
    assert list(Stage(0, BACKWARD, 2, 5).calls) == [4, 3, 2]
    assert len(Stage(0, BACKWARD, 2, 5)) == 3
    assert list(Stage(0, FUSED, 2, 2).calls) == []


@pytest.mark.parametrize(
    "sizes",
    [((0,), 1, ()), ((-1,), 1, (-1,)), ((1,), -1, (1,)), ((1, 1), 1, (2, 0))],
)
def test_empty_and_negative_stages_are_refused(sizes: tuple[tuple[int, ...], int, tuple[int, ...]]) -> None:
    with pytest.raises(PlanError, match="at least one call and the fused stage none or more, but got"):
        Plan(*sizes)


@pytest.mark.parametrize(
    "sizes, covered",
    [
        (((2, 1), 1, (1,)), "cover 3 calls, backward stages 1"),
        (((1,), 1, (2,)), "cover 1 calls, backward stages 2"),
        (((1,), 1), "cover 1 calls, backward stages 0"),
        (((1,), None, (1,)), "cover 1 calls, backward stages 1"),
    ],
)
def test_backward_must_cover_what_forward_does(sizes: tuple[tuple[int, ...], ...], covered: str) -> None:
    with pytest.raises(PlanError, match="a plan without a fused stage has no backward") as caught:
        Plan(*sizes)  # type: ignore[arg-type]
    caught.match(covered)


@given(st.lists(st.integers(1, 4), max_size=5), st.integers(0, 3), st.data())
def test_every_call_runs_forward_and_backward_once(forward: list[int], fused: int, data: st.DataObject) -> None:
    """In order forward, in reverse order backward; the stage of a call is the one that holds it."""
    num_calls = sum(forward)
    cuts = data.draw(st.sets(st.integers(1, num_calls - 1))) if num_calls > 1 else set()
    bounds = [0, *sorted(cuts), num_calls] if num_calls else [0]
    plan = Plan(tuple(forward), fused, tuple(stop - start for start, stop in pairwise(bounds)))
    ahead = [call for stage in plan.stages if stage.kind is not BACKWARD for call in stage.calls]
    back = [call for stage in plan.stages if stage.kind is BACKWARD for call in stage.calls]
    assert ahead == list(range(plan.num_calls))
    assert back == list(reversed(range(num_calls)))
    assert [stage.index for stage in plan.stages] == list(range(plan.num_stages))
    assert plan.stages[plan.fused_stage].kind is FUSED
    starts = list(accumulate(forward, initial=0))
    for call in range(plan.num_calls):
        assert call in plan.stages[plan.forward_stage(call)].calls
        assert call in plan.stages[plan.backward_stage(call)].calls
        assert (plan.forward_stage(call) == plan.fused_stage) == (call >= starts[-1])


@pytest.mark.parametrize(
    ("fused", "expected"),
    [
        (2, Plan((3, 4), 2, (2, 3, 2))),
        (4, Plan((3, 2), 4, (3, 2))),
        (9, Plan((), 9)),
        (1, Plan((3, 4, 1), 1, (1, 2, 3, 2))),
    ],
)
def test_another_fused_stage_leaves_the_other_cuts(fused: int, expected: Plan) -> None:
    assert Plan((3, 4), 2, (2, 3, 2)).with_fused(fused) == expected
