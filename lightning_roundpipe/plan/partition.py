"""Where to cut: from sizes and times of calls to a plan.

:func:`balanced_plan` needs nothing but the bytes of every call and serves the first step.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from lightning_roundpipe.plan.stages import Plan

__all__ = ["balanced_evaluation_plan", "balanced_plan", "cut_evenly"]

# A backward stage recomputes (1), then forms the gradients of its inputs (1) and of its weights (1).
_BACKWARD_TO_FORWARD = 3

# Without measured times, enough stages that two of the largest fit beside the activations even on one worker.
_FEWEST_STAGES = 16


def balanced_plan(call_bytes: Sequence[int], num_workers: int) -> Plan:
    """Cuts calls for training by their bytes alone, for want of measured times.

    Backward is cut about three times as fine as forward; the fused stage is as heavy as a backward stage and holds at
    least the last call.

    Args:
        call_bytes: bytes of parameters that each call needs, in the order of the calls.
        num_workers: number of workers (of one replica group).

    Returns:
        A plan of about two stages per worker, and of at least 16 if there are that many calls.
    """
    if not call_bytes:
        return Plan((), fused=0)
    weights = _weights(call_bytes)
    num_stages = _num_stages(num_workers)
    fine = min(len(weights), max(2, num_stages * _BACKWARD_TO_FORWARD // (_BACKWARD_TO_FORWARD + 1)))
    fused, *backward = cut_evenly(weights[::-1], fine)
    forward = cut_evenly(weights[: len(weights) - fused], -(-len(backward) // _BACKWARD_TO_FORWARD))
    return Plan(forward, fused, tuple(backward))


def balanced_evaluation_plan(call_bytes: Sequence[int], num_workers: int) -> Plan:
    """Cuts calls for a forward pass alone by their bytes.

    Args:
        call_bytes: bytes of parameters that each call needs, in the order of the calls.
        num_workers: number of workers (of one replica group).

    Returns:
        A plan without a fused stage and without backward stages.
    """
    return Plan(cut_evenly(_weights(call_bytes), _num_stages(num_workers)))


def cut_evenly(weights: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Cuts a sequence into consecutive parts whose heaviest is as light as possible.

    Args:
        weights: non-negative weights.
        num_parts: number of parts that are wanted. There are fewer if there are fewer weights; none if there are none.

    Returns:
        Sizes of the parts, each at least 1. Parts that need not be as heavy as the heaviest are close to the mean.
    """
    num_parts = min(num_parts, len(weights))
    if num_parts < 1:
        return ()
    prefix = [0, *accumulate(weights)]
    limit = _lightest_limit(prefix, num_parts)
    # `needed[i]`: the fewest parts within the limit that cover `weights[i:]`.
    needed = [0] * len(prefix)
    for start in range(len(weights) - 1, -1, -1):
        needed[start] = 1 + needed[_reach(prefix, start, limit)]
    cuts = [0]
    for parts_after in range(num_parts - 1, -1, -1):
        start = cuts[-1]
        furthest = min(_reach(prefix, start, limit), len(weights) - parts_after)
        fair = prefix[start] + (prefix[-1] - prefix[start]) / (parts_after + 1)
        stop = start + 1
        while stop < furthest and (
            needed[stop] > parts_after or prefix[stop + 1] - fair <= fair - prefix[stop]  # is one more closer to fair?
        ):
            stop += 1
        cuts.append(stop)
    return tuple(stop - start for start, stop in pairwise(cuts))


def _weights(call_bytes: Sequence[int]) -> list[int]:
    """Bytes, with a hundredth of the mean added to each, so that calls without parameters are spread out as well."""
    total = sum(call_bytes)
    return [100 * len(call_bytes) * size + total + (total == 0) for size in call_bytes]


def _num_stages(num_workers: int) -> int:
    return max(2 * num_workers, _FEWEST_STAGES)


def _reach(prefix: Sequence[float], start: int, limit: float) -> int:
    """The furthest end of a part that begins at ``start`` and weighs at most ``limit``; one weight always fits."""
    return max(start + 1, bisect_right(prefix, prefix[start] + limit) - 1)


def _lightest_limit(prefix: Sequence[float], num_parts: int) -> float:
    """The weight of the heaviest part in the best cut, found among the sums that a part can have."""

    def fits(limit: float) -> bool:
        start = 0
        for _ in range(num_parts):
            start = _reach(prefix, start, limit)
            if start == len(prefix) - 1:
                return True
        return False

    low = max(stop - start for start, stop in pairwise(prefix))
    if fits(low):
        return low
    high = prefix[-1]
    # Bisection to a relative precision far below any measured weight keeps the cost at O(num_parts log n) a step.
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
