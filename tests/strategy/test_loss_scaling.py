"""Updates reach into the next step under a loss scale, too: skipped steps, scales, numbers are those of plain AMP."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from lightning_roundpipe.runtime.testing import executor_of
from tests.helpers.equivalence import BatchDealer
from tests.helpers.late import Late


class Halves(L.LightningModule):
    """Layers in float16; some batches are too large for it."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.optimizer = optimizer
        self.overlapped: list[bool] = []
        self.seen: list[tuple[float, int, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        if isinstance(strategy, RoundPipeStrategy):
            self.overlapped.append(executor_of(strategy).store.pending is not None)
        x = batch
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x.float() - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(6, 8, generator=generator) for _ in range(14)]
    for index in (0, 5, 6, 11):
        found[index][1, 2] = 1e30
    return found


def fit(overlap: str | None, module: Halves, num_microbatches: int = 3, **flags: Any) -> tuple[Halves, list[Any]]:
    """Fit, without the strategy if ``overlap`` is None; scale and growth count after every step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    scales = []
    update = scaler.update

    def noted_update() -> None:
        update()
        scales.append((scaler.get_scale(), scaler._get_growth_tracker()))

    scaler.update = noted_update  # type: ignore[method-assign]
    strategy: Any = "auto"
    plugin: Any = MixedPrecision("16-mixed", "cpu", scaler)
    if overlap is not None:
        strategy = RoundPipeStrategy(num_microbatches, optimizer_overlap=overlap)
        plugin = RoundPipePrecision("16-mixed", scaler=scaler)
    trainer = L.Trainer(
        accelerator="cpu", devices=1 if overlap is None else 2, strategy=strategy, plugins=[plugin], max_epochs=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **flags,
    )  # fmt: skip
    trainer.fit(module, BatchDealer(batches()))
    return module, scales


def assert_same_bits(one: Halves, other: Halves) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    states = [module.trainer.optimizers[0].state_dict() for module in (one, other)]
    for key, state in states[0]["state"].items():
        for name, value in state.items():
            assert value is states[1]["state"][key][name] or torch.equal(value, states[1]["state"][key][name])
    assert states[0]["param_groups"][0]["lr"] == states[1]["param_groups"][0]["lr"]


def fused_adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True, **options)


CASES: list[dict[str, Any]] = [
    {}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}, {"optimizer": fused_adam},
    {"optimizer": torch.optim.SGD, "gradient_clip_val": 0.05},
]  # fmt: skip


def name_of(flags: dict[str, Any]) -> str:
    """The same in every process, which the address of a function is not."""
    return str({key: getattr(value, "__name__", value) for key, value in flags.items()})


FIRST_IS_SKIPPED = pytest.mark.filterwarnings(r"ignore:Detected call of `lr_scheduler.step\(\)` before")


@FIRST_IS_SKIPPED
@pytest.mark.parametrize("flags", CASES, ids=name_of)
def test_same_bits_and_the_same_scales(flags: dict[str, Any]) -> None:
    options = dict(flags)
    build = [options.pop("optimizer", torch.optim.Adam)]
    off, scales = fit("off", Halves(*build), **options)
    found, found_scales = fit("exact", Halves(*build), **options)
    assert any(found.overlapped), "no update reached into a step: the test shows nothing"
    assert scales == found_scales
    assert len({scale for scale, _ in scales}) > 2, "the scale never grew or shrank: the test shows nothing"
    assert_same_bits(off, found)

    plain, plain_scales = fit(None, Halves(*build), **options)
    whole, whole_scales = fit("exact", Halves(*build), num_microbatches=1, **options)
    assert plain_scales == whole_scales == scales
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(whole.state_dict()[name], tensor, rtol=2e-3, atol=2e-3)


@FIRST_IS_SKIPPED
@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.05}], ids=str)
def test_delayed_updates(flags: dict[str, Any]) -> None:
    """No update is missing after a skipped step, so that nothing is late then."""

    class LateHalves(Late, Halves):
        pass

    found, scales = fit("stale", Halves(), **flags)
    assert any(found.overlapped)
    late, late_scales = fit("off", LateHalves(), **flags)
    assert scales == late_scales
    assert_same_bits(late, found)


def test_schedulers_say_nothing_but_the_truth() -> None:
    """A scheduler that is stepped before any update says so, as in plain AMP; after one it says nothing."""

    def said(overlap: str | None, first: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            patch.setitem(globals(), "batches", lambda usual=batches: usual()[first:])
            fit(overlap, Halves())
        return [str(warning.message)[:60] for warning in caught if "lr_scheduler" in str(warning.message)]

    assert said(None, 0) == said("off", 0) == said("exact", 0) != []
    assert said(None, 1) == said("off", 1) == said("exact", 1) == []
