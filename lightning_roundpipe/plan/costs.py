"""What a call costs: times, bytes, and how measured times replace the estimated ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_roundpipe.plan.stages import Plan, Stage, StageKind

__all__ = [
    "PRECISIONS",
    "CallCost",
    "CallCount",
    "MeasuredCosts",
    "Precision",
    "Work",
    "busy_seconds",
    "layer_costs",
    "stage_seconds",
]


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
        copy_bytes: bytes of the call's weights on the worker, where these are known apart from ``weight_bytes``.
        accumulator_bytes: bytes of the sums of gradients on the worker, where these are known.
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
    copy_bytes: int = 0
    accumulator_bytes: int = 0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one direction of a call does.

    Args:
        product_flops: operations of matrix products (a multiplication and an addition are two).
        attention_flops: operations of attention.
        moved_bytes: bytes that all other operations read and write.
        num_operations: number of operations, each a kernel.
    """

    product_flops: float = 0
    attention_flops: float = 0
    moved_bytes: float = 0
    num_operations: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            product_flops=self.product_flops + other.product_flops,
            attention_flops=self.attention_flops + other.attention_flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            num_operations=self.num_operations + other.num_operations,
        )

    def times(self, scale: float) -> "Work":
        """The same operations on so many times the data."""
        return replace(
            self,
            product_flops=scale * self.product_flops,
            attention_flops=scale * self.attention_flops,
            moved_bytes=scale * self.moved_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes for each weight, with an optimizer that keeps two moments (Adam).

    Args:
        compute_bytes: of its compute copy and of its gradient on the worker.
        trained_bytes: of all that the host keeps for a trained weight.
        update_bytes: that an update reads and writes.
        sum_bytes: that the sum of several replica groups' gradients writes.
    """

    compute_bytes: int
    trained_bytes: int
    update_bytes: int
    sum_bytes: int


PRECISIONS = {
    # fp32 master, gradient and two moments; 16-bit compute copy and landing buffer.
    "bf16-mixed": Precision(compute_bytes=2, trained_bytes=4 * 4 + 2 * 2, update_bytes=4 * 7 + 2, sum_bytes=4),
    "16-mixed": Precision(compute_bytes=2, trained_bytes=4 * 4 + 2 * 2, update_bytes=4 * 7 + 2, sum_bytes=4),
    # Master, gradient and two moments in 16 bits.
    "bf16-true": Precision(compute_bytes=2, trained_bytes=4 * 2, update_bytes=7 * 2, sum_bytes=2),
    "16-true": Precision(compute_bytes=2, trained_bytes=4 * 2, update_bytes=7 * 2, sum_bytes=2),
    # The same in 32 bits.
    "32-true": Precision(compute_bytes=4, trained_bytes=4 * 4, update_bytes=7 * 4, sum_bytes=4),
}
"""By the names of Lightning's ``Trainer(precision=...)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCount:
    """What a call does and holds, for the micro-batch for which it was counted; independent of any device.

    Args:
        forward: work forward.
        backward: work backward, without recomputation.
        weight_bytes: bytes of weights, as uploaded.
        gradient_bytes: bytes of gradients of the trained ones, as downloaded.
        input_bytes: bytes of the inputs that change from micro-batch to micro-batch.
        output_bytes: bytes of the outputs.
        graph_bytes: bytes alive after forward with a graph.
        working_bytes: bytes beyond those at the peak of forward and backward; gradients of weights not counted.
        num_weights: number of weights that no earlier call has used.
        num_trained: number of trained weights among them.
    """

    forward: Work
    backward: Work
    weight_bytes: int
    gradient_bytes: int
    input_bytes: int
    output_bytes: int
    graph_bytes: int
    working_bytes: int
    num_weights: int = 0
    num_trained: int = 0

    def with_stored(self, numbers: tuple[int, int]) -> "CallCount":
        """The same call with other numbers of weights and trained weights that it is the first to use."""
        return replace(self, num_weights=numbers[0], num_trained=numbers[1])


class MeasuredCosts:
    """Costs that follow measured times of tickets.

    A ticket is measured as a whole. Its calls share the time in proportion to what was believed before, and belief
    moves towards the measurement by a fixed share, so that one slow ticket does not change a plan.

    Args:
        costs: the costs to begin with, estimated or all alike.
        share: how far each measurement moves them, above 0 and up to 1.

    Raises:
        ValueError: ``share`` is out of bounds.
    """

    def __init__(self, costs: Sequence[CallCost], share: float = 0.3) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"`share` must be above 0 and at most 1, but got {share}.")
        self._costs = list(costs)
        self._share = share

    @property
    def costs(self) -> tuple[CallCost, ...]:
        """The costs as they are believed now."""
        return tuple(self._costs)

    def observe(self, stage: Stage, seconds: float, speed: float = 1.0) -> None:
        """Takes in the time of one ticket.

        Args:
            stage: the ticket's stage.
            seconds: its time on the worker, waits excluded.
            speed: the worker's speed.
        """
        believed = sum(stage_seconds(self._costs, stage))
        if believed <= 0 or seconds <= 0:
            return
        factor = 1 + self._share * (seconds * speed / believed - 1)
        for call in stage.calls:
            self._costs[call] = self._scaled(self._costs[call], stage.kind, factor)

    def _scaled(self, cost: CallCost, kind: StageKind, factor: float) -> CallCost:
        forward_s = cost.forward_s * (factor if kind is not StageKind.BACKWARD else 1.0)
        if kind is StageKind.FORWARD:
            # Recomputation is another measurement; unless it was ever told apart, it costs what forward does.
            return replace(cost, forward_s=forward_s)
        recompute_s = cost.forward_s if cost.recompute_s is None else cost.recompute_s
        if kind is StageKind.BACKWARD:
            recompute_s *= factor
        return replace(cost, forward_s=forward_s, backward_s=cost.backward_s * factor, recompute_s=recompute_s)
