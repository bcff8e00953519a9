"""The judgement on machines that are made up, and the command on the one at hand, which has no GPU in most tests."""

import json
import re
from dataclasses import replace

import pytest
import torch

from lightning_roundpipe import doctor
from lightning_roundpipe.cli import main
from lightning_roundpipe.doctor import Checkup, GpuCheckup, HostCheckup, findings, measured_profile
from lightning_roundpipe.plan.devices import load_profile, save_profile
from lightning_roundpipe.plan.timeline import Lane
from lightning_roundpipe.runtime.gpu_rates import GpuRates
from lightning_roundpipe.runtime.hardware import GpuFacts, HostFacts, PcieLink
from lightning_roundpipe.runtime.measurements import adamw_weights_per_s, host_bytes_per_s

GIB = 2**30


def both_ways(h2d_gb, d2h_gb):
    return {Lane.H2D: h2d_gb * 1e9, Lane.D2H: d2h_gb * 1e9}


def gpu(index=0, **changes):
    facts = GpuFacts(index=index, name="NVIDIA H200", memory_bytes=140 * GIB, free_bytes=139 * GIB)
    sound = GpuCheckup(
        facts=facts,
        link=PcieLink(generation=5, width=16, max_generation=5, max_width=16),
        traffic_bytes_per_s=1e6,
        rates=GpuRates(
            product_flops_per_s=700e12, attention_flops_per_s=400e12, memory_bytes_per_s=4e12, launch_s=5e-6
        ),
        alone=both_ways(55, 54),
        both=both_ways(50, 48),
        with_all=both_ways(45, 44),
    )
    return replace(sound, **changes)


def host(**changes):
    facts = HostFacts(
        cpu="CPU",
        num_cores=16,
        num_threads=16,
        memory_bytes=1024 * GIB,
        available_bytes=1000 * GIB,
        swap_bytes=0,
        lockable_bytes=8 * 2**20,
    )
    sound = HostCheckup(facts=facts, bytes_per_s=400e9, adamw_weights_per_s=5e9, pinned_bytes=16 * GIB)
    return replace(sound, **changes)


def checkup(*gpus, **changes):
    return Checkup(torch_version="2.13.0", host=host(**changes), gpus=gpus or (gpu(),))


def test_nothing_is_wrong_with_a_sound_machine():
    assert findings(checkup(gpu(0), gpu(1))) == []


