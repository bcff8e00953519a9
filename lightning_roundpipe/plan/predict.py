"""Will it fit, how fast will it be, and what is in the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.costs import CallCount, Precision
from lightning_roundpipe.plan.devices import DeviceProfile, Machine, call_costs
from lightning_roundpipe.plan.memory import host_bytes, worker_bytes
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.search import Case, Choice, search_cases
from lightning_roundpipe.plan.simulator import Boundary
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.plan.timeline import Lane

__all__ = ["Prediction", "Setup", "least_memory", "longest_sequence", "predict"]

_SEQUENCE_STEP = 256


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is to be trained, and on what.

    Args:
        counts: counts of the calls for one sequence.
        sequence: its length in tokens.
        profile: the GPU.
        num_workers: number of GPUs.
        precision: bytes for each weight.
        chunked_loss: whether the loss forms logits in chunks.
        host_bytes_per_s: bandwidth of host memory.
        host_memory_bytes: host memory.
    """

    counts: Sequence[CallCount]
    sequence: int
    profile: DeviceProfile
    num_workers: int
    precision: Precision
    chunked_loss: bool = True
    host_bytes_per_s: float = inf
    host_memory_bytes: float = inf


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The best step that was found.

    Args:
        choice: its schedule, timeline and memory.
        microbatch: sequences of a micro-batch.
        tokens_per_s: tokens of a step over its time.
        limit: what is busiest: ``compute``, ``h2d``, ``d2h``, ``host memory`` or ``optimizer``.
        busy: the share of the time that each of them is busy.
    """

    choice: Choice
    microbatch: int
    tokens_per_s: float
    limit: str
    busy: dict[str, float]


def predict(
    setup: Setup,
    batch: int,
    *,
    boundary: Boundary = Boundary.EXACT,
    microbatch: int | None = None,
    max_fused: int | None = None,
) -> Prediction:
    """Searches sizes of micro-batches and plans for the most tokens per second.

    Args:
        setup: what is to be trained.
        batch: sequences of a step.
        boundary: what a step waits for.
        microbatch: sequences of a micro-batch; None to try powers of two.
        max_fused: most calls in the fused stage; None for as many as fit.

    Raises:
        PlanError: nothing fits, not even micro-batches of one sequence.
    """
    if batch < 1:
        raise PlanError(f"A step must have at least one sequence, but `batch` is {batch}.")
    sizes = {}
    for size in _microbatches(batch, setup.num_workers) if microbatch is None else [microbatch]:
        costs = call_costs(setup.counts, setup.profile, setup.precision, scale=size, chunked_loss=setup.chunked_loss)
        sizes[Case(costs, _machine(setup, size), -(-batch // size))] = size
    case, choice = search_cases(list(sizes), boundary=boundary, max_fused=max_fused)
    busy = _busy(choice, setup)
    return Prediction(
        choice=choice,
        microbatch=sizes[case],
        tokens_per_s=batch * setup.sequence / choice.step_s,
        limit=max(busy, key=busy.__getitem__),
        busy=busy,
    )


def longest_sequence(setup: Setup) -> int:
    """Longest sequence, in tokens, that one micro-batch of one sequence for each worker can have; 0 if none fits.

    Memory for activations grows with the length, since fused attention keeps no scores.
    """
    low, high = 0, 2**24 // _SEQUENCE_STEP
    while low < high:
        middle = (low + high + 1) // 2
        on_worker, on_host = least_memory(setup, middle * _SEQUENCE_STEP)
        if on_worker <= _machine(setup, 1).worker_memory_bytes and on_host <= setup.host_memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low * _SEQUENCE_STEP


def least_memory(setup: Setup, sequence: int) -> tuple[int, int]:
    """Bytes on a worker and on the host with one call per stage and one sequence per micro-batch and worker."""
    costs = call_costs(
        setup.counts,
        setup.profile,
        setup.precision,
        scale=sequence / setup.sequence,
        chunked_loss=setup.chunked_loss,
    )
    ones = (1,) * (len(costs) - 1)
    schedule = Schedule(Plan(ones, 1, ones), setup.num_workers, setup.num_workers)
    return worker_bytes(costs, schedule.plan), host_bytes(costs, schedule)


def _microbatches(batch: int, num_workers: int) -> list[int]:
    """Powers of two up to one micro-batch for each worker."""
    sizes = [1]
    while 2 * sizes[-1] * num_workers <= batch:
        sizes.append(2 * sizes[-1])
    return sizes


def _machine(setup: Setup, microbatch: int) -> Machine:
    handed_on = max((count.input_bytes for count in setup.counts), default=0)
    return setup.profile.machine(
        setup.num_workers,
        hop_bytes=microbatch * handed_on,
        host_bytes_per_s=setup.host_bytes_per_s,
        host_memory_bytes=setup.host_memory_bytes,
    )


def _busy(choice: Choice, setup: Setup) -> dict[str, float]:
    timeline = choice.timeline
    begin, end = window = timeline.settled_window
    moved = sum(
        transfer.num_bytes * max(0.0, min(transfer.stop, end) - max(transfer.start, begin)) / duration
        for transfer in timeline.transfers
        if (duration := transfer.stop - transfer.start) > 0
    )
    return {
        "compute": 1 - timeline.bubble(window).total,
        "h2d": timeline.busy(Lane.H2D, window),
        "d2h": timeline.busy(Lane.D2H, window),
        "host memory": moved / (setup.host_bytes_per_s * (end - begin)) if end > begin else 0.0,
        "optimizer": timeline.busy(Lane.CPU, window),
    }
