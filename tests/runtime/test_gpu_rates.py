from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # noqa: F401 - sets an environment variable, for which counting would else be blamed

from lightning_roundpipe.plan.devices import DeviceProfile
from lightning_roundpipe.runtime import gpu_rates
from lightning_roundpipe.runtime.gpu_rates import _attention_flops_per_s, _launch_s, _layer_work, _product_flops_per_s

CPU = torch.device("cpu")


class FakeEvent:
    """An event between any two of which 100 ms go by."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 100.0


@pytest.fixture
def fake_cuda(monkeypatch):
    """Lets what is written for GPUs run in host memory, by a clock of its own; on a layer of width 8."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for name, value in {"HEADS": 2, "HEAD_WIDTH": 4, "WIDE": 24}.items():
        monkeypatch.setattr(gpu_rates._Layer, name, value)


def test_rates_count_the_work_that_was_done(fake_cuda):
    """Ten runs (or one) in 100 ms."""
    assert _product_flops_per_s(CPU, 3, 5, 7) == pytest.approx(10 * 3 * 2 * 3 * 5 * 7 / 0.1)
    # Two products forward and five backward, each of half of 2 x 4 x 8 x 8 x 128 multiplications and additions.
    assert _attention_flops_per_s(CPU, 2, 4, 8) == pytest.approx(10 * 7 * 2 * 4 * 8 * 8 * 128 / 0.1)
    assert _launch_s(CPU, 10) == pytest.approx(0.1 / 30)


def test_the_work_of_the_layer_is_that_of_its_shapes(fake_cuda):
    batch, length, width, wide = 2, 16, 8, 24
    work = _layer_work(batch, length)
    assert work.product_flops == 3 * 2 * batch * length * (4 * width * width + 3 * width * wide)
    assert work.attention_flops == (2 + 5) * batch * length * length * 2 * width / 2
    assert work.moved_bytes > 20 * batch * length * width * 2


def test_memory_is_what_products_and_attention_leave(fake_cuda):
    work = _layer_work(2, 16)
    # A layer takes 20 ms, its products 5 ms, its attention 7 ms.
    rates = work.product_flops / 5e-3, work.attention_flops / 7e-3
    assert gpu_rates._memory_bytes_per_s(CPU, *rates, 2, 16) == pytest.approx(work.moved_bytes / 8e-3)
    # Were products to take all of it, a tenth would be left.
    rates = work.product_flops / 30e-3, work.attention_flops / 7e-3
    assert gpu_rates._memory_bytes_per_s(CPU, *rates, 2, 16) == pytest.approx(work.moved_bytes / 2e-3)


def test_a_layer_is_predicted_as_it_was_measured(fake_cuda):
    """The profile's rates give back the time from which they came."""
    work = _layer_work(2, 16)
    products, attention = work.product_flops / 5e-3, work.attention_flops / 7e-3
    profile = DeviceProfile(
        name="measured",
        memory_bytes=2**30,
        product_flops_per_s=products,
        attention_flops_per_s=attention,
        memory_bytes_per_s=gpu_rates._memory_bytes_per_s(CPU, products, attention, 2, 16),
        link_bytes_per_s=1e9,
        launch_s=0.0,
    )
    assert profile.seconds(work) == pytest.approx(20e-3)
