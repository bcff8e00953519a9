"""``lightning-roundpipe doctor``: what this machine is, what it reaches, and what is wrong with it for streaming.

`examine` measures, `findings` judges what was measured, `measured_profile` makes of it what ``plan --profile`` reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_roundpipe.exceptions import PlanError, RoundPipeError
from lightning_roundpipe.plan.costs import PRECISIONS
from lightning_roundpipe.plan.devices import DeviceProfile
from lightning_roundpipe.plan.timeline import Lane
from lightning_roundpipe.runtime.gpu_rates import GpuRates, gpu_rates
from lightning_roundpipe.runtime.hardware import (
    GpuFacts,
    HostFacts,
    PcieLink,
    gpu_facts,
    host_facts,
    pcie_link,
    pcie_traffic,
    reason_without_gpu,
)
from lightning_roundpipe.runtime.measurements import (
    adamw_weights_per_s,
    host_bytes_per_s,
    link_bytes_per_s,
    peer_copy_is_right,
    pin_host_memory,
)

__all__ = ["Checkup", "GpuCheckup", "HostCheckup", "examine", "findings", "measured_profile", "report", "rows"]

_GIB = 2**30
_BOTH = (Lane.H2D, Lane.D2H)

# What is called wrong. These bounds are judgements: pinned copies usually reach 80 % of what a link carries.
_GOOD_LINK = 0.65
_GOOD_BOTH_WAYS = 1.3
_GOOD_BESIDE_OTHERS = 0.7
_QUIET_LINK = 0.05
_FREE_GPU = 0.9
_EQUAL_GPUS = 0.9


@dataclass(frozen=True, kw_only=True)
class HostCheckup:
    """The host.

    Attributes:
        facts: what it says of itself.
        bytes_per_s: bandwidth of its memory, reads and writes together.
        adamw_weights_per_s: float32 weights that AdamW updates.
        pinned_bytes: memory that could be pinned at once; None where nothing was tried, for want of a GPU.
        pin_complaint: why it was not more; None if nothing stood in the way.
    """

    facts: HostFacts
    bytes_per_s: float
    adamw_weights_per_s: float
    pinned_bytes: int | None = None
    pin_complaint: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuCheckup:
    """One GPU and its link; bandwidths in bytes/s, of pinned copies, by direction.

    Attributes:
        facts: what it says of itself.
        link: what the driver says of its link, under load; None if it does not.
        traffic_bytes_per_s: what crossed the link before anything was measured; None if the driver does not say.
        rates: what it reaches when it computes.
        alone: each direction by itself.
        both: both directions at once.
        with_all: both directions at once on all GPUs.
        wrong_peers: GPUs to which copies from this one arrive wrong.
    """

    facts: GpuFacts
    link: PcieLink | None
    traffic_bytes_per_s: float | None
    rates: GpuRates
    alone: Mapping[Lane, float]
    both: Mapping[Lane, float]
    with_all: Mapping[Lane, float]
    wrong_peers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """All that was found out.

    Attributes:
        torch_version: version of torch.
        host: the host.
        gpus: the GPUs.
        no_gpu: why there are none; None if there are.
    """

    torch_version: str
    host: HostCheckup
    gpus: tuple[GpuCheckup, ...] = ()
    no_gpu: str | None = None


# ------------------------------------------------------------------ measure


def examine(*, pin_bytes: int | None = None, needs_gpu: bool = False) -> Checkup:
    """Measures this machine, for some seconds for each GPU.

    Args:
        pin_bytes: host memory to try to pin; None for 16 GiB, or half of what is free if that is less.
        needs_gpu: whether to refuse a machine without a GPU before anything is measured.

    Raises:
        PlanError: there is no GPU, but one is needed.
        RoundPipeError: a GPU has too little free memory to be measured.
    """
    facts = host_facts()
    no_gpu = reason_without_gpu()
    if needs_gpu and no_gpu is not None:
        raise PlanError(
            f"A profile describes a GPU, but there is none: {no_gpu}. Leave out `--output` for a report on the host."
        )
    sample_bytes = min(512 * 2**20, facts.available_bytes // 8)
    pinned: tuple[int | None, str | None] = (None, None)
    gpus: tuple[GpuCheckup, ...] = ()
    if no_gpu is None:
        gpus = tuple(_examine_gpus(torch.cuda.device_count()))
        pinned = pin_host_memory(min(16 * _GIB, facts.available_bytes // 2) if pin_bytes is None else pin_bytes)
    host = HostCheckup(
        facts=facts,
        bytes_per_s=host_bytes_per_s(sample_bytes),
        adamw_weights_per_s=adamw_weights_per_s(sample_bytes // 16),
        pinned_bytes=pinned[0],
        pin_complaint=pinned[1],
    )
    return Checkup(torch_version=torch.__version__, host=host, gpus=gpus, no_gpu=no_gpu)


def _examine_gpus(count: int) -> Iterator[GpuCheckup]:
    # Before anything is allocated, or moved.
    facts = [gpu_facts(index) for index in range(count)]
    traffic = [pcie_traffic(index) for index in range(count)]
    devices = [torch.device("cuda", index) for index in range(count)]
    for gpu, device in zip(facts, devices, strict=True):
        try:
            alone = {lane: link_bytes_per_s([device], [lane])[0][lane] for lane in _BOTH}
            both = link_bytes_per_s([device], _BOTH)[0]
            link = pcie_link(gpu.index)  # Right after the copies: an idle link falls back to save power.
            with_all = link_bytes_per_s(devices, _BOTH)[gpu.index] if count > 1 else both
            rates = gpu_rates(device)
        except torch.OutOfMemoryError as error:
            raise RoundPipeError(
                f"To be measured a GPU needs 4 GiB of free memory, but GPU {gpu.index} has"
                f" {_gib(gpu.free_bytes)} free. End the programs that use it (`nvidia-smi` lists them)."
            ) from error
        wrong = [other.index for other in devices if other != device and not peer_copy_is_right(device, other)]
        torch.cuda.empty_cache()
        yield GpuCheckup(
            facts=gpu,
            link=link,
            traffic_bytes_per_s=traffic[gpu.index],
            rates=rates,
            alone=alone,
            both=both,
            with_all=with_all,
            wrong_peers=tuple(wrong),
        )


# ------------------------------------------------------------------ judge


def findings(checkup: Checkup) -> list[str]:
    """What is wrong: one sentence or two for each, with what to do about it."""
    found = []
    if checkup.no_gpu is not None:
        found.append(
            f"No GPU: {checkup.no_gpu}. Virtual workers (`Trainer(accelerator='cpu', devices=4)`) run the whole"
            " schedule, for trying and testing, not for speed."
        )
    found += _about_host(checkup.host, checkup.gpus)
    for gpu in checkup.gpus:
        found += _about_link(gpu)
        if gpu.facts.free_bytes < _FREE_GPU * gpu.facts.memory_bytes:
            found.append(
                f"GPU {gpu.facts.index} is in use: {_gib(gpu.facts.free_bytes)} of {_gib(gpu.facts.memory_bytes)} are"
                " free. `nvidia-smi` lists the programs; rates are too low while they run."
            )
        if gpu.wrong_peers:
            found.append(
                f"Copies from GPU {gpu.facts.index} to GPU {_listed(gpu.wrong_peers)} arrive wrong. This package makes"
                " no such copies, but NCCL does (`NCCL_P2P_DISABLE=1` stops it), and so does your own code with"
                " `tensor.to(...)`."
            )
    products = [gpu.rates.product_flops_per_s for gpu in checkup.gpus]
    for gpu in checkup.gpus:
        if gpu.rates.product_flops_per_s < _EQUAL_GPUS * max(products):
            found.append(
                f"GPU {gpu.facts.index} computes at {gpu.rates.product_flops_per_s / 1e12:.0f} TFLOP/s, the fastest at"
                f" {max(products) / 1e12:.0f} TFLOP/s. Workers are taken to be equal, and all wait for the slowest:"
                " look at its temperature and its power limit (`nvidia-smi -q -d PERFORMANCE`), or leave it out with"
                " `Trainer(devices=[...])`."
            )
    return found


def _about_host(host: HostCheckup, gpus: Sequence[GpuCheckup]) -> list[str]:
    found = []
    facts = host.facts
    if facts.num_threads < facts.num_cores / 2:
        found.append(
            f"torch uses {facts.num_threads} threads, but this process may run on {facts.num_cores} cores: the"
            " optimizer is slower than it need be. Unset `OMP_NUM_THREADS`, or raise it."
        )
    if host.pin_complaint is not None:
        limit = "no limit" if facts.lockable_bytes is None else _gib(facts.lockable_bytes)
        found.append(
            f"Only {_gib(host.pinned_bytes or 0)} of host memory could be pinned ({limit} by `ulimit -l`). What is not"
            f" pinned is copied slowly. {host.pin_complaint}"
        )
    on_gpus = sum(gpu.facts.memory_bytes for gpu in gpus)
    if facts.available_bytes < on_gpus:
        found.append(
            f"Too little host memory: {_gib(facts.available_bytes)} are free, less than the {_gib(on_gpus)} of all"
            " GPUs. What this host can hold fits the GPUs without streaming, too."
        )
    of_links = sum(sum(gpu.with_all.values()) for gpu in gpus)
    if host.bytes_per_s < of_links:
        found.append(
            f"Host memory moves {_gb(host.bytes_per_s)}, all links together {_gb(of_links)}: the optimizer and the"
            " links slow each other down. Fill all memory channels; prefer few replica groups."
        )
    return found


def _about_link(gpu: GpuCheckup) -> list[str]:
    found = []
    name, link = f"GPU {gpu.facts.index}", gpu.link
    slowest = min(gpu.alone.values())
    if link is None:
        found.append(
            f"What link {name} has is not known: NVML does not tell. `pip install lightning-roundpipe[gpu]` if it is"
            " not installed."
        )
    elif (link.generation, link.width) < (link.max_generation, link.max_width) or link.width < link.max_width:
        found.append(
            f"{name} is linked by PCIe {link.generation}.0 x{link.width}, but could be by {link.max_generation}.0"
            f" x{link.max_width}. Look at the slot (lanes may be shared), the riser and the BIOS."
        )
    if link is not None and link.bytes_per_s is not None and slowest < _GOOD_LINK * link.bytes_per_s:
        found.append(
            f"Pinned copies to or from {name} reach {_gb(slowest)} of the {_gb(link.bytes_per_s)} that its link"
            " carries. Other traffic, an IOMMU, or memory of another socket (try `numactl --cpunodebind --membind`) may"
            " be why."
        )
    if gpu.traffic_bytes_per_s is not None and gpu.traffic_bytes_per_s > _QUIET_LINK * slowest:
        found.append(
            f"Other programs move {_gb(gpu.traffic_bytes_per_s)} over the link of {name}, to or from the host or"
            " another GPU. Bandwidths are too low while they run."
        )
    if sum(gpu.both.values()) < _GOOD_BOTH_WAYS * max(gpu.alone.values()):
        found.append(
            f"Uploads and downloads of {name} share one bandwidth: {_gb(sum(gpu.both.values()))} both ways at once,"
            f" {_gb(max(gpu.alone.values()))} one way. Downloads of gradients and activations will delay weights."
        )
    for lane in _BOTH:
        if gpu.with_all[lane] < _GOOD_BESIDE_OTHERS * gpu.both[lane]:
            found.append(
                f"GPUs slow each other down: {lane.value} of {name} falls from {_gb(gpu.both[lane])} to"
                f" {_gb(gpu.with_all[lane])} when all copy. They share a switch, or the host's memory; one replica"
                " group moves least."
            )
    return found


# ------------------------------------------------------------------ tell


def measured_profile(checkup: Checkup) -> DeviceProfile:
    """What ``plan --profile`` reads. Of several GPUs the slowest counts for each rate: a pipeline waits for it.

    Args:
        checkup: of a machine with a GPU.
    """
    rates = [gpu.rates for gpu in checkup.gpus]
    update = PRECISIONS["32-true"].update_bytes
    return DeviceProfile(
        name=checkup.gpus[0].facts.name,
        memory_bytes=min(gpu.facts.memory_bytes for gpu in checkup.gpus),
        product_flops_per_s=min(rate.product_flops_per_s for rate in rates),
        attention_flops_per_s=min(rate.attention_flops_per_s for rate in rates),
        memory_bytes_per_s=min(rate.memory_bytes_per_s for rate in rates),
        # Both ways at once on all GPUs, as in training.
        link_bytes_per_s=min(min(gpu.with_all.values()) for gpu in checkup.gpus),
        launch_s=max(rate.launch_s for rate in rates),
        host_bytes_per_s=checkup.host.bytes_per_s,
        optimizer_bytes_per_s=update * checkup.host.adamw_weights_per_s,
        host_memory_bytes=checkup.host.facts.available_bytes,
    )


def report(checkup: Checkup) -> dict[str, Any]:
    """Everything as names, numbers and lists that JSON knows, in bytes, seconds, bytes/s."""
    return {**asdict(checkup), "findings": findings(checkup)}


def rows(checkup: Checkup) -> dict[str, str]:
    """A table to read."""
    host, facts = checkup.host, checkup.host.facts
    table = {
        "torch": checkup.torch_version,
        "CPU": f"{facts.cpu}; cores for this process: {facts.num_cores}, threads of torch: {facts.num_threads}",
        "host memory": f"{_gib(facts.memory_bytes)}, {_gib(facts.available_bytes)} free",
        "enough for": ", ".join(
            f"{facts.available_bytes / PRECISIONS[name].trained_bytes / 1e9:.1f} billion trained weights in {name}"
            for name in ("32-true", "bf16-true")
        ),
        "its bandwidth": f"{_gb(host.bytes_per_s)}, read and written",
        "AdamW": f"{host.adamw_weights_per_s / 1e9:.2f} billion float32 weights/s",
        "locked memory": _pinned_text(host),
    }
    for gpu in checkup.gpus:
        table |= _gpu_rows(gpu)
    if not checkup.gpus:
        table["GPUs"] = "none"
    return table


def _pinned_text(host: HostCheckup) -> str:
    lockable = host.facts.lockable_bytes
    limit = "`ulimit -l` sets no limit" if lockable is None else f"`ulimit -l` is {_gib(lockable)}"
    if host.pinned_bytes is None:
        return f"{limit}; pinning was not tried, which takes a GPU's driver"
    stop = "no more could be had" if host.pin_complaint is not None else "more was not tried"
    return f"{limit}; the GPU's driver pinned {_gib(host.pinned_bytes)}, {stop}"


def _gpu_rows(gpu: GpuCheckup) -> dict[str, str]:
    link = "link not known" if gpu.link is None else f"PCIe {gpu.link.generation}.0 x{gpu.link.width}"
    name, rates = f"GPU {gpu.facts.index}", gpu.rates
    return {
        name: f"{gpu.facts.name}, {_gib(gpu.facts.memory_bytes)}, {link}",
        f"{name}: one way": _both_text(gpu.alone),
        f"{name}: both ways": _both_text(gpu.both),
        f"{name}: all GPUs": _both_text(gpu.with_all),
        f"{name}: products": f"{rates.product_flops_per_s / 1e12:.0f} TFLOP/s in bfloat16",
        f"{name}: attention": f"{rates.attention_flops_per_s / 1e12:.0f} TFLOP/s",
        f"{name}: memory": f"{_gb(rates.memory_bytes_per_s)} in other operations",
        f"{name}: launch": f"{1e6 * rates.launch_s:.1f} microseconds for a kernel",
    }


def _both_text(rates: Mapping[Lane, float]) -> str:
    return f"{_gb(rates[Lane.H2D])} to the GPU, {_gb(rates[Lane.D2H])} back"


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / 2**20:.0f} MiB"


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
