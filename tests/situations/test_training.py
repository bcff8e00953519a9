"""Situations in training that users of other systems met, as far as no test beside the code covers them."""

import copy
import gc
import os
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.checks import check_devices
from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.worker import Worker
from tests.helpers.equivalence import BatchDealer, TrainResult, assert_results_close, train, trainer_for
from tests.helpers.models import Block, Residual, StepModule, residual_batches, seeded, vector_batches


def ours(num_microbatches: int = 3) -> RoundPipeStrategy:
    return RoundPipeStrategy(num_microbatches=num_microbatches)


@pytest.mark.parametrize("where", ["copy", "list"])
def test_optimizer_of_parameters_that_are_not_the_modules(where: str) -> None:
    class Elsewhere(Residual):
        def configure_optimizers(self) -> Any:
            if where == "copy":
                return torch.optim.SGD(copy.deepcopy(self).parameters(), lr=0.1)
            self.loose = [nn.Parameter(torch.zeros(7, 3))]
            return torch.optim.SGD([*self.parameters(), *self.loose], lr=0.1)

    with pytest.raises(MisconfigurationException, match=r"optimizer holds \d+ parameter.*Register them"):
        train(lambda: seeded(Elsewhere), residual_batches(), ours(), 2)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_what_trains_is_what_changes(devices: int) -> None:
    class PartlyFrozen(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].requires_grad_(False)
            self.embed.requires_grad_(False)

    before = seeded(PartlyFrozen)
    found = train(lambda: seeded(PartlyFrozen), residual_batches(), ours(), devices)
    changed = {name for name, p in before.named_parameters() if not torch.equal(found.state[name], p)}
    assert changed == {name for name, p in before.named_parameters() if p.requires_grad}


def test_labels_meet_the_outputs_of_their_own_rows() -> None:
    """Batches of changing length, whose labels are the rows' numbers."""
    seen: list[tuple[list[int], list[int]]] = []

    class Numbered(Residual):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            rows, numbers = batch
            logits = self(rows)
            seen.append((rows[:, 0].tolist(), numbers.tolist()))
            return F.cross_entropy(logits[:, 0], numbers)

    batches = [
        (torch.arange(rows)[:, None].expand(rows, length).contiguous(), torch.arange(rows))
        for rows, length in ((6, 3), (5, 7), (1, 2), (7, 1))
    ]
    expected = train(lambda: seeded(Numbered).double(), batches)
    seen.clear()
    found = train(lambda: seeded(Numbered).double(), batches, ours(), 3)
    assert_results_close(expected, found, rtol=1e-9)
    assert all(rows == numbers for rows, numbers in seen) and len(seen) == 3 + 3 + 1 + 3


def test_another_shape_in_recomputation_is_refused_by_name() -> None:
    """As routers do that decide by something else than their arguments."""

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            return torch.cat([y, y[:1]]) if torch.is_grad_enabled() else y

    class Routed(StepModule):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.routes = Grows()
            self.rest = nn.Sequential(*(Block(16) for _ in range(4)), nn.Linear(16, 10))

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(self.rest(self.routes(self.first(batch[0]))[: len(batch[1])]), batch[1])

    with pytest.raises(UnsupportedUseError, match=r"Recomputing unit .*routes.* took another path.*a routing decision"):
        train(lambda: seeded(Routed), vector_batches(16), RoundPipeStrategy(num_microbatches=2, units=["Grows"]), 2)


def test_no_copy_from_gpu_to_gpu() -> None:
    worker = Worker(1, torch.device("cuda", 1), mock.Mock())
    tensor = mock.Mock(device=torch.device("cuda", 0))
    worker.move(tensor)
    tensor.to.assert_not_called()
    tensor.cpu.return_value.to.assert_called_once_with(worker.device)


def test_small_numbers_and_nan_survive_a_fit() -> None:
    """No code is loaded that switches the process to flushing denormal numbers, and no NaN is lost."""

    class MakesNan(Residual):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return super().loss(batch) * torch.nan

    found = train(lambda: seeded(MakesNan), residual_batches(), ours(), 2)
    assert all(parameter.isnan().all() for parameter in found.module.blocks[0].parameters())
    assert 5e-324 != 0.0 and float(torch.tensor(1e-40) * 1) != 0.0


def test_norm_over_several_dtypes() -> None:
    """Layers in float32 and bfloat16, in different stages, with no process group: one norm over all."""
    norms: list[tuple[float, float]] = []

    class Mixed(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].bfloat16()

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x.to(block.up.weight.dtype))
            return self.head(x)

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            def norm() -> float:
                return float(sum(p.grad.float().square().sum() for p in self.parameters())) ** 0.5

            before = norm()
            self.clip_gradients(optimizer, *args, **kwargs)
            norms.append((before, norm()))

    flags: dict[str, Any] = {"gradient_clip_val": 0.1}
    train(lambda: seeded(Mixed), residual_batches(), **flags)
    plain, norms[:] = list(norms), []
    train(lambda: seeded(Mixed), residual_batches(), ours(), 2, **flags)
    assert not torch.distributed.is_initialized()
    for (expected, _), (found, clipped) in zip(plain, norms, strict=True):
        assert found == pytest.approx(expected, rel=2e-2)
        assert clipped == pytest.approx(0.1, rel=1e-2)


