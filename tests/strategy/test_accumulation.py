"""Micro-batches within a batch and accumulation over batches are two divisions, and each happens once."""

import itertools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, TrainResult, assert_results_close, train, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded

GRID = list(itertools.product((1, 2, 3), repeat=3))


def tiny() -> L.LightningModule:
    return seeded(Residual).double()


@pytest.fixture(scope="module")
def references() -> dict[int, TrainResult]:
    """Plain fits by number of accumulated batches."""
    return {count: train(tiny, residual_batches(), accumulate_grad_batches=count) for count in (1, 2, 3)}


@pytest.mark.parametrize(("devices", "num_microbatches", "accumulate"), GRID)
def test_grid(references: dict[int, TrainResult], devices: int, num_microbatches: int, accumulate: int) -> None:
    strategy = RoundPipeStrategy(num_microbatches=num_microbatches)
    found = train(tiny, residual_batches(), strategy, devices, accumulate_grad_batches=accumulate)
    assert_results_close(references[accumulate], found, rtol=1e-10)


@pytest.mark.parametrize("accumulate", [4, 7])
def test_last_group_is_short(accumulate: int) -> None:
    """Five batches: the last group has fewer batches than the number to accumulate, in each of two epochs."""
    flags: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    expected = train(tiny, residual_batches(num=5), **flags)
    found = train(tiny, residual_batches(num=5), RoundPipeStrategy(num_microbatches=2), 2, **flags)
    assert_results_close(expected, found, rtol=1e-10)


def test_number_of_accumulated_batches_changes_between_epochs() -> None:
    def run(strategy: Any, devices: int) -> TrainResult:
        scheduler = GradientAccumulationScheduler(scheduling={0: 2, 1: 1})
        return train(tiny, residual_batches(), strategy, devices, max_epochs=2, callbacks=[scheduler])

    assert_results_close(run("auto", 1), run(RoundPipeStrategy(num_microbatches=2), 2), rtol=1e-10)


class GradientRecorder(L.Callback):
    """Copies every gradient in the hooks that may read it."""

    def __init__(self) -> None:
        self.seen: dict[str, list[dict[str, Tensor | None]]] = {}

    def _record(self, hook: str, module: L.LightningModule) -> None:
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        self.seen.setdefault(hook, []).append(gradients)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record("on_after_backward", pl_module)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._record("on_before_optimizer_step", pl_module)

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._record("on_before_zero_grad", pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._record("on_train_batch_end", pl_module)


def test_hooks_see_the_gradients_that_plain_lightning_shows() -> None:
    """Complete, unscaled and accumulated, in every hook; and the accumulated one is a sum, not the last."""
    expected, found = GradientRecorder(), GradientRecorder()
    train(tiny, residual_batches(), callbacks=[expected], accumulate_grad_batches=2)
    strategy = RoundPipeStrategy(num_microbatches=3)
    train(tiny, residual_batches(), strategy, 2, callbacks=[found], accumulate_grad_batches=2)
    assert expected.seen.keys() == found.seen.keys()
    for hook, steps in expected.seen.items():
        assert len(found.seen[hook]) == len(steps), hook
        for step, (one, two) in enumerate(zip(steps, found.seen[hook], strict=True)):
            for name, gradient in one.items():
                where = f"{hook}, call {step}, {name}"
                if gradient is None:
                    assert two[name] is None, where
                else:
                    assert two[name] is not None, where
                    torch.testing.assert_close(two[name], gradient, rtol=1e-9, atol=1e-12, msg=where)


def test_same_batch_twice_doubles_the_gradient() -> None:
    recorder = GradientRecorder()
    batch = residual_batches(num=1)
    strategy = RoundPipeStrategy(num_microbatches=2)
    train(tiny, batch * 2, strategy, 2, callbacks=[recorder], accumulate_grad_batches=2)
    once, twice = recorder.seen["on_after_backward"]
    for name, gradient in once.items():
        assert gradient is not None
        torch.testing.assert_close(twice[name], 2 * gradient, msg=name)


class SkipsSomeBatches(Residual):
    """``training_step`` returns what a test asks for in its batch number."""

    def __init__(self, returns: dict[int, Any], **options: Any) -> None:
        super().__init__(**options)
        self.returns = returns
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        make = self.returns.get(batch_idx, lambda loss: loss)
        return make(loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


def nothing(loss: Tensor) -> None:
    return None


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None")
def test_training_step_returns_none(accumulate: int) -> None:
    """The batch is skipped, gradients accumulated before are kept, and the next batch trains."""

    def module() -> L.LightningModule:
        return seeded(lambda: SkipsSomeBatches({1: nothing, 4: nothing})).double()

    flags: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    expected = train(module, residual_batches(num=6), **flags)
    found = train(module, residual_batches(num=6), RoundPipeStrategy(num_microbatches=3), 2, **flags)
    assert_results_close(expected, found, rtol=1e-10)


def test_training_step_returns_a_dict() -> None:
    """Extra keys reach ``on_train_batch_end`` detached and for the whole batch."""

    class Extra(SkipsSomeBatches):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
            return {"loss": loss, "predictions": logits.argmax(-1), "logits": logits, "batch": batch_idx}

    def module() -> L.LightningModule:
        return seeded(lambda: Extra({})).double()

    expected = train(module, residual_batches())
    found = train(module, residual_batches(), RoundPipeStrategy(num_microbatches=3), 2)
    assert_results_close(expected, found, rtol=1e-10)
    for one, two in zip(expected.module.outputs, found.module.outputs, strict=True):
        assert torch.equal(one["predictions"], two["predictions"])
        torch.testing.assert_close(two["logits"], one["logits"])
        assert not two["logits"].requires_grad
        assert two["batch"] == one["batch"]


def test_loss_without_a_graph_raises_torchs_own_error() -> None:
    module = seeded(lambda: SkipsSomeBatches({1: lambda loss: loss.detach()}))
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2)
    with pytest.raises(RuntimeError, match="does not require grad"):
        trainer.fit(module, BatchDealer(residual_batches()))


def test_nan_loss() -> None:
    """Without a guard NaN spreads as in plain Lightning; ``detect_anomaly`` stops before the weights are touched."""

    def module() -> L.LightningModule:
        return seeded(lambda: SkipsSomeBatches({2: lambda loss: loss * torch.nan}))

    expected = train(module, residual_batches())
    found = train(module, residual_batches(), RoundPipeStrategy(num_microbatches=2), 2)
    assert expected.state["head.weight"].isnan().all()
    assert_results_close(expected, found, rtol=1e-5)

    guarded = module()
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2, detect_anomaly=True)
    with pytest.raises((RuntimeError, ValueError), match="(?i)nan"):
        trainer.fit(guarded, BatchDealer(residual_batches()))
    assert all(parameter.isfinite().all() for parameter in guarded.parameters())
