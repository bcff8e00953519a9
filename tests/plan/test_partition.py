from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_roundpipe.plan.partition import balanced_evaluation_plan, balanced_plan, cut_evenly

sizes = st.lists(st.one_of(st.just(0), st.integers(0, 10**12)), max_size=60)


def heaviest(weights, parts):
    position, loads = 0, []
    for part in parts:
        loads.append(sum(weights[position : position + part]))
        position += part
    return max(loads)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5))
def test_cut_evenly_is_as_good_as_trying_every_cut(weights, num_parts):
    parts = cut_evenly(weights, num_parts)
    wanted = min(num_parts, len(weights))
    assert len(parts) == wanted
    assert sum(parts) == len(weights)
    assert min(parts) >= 1
    best = min(
        heaviest(weights, [stop - start for start, stop in pairwise((0, *cuts, len(weights)))])
        for cuts in combinations(range(1, len(weights)), wanted - 1)
    )
    assert heaviest(weights, parts) == best


@pytest.mark.parametrize(
    ("num_calls", "num_parts", "parts"),
    [(28, 4, (7, 7, 7, 7)), (28, 10, (3, 3, 3, 3, 3, 2, 3, 2, 3, 3)), (3, 8, (1, 1, 1)), (0, 4, ())],
)
def test_cut_evenly_spreads_what_is_left_over(num_calls, num_parts, parts):
    assert sorted(cut_evenly([1] * num_calls, num_parts)) == sorted(parts)


@given(sizes, st.integers(1, 16))
def test_balanced_plan_covers_every_call_once_per_direction(call_bytes, num_workers):
    plan = balanced_plan(call_bytes, num_workers)
    forward = [call for stage in plan.stages[: plan.fused_stage + 1] for call in stage.calls]
    backward = [call for stage in plan.stages[plan.fused_stage :] for call in stage.calls]
    assert forward == list(range(len(call_bytes)))
    assert sorted(backward) == list(range(len(call_bytes)))
    assert plan.trains
    assert plan.fused >= min(1, len(call_bytes))
    assert plan == balanced_plan(tuple(call_bytes), num_workers)


@given(sizes, st.integers(1, 16))
def test_balanced_evaluation_plan_covers_every_call_once(call_bytes, num_workers):
    plan = balanced_evaluation_plan(call_bytes, num_workers)
    assert not plan.trains
    assert [call for stage in plan.stages for call in stage.calls] == list(range(len(call_bytes)))


def test_balanced_plan_cuts_backward_finer_than_forward():
    plan = balanced_plan([100] * 96, num_workers=8)
    assert len(plan.backward) == pytest.approx(3 * len(plan.forward), abs=2)
    assert max(plan.forward) > 2 * max(plan.backward)


def test_balanced_plan_of_a_heavy_head_fuses_the_head_alone():
    assert balanced_plan([1000, *[100] * 24, 2000], num_workers=4).fused == 1


def test_balanced_plan_of_thousands_of_calls_is_quick():
    plan = balanced_plan([7, 0, 13] * 2000, num_workers=8)
    assert plan.num_calls == 6000
    assert plan.num_stages >= 16
