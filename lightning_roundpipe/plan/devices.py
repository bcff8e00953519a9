"""What the plan runs on: GPUs, links, host memory.

Figures of a GPU are of two kinds. Memory, its bandwidth and the peak rate of dense 16-bit matrix products come from the
vendor's data sheet. The share of them that training reaches is a guess, but for the RTX 4090, where it is fitted to
published layer times; measure your own and pass it as a file for predictions that matter.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.costs import CallCost, CallCount, Precision, Work

__all__ = ["PROFILES", "DeviceProfile", "Machine", "call_costs", "load_profile", "save_profile"]

# Usable share of a GPU's memory: the rest goes to the CUDA context, libraries and what the allocator cannot reuse.
_USABLE_MEMORY = 0.95

# A loss that is formed in chunks works on a sixteenth of the logits at a time: in 16 bits, in 32 bits, as
# probabilities, and both gradients, 16 bytes for each.
_LOSS_CHUNKS = 16
_LOGIT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Workers of one machine and what they share.

    Args:
        num_workers: number of workers.
        speeds: speed of every worker; times of calls are divided by it. Empty for 1 everywhere.
        hop_s: seconds from the end of a stage on one worker to the start of the next one on another.
        h2d_bytes_per_s: bandwidth of each worker's link from the host.
        d2h_bytes_per_s: bandwidth of each worker's link to the host.
        host_bytes_per_s: host memory bandwidth that links and optimizer share.
        optimizer_bytes_per_s: host memory bandwidth that the optimizer (and the sum of gradients) reaches alone.
        worker_memory_bytes: memory of each worker that may be used.
        host_memory_bytes: host memory that may be used.

    Raises:
        PlanError: there is not a positive speed for every worker.
    """

    num_workers: int
    speeds: tuple[float, ...] = ()
    hop_s: float = 0.0
    h2d_bytes_per_s: float = inf
    d2h_bytes_per_s: float = inf
    host_bytes_per_s: float = inf
    optimizer_bytes_per_s: float = inf
    worker_memory_bytes: float = inf
    host_memory_bytes: float = inf

    def __post_init__(self) -> None:
        if self.speeds and (len(self.speeds) != self.num_workers or min(self.speeds) <= 0):
            raise PlanError(
                f"`speeds` must hold a positive number for each of {self.num_workers} workers, but got {self.speeds}."
            )

    def speed(self, worker: int) -> float:
        """Speed of ``worker``."""
        return self.speeds[worker] if self.speeds else 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Rates that a GPU reaches in training, and, where they were measured, those of the host that it hangs on.

    Args:
        name: the GPU.
        memory_bytes: its memory.
        product_flops_per_s: rate of 16-bit matrix products.
        attention_flops_per_s: rate of fused attention.
        memory_bytes_per_s: bandwidth at which all other operations run.
        link_bytes_per_s: bandwidth of its link to the host, each way.
        launch_s: seconds between the starts of two kernels.
        host_bytes_per_s: bandwidth of host memory; None if it is not known.
        optimizer_bytes_per_s: bandwidth that the optimizer reaches alone; None for half of the host's.
        host_memory_bytes: host memory; None if it is not known.
    """

    name: str
    memory_bytes: int
    product_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    launch_s: float = 5e-6
    host_bytes_per_s: float | None = None
    optimizer_bytes_per_s: float | None = None
    host_memory_bytes: int | None = None

    def seconds(self, work: Work) -> float:
        """Seconds of some work; at least what it takes to launch it."""
        return max(
            work.product_flops / self.product_flops_per_s
            + work.attention_flops / self.attention_flops_per_s
            + work.moved_bytes / self.memory_bytes_per_s,
            work.num_operations * self.launch_s,
        )

    def machine(
        self,
        num_workers: int,
        *,
        hop_bytes: float = 0.0,
        host_bytes_per_s: float = inf,
        host_memory_bytes: float = inf,
    ) -> Machine:
        """A machine of several of these.

        Args:
            num_workers: number of GPUs.
            hop_bytes: bytes that a stage hands on; they cross two links.
            host_bytes_per_s: bandwidth of host memory, of which the optimizer is taken to reach one half alone, unless
                the profile knows better.
            host_memory_bytes: host memory.
        """
        return Machine(
            num_workers=num_workers,
            hop_s=2 * hop_bytes / self.link_bytes_per_s,
            h2d_bytes_per_s=self.link_bytes_per_s,
            d2h_bytes_per_s=self.link_bytes_per_s,
            host_bytes_per_s=host_bytes_per_s,
            optimizer_bytes_per_s=self.optimizer_bytes_per_s or host_bytes_per_s / 2,
            worker_memory_bytes=_USABLE_MEMORY * self.memory_bytes,
            host_memory_bytes=host_memory_bytes,
        )


def _profile(
    name: str,
    *,
    memory_gib: float,
    peak_tflops: float,
    reached: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
) -> DeviceProfile:
    product_flops_per_s = reached * peak_tflops * 1e12
    return DeviceProfile(
        name=name,
        memory_bytes=int(memory_gib * 2**30),
        product_flops_per_s=product_flops_per_s,
        # The shares of the fit for the RTX 4090.
        attention_flops_per_s=0.57 * product_flops_per_s,
        memory_bytes_per_s=0.9 * memory_gb_per_s * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
    )


# Sources: NVIDIA's data sheets and architecture white papers (GA102, Ada, Blackwell RTX, A100, H100, H200). The peak of
# a GeForce card is that of 16-bit products with 16-bit accumulation, twice the other: published layer times of the RTX
# 4090 imply 280 TFLOP/s. PCIe 4.0 and 5.0 x16 reach about 25 and 50 GB/s of their 31.5 and 63 GB/s each way.
PROFILES = {
    profile.name: profile
    for profile in (
        _profile("rtx-3090", memory_gib=24, peak_tflops=142, reached=0.85, memory_gb_per_s=936, link_gb_per_s=25),
        _profile("rtx-4090", memory_gib=24, peak_tflops=330, reached=0.85, memory_gb_per_s=1008, link_gb_per_s=25),
        _profile("rtx-5090", memory_gib=32, peak_tflops=419, reached=0.85, memory_gb_per_s=1792, link_gb_per_s=50),
        _profile("a100-80g", memory_gib=80, peak_tflops=312, reached=0.75, memory_gb_per_s=2039, link_gb_per_s=25),
        _profile("a800-80g", memory_gib=80, peak_tflops=312, reached=0.75, memory_gb_per_s=2039, link_gb_per_s=25),
        _profile("h100", memory_gib=80, peak_tflops=989, reached=0.65, memory_gb_per_s=3350, link_gb_per_s=50),
        _profile("h200", memory_gib=141, peak_tflops=989, reached=0.65, memory_gb_per_s=4800, link_gb_per_s=50),
    )
}
"""Shipped profiles, by name."""


def load_profile(path: str | Path) -> DeviceProfile:
    """Reads a profile from a JSON file with the fields of :class:`DeviceProfile`.

    Raises:
        PlanError: the file is no JSON object with these fields; those that have a default may be left out.
    """
    names = [field.name for field in fields(DeviceProfile)]
    try:
        return DeviceProfile(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"A profile must be a JSON object with {', '.join(names)}, but {path} is not: {error}"
        ) from error


def save_profile(profile: DeviceProfile, path: str | Path) -> None:
    """Writes a profile that :func:`load_profile` reads."""
    Path(path).write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")


def call_costs(
    counts: Sequence[CallCount], profile: DeviceProfile, precision: Precision, *, scale: float = 1.0, chunked_loss: bool
) -> tuple[CallCost, ...]:
    """Estimates costs from counts.

    Args:
        counts: counts of the calls, the head last.
        profile: the GPU.
        precision: bytes for each weight.
        scale: micro-batch in multiples of the one that was counted.
        chunked_loss: whether logits are formed in chunks and never all at once, as fused losses do.
    """
    costs = []
    for index, count in enumerate(counts):
        is_head = index == len(counts) - 1
        graph_bytes, working_bytes, extra_bytes = count.graph_bytes, count.working_bytes, 0
        if is_head and chunked_loss:
            num_logits = count.output_bytes / precision.compute_bytes
            graph_bytes, working_bytes = 0, int(num_logits / _LOSS_CHUNKS * _LOGIT_BYTES)
        elif is_head:
            # Logits go to 32 bits, then through the softmax; so do their gradients back.
            logits = 4 * count.output_bytes // precision.compute_bytes
            graph_bytes, working_bytes = graph_bytes + 2 * logits, working_bytes + logits
            extra_bytes = 3 * logits + count.output_bytes
        costs.append(
            CallCost(
                forward_s=profile.seconds((count.forward + Work(moved_bytes=extra_bytes)).times(scale)),
                backward_s=profile.seconds((count.backward + Work(moved_bytes=extra_bytes)).times(scale)),
                recompute_s=0.0 if is_head else None,
                weight_bytes=count.weight_bytes,
                gradient_bytes=count.gradient_bytes,
                sum_bytes=count.num_trained * precision.sum_bytes,
                optimizer_bytes=count.num_trained * precision.update_bytes,
                input_bytes=int(scale * count.input_bytes),
                graph_bytes=int(scale * graph_bytes),
                working_bytes=int(scale * working_bytes),
                host_bytes=count.num_trained * precision.trained_bytes
                + (count.num_weights - count.num_trained) * precision.compute_bytes,
            )
        )
    return tuple(costs)
