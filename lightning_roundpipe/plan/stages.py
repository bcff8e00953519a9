"""A plan: how the calls of one micro-batch are cut into stages.

The calls of one forward pass are numbered ``0 .. num_calls - 1`` in the order in which they happen. A plan cuts them
into forward stages, one fused stage (forward and backward at once), and backward stages. Forward and backward are cut
differently, because a backward stage does about three times the work (recomputation, then two products) of a forward
stage of the same calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from lightning_roundpipe.exceptions import PlanError

__all__ = ["Plan", "Stage", "StageKind"]


class StageKind(StrEnum):
    """What a stage does with its calls."""

    FORWARD = "forward"
    """Runs the calls without a graph and keeps their inputs."""
    FUSED = "fused"
    """Runs the calls with a graph, then the loss, then their backward."""
    BACKWARD = "backward"
    """Recomputes the calls from the kept inputs, then runs their backward."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive calls ``start .. stop - 1`` that run on one worker as one job.

    A backward stage runs its calls from ``stop - 1`` down to ``start``.
    """

    index: int
    kind: StageKind
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def calls(self) -> range:
        """The calls in the order in which the stage runs them."""
        forwards = range(self.start, self.stop)
        return forwards[::-1] if self.kind is StageKind.BACKWARD else forwards


@dataclass(frozen=True)
class Plan:
    """Stage sizes, in calls, in the order in which the stages run.

    Args:
        forward: sizes of the forward stages, from the first call on.
        fused: size of the fused stage, which takes the last calls and the loss. May be 0: then only the loss is left.
            None for a plan that only evaluates: it has neither a fused stage nor backward stages.
        backward: sizes of the backward stages, from the last call that is not fused down to the first.

    Raises:
        PlanError: a size is negative, a forward or backward stage is empty, or forward and backward do not cover the
            same calls.
    """

    forward: tuple[int, ...]
    fused: int | None = None
    backward: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in (*self.forward, *self.backward)) or (self.fused or 0) < 0:
            raise PlanError(
                "Every forward and backward stage must hold at least one call and the fused stage none or more, but"
                f" got {self}."
            )
        if sum(self.backward) != (sum(self.forward) if self.trains else 0):
            raise PlanError(
                f"Forward stages cover {sum(self.forward)} calls, backward stages {sum(self.backward)}; both must"
                f" cover every call that is not fused (a plan without a fused stage has no backward), but got {self}."
            )

    def __str__(self) -> str:
        forward = "-".join(map(str, self.forward))
        if not self.trains:
            return forward
        return f"{forward}|{'-'.join(map(str, (self.fused, *self.backward)))}"

    @property
    def trains(self) -> bool:
        """Whether the plan has a fused stage and a backward pass."""
        return self.fused is not None

    def with_fused(self, fused: int) -> "Plan":
        """The plan with so many calls in the fused stage, and the same cuts between the others as far as they go."""
        others = self.num_calls - fused
        return Plan(_up_to(self.forward, others), fused, _up_to(self.backward[::-1], others)[::-1])

    @property
    def num_calls(self) -> int:
        """Number of calls of one forward pass."""
        return sum(self.forward) + (self.fused or 0)

    @property
    def num_stages(self) -> int:
        """Number of stages, the fused one included."""
        return len(self.stages)

    @property
    def fused_stage(self) -> int:
        """Index of the fused stage (for an evaluating plan: the number of stages)."""
        return len(self.forward)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in the order in which they run; ``stages[i].index == i``."""
        return tuple(self._cut())

    def _cut(self) -> Iterator[Stage]:
        index = position = 0
        for size in self.forward:
            yield Stage(index, StageKind.FORWARD, position, position + size)
            index, position = index + 1, position + size
        if self.fused is None:
            return
        yield Stage(index, StageKind.FUSED, position, position + self.fused)
        for size in self.backward:
            index += 1
            yield Stage(index, StageKind.BACKWARD, position - size, position)
            position -= size

    @cached_property
    def _forward_stage_of(self) -> tuple[int, ...]:
        ahead = [stage for stage in self.stages if stage.kind is not StageKind.BACKWARD]
        return tuple(stage.index for stage in ahead for _ in stage.calls)

    @cached_property
    def _backward_stage_of(self) -> tuple[int, ...]:
        stages = [0] * self.num_calls
        for stage in self.stages[self.fused_stage :]:
            for call in stage.calls:
                stages[call] = stage.index
        return tuple(stages)

    def forward_stage(self, call: int) -> int:
        """Index of the stage that runs ``call`` forward (the fused stage for the last calls)."""
        return self._forward_stage_of[call]

    def backward_stage(self, call: int) -> int:
        """Index of the stage that runs ``call`` backward (the fused stage for the last calls)."""
        return self._backward_stage_of[call]


def _up_to(sizes: Sequence[int], total: int) -> tuple[int, ...]:
    """Sizes that sum to ``total``: those given, cut off, and one more for what is missing."""
    taken: list[int] = []
    for size in (*sizes, total):
        taken.append(min(size, total - sum(taken)))
    return tuple(size for size in taken if size)
