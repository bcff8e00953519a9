"""How far the fused stage may grow."""

import pytest

from lightning_roundpipe.plan.costs import CallCost
from lightning_roundpipe.plan.memory import largest_fused
from lightning_roundpipe.plan.stages import Plan

CALL = CallCost(forward_s=1.0, backward_s=2.0, graph_bytes=10, accumulator_bytes=4, copy_bytes=2)
PLAN = Plan((4, 4), 2, (4, 4))


def grown(costs: list[CallCost] | None = None, **given: float) -> int:
    arguments = {"free_bytes": 1e9, "weight_bytes": 1e9, "step_s": 1000.0, "update_s": 0.0, **given}
    return largest_fused(costs or [CALL] * 10, PLAN, num_microbatches=2, **arguments)


@pytest.mark.parametrize(("free_bytes", "calls"), [(0, 2), (13, 2), (14, 3), (14 * 5 + 13, 7), (14 * 8, 10)])
def test_memory_bounds_it(free_bytes: int, calls: int) -> None:
    assert grown(free_bytes=free_bytes) == calls


def test_weights_count_where_not_all_of_them_fit() -> None:
    assert grown(free_bytes=14 * 3, weight_bytes=20) == 5
    assert grown(free_bytes=14 * 3, weight_bytes=19) == 4
    assert grown(free_bytes=16 * 3, weight_bytes=19) == 5


def test_calls_of_unknown_size_stay_out() -> None:
    unknown = CallCost(forward_s=1.0, backward_s=2.0)
    assert grown([CALL] * 5 + [unknown] + [CALL] * 4) == 4


def test_the_optimizer_needs_time_in_which_gradients_are_there() -> None:
    # With k calls fused a step takes 58 - 2 * (k - 2), of which 3 * k come before the first gradient.
    assert grown(step_s=58.0, update_s=0.9 * 32) == 6
    assert grown(step_s=58.0, update_s=0.9 * 32.1) == 5
    assert grown(step_s=58.0, update_s=100.0) == 2