def test_loss_scaling_with_clipping() -> None:
    """Gradients are unscaled before they are clipped; one that overflows skips its step and halves the scale."""

    class Overflows(Residual):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return super().loss(batch) * (torch.inf if self.trainer.fit_loop.batch_idx == 2 else 1.0)

    def fit(strategy: Any, devices: int) -> TrainResult:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        flags: dict[str, Any] = {"plugins": [plugin], "gradient_clip_val": 0.1}
        return train(lambda: seeded(Overflows), residual_batches(), strategy, devices, **flags)

    expected, found = fit("auto", 1), fit(ours(1), 2)
    assert_results_close(expected, found, rtol=1e-6)
    assert_results_close(expected, fit(ours(3), 2), rtol=2e-2)
    assert found.trainer.precision_plugin.scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("manual", [False, True])
def test_preferences_against_a_frozen_reference(manual: bool) -> None:
    """DPO: the reference is a copy of the policy, without gradients, made when the fit begins."""

    class Preferences(StepModule):
        def __init__(self) -> None:
            super().__init__()
            self.policy = nn.Sequential(nn.Embedding(32, 16), Block(16), Block(16), nn.Linear(16, 32))
            self.reference = copy.deepcopy(self.policy).requires_grad_(False)
            self.automatic_optimization = not manual

        @staticmethod
        def log_probability(model: nn.Module, tokens: Tensor) -> Tensor:
            logits = model(tokens[:, :-1]).log_softmax(-1)
            return logits.gather(-1, tokens[:, 1:, None]).sum((1, 2))

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            chosen, rejected = batch
            with torch.no_grad():
                reference = self.log_probability(self.reference, chosen) - self.log_probability(
                    self.reference, rejected
                )
            policy = self.log_probability(self.policy, chosen) - self.log_probability(self.policy, rejected)
            return -F.logsigmoid(0.5 * (policy - reference)).mean()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.policy.parameters(), lr=1e-2, eps=1e-3)

    def module() -> L.LightningModule:
        return seeded(Preferences).double()

    expected = train(module, residual_batches())
    found = train(module, residual_batches(), RoundPipeStrategy(num_microbatches=1 if manual else 3), 2)
    assert_results_close(expected, found, rtol=1e-9)
    assert all(parameter.grad is None for parameter in found.module.reference.parameters())
    for name, tensor in module().reference.state_dict().items():
        assert torch.equal(found.state[f"reference.{name}"], tensor), name


def test_termination_signal_during_a_step(tmp_path: Path) -> None:
    """The step ends, a checkpoint is written, Lightning's exception arrives, and a new run goes on from the file."""

    class Terminated(Residual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.trainer.strategy.step_stats is not None and not getattr(self, "sent", False):
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    with pytest.raises(SystemExit), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, about a checkpoint to go on from.
        train(
            lambda: seeded(Terminated), residual_batches(), ours(), 2,
            callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True, default_root_dir=tmp_path,
        )  # fmt: skip
    path = tmp_path / "on_exception.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == 2
    resumed = train(lambda: seeded(Residual), residual_batches(), ours(), 3, ckpt_path=str(path))
    whole = train(lambda: seeded(Residual), residual_batches(), ours(), 1)
    for name, tensor in whole.state.items():
        assert torch.equal(resumed.state[name], tensor), name


def test_other_accelerators_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="runs on GPUs .CUDA. or on virtual CPU workers"):
        check_devices(torch.device("mps", 0), 1)


def test_notebook_is_told_of_gpus_that_it_does_not_use() -> None:
    with (
        mock.patch("lightning_roundpipe.checks._IS_INTERACTIVE", True),
        mock.patch("torch.cuda.device_count", return_value=4),
        mock.patch("lightning_roundpipe.checks.rank_zero_info") as told,
    ):
        check_devices(torch.device("cuda", 0), 1)
    told.assert_called_once_with("4 GPUs are visible; `Trainer(devices=4)` uses them all.")


def test_failed_setup_leaves_nothing_behind() -> None:
    """No half-built object whose destructor raises, and the same strategy's trainer can fit afterwards."""

    class Fails(Residual):
        fails = True

        def configure_optimizers(self) -> Any:
            if self.fails:
                raise KeyError("mine")
            return super().configure_optimizers()

    unraisable: list[Any] = []
    module, trainer = seeded(Fails), trainer_for(ours(), 2)
    with mock.patch("sys.unraisablehook", unraisable.append):
        with pytest.raises(KeyError, match="mine"):
            trainer.fit(module, BatchDealer(residual_batches()))
        gc.collect()
    assert not unraisable
    module.fails = False
    trainer.fit(module, BatchDealer(residual_batches()))
    assert trainer.global_step == 4
