"""``optimizer_overlap="stale"``: a step computes with weights that lack exactly the update of the step before."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from lightning_roundpipe.runtime.testing import executor_of
from tests.helpers.equivalence import BatchDealer
from tests.helpers.late import Late

LOGGER = "lightning.pytorch.utilities.rank_zero"


class SlowAdam(torch.optim.Adam):
    """Takes long enough that workers run while it steps."""

    def step(self, closure: Any = None) -> Any:
        """Sleep, then step."""
        time.sleep(0.002)
        return super().step(closure)


class Stack(L.LightningModule):
    """Layers, a loose parameter, a tied one, a frozen one, one that every other step uses, one that none does."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = SlowAdam, *, tied: bool = True) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        if tied:
            self.layers[5].weight = self.layers[0].weight
        self.layers[2].weight.requires_grad_(False)
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.optimizer = optimizer
        self.overlapped: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        if isinstance(strategy, RoundPipeStrategy):
            self.overlapped.append(executor_of(strategy).store.pending is not None)
        x = batch + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if batch_idx % 2:
            x = x + self.sometimes(x)
        self.log("loss", loss := (x - 1).square().mean())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for layer in self.layers:
            batch = layer(batch)
        self.log("val", batch.square().mean())

    def configure_optimizers(self) -> Any:
        rest = [p for p in self.parameters() if p is not self.shift and p.requires_grad]
        optimizer = self.optimizer([{"params": [self.shift], "lr": 0.05}, {"params": rest}], lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class LateStack(Late, Stack):
    """The reference."""


def fit(overlap: str | None, devices: int = 2, module: Stack | None = None, steps: int = 9, **flags: Any) -> Stack:
    """Fit; without the strategy if ``overlap`` is None."""
    module = Stack() if module is None else module
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    loader = BatchDealer([torch.randn(6, 8, generator=generator) for _ in range(steps)])
    options = {name: flags.pop(name) for name in ("replica_groups", "precision_plugin") if name in flags}
    strategy: Any = "auto"
    if overlap is not None:
        strategy = RoundPipeStrategy(flags.pop("num_microbatches", 3), optimizer_overlap=overlap, **options)
    flags = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **flags}
    flags = {"enable_checkpointing": False, "max_epochs": 1, **flags}
    ckpt_path = flags.pop("ckpt_path", None)
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **flags)
    trainer.fit(module, loader, loader if flags.get("val_check_interval") else None, ckpt_path=ckpt_path)
    return module


