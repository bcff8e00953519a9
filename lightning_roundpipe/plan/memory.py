"""How much memory a plan needs."""

from collections.abc import Sequence

from lightning_roundpipe.plan.costs import CallCost
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan, Stage, StageKind

__all__ = ["combined_bytes", "host_bytes", "largest_fused", "stage_bytes", "worker_bytes"]

_UPDATE_SHARE = 0.9
"""Of the time in which updates can run, the share that they may take: gradients do not come evenly."""


def stage_bytes(costs: Sequence[CallCost], stage: Stage) -> tuple[int, int]:
    """Memory of a stage on its worker.

    Returns:
        What a slot must hold for it (weights, and gradients unless it is a forward stage), and what it needs besides
        for the micro-batch that runs and the next one, whose kept inputs are already on their way.
    """
    calls = costs[stage.start : stage.stop]
    weights = sum(call.weight_bytes for call in calls)
    working = max((call.working_bytes for call in calls), default=0)
    match stage.kind:
        case StageKind.FORWARD:
            return weights, working + 2 * max((call.input_bytes for call in calls), default=0)
        case StageKind.FUSED:
            slot = weights + sum(call.gradient_bytes for call in calls)
            return slot, working + sum(call.graph_bytes for call in calls)
        case StageKind.BACKWARD:
            # Recomputation goes call by call: one call's graph lives at a time.
            slot = weights + sum(call.gradient_bytes for call in calls)
            graph = max(call.graph_bytes + call.working_bytes for call in calls)
            return slot, graph + 2 * sum(call.input_bytes for call in calls)


def worker_bytes(costs: Sequence[CallCost], plan: Plan, *, streams_weights: bool = True) -> int:
    """Memory that every worker needs: two slots of the largest stage, and the most that a stage needs besides."""
    return combined_bytes([stage_bytes(costs, stage) for stage in plan.stages], plan, streams_weights=streams_weights)


def combined_bytes(needs: Sequence[tuple[int, int]], plan: Plan, *, streams_weights: bool = True) -> int:
    """Memory that every worker needs for stages of which each needs so much (:func:`stage_bytes`).

    The fused stage works on logits, whose blocks are like nothing else; an allocator that has once given them out does
    not reuse them for layers. So the needs of the fused stage and of the largest other stage add up.
    """
    slot = max((slot for slot, _ in needs), default=0)
    fused = sum(besides for _, besides in needs[plan.fused_stage : plan.fused_stage + 1])
    others = max((besides for stage, (_, besides) in enumerate(needs) if stage != plan.fused_stage), default=0)
    return 2 * slot * streams_weights + fused + others


def host_bytes(costs: Sequence[CallCost], schedule: Schedule) -> int:
    """Host memory of a step: weights and what belongs to them, kept inputs, landing buffers of replica groups."""
    plan = schedule.plan
    kept = sum(call.input_bytes for call in costs[: sum(plan.forward)]) if plan.trains else 0
    landing = max(
        (
            sum(call.gradient_bytes for call in costs[stage.start : stage.stop])
            for stage in plan.stages[plan.fused_stage :]
        ),
        default=0,
    )
    return sum(call.host_bytes for call in costs) + schedule.num_microbatches * kept + schedule.replica_groups * landing


def largest_fused(
    costs: Sequence[CallCost],
    plan: Plan,
    *,
    num_microbatches: int,
    free_bytes: float,
    weight_bytes: float,
    step_s: float,
    update_s: float,
) -> int:
    """How many calls the fused stage of a worker that runs all stages may hold: their graphs need not be recomputed.

    A larger fused stage must fit the memory that ``plan`` leaves free, and leave time for the optimizer: gradients of
    the fused stage are complete when its last micro-batch runs backward, so that nothing is updated before.

    Args:
        costs: of the calls, measured while ``plan`` ran. Calls whose ``graph_bytes`` are 0 are not known and stay out.
        plan: the plan in use.
        num_microbatches: number of micro-batches.
        free_bytes: memory of the worker that has never been in use.
        weight_bytes: memory of the worker for weights, which are part of what is in use if all of them fit.
        step_s: seconds of a step.
        update_s: seconds of the optimizer in a step.

    Returns:
        A number of calls, at least that of ``plan``.
    """
    assert plan.fused is not None
    fits_all = sum(call.copy_bytes for call in costs) <= weight_bytes
    fused = largest = plan.fused
    fused_s = sum(call.forward_s + call.backward_s for call in costs[len(costs) - fused :])
    while fused < len(costs):
        call = costs[len(costs) - fused - 1]
        free_bytes -= call.graph_bytes + call.accumulator_bytes + (0 if fits_all else call.copy_bytes)
        if call.graph_bytes == 0 or free_bytes < 0:
            break
        fused += 1
        fused_s += call.forward_s + call.backward_s
        step_s -= num_microbatches * (call.forward_s if call.recompute_s is None else call.recompute_s)
        if update_s <= _UPDATE_SHARE * (step_s - (num_microbatches - 1) * fused_s):
            largest = fused
    return largest
