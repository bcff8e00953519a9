import resource
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_roundpipe.runtime import hardware
from lightning_roundpipe.runtime.hardware import PcieLink, host_facts, pcie_link, pcie_traffic, reason_without_gpu


def test_the_host_tells_what_this_process_may_use():
    facts = host_facts()
    assert 2**28 < facts.available_bytes <= facts.memory_bytes
    assert facts.num_cores >= 1
    assert facts.num_threads == torch.get_num_threads()


def test_the_limit_of_locked_memory_is_the_soft_one(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**16, resource.RLIM_INFINITY))
    assert host_facts().lockable_bytes == 2**16
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert host_facts().lockable_bytes is None


@pytest.mark.parametrize(
    "line, folder, names",
    [
        ("0::/app/inner", "app", ("memory.max", "memory.current")),
        ("4:memory:/app/inner", "memory/app", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        ("0::/of/the/host", "", ("memory.max", "memory.current")),  # in a container: its own group is the root
    ],
)
def test_a_container_limits_memory(line, folder, names, tmp_path, monkeypatch):
    group = tmp_path / "cgroup" / folder
    group.mkdir(parents=True)
    (group / names[0]).write_text("1000000\n")
    (group / names[1]).write_text("600000\n")
    (group / "memory.stat").write_text("anon 400000\ninactive_file 60000\nactive_file 40000\n")
    (tmp_path / "own").write_text(f"9:cpu:/\n{line}\n")
    limits = list(hardware._memory_limits(tmp_path / "cgroup", tmp_path / "own"))
    assert limits == [(1000000, 600000, 100000)]
    monkeypatch.setattr(hardware, "_memory_limits", lambda: limits)
    facts = host_facts()
    assert facts.memory_bytes == 1000000
    assert facts.available_bytes == 500000


def test_a_container_limits_swap(tmp_path, monkeypatch):
    (tmp_path / "memory.swap.max").write_text("5000\n")
    (tmp_path / "memory.swap.current").write_text("2000\n")
    (tmp_path / "own").write_text("0::/\n")
    limits = list(hardware._swap_limits(tmp_path, tmp_path / "own"))
    assert limits == [3000]
    (tmp_path / "memory.swap.max").write_text("max\n")
    assert list(hardware._swap_limits(tmp_path, tmp_path / "own")) == []
    monkeypatch.setattr(hardware, "_swap_limits", lambda: limits)
    monkeypatch.setattr(hardware, "_meminfo", lambda: {"SwapFree": 4000})
    assert host_facts().swap_bytes == 3000


def test_no_limit_is_no_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    (tmp_path / "own").write_text("0::/\n")
    assert list(hardware._memory_limits(tmp_path, tmp_path / "own")) == []


def test_a_link_carries_lanes_times_their_rate():
    assert PcieLink(generation=4, width=16, max_generation=4, max_width=16).bytes_per_s == pytest.approx(31.5e9, 1e-3)
    assert PcieLink(generation=9, width=16, max_generation=9, max_width=16).bytes_per_s is None


def test_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "has no CUDA" in reason_without_gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "nvidia-smi" in reason_without_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in reason_without_gpu()
    monkeypatch.undo()


@pytest.fixture
def nvml(monkeypatch):
    """NVML on a machine where it works; what is opened must be closed."""
    calls = []
    fake = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetHandleByUUID={"GPU-abc": 7}.__getitem__,
        nvmlDeviceGetCurrPcieLinkGeneration={7: 4}.__getitem__,
        nvmlDeviceGetCurrPcieLinkWidth={7: 8}.__getitem__,
        nvmlDeviceGetMaxPcieLinkGeneration={7: 5}.__getitem__,
        nvmlDeviceGetMaxPcieLinkWidth={7: 16}.__getitem__,
        NVML_PCIE_UTIL_RX_BYTES=1,
        NVML_PCIE_UTIL_TX_BYTES=0,
        nvmlDeviceGetPcieThroughput=lambda handle, way: 3000 if way else 500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="abc"))
    yield fake
    assert calls == ["init", "shutdown"]


def test_the_driver_tells_of_the_link(nvml):
    assert pcie_link(0) == PcieLink(generation=4, width=8, max_generation=5, max_width=16)


def test_the_driver_tells_of_traffic_in_kilobytes(nvml):
    assert pcie_traffic(0) == 3_500_000


def test_a_driver_that_does_not_tell_is_no_error(nvml, monkeypatch):
    def refuse(handle):
        raise OSError("not supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrPcieLinkWidth", refuse)
    assert pcie_link(0) is None


def test_without_the_library_there_is_no_link(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert pcie_link(0) is None
