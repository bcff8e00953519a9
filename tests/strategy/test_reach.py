"""An update may reach into the next step's forward pass; nobody sees weights, gradients or state before it is done."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime.testing import executor_of


class SlowAdam(torch.optim.Adam):
    """Takes so long that the next forward pass begins before it is through."""

    fails_at = -1

    def step(self, closure: Any = None) -> Any:
        """Sleep, then step."""
        time.sleep(0.004)
        if self.fails_at == int(next(iter(self.state.values()))["step"] if self.state else 0):
            raise ArithmeticError("the optimizer fails")
        return super().step(closure)


class Stack(L.LightningModule):
    """Layers, a loose parameter and a tied one; notes whether an update was under way when a step began."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = SlowAdam) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.layers[5].weight = self.layers[0].weight
        self.optimizer = optimizer
        self.overlapped: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        if isinstance(strategy, RoundPipeStrategy):
            self.overlapped.append(executor_of(strategy).store.pending is not None)
        x = batch + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.log("loss", loss := (x - 1).square().mean())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for layer in self.layers:
            batch = layer(batch)
        self.log("val", batch.square().mean())

    def configure_optimizers(self) -> Any:
        rest = [parameter for parameter in self.parameters() if parameter is not self.shift]
        groups = [{"params": [self.shift], "lr": 0.05}, {"params": rest}]
        optimizer = self.optimizer(groups, lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def fit(overlap: str, devices: int = 2, module: Stack | None = None, num_microbatches: int = 3, **flags: Any) -> Stack:
    torch.manual_seed(0)
    module = Stack() if module is None else module
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(step)) for step in range(8)]
    loader = DataLoader(batches, batch_size=None)
    flags = {"enable_checkpointing": False, "max_epochs": 2, **flags}
    strategy = RoundPipeStrategy(num_microbatches=num_microbatches, optimizer_overlap=overlap)
    flags = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **flags}
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **flags)
    trainer.fit(module, loader, loader if flags.get("val_check_interval") else None)
    return module


def assert_same_bits(one: Stack, other: Stack) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    states = [module.trainer.optimizers[0].state_dict()["state"] for module in (one, other)]
    for key, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(value, states[1][key][name]), (key, name)


@pytest.mark.parametrize("devices", [1, 3])
def test_same_bits_on_any_number_of_workers(devices: int) -> None:
    assert_same_bits(fit("off", 2), fit("exact", devices))


@pytest.mark.parametrize(
    "flags",
    [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
     {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3},
     {"val_check_interval": 3}],
    ids=str,
)  # fmt: skip
def test_same_bits(flags: dict[str, Any]) -> None:
    found = fit("exact", **flags)
    assert any(found.overlapped), "no update reached into a step: the test shows nothing"
    assert_same_bits(fit("off", **flags), found)
    assert "zero_grad" not in vars(found)
    assert not any(thread.name == "roundpipe-pending-step" for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "AdamW", "Adagrad", "NAdam", "RAdam", "Adafactor", "Adamax"])
def test_optimizers(name: str) -> None:
    optimizer = getattr(torch.optim, name)
    assert_same_bits(fit("off", module=Stack(optimizer)), fit("exact", module=Stack(optimizer)))


def test_checkpoints_hold_a_finished_step(tmp_path: Path) -> None:
    """Saved after every step, by a callback that the update need not wait for; resumed from in the middle."""
    folders = {}
    for overlap in ("off", "exact"):
        saver = ModelCheckpoint(tmp_path / overlap, save_top_k=-1, every_n_train_steps=1, filename="{step}")
        module = fit(overlap, callbacks=[saver], enable_checkpointing=True)
        folders[overlap] = sorted((tmp_path / overlap).iterdir())
        if overlap == "exact":
            assert not any(module.overlapped)  # every step saves
    assert len(folders["off"]) == len(folders["exact"]) == 16
    for one, other in zip(*folders.values(), strict=True):
        states = [torch.load(path, weights_only=True) for path in (one, other)]
        assert all(
            torch.equal(states[0]["state_dict"][name], states[1]["state_dict"][name])
            for name in states[0]["state_dict"]
        )


