import json
from importlib.util import find_spec

import pytest
import torch

from lightning_roundpipe.cli import main
from lightning_roundpipe.plan.devices import load_profile
from lightning_roundpipe.plan.timeline import Lane
from lightning_roundpipe.runtime.gpu_rates import gpu_rates
from lightning_roundpipe.runtime.hardware import pcie_link
from lightning_roundpipe.runtime.measurements import link_bytes_per_s, pin_host_memory

CUDA = torch.device("cuda", 0)

needs_command_line = pytest.mark.skipif(find_spec("jsonargparse") is None, reason="needs jsonargparse")


@pytest.mark.gpu
def test_links_are_measured_within_what_they_carry():
    both = link_bytes_per_s([CUDA], [Lane.H2D, Lane.D2H])[0]
    alone = {lane: link_bytes_per_s([CUDA], [lane])[0][lane] for lane in Lane if lane is not Lane.CPU}
    link = pcie_link(0)
    for lane, rate in alone.items():
        assert 1e9 < rate < 1e12
        assert both[lane] < 1.1 * rate
        if link is not None and link.bytes_per_s is not None:
            assert rate < 1.05 * link.bytes_per_s


@pytest.mark.gpu
def test_a_copy_of_other_make_takes_the_same_time():
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=CUDA)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    device.copy_(host)
    start.record()
    for _ in range(4):
        device.copy_(host, non_blocking=True)
    stop.record()
    stop.synchronize()
    rate = 4 * 2**28 / start.elapsed_time(stop) * 1e3
    assert link_bytes_per_s([CUDA], [Lane.H2D])[0][Lane.H2D] == pytest.approx(rate, rel=0.2)


@pytest.mark.gpu
def test_rates_are_those_of_a_gpu():
    rates = gpu_rates(CUDA)
    assert 1e12 < rates.product_flops_per_s < 1e16
    assert 1e11 < rates.attention_flops_per_s < rates.product_flops_per_s * 1.2
    assert 1e10 < rates.memory_bytes_per_s < 2e13
    assert 1e-7 < rates.launch_s < 1e-3


@pytest.mark.gpu
def test_memory_can_be_pinned_and_is_given_back():
    for _ in range(3):
        assert pin_host_memory(2**28, piece_bytes=2**27) == (2**28, None)


@pytest.mark.gpu
@needs_command_line
def test_doctor_writes_the_profile(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert main(["doctor", "--json", "--pin-gb=0.5", f"--output={path}"]) == 0
    told = json.loads(capsys.readouterr().out)
    profile = load_profile(path)
    assert profile.name == torch.cuda.get_device_name(0)
    assert profile.memory_bytes == min(gpu["facts"]["memory_bytes"] for gpu in told["gpus"])
    assert profile.link_bytes_per_s == min(min(gpu["with_all"].values()) for gpu in told["gpus"])


@pytest.mark.gpu
@needs_command_line
def test_doctor_tells_in_a_table(capsys):
    assert main(["doctor", "--pin-gb=0.1"]) == 0
    out = capsys.readouterr().out
    assert "TFLOP/s" in out
    assert "GPUs │ none" not in out
