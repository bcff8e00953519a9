"""Rates at which a GPU computes in training, in the terms in which `counting` counts and `DeviceProfile` predicts.

They are those that a GPU keeps up: it lowers its clock when it gets hot or short of power.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.plan.costs import Work
from lightning_roundpipe.runtime.counting import count_calls

__all__ = ["GpuRates", "gpu_rates"]

_KEPT_UP_S = 0.5
"""Seconds for which a GPU computes before its rate is taken."""


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """What a GPU reaches.

    Attributes:
        product_flops_per_s: bfloat16 matrix products of a layer of width 4096, forward and both of backward.
        attention_flops_per_s: fused causal attention, forward and backward; the half that the mask cuts off is not
            counted.
        memory_bytes_per_s: all other operations of a decoder layer, run as an ordinary eager model runs them; bytes
            read and written. Strided operands (rotary embeddings) and small sums keep it far below the data sheet.
        launch_s: seconds from the start of a small kernel to the start of the next one, forward and backward.
    """

    product_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float


def gpu_rates(device: torch.device) -> GpuRates:
    """Measures a GPU for some seconds; up to 4 GiB of its memory are used."""
    products = _product_flops_per_s(device)
    attention = _attention_flops_per_s(device)
    return GpuRates(
        product_flops_per_s=products,
        attention_flops_per_s=attention,
        memory_bytes_per_s=_memory_bytes_per_s(device, products, attention),
        launch_s=_launch_s(device),
    )


def _product_flops_per_s(device: torch.device, tokens: int = 8192, width: int = 4096, wide: int = 12288) -> float:
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    weight = torch.randn(wide, width, dtype=torch.bfloat16, device=device)

    def run() -> None:
        out = F.linear(hidden, weight)
        _ = out @ weight
        _ = out.t() @ hidden

    return 3 * 2 * tokens * width * wide / _gpu_s(run, device, repeats=10)


def _attention_flops_per_s(device: torch.device, batch: int = 4, heads: int = 32, length: int = 2048) -> float:
    head_width = 128
    shape = batch, heads, length, head_width
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def run() -> None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), grad)

    # As `counting` counts them: two products forward, five backward, half of each cut off by the mask.
    flops = (2 + 5) * batch * heads * length * length * 2 * head_width / 2
    return flops / _gpu_s(run, device, repeats=10)


def _memory_bytes_per_s(
    device: torch.device, product_flops_per_s: float, attention_flops_per_s: float, batch: int = 2, length: int = 2048
) -> float:
    """What a layer takes beyond its products and its attention, by the bytes that its other operations move."""
    work = _layer_work(batch, length)
    with device:
        layer = _Layer().bfloat16()
    arguments = _arguments(batch, length, device)
    grad = torch.randn_like(arguments["hidden"])

    def run() -> None:
        layer(**arguments).backward(grad)
        layer.zero_grad(set_to_none=True)
        arguments["hidden"].grad = None

    layer_s = _gpu_s(run, device, repeats=5)
    products_s = work.product_flops / product_flops_per_s + work.attention_flops / attention_flops_per_s
    # At least a tenth: products that are faster here than where they were measured must not make memory endless.
    return work.moved_bytes / max(layer_s - products_s, layer_s / 10)


def _layer_work(batch: int, length: int) -> Work:
    """What the reference layer does, forward and backward."""
    (count,) = count_calls(
        lambda: _Model().bfloat16(),
        lambda: _arguments(batch, length, torch.device("cpu")),
        units=[_Layer.__name__],
        causal=True,
    )
    return count.forward + count.backward


def _launch_s(device: torch.device, operations: int = 500) -> float:
    start = torch.ones(16, device=device, requires_grad=True)

    def run() -> None:
        value = start
        for _ in range(operations):
            value = value.sin()
        value.sum().backward()

    # Backward of a sine is a cosine and a product.
    return _gpu_s(run, device, repeats=1) / (3 * operations)


def _gpu_s(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a run, timed by events around ``repeats`` of them, when the GPU has computed for a while."""
    tries: list[float] = []
    with torch.cuda.device(device):
        run()
        while sum(tries) < _KEPT_UP_S:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                run()
            stop.record()
            stop.synchronize()
            tries.append(start.elapsed_time(stop) / 1e3)
    return median(tries[len(tries) // 2 :]) / repeats


# ------------------------------------------------------------------ the layer that is measured


class _Norm(nn.Module):
    """Root mean square normalisation in float32, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        single = hidden.float()
        single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * single.to(hidden.dtype)


class _Layer(nn.Module):
    """A decoder layer like those of today's language models: rotary embeddings, gated activations, no biases."""

    HEADS, HEAD_WIDTH, WIDE = 32, 128, 12288

    def __init__(self) -> None:
        super().__init__()
        width = self.HEADS * self.HEAD_WIDTH
        self.norms = nn.ModuleList([_Norm(width), _Norm(width)])
        self.projections = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(4)])
        self.gate = nn.Linear(width, self.WIDE, bias=False)
        self.up = nn.Linear(width, self.WIDE, bias=False)
        self.down = nn.Linear(self.WIDE, width, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        attention_norm, feed_norm = self.norms
        normed = attention_norm(hidden)
        query, key, value = (
            projection(normed).view(batch, length, self.HEADS, self.HEAD_WIDTH).transpose(1, 2)
            for projection in self.projections[:3]
        )
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projections[3](mixed.transpose(1, 2).reshape(batch, length, width))
        normed = feed_norm(hidden)
        out: Tensor = hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class _Model(nn.Module):
    """Something for the layer to be a unit of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = self.layer(hidden, cos, sin)
        return out


def _arguments(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    return {
        "hidden": random(batch, length, _Layer.HEADS * _Layer.HEAD_WIDTH).requires_grad_(),
        "cos": random(length, _Layer.HEAD_WIDTH),
        "sin": random(length, _Layer.HEAD_WIDTH),
    }