class Looks(Callback):
    """Notes sums of weights and moments in one hook."""

    def __init__(self, hook: str) -> None:
        self.sums: list[float] = []
        setattr(self, hook, self._look)

    def _look(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        values = [parameter.detach().double().sum() for parameter in module.parameters()]
        state = trainer.optimizers[0].state
        values += [value.double().sum() for p in module.parameters() for value in state.get(p, {}).values()]
        self.sums.append(float(torch.stack(values).sum()))


HOOKS = (
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start",
    "on_validation_end", "on_train_end", "on_fit_end", "on_before_zero_grad", "on_before_optimizer_step",
)  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_callbacks_see_finished_steps(hook: str) -> None:
    sums = []
    for overlap in ("off", "exact"):
        # A class of its own: Lightning looks for overridden methods there.
        looking = type("Looking", (Looks,), {hook: lambda self, *args: self._look(*args)})("unused")
        fit(overlap, callbacks=[looking], val_check_interval=3)
        sums.append(looking.sums)
    assert sums[0] and sums[0] == sums[1]


@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end", "on_train_end"]
)
def test_hooks_of_the_module_see_finished_steps(hook: str) -> None:
    sums: dict[str, list[float]] = {"off": [], "exact": []}
    for overlap, seen in sums.items():

        def look(self: Stack, *args: Any, seen: list[float] = seen) -> None:
            seen.append(float(sum(parameter.detach().double().sum() for parameter in self.parameters())))

        fit(overlap, module=type("Looking", (Stack,), {hook: look})(), val_check_interval=3)
    assert sums["off"] and sums["off"] == sums["exact"]


def test_averages_and_monitors(tmp_path: Path) -> None:
    """An average of the weights after every step, which looks in between; a monitor of the rate, which does not."""
    averages = []
    for overlap in ("off", "exact"):
        averaging = WeightAveraging(use_buffers=False)
        fit(overlap, callbacks=[averaging])
        averages.append(averaging._average_model.state_dict())  # type: ignore[union-attr]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    module = fit("exact", callbacks=[LearningRateMonitor()], logger=L.pytorch.loggers.CSVLogger(tmp_path))
    assert any(module.overlapped)


def test_errors_of_the_optimizer_are_raised() -> None:
    module = Stack()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlowAdam, "fails_at", 4)
        with pytest.raises(ArithmeticError, match="the optimizer fails") as raised:
            fit("exact", module=module)
    assert any("in the background" in note for note in raised.value.__notes__)
    assert_same_bits(fit("off"), fit("exact"))


def test_errors_of_the_step_win() -> None:
    class Failing(Stack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 4:
                raise KeyError("the step fails")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="the step fails"):
        fit("exact", module=Failing())


def test_frozen_and_unfrozen_between_epochs() -> None:
    class Unfreezing(Stack):
        def on_train_epoch_start(self) -> None:
            self.layers[2].requires_grad_(self.current_epoch == 1)

    assert_same_bits(fit("off", module=Unfreezing()), fit("exact", module=Unfreezing()))


def test_the_account() -> None:
    """Update time is that of the updates that ran; what was waited for is no longer than that."""
    module = fit("exact")
    stats = module.trainer.strategy.step_stats  # type: ignore[attr-defined]
    assert stats.update_s > 0.004
    assert stats.update_exposed_s >= 0


def count_clips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that all gradients are clipped at once."""
    clips: list[int] = []
    clip = torch.nn.utils.clip_grad_norm_

    def counted(parameters: Any, *args: Any, **options: Any) -> Tensor:
        parameters = list(parameters)
        clips.append(len(parameters))
        return clip(parameters, *args, **options)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", counted)
    return clips


class Wide(Stack):
    """Gradients of which a norm is taken by several threads."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD)
        self.wide = nn.Linear(8, 40000)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.wide(batch).square().mean()


