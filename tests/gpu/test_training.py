"""The main job on a GPU: the same numbers as plain training there, whatever streams and slots do."""

import copy
import gc
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from tests.helpers.equivalence import TrainResult, assert_results_close, train
from tests.helpers.late import Late
from tests.helpers.models import CASES, Block, Case, seeded

pytestmark = pytest.mark.gpu

ON_HOST_ONLY = {"sparse_adam"}  # fills a host buffer by hand
BY_NAME = {name: case for name, case in CASES.items() if name not in ON_HOST_ONLY}


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def fit(case: Case, strategy: Any = "auto", **flags: Any) -> TrainResult:
    result = train(case.module, case.batches(), strategy, 1, accelerator="gpu", **flags)
    result.losses[:] = [None if loss is None else loss.cpu() for loss in result.losses]
    result.metrics.update({name: value.cpu() for name, value in result.metrics.items()})
    return result


@pytest.mark.parametrize("name", BY_NAME)
def test_equals_plain_training(name: str) -> None:
    case = BY_NAME[name]
    found = fit(case, RoundPipeStrategy(num_microbatches=3))
    # Adapters start at zero, so all of them is update: rounding shows a little more. cuDNN sums otherwise than we do.
    loose = {"llama_lora": 3e-5, "lstm": 1e-4, "gru": 1e-4}
    assert_results_close(fit(case), found, rtol=loose.get(name, 1e-5))


@pytest.mark.parametrize("name", ["qwen3_tied", "llama_lora", "gpt2"])
def test_exact_overlap_gives_the_same_bits(name: str) -> None:
    case = BY_NAME[name]
    after, along = (fit(case, RoundPipeStrategy(num_microbatches=3, optimizer_overlap=o)) for o in ("off", "exact"))
    for key, tensor in after.state.items():
        assert torch.equal(tensor, along.state[key]), key


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_that_share_a_gpu_give_the_same_bits(workers: int) -> None:
    case = BY_NAME["qwen3_tied"]
    one = fit(case, RoundPipeStrategy(num_microbatches=3))
    several = fit(case, RoundPipeStrategy(num_microbatches=3, workers_per_device=workers))
    for name, tensor in one.state.items():
        assert torch.equal(tensor, several.state[name]), name


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_half_precision_is_near_plain(precision: str) -> None:
    case = BY_NAME["qwen3_tied"]
    expected, found = (
        fit(case, precision=precision),
        fit(case, RoundPipeStrategy(num_microbatches=3), precision=precision),
    )
    for plain, ours in zip(expected.losses, found.losses, strict=True):
        assert plain is not None and ours is not None
        assert float(ours) == pytest.approx(float(plain), rel=2e-2)


class Gan(L.LightningModule):
    """Two optimizers in turn, weights clipped through ``data``, a moving average, gradients accumulated by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 64))
        self.discriminator = nn.Sequential(Block(64), Block(64), nn.Linear(64, 1))
        self.average = copy.deepcopy(self.generator).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, noise = batch
        for_generator, for_discriminator = self.optimizers()
        self.toggle_optimizer(for_generator)
        fake = self.generator(noise)
        self.manual_backward((self.average(noise) - fake).square().mean() - self.discriminator(fake).mean())
        if batch_idx % 2:
            self.clip_gradients(for_generator, 0.5, "norm")
            for_generator.step()
            for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        for _ in range(2):
            for_discriminator.zero_grad()
            loss = self.discriminator(self.generator(noise).detach()).mean() - self.discriminator(real).mean()
            self.log("loss", loss)
            self.manual_backward(loss)
            for_discriminator.step()
            for parameter in self.discriminator.parameters():
                parameter.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            for old, new in zip(self.average.parameters(), self.generator.parameters(), strict=True):
                old.lerp_(new, 0.1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-3) for net in (self.generator, self.discriminator)]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_manual_optimization(precision: str, workers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randn(2, 6, 64, generator=generator)) for _ in range(6)]
    case = Case("gan", lambda: seeded(Gan), lambda: batches)
    expected = fit(case, precision=precision)
    found = fit(case, RoundPipeStrategy(workers_per_device=workers), precision=precision)
    assert_results_close(expected, found, rtol=1e-5 if precision == "32-true" else 2e-2)


def test_nothing_stays_on_the_gpu() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    fit(BY_NAME["qwen3_tied"], RoundPipeStrategy(num_microbatches=3))
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**16


class UsedThrice(L.LightningModule):
    """One weight with three places of use, in stages of different workers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        for index in (2, 5):
            self.layers[index].weight = self.layers[0].weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch)) + batch
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LateUsedThrice(Late, UsedThrice):
    """Computes one update behind."""


def test_a_weight_used_thrice_is_added_up_in_a_fixed_order() -> None:
    """Whatever the number of workers, and however their stages interleave."""
    states = []
    for workers in (1, 2, 3, 3):
        torch.manual_seed(0)
        module = UsedThrice()
        strategy = RoundPipeStrategy(num_microbatches=4, workers_per_device=workers)
        batches = [torch.randn(16, 64, generator=torch.Generator().manual_seed(step)) for step in range(4)]
        trainer = L.Trainer(
            accelerator="gpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(batches, batch_size=None))
        states.append(module.state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())


@pytest.mark.parametrize("overlap", ["off", "exact"])
def test_compiled_units(overlap: str) -> None:
    case = CASES["qwen3_tied"]
    found = fit(case, RoundPipeStrategy(num_microbatches=3, compile_units=True, optimizer_overlap=overlap))
    assert_results_close(fit(case), found, rtol=1e-4)


@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.1}], ids=str)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("half_weights", [False, True])
def test_updates_that_reach_into_the_next_step(workers: int, flags: dict[str, Any], half_weights: bool) -> None:
    states = []
    for overlap, cls in (("off", UsedThrice), ("exact", UsedThrice), ("off", LateUsedThrice), ("stale", UsedThrice)):
        torch.manual_seed(0)
        module = cls()
        module.configure_optimizers = lambda module=module: torch.optim.AdamW(module.parameters(), lr=1e-3)  # type: ignore[misc]
        batches = [torch.randn(16, 64, generator=torch.Generator().manual_seed(step)) for step in range(12)]
        strategy = RoundPipeStrategy(num_microbatches=4, workers_per_device=workers, optimizer_overlap=overlap)
        plugins = [RoundPipePrecision("bf16-mixed", half_weights=True)] if half_weights else []
        trainer = L.Trainer(
            accelerator="gpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, plugins=plugins, **flags,
        )  # fmt: skip
        trainer.fit(module, DataLoader(batches, batch_size=None))
        states.append(module.state_dict())
    for reference, found in (states[:2], states[2:]):
        assert all(torch.equal(found[name], tensor) for name, tensor in reference.items())
    assert not torch.equal(states[0]["layers.0.weight"], states[2]["layers.0.weight"])
