"""What this machine says of itself: host memory and its limits, GPUs, and their links by the driver's own account.

Nothing is measured here (see `measurements`). What cannot be found out is None, and never an error: these are wanted
most where things are amiss.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "GpuFacts",
    "HostFacts",
    "PcieLink",
    "gpu_facts",
    "host_facts",
    "pcie_link",
    "pcie_traffic",
    "reason_without_gpu",
]

_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes/s of one lane each way, after line coding, by generation. Source: the PCI Express base specifications."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """The host, as this process may use it.

    Attributes:
        cpu: its name.
        num_cores: cores on which this process may run.
        num_threads: threads that torch uses for one operation.
        memory_bytes: memory of the machine, or of the container if that has less.
        available_bytes: what is free or can be freed of it.
        swap_bytes: free swap.
        lockable_bytes: limit of locked memory (``ulimit -l``); None if there is none.
    """

    cpu: str
    num_cores: int
    num_threads: int
    memory_bytes: int
    available_bytes: int
    swap_bytes: int
    lockable_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """A GPU's link to the host, as it is now, and the most that GPU and slot are made for.

    Attributes:
        generation: generation of PCI Express; idle links may fall back to save power.
        width: number of lanes.
        max_generation: see above.
        max_width: see above.
    """

    generation: int
    width: int
    max_generation: int
    max_width: int

    @property
    def bytes_per_s(self) -> float | None:
        """What the link carries each way, in bytes/s, before the overhead of packets; None for unknown generations."""
        lane = _PCIE_LANE_BYTES_PER_S.get(self.generation)
        return None if lane is None else lane * self.width


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU.

    Attributes:
        index: index by which torch knows it.
        name: its name.
        memory_bytes: its memory.
        free_bytes: what of it is free.
    """

    index: int
    name: str
    memory_bytes: int
    free_bytes: int


def host_facts() -> HostFacts:
    """The host, read from the kernel (``/proc`` and the memory controller of the container)."""
    meminfo = _meminfo()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available_bytes = meminfo.get("MemAvailable", memory_bytes)
    for limit, used, cached in _memory_limits():
        memory_bytes = min(memory_bytes, limit)
        available_bytes = min(available_bytes, max(0, limit - used + cached))
    swap_bytes = min([meminfo.get("SwapFree", 0), *_swap_limits()])
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)),
        num_threads=torch.get_num_threads(),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        swap_bytes=swap_bytes,
        lockable_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def _meminfo() -> dict[str, int]:
    """Bytes by name, of ``/proc/meminfo``."""
    lines = (line.split() for line in _read(Path("/proc/meminfo")).splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[-1] == "kB"}


def _cpu_name() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def _memory_limits(root: Path = _GROUPS, own: Path = _OWN_GROUPS) -> Iterator[tuple[int, int, int]]:
    """Limit, use, and reclaimable part of the use, in bytes, of every control group that holds this process."""
    for folder, is_old in _control_groups(root, own):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_old else ("memory.max", "memory.current")
        limit, used = (_read(folder / name).strip() for name in names)
        if limit.isdecimal() and used.isdecimal():
            stat = dict(row.split() for row in _read(folder / "memory.stat").splitlines())
            # Pages of files, mapped ones too: what was read of weights is not lost memory.
            yield int(limit), int(used), sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))


def _swap_limits(root: Path = _GROUPS, own: Path = _OWN_GROUPS) -> Iterator[int]:
    """Bytes of swap that are left to every control group that holds this process; old ones do not limit it alone."""
    for folder, is_old in _control_groups(root, own):
        limit, used = (_read(folder / name).strip() for name in ("memory.swap.max", "memory.swap.current"))
        if not is_old and limit.isdecimal() and used.isdecimal():
            yield max(0, int(limit) - int(used))


def _control_groups(root: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the control groups of memory that hold this process, and whether they are of the first version."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / controllers
        group = base / path.lstrip("/")
        # In a container the path may be the host's: what is mounted at the root is then the container's own group.
        for folder in {group, *group.parents, base}:
            if folder.is_relative_to(base):
                yield folder, bool(controllers)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def reason_without_gpu() -> str | None:
    """Why torch sees no GPU; None if it sees one."""
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        return None
    if torch.version.cuda is None:
        return f"this build of torch ({torch.__version__}) has no CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "`CUDA_VISIBLE_DEVICES` hides them"
    return "torch finds no driver, or no GPU that the driver can use (`nvidia-smi` shows what the driver sees)"


def gpu_facts(index: int) -> GpuFacts:
    """A GPU, by torch's index."""
    free_bytes, memory_bytes = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_properties(index).name
    return GpuFacts(index=index, name=name, memory_bytes=memory_bytes, free_bytes=free_bytes)


def pcie_link(index: int) -> PcieLink | None:
    """The link of torch's GPU ``index``; None where NVML is not installed, or does not tell."""
    with _nvml(index) as (nvml, handle):
        if nvml is None:
            return None
        try:
            return PcieLink(
                generation=nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
                width=nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
                max_generation=nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
                max_width=nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
            )
        except nvml.NVMLError:
            return None  # A GPU that hangs on something else than PCI Express, or a virtual one.


def pcie_traffic(index: int) -> float | None:
    """Bytes/s that cross the link of torch's GPU ``index`` now, both ways together; None where NVML does not tell."""
    with _nvml(index) as (nvml, handle):
        if nvml is None:
            return None
        ways = nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES
        try:
            return sum(1e3 * int(nvml.nvmlDeviceGetPcieThroughput(handle, way)) for way in ways)  # NVML tells kB/s.
        except nvml.NVMLError:
            return None


@contextmanager
def _nvml(index: int) -> Iterator[tuple[Any, Any]]:
    """The library and the handle of torch's GPU ``index``; (None, None) where there is no NVML."""
    try:
        import pynvml
    except ModuleNotFoundError:
        yield None, None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None, None
        return
    try:
        # By its identity: torch counts visible GPUs, NVML all of them.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    except (AttributeError, pynvml.NVMLError):
        handle = None
    try:
        yield (pynvml, handle) if handle is not None else (None, None)
    finally:
        pynvml.nvmlShutdown()