@pytest.mark.parametrize(
    "sick, message",
    [
        (
            {"link": PcieLink(generation=5, width=8, max_generation=5, max_width=16)},
            r"5\.0 x8, but could be by 5\.0 x16",
        ),
        ({"link": PcieLink(generation=4, width=16, max_generation=5, max_width=16)}, r"4\.0 x16, but could be by 5\.0"),
        ({"link": None}, "NVML does not tell"),
        ({"alone": both_ways(12, 54)}, r"reach 12\.0 GB/s of the 63\.0 GB/s"),
        ({"both": both_ways(28, 27), "with_all": both_ways(28, 27)}, "share one bandwidth: 55.0 GB/s both ways"),
        ({"with_all": both_ways(45, 20)}, r"d2h of GPU 0 falls from 48\.0 GB/s to 20\.0 GB/s"),
        ({"traffic_bytes_per_s": 5e9}, r"Other programs move 5\.0 GB/s over the link of GPU 0"),
        ({"wrong_peers": (1, 2)}, "from GPU 0 to GPU 1, 2 arrive wrong"),
        ({"facts": replace(gpu().facts, free_bytes=70 * GIB)}, r"in use: 70\.0 GiB of 140\.0 GiB"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_named(sick, message):
    (found,) = findings(checkup(gpu(**sick)))
    assert re.search(message, found)


def test_a_slow_gpu_among_faster_ones_is_named():
    slow = gpu(3, rates=replace(gpu().rates, product_flops_per_s=500e12))
    (found,) = findings(checkup(gpu(0), slow))
    assert found.startswith("GPU 3 computes at 500 TFLOP/s, the fastest at 700 TFLOP/s")


@pytest.mark.parametrize(
    "sick, message",
    [
        ({"facts": replace(host().facts, num_threads=1)}, "torch uses 1 threads"),
        ({"facts": replace(host().facts, available_bytes=100 * GIB)}, "Too little host memory: 100.0 GiB are free"),
        (
            {"pinned_bytes": 2 * GIB, "pin_complaint": "Out of memory."},
            r"Only 2.0 GiB of host memory could be pinned (8 M",
        ),
        ({"bytes_per_s": 80e9}, "Host memory moves 80.0 GB/s, all links together 89.0 GB/s"),
    ],
)
def test_what_is_wrong_with_the_host_is_named(sick, message):
    (found,) = findings(checkup(**sick))
    assert message in found


def test_the_profile_is_that_of_the_slowest(tmp_path):
    slow = gpu(
        1,
        with_all=both_ways(20, 30),
        rates=GpuRates(
            product_flops_per_s=600e12, attention_flops_per_s=500e12, memory_bytes_per_s=3e12, launch_s=9e-6
        ),
    )
    profile = measured_profile(checkup(gpu(0), slow))
    assert profile.link_bytes_per_s == 20e9
    assert profile.product_flops_per_s == 600e12
    assert profile.attention_flops_per_s == 400e12
    assert profile.launch_s == 9e-6
    assert profile.optimizer_bytes_per_s == 28 * 5e9
    machine = profile.machine(2, host_bytes_per_s=100e9)
    assert machine.optimizer_bytes_per_s == 28 * 5e9
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


@pytest.fixture
def quick(monkeypatch):
    """Measures host memory on 4 MiB, and sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "host_bytes_per_s", lambda _: host_bytes_per_s(2**22))
    monkeypatch.setattr(doctor, "adamw_weights_per_s", lambda _: adamw_weights_per_s(2**20))


def test_doctor_works_without_a_gpu_and_says_so(quick, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "host memory" in out
    assert "billion float32 weights/s" in out
    assert "- No GPU: " in out


def test_doctor_prints_json(quick, capsys):
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == []
    assert told["host"]["bytes_per_s"] > 1e8
    assert told["host"]["adamw_weights_per_s"] > 1e6
    assert told["host"]["facts"]["memory_bytes"] >= told["host"]["facts"]["available_bytes"] > 0
    assert any(finding.startswith("No GPU") for finding in told["findings"])


def test_doctor_writes_no_profile_without_a_gpu(quick, tmp_path, capsys):
    assert main(["doctor", f"--output={tmp_path / 'gpu.json'}"]) == 1
    assert "A profile describes a GPU, but there is none" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_doctor_tells_of_gpus_and_writes_their_profile(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "examine", lambda **_: checkup(gpu(0), gpu(1, alone=both_ways(12, 54))))
    assert main(["doctor", f"--output={tmp_path / 'gpu.json'}"]) == 0
    out = capsys.readouterr().out
    assert "PCIe 5.0 x16" in out
    assert "700 TFLOP/s" in out
    assert "Pinned copies to or from GPU 1" in out
    assert load_profile(tmp_path / "gpu.json").name == "NVIDIA H200"
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["alone"] == {"h2d": 55e9, "d2h": 54e9}


def test_a_full_gpu_is_named(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(doctor, "reason_without_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "gpu_facts", lambda index: gpu().facts)
    monkeypatch.setattr(doctor, "pcie_traffic", lambda index: None)
    monkeypatch.setattr(doctor, "link_bytes_per_s", full)
    with pytest.raises(doctor.RoundPipeError, match="needs 4 GiB of free memory, but GPU 0 has 139.0 GiB free"):
        doctor.examine()


def test_all_gpus_are_measured(monkeypatch):
    """Each alone, and all together, with peers in both directions."""
    asked = []

    def rates(devices, lanes):
        asked.append((len(devices), len(lanes)))
        return [both_ways(50 / len(devices), 50) for _ in devices]

    monkeypatch.setattr(doctor, "reason_without_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "gpu_facts", lambda index: gpu(index).facts)
    monkeypatch.setattr(doctor, "pcie_link", lambda index: gpu().link)
    monkeypatch.setattr(doctor, "pcie_traffic", lambda index: None)
    monkeypatch.setattr(doctor, "link_bytes_per_s", rates)
    monkeypatch.setattr(doctor, "gpu_rates", lambda device: gpu().rates)
    monkeypatch.setattr(doctor, "peer_copy_is_right", lambda source, target: source.index == 0)
    monkeypatch.setattr(doctor, "pin_host_memory", lambda num_bytes: (num_bytes, None))
    monkeypatch.setattr(doctor, "host_bytes_per_s", lambda _: 1e12)
    monkeypatch.setattr(doctor, "adamw_weights_per_s", lambda _: 1e9)
    found = doctor.examine(pin_bytes=5)
    assert asked == [(1, 1), (1, 1), (1, 2), (2, 2)] * 2
    assert [one.with_all[Lane.H2D] for one in found.gpus] == [25e9, 25e9]
    assert [one.wrong_peers for one in found.gpus] == [(), (0,)]
    assert found.host.pinned_bytes == 5