@pytest.mark.parametrize("module", [Stack, Wide])
@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 3}], ids=str)
def test_norms_are_taken_as_gradients_land(
    module: Callable[[], Stack], flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = count_clips(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        off = fit("off", module=module(), gradient_clip_val=0.05, **flags)
        assert len(clips) == off.trainer.global_step
        clips.clear()
        found = fit("exact", module=module(), gradient_clip_val=0.05, **flags)
    finally:
        torch.set_num_threads(before)
    assert len(clips) == 1, "the first step of an optimizer does not reach over, the others must"
    assert_same_bits(off, found)
    for one, other in zip(off.parameters(), found.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("through", ["grad", "data"])
def test_gradients_that_hooks_change_are_clipped_as_they_are(through: str) -> None:
    seen: dict[str, list[float]] = {"off": [], "exact": []}
    for overlap, norms in seen.items():

        class Halves(Callback):
            def on_before_optimizer_step(
                self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any, norms: list[float] = norms
            ) -> None:
                norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    (parameter.grad if through == "grad" else parameter.grad.data).mul_(0.5)

        found = fit(overlap, gradient_clip_val=0.05, callbacks=[Halves()])
        if overlap == "off":
            off = found
    assert seen["off"] == seen["exact"]
    assert max(seen["off"]) > 0.2, "nothing was clipped"
    assert any(found.overlapped)
    assert_same_bits(off, found)


def test_clipping_of_ones_own_is_called() -> None:
    class Own(Stack):
        calls = 0

        def clip_gradients(self, *args: Any, **options: Any) -> None:
            self.calls += 1
            super().clip_gradients(*args, **options)

    off, found = fit("off", module=Own(), gradient_clip_val=0.05), fit("exact", module=Own(), gradient_clip_val=0.05)
    assert off.calls == found.calls == 16  # type: ignore[attr-defined]
    assert_same_bits(off, found)


def test_norms_of_several_dtypes_are_taken_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 8, dtype=torch.float64)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            rows = self.table(torch.arange(len(batch)) % 4)
            return super().training_step(batch, batch_idx) + rows.square().mean().float()

    clips = count_clips(monkeypatch)
    off, found = (fit(overlap, module=Mixed(), gradient_clip_val=0.05) for overlap in ("off", "exact"))
    assert len(clips) == 2 * 16
    assert any(found.overlapped)
    assert_same_bits(off, found)


class Hooked(Stack):
    """Counts steps by a hook of the optimizer, or of all optimizers."""

    def __init__(self, where: str) -> None:
        super().__init__(torch.optim.SGD)
        self.where = where
        self.counts: list[int] = []

    def configure_optimizers(self) -> Any:
        (optimizer,), schedulers = super().configure_optimizers()
        register: Any = {
            "before": optimizer.register_step_pre_hook,
            "after": optimizer.register_step_post_hook,
            "after all": register_optimizer_step_post_hook,
        }[self.where]
        self.handle = register(self.note)
        return [optimizer], schedulers

    def note(self, stepped: torch.optim.Optimizer, *args: Any) -> None:
        assert stepped is self.trainer.optimizers[0]
        self.counts.append(sum(len(group["params"]) for group in stepped.param_groups))

    def on_fit_end(self) -> None:
        self.handle.remove()


@pytest.mark.parametrize("where", ["before", "after", "after all"])
def test_hooks_of_optimizers_run_once_for_a_step(where: str) -> None:
    for overlap in ("off", "exact"):
        found = fit(overlap, module=Hooked(where))
        assert found.counts == [12] * 16  # type: ignore[attr-defined]


def test_optimizer_step_of_the_module() -> None:
    """A warm-up, as Lightning's documentation writes it, and arguments for the optimizer."""

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(scale)
            return loss

    class Warm(Stack):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if self.trainer.global_step == 4:
                optimizer.step(closure=optimizer_closure, scale=0.5)
            else:
                optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 6)

    assert_same_bits(fit("off", module=Warm(Counts)), fit("exact", module=Warm(Counts)))


class Patched(Stack):
    """Counts steps in a function that stands in the place of the optimizer's ``step``."""

    calls = 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        step = optimizer.step

        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            return step(*args, **options)

        optimizer.step = counted  # type: ignore[method-assign]
        return optimizer


@pytest.mark.parametrize("overlap", ["off", "exact"])
def test_a_step_that_was_replaced_is_called(overlap: str) -> None:
    assert fit(overlap, module=Patched()).calls == 16  # type: ignore[attr-defined]


def test_schedulers_count_every_step() -> None:
    rates = []
    for overlap in ("off", "exact", "stale"):
        module = fit(overlap, accumulate_grad_batches=2)
        scheduler: Any = module.trainer.lr_scheduler_configs[0].scheduler
        rates.append((scheduler.last_epoch, scheduler._step_count, scheduler.get_last_lr()))
    assert rates[0] == rates[1] == rates[2]
