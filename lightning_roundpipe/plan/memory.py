"""How much memory a plan needs."""

from collections.abc import Sequence

from lightning_roundpipe.plan.costs import CallCost
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan, Stage, StageKind

__all__ = ["combined_bytes", "host_bytes", "stage_bytes", "worker_bytes"]


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
