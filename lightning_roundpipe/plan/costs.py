"""What a call costs: times, bytes, and how measured times replace the estimated ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_roundpipe.plan.stages import Plan, Stage, StageKind

__all__ = ["CallCost", "busy_seconds", "layer_costs", "stage_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """Costs of one call for one micro-batch on a worker of speed 1.

    Args:
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass, without recomputation.
        recompute_s: seconds of the recomputation in a backward stage; None for ``forward_s``.
        weight_bytes: bytes that a worker uploads to run the call (compute dtype).
        gradient_bytes: bytes that a worker downloads after the call's backward stage; 0 for frozen weights.
        optimizer_bytes: host memory that an update of the call's weights reads and writes.
        sum_bytes: host memory that the sum of the gradients of several replica groups writes.
        input_bytes: bytes of inputs that the host keeps from forward to backward, for each micro-batch.
        graph_bytes: bytes that the call's autograd graph holds on the worker from its forward to its backward.
        working_bytes: largest extra bytes on the worker while the call runs.
        host_bytes: host memory for the call's weights, gradients and optimizer state.
    """

    forward_s: float
    backward_s: float
    recompute_s: float | None = None
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    sum_bytes: int = 0
    input_bytes: int = 0
    graph_bytes: int = 0
    working_bytes: int = 0
    host_bytes: int = 0


def stage_seconds(costs: Sequence[CallCost], stage: Stage) -> tuple[float, float]:
    """Seconds of one ticket on a worker of speed 1.

    Returns:
        The part that needs only the inputs kept from the forward pass (recomputation; 0 unless a backward stage), and
        the part that also needs what the previous stage hands on.
    """
    calls = costs[stage.start : stage.stop]
    match stage.kind:
        case StageKind.FORWARD:
            return 0.0, sum(call.forward_s for call in calls)
        case StageKind.FUSED:
            return 0.0, sum(call.forward_s + call.backward_s for call in calls)
        case StageKind.BACKWARD:
            recompute = sum(call.forward_s if call.recompute_s is None else call.recompute_s for call in calls)
            return recompute, sum(call.backward_s for call in calls)


def busy_seconds(costs: Sequence[CallCost], plan: Plan) -> float:
    """Seconds of computation of one micro-batch in all stages."""
    return sum(sum(stage_seconds(costs, stage)) for stage in plan.stages)


def layer_costs(layer: CallCost, num_layers: int, head: CallCost) -> tuple[CallCost, ...]:
    """Costs of a stack of equal layers and the head, which keeps its graph rather than recompute."""
    return (*[layer] * num_layers, replace(head, recompute_s=0.0))
