"""Compiled units give the numbers of eager ones, one graph serves equal ones, and what does not compile still runs."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, assert_equivalent, trainer_for
from tests.helpers.models import CASES, Residual, residual_batches, seeded

# Traces and differentiates as the default backend does, but runs the graph as it is: tests need no C++ compiler.
BACKEND = {"backend": "aot_eager"}


@pytest.mark.parametrize("name", ["qwen3_tied", "llama_lora", "transformer_encoder", "called_twice", "layer_drop"])
def test_equals_plain_training(name: str) -> None:
    assert_equivalent(CASES[name], devices=2, num_microbatches=3, compile_units=BACKEND)


class Recorded:
    """A backend of the compiler that counts the graphs which it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def test_equal_layers_share_a_graph() -> None:
    torch.compiler.reset()
    backend = Recorded()
    strategy = RoundPipeStrategy(num_microbatches=2, compile_units={"backend": backend})
    trainer_for(strategy, devices=2).fit(seeded(Residual), BatchDealer(residual_batches()))
    module = seeded(Residual)
    classes = Counter(type(block) for block in module.modules())
    assert max(classes.values()) > 2
    assert 0 < backend.graphs <= 2 * sum(count > 1 for count in classes.values())  # without and with a graph


class Doubling(nn.Module):
    """A layer whose forward depends on a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.factor + x


class Layers(L.LightningModule):
    """A stack of layers of which the attribute changes between steps; ``breaks``: the compiler gives up on them."""

    def __init__(self, layer: Callable[[], nn.Module] = Doubling) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in self.layers:
            layer.factor = 1.0 + batch_idx

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Printing(Doubling):
    """A layer that the compiler can not capture as one graph."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:
            return x
        return super().forward(x)


def _fit(strategy: Any, layer: Callable[[], nn.Module] = Doubling) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Layers(layer)
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    trainer_for(strategy, devices=1 if strategy == "auto" else 2).fit(module, BatchDealer(batches))
    return module.state_dict()


def test_attributes_are_followed() -> None:
    expected = _fit("auto")
    found = _fit(RoundPipeStrategy(num_microbatches=2, compile_units=BACKEND))
    torch.testing.assert_close(found, expected)


def test_what_does_not_compile_runs_eagerly() -> None:
    expected = _fit("auto", Printing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _fit(RoundPipeStrategy(num_microbatches=2, compile_units=BACKEND), Printing)
    assert sum("Units of class Printing run eagerly" in str(warning.message) for warning in caught) == 1
    torch.testing.assert_close(found, expected)


def _hooked() -> nn.Module:
    layer = Doubling()
    layer.linear.register_forward_hook(lambda module, args, output: output * 2)
    return layer


def test_hooks_run() -> None:
    expected = _fit("auto", _hooked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _fit(RoundPipeStrategy(num_microbatches=2, compile_units=BACKEND), _hooked)
    assert sum("because hooks are registered" in str(warning.message) for warning in caught) == 1
    torch.testing.assert_close(found, expected)


def test_type_is_checked() -> None:
    with pytest.raises(TypeError, match="compile_units"):
        RoundPipeStrategy(compile_units="yes")  # type: ignore[arg-type]