def assert_same_bits(one: Stack, other: Stack) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    states = [module.trainer.optimizers[0].state_dict()["state"] for module in (one, other)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(value, states[1][key][name]), (key, name)


@pytest.mark.parametrize(
    "flags",
    [{"devices": 1}, {"devices": 3}, {"num_microbatches": 1}, {"accumulate_grad_batches": 3},
     {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
     {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, {"val_check_interval": 4}, {"max_epochs": 2},
     {"devices": 4, "num_microbatches": 4, "replica_groups": 2}],
    ids=str,
)  # fmt: skip
def test_gradients_are_applied_one_step_late(flags: dict[str, Any]) -> None:
    found = fit("stale", **flags)
    assert any(found.overlapped), "no update reached into a step: the test shows nothing"
    assert_same_bits(fit("off", module=LateStack(), **flags), found)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
def test_optimizers(name: str) -> None:
    optimizer = getattr(torch.optim, name)
    assert_same_bits(fit("off", module=LateStack(optimizer)), fit("stale", module=Stack(optimizer)))


def test_plain_training_one_step_late() -> None:
    """The reference is right: in plain Lightning it gives the same, and so does a loop in plain torch."""
    sgd = partial(torch.optim.SGD, momentum=0.9, foreach=True)
    found = fit("stale", num_microbatches=1, module=Stack(sgd, tied=False))
    plain = fit(None, devices=1, module=LateStack(sgd, tied=False))
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)

    generator = torch.Generator().manual_seed(0)
    module = Stack(sgd, tied=False)
    module.log = lambda *args: None  # type: ignore[assignment, method-assign]
    module._fabric, module._trainer = None, L.Trainer(accelerator="cpu", logger=False)
    masters = list(module.parameters())
    with torch.no_grad():
        for parameter in masters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    batches = [torch.randn(6, 8, generator=generator) for _ in range(9)]
    (optimizer,), (schedule,) = module.configure_optimizers()
    late = [parameter.detach().clone() for parameter in masters]
    for step, batch in enumerate(batches):
        ahead = [parameter.detach().clone() for parameter in masters]
        with torch.no_grad():
            for parameter, value in zip(masters, late, strict=True):
                parameter.copy_(value)
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        with torch.no_grad():
            for parameter, value in zip(masters, ahead, strict=True):
                parameter.copy_(value)
        optimizer.step()
        schedule["scheduler"].step()
        late = [parameter.detach().clone() for parameter in masters] if step == 0 else ahead
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    in_time = fit("exact", num_microbatches=1, module=Stack(sgd, tied=False))
    assert not torch.allclose(in_time.shift, found.shift, rtol=1e-2)


def test_copies_in_half_precision() -> None:
    """Workers read copies in the dtype in which they compute."""
    precision = {"precision_plugin": RoundPipePrecision("bf16-mixed", half_weights=True)}
    module = Stack()
    dtypes = []

    def note(*args: Any) -> None:
        store = executor_of(module.trainer.strategy).store  # type: ignore[arg-type]
        dtypes.append((store.weight(module.shift).dtype, store.uploaded_bytes(module.shift)))

    module.layers[0].register_forward_pre_hook(note)
    found = fit("stale", module=module, **precision)
    assert set(dtypes) == {(torch.bfloat16, 16)}
    assert_same_bits(fit("off", module=LateStack(), **precision), found)


def test_checkpoints_hold_finished_masters(tmp_path: Path) -> None:
    """Saved after every second step, by a callback that the update need not wait for; and resumed from."""
    folders = []
    for overlap, module in (("off", LateStack()), ("stale", Stack())):
        saver = ModelCheckpoint(tmp_path / overlap, save_top_k=-1, every_n_train_steps=2, filename="{step}")
        found = fit(overlap, module=module, callbacks=[saver], enable_checkpointing=True)
        folders.append(sorted((tmp_path / overlap).iterdir()))
    assert any(found.overlapped)
    assert len(folders[0]) == len(folders[1]) == 4
    for one, other in zip(*folders, strict=True):
        states = [torch.load(path, weights_only=True) for path in (one, other)]
        for name, tensor in states[0]["state_dict"].items():
            assert torch.equal(tensor, states[1]["state_dict"][name]), name
    saver = ModelCheckpoint(tmp_path / "stale", save_top_k=-1, every_n_train_steps=2, filename="{step}")
    more = {"callbacks": [saver], "enable_checkpointing": True, "ckpt_path": str(folders[1][1])}
    resumed = fit("stale", **more)
    assert resumed.trainer.global_step == 9
    assert_same_bits(fit("off", module=LateStack(), **more), resumed)


class Looks(Callback):
    """Notes sums of weights and moments after every step."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        state = trainer.optimizers[0].state
        values = [parameter.detach().double().sum() for parameter in module.parameters()]
        values += [value.double().sum() for p in module.parameters() for value in state.get(p, {}).values()]
        self.sums.append(float(torch.stack(values).sum()))


class Scales(Callback):
    """Changes weights after every epoch."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.5)


def test_nothing_is_late_where_something_looks(caplog: pytest.LogCaptureFixture) -> None:
    looks = [Looks(), Looks()]
    with caplog.at_level("INFO", logger=LOGGER):
        found = fit("stale", callbacks=[looks[0]])
    assert_same_bits(fit("exact", callbacks=[looks[1]]), found)
    assert looks[0].sums == looks[1].sums
    said = [r.getMessage() for r in caplog.records if "No step lacks" in r.getMessage()]
    assert said == [
        "No step lacks the update of the step before, because `on_train_batch_end` of Looks may look at weights"
        " between steps."
    ]


def test_weights_that_hooks_change_reach_the_copies() -> None:
    flags = {"callbacks": [Scales()], "max_epochs": 3, "steps": 4}
    found = fit("stale", **flags)
    assert any(found.overlapped)
    assert_same_bits(fit("off", module=LateStack(), **flags), found)


def test_frozen_and_unfrozen_between_epochs() -> None:
    class Unfreezing:
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()  # type: ignore[misc]
            self.layers[3].requires_grad_(self.current_epoch == 1)  # type: ignore[attr-defined]

    late = type("Late", (Unfreezing, LateStack), {})()
    found = fit("stale", module=type("Found", (Unfreezing, Stack), {})(), max_epochs=3, steps=4)
    assert any(found.overlapped)
    assert_same_bits(fit("off", module=late, max_epochs=3, steps=4), found)


def test_manual_optimization_is_never_late() -> None:
    class Manual(Stack):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    flags = {"num_microbatches": 1}
    assert_same_bits(fit("off", module=Manual(), **flags), fit("stale", module=Manual(), **flags))


def test_errors_of_the_optimizer_are_raised() -> None:
    class Fails(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Fails.steps += 1
            if Fails.steps > 7:
                raise ArithmeticError("no step")
            return super().step(closure)

    with pytest.raises(ArithmeticError, match="no step"):
        fit("stale", module=Stack(Fails))
