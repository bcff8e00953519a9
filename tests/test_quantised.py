"""Quantised frozen weights are streamed byte for byte, or refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.quantised import refuse_hidden_quantisation
from lightning_roundpipe.runtime.testing import poison_masters
from lightning_roundpipe.runtime.worker import Worker
from tests.helpers.equivalence import assert_results_close, train
from tests.helpers.models import Block, Residual, residual_batches, seeded

DTYPES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


class QuantisedLinear(nn.Module):
    """A frozen layer in 8 bits, with a scale for each row, and a trained low-rank update beside it."""

    def __init__(self, width: int, dtype: torch.dtype, *, as_buffer: bool) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        greatest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
        scale = weight.abs().amax(1, keepdim=True) / greatest
        quantised = (weight / scale).round().to(dtype) if dtype is torch.int8 else (weight / scale).to(dtype)
        if as_buffer:
            self.register_buffer("weight", quantised)
            self.register_buffer("scale", scale)
        else:
            self.weight = nn.Parameter(quantised, requires_grad=False)
            self.scale = nn.Parameter(scale, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, width))
        self.up = nn.Parameter(torch.zeros(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale) + x @ self.down.t() @ self.up.t()


class Quantised(Residual):
    def __init__(self, dtype: torch.dtype, *, as_buffer: bool = False) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(QuantisedLinear(16, dtype, as_buffer=as_buffer), nn.Tanh()) for _ in range(4)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_tensors_of_any_dtype_are_streamed(dtype: torch.dtype, as_buffer: bool) -> None:
    build = lambda: seeded(lambda: Quantised(dtype, as_buffer=as_buffer))  # noqa: E731
    before = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    expected = train(build, residual_batches())
    strategy = RoundPipeStrategy(num_microbatches=3)
    found = train(build, residual_batches(), strategy, devices=2, during=lambda trainer: poison_masters(strategy))
    assert_results_close(expected, found, rtol=1e-5)
    for name, tensor in found.module.state_dict().items():
        if name.endswith(("weight", "scale")):
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


def test_a_worker_gets_a_byte_for_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[Tensor] = []
    upload = Worker.upload_weight

    def watched(worker: Worker, parameter: Tensor) -> Tensor:
        uploaded.append(upload(worker, parameter))
        return uploaded[-1]

    monkeypatch.setattr(Worker, "upload_weight", watched)
    train(lambda: seeded(lambda: Quantised(torch.int8)), residual_batches(num=2), RoundPipeStrategy(num_microbatches=2))
    quantised = [tensor for tensor in uploaded if tensor.shape == (16, 16)]
    assert quantised
    assert all(tensor.dtype is torch.int8 for tensor in quantised)


class PackedParameter(nn.Parameter):
    """As bitsandbytes' are: values in 8 bits, and an object with the scales hung on them."""


def with_attached_state() -> nn.Module:
    module = nn.Sequential(Block(16), Block(16))
    packed = PackedParameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(absmax=torch.ones(2), blocksize=64)  # type: ignore[attr-defined]
    module[1].down.weight = packed
    return module


def with_wrapper() -> nn.Module:
    """As torchao's are: a tensor class around others."""
    module = nn.Sequential(Block(16), Block(16))
    wrapped = TwoTensor(torch.zeros(16, 32), torch.ones(16, 32))
    module[1].down.weight = nn.Parameter(wrapped, requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("build", "name"), [(with_attached_state, "PackedParameter"), (with_wrapper, "two_tensor.TwoTensor")]
)
def test_weights_with_a_hidden_part_are_refused(build: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}, which keeps a part of the weight elsewhere: `1\.down\.weight`"):
        refuse_hidden_quantisation(build())


def test_parameters_with_notes_of_a_library_are_not() -> None:
    module = nn.Sequential(Block(16), Block(16))
    module[0].down.weight.tensor_model_parallel = True
    module[1].down.weight = PackedParameter(torch.zeros(16, 32))
    refuse_hidden_quantisation(module)


@pytest.mark.parametrize("config", [{"quant_method": "mxfp4"}, SimpleNamespace(quant_method="mxfp4")], ids=repr)
def test_mxfp4_is_refused_with_the_way_out(config: Any) -> None:
    model = Residual()
    model.blocks[0].config = SimpleNamespace(quantization_config=config)
    with pytest.raises(ValueError, match=r"Block has weights in MXFP4.*Mxfp4Config\(dequantize=True\)"):
        train(lambda: model, residual_batches(), RoundPipeStrategy(num_microbatches=2))
