"""Models of many architectures train as in plain Lightning; the page that lists them is the list."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import assert_results_close, train
from tests.helpers.models import seeded
from tests.models.architectures import FAMILIES, Family, page


class Trains(L.LightningModule):
    """Keeps the gradients of its first step, and the loss of each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_after_backward(self) -> None:
        self.gradients = self.gradients or {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_architecture(family: Family) -> None:
    if not hasattr(transformers, family.model):
        pytest.skip(f"this version of transformers has no {family.model}")

    def module() -> L.LightningModule:
        return Trains(seeded(family.build))

    batches = [family.batch(seed) for seed in (1, 2)]
    expected = train(module, batches)
    found = train(module, batches, RoundPipeStrategy(num_microbatches=family.num_microbatches), 2)
    assert_results_close(expected, found, rtol=1e-4)
    one, two = expected.module.gradients, found.module.gradients
    assert one.keys() == two.keys() and len(one) > 10
    scale = max(float(gradient.abs().max()) for gradient in one.values())
    for name, gradient in one.items():
        torch.testing.assert_close(two[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_the_page_lists_them_all() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 25
    kinds = {"decoder", "encoder", "encoder-decoder", "vision", "speech", "mixture of experts", "state space"}
    assert {family.kind for family in FAMILIES} == kinds
    written = (Path(__file__).parents[2] / "docs/architectures.md").read_text(encoding="utf-8")
    assert written == page(), "Run `python -m tests.models.architectures > docs/architectures.md`."
