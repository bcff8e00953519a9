"""Lightning's own callbacks, tuners and debugging flags do what they do on a single device."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, TrainResult, assert_results_close, train, trainer_for
from tests.helpers.models import BatchNormCNN, Block, Residual, StepModule, residual_batches, seeded, vector_batches


def ours(num_microbatches: int = 3) -> RoundPipeStrategy:
    return RoundPipeStrategy(num_microbatches=num_microbatches)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def residual() -> L.LightningModule:
    return seeded(lambda: Residual(optimizer=adamw)).double()


def both(build_callbacks: Any, module: Any = residual, **flags: Any) -> tuple[TrainResult, TrainResult, Any, Any]:
    """Plain and streamed fit with fresh callbacks each; returns both results and both lists of callbacks."""
    flags = {"max_epochs": 3, "val_batches": residual_batches(num=2), **flags}
    expected_callbacks, found_callbacks = build_callbacks(), build_callbacks()
    expected = train(module, residual_batches(), callbacks=expected_callbacks, **flags)
    found = train(module, residual_batches(), ours(), 2, callbacks=found_callbacks, **flags)
    assert_results_close(expected, found, rtol=1e-9)
    return expected, found, expected_callbacks, found_callbacks


def test_early_stopping() -> None:
    expected, found, _, (stopper,) = both(
        lambda: [EarlyStopping("val_loss", patience=1, min_delta=10.0)], max_epochs=10
    )
    assert stopper.stopped_epoch == 1
    assert found.trainer.current_epoch == expected.trainer.current_epoch == 2


def test_learning_rate_monitor(tmp_path: Path) -> None:
    class Scheduled(Residual):
        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.parameters())
            return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.7), "interval": "step"}]

    def logged(strategy: Any, devices: int, where: Path) -> list[str]:
        logger = CSVLogger(where, name="", version="")
        flags: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2}
        train(
            lambda: seeded(Scheduled), residual_batches(), strategy, devices, callbacks=[LearningRateMonitor()], **flags
        )
        rows = (where / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("lr-AdamW")
        return [row.split(",")[column] for row in rows[1:]]

    expected = logged("auto", 1, tmp_path / "plain")
    assert len({rate for rate in expected if rate}) > 4
    assert logged(ours(), 2, tmp_path / "ours") == expected


def test_progress_bar_summary_and_timer(capsys: pytest.CaptureFixture[str]) -> None:
    """The bar shows the logged loss; the summary counts all parameters."""

    class ShowsLoss(Residual):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("shown_loss", loss, prog_bar=True)
            return loss

    timer = Timer()
    trainer = trainer_for(
        ours(), 2, enable_progress_bar=True, enable_model_summary=True, callbacks=[ModelSummary(max_depth=1), timer]
    )
    trainer.fit(seeded(Residual), BatchDealer(residual_batches()))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(seeded(ShowsLoss), BatchDealer(residual_batches()))
    captured = capsys.readouterr()
    assert "shown_loss" in captured.out + captured.err
    assert timer.time_elapsed("train") > 0


def test_summary_equals_that_of_the_plain_module() -> None:
    class Summarizes(Residual):
        def on_train_start(self) -> None:
            self.summary = str(summarize(self, max_depth=2))

    expected = train(lambda: seeded(Summarizes), residual_batches())
    found = train(lambda: seeded(Summarizes), residual_batches(), ours(), 2)
    assert found.module.summary == expected.module.summary


@pytest.mark.parametrize("kind", ["ema", "swa_by_average"])
def test_weight_averaging(kind: str, tmp_path: Path) -> None:
    """Averaged weights validate, end up in the module, and are in the checkpoint beside the current ones."""

    def callbacks(where: Path) -> list[L.Callback]:
        average = (
            EMAWeightAveraging(decay=0.8, update_every_n_steps=1)
            if kind == "ema"
            else WeightAveraging(avg_fn=lambda average, current, count: average + (current - average) / (count + 1))
        )
        return [average, ModelCheckpoint(where, "average", save_last=False)]

    def fit(strategy: Any, devices: int, where: Path) -> TrainResult:
        flags: dict[str, Any] = {"max_epochs": 2, "val_batches": residual_batches(num=2), "enable_checkpointing": True}
        return train(residual, residual_batches(), strategy, devices, callbacks=callbacks(where), **flags)

    expected, found = fit("auto", 1, tmp_path / "plain"), fit(ours(), 2, tmp_path / "ours")
    assert_results_close(expected, found, rtol=1e-9)
    plain = residual().state_dict()
    assert not torch.equal(found.state["head.weight"], plain["head.weight"])
    one, two = (torch.load(tmp_path / side / "average.ckpt", weights_only=True) for side in ("plain", "ours"))
    assert two["current_model_state"].keys() == one["current_model_state"].keys()
    for part in ("state_dict", "current_model_state"):
        assert one[part].keys() == two[part].keys()
        for name, tensor in one[part].items():
            torch.testing.assert_close(two[part][name], tensor, rtol=1e-9, atol=1e-12, msg=f"{part} {name}")


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_stochastic_weight_averaging() -> None:
    both(lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)], val_batches=None, max_epochs=4)


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
def test_stochastic_weight_averaging_updates_batch_norm() -> None:
    """One more pass over the data sets the statistics of the averaged weights."""
    batches = vector_batches(1, 8, 8)

    def fit(strategy: Any, devices: int) -> TrainResult:
        averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
        return train(lambda: seeded(BatchNormCNN), batches, strategy, devices, callbacks=[averaging], max_epochs=4)

    # One micro-batch: only then are the statistics those of the plain run.
    assert_results_close(fit("auto", 1), fit(ours(1), 2), rtol=1e-4)


class WithBackbone(StepModule):
    """A ``backbone`` and a head, as ``BackboneFinetuning`` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(32, 16), *(Block(16) for _ in range(3)))
        self.head = nn.Linear(16, 32)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return nn.functional.cross_entropy(self.head(self.backbone(tokens)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def test_backbone_finetuning() -> None:
    """Frozen for two epochs, then unfrozen and added to the optimizer: from then on it trains."""
    before = seeded(WithBackbone).double().state_dict()
    _, found, _, _ = both(
        lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5, verbose=False)],
        module=lambda: seeded(WithBackbone).double(),
        val_batches=None,
        max_epochs=4,
    )
    assert not torch.equal(found.state["backbone.1.up.weight"], before["backbone.1.up.weight"])


class UnfreezesInSteps(BaseFinetuning):
    """Unfreezes one block an epoch."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(pl_module.blocks[-epoch], optimizer, lr=1e-2)


def test_base_finetuning() -> None:
    def module() -> L.LightningModule:
        return seeded(lambda: Residual(optimizer=lambda p: adamw([q for q in p if q.requires_grad]))).double()

    before = module().state_dict()
    _, found, _, _ = both(lambda: [UnfreezesInSteps()], module=module)
    changed = [not torch.equal(found.state[f"blocks.{n}.up.weight"], before[f"blocks.{n}.up.weight"]) for n in range(4)]
    assert changed == [False, False, True, True]


def test_freezing_during_training() -> None:
    """``requires_grad`` switched off in a hook takes effect at the next step, as in torch."""

    class Freezes(Residual):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.blocks[1].requires_grad_(batch_idx % 2 == 0)

    def module() -> L.LightningModule:
        return seeded(lambda: Freezes(optimizer=adamw)).double()

    expected = train(module, residual_batches(), max_epochs=2)
    assert_results_close(expected, train(module, residual_batches(), ours(), 2, max_epochs=2), rtol=1e-9)


class Tunable(Residual):
    """Has the attributes that the tuner changes, and a dataloader that follows them."""

    def __init__(self, largest: int = 1000) -> None:
        super().__init__()
        self.learning_rate = 1e-3
        self.batch_size = 2
        self.largest = largest

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    def train_dataloader(self) -> DataLoader[Any]:
        tokens, targets = residual_batches(num=1, rows=48)[0]
        return DataLoader(list(zip(tokens, targets, strict=True)), batch_size=self.batch_size)

    val_dataloader = train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.batch_size > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")
        return super().training_step(batch, batch_idx)


def test_learning_rate_finder(tmp_path: Path) -> None:
    """The same curve, and everything as it was afterwards."""

    def find(strategy: Any, devices: int, where: Path) -> tuple[Any, L.LightningModule, L.Trainer]:
        module = seeded(Tunable).double()
        trainer = trainer_for(strategy, devices, default_root_dir=where, enable_checkpointing=True)
        finder = Tuner(trainer).lr_find(module, num_training=12, early_stop_threshold=None)
        return finder, module, trainer

    expected, _, _ = find("auto", 1, tmp_path / "plain")
    found, module, trainer = find(ours(), 2, tmp_path / "ours")
    assert found.results["lr"] == pytest.approx(expected.results["lr"])
    assert found.results["loss"] == pytest.approx(expected.results["loss"])
    assert found.suggestion() == pytest.approx(expected.suggestion())
    assert trainer.global_step == 0
    for name, tensor in seeded(Tunable).double().state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_batch_size_finder(tmp_path: Path) -> None:
    """Works, since there is one process; an out-of-memory error arrives as one, and ends the search."""
    flags: dict[str, Any] = {"default_root_dir": tmp_path, "enable_checkpointing": True, "limit_val_batches": 0}
    module = seeded(lambda: Tunable(largest=8))
    tuner = Tuner(trainer_for(ours(), 2, **flags))
    assert tuner.scale_batch_size(module, mode="power", steps_per_trial=1, init_val=2) == 8

    module = seeded(lambda: Tunable(largest=12))
    finder = BatchSizeFinder(mode="binsearch", steps_per_trial=1, init_val=2)
    trainer_for(ours(), 2, callbacks=[finder], **flags).fit(module)
    assert finder.optimal_batch_size in (11, 12)  # Lightning's search may stop one short of the largest.


@pytest.mark.parametrize(
    "flags",
    [
        {"overfit_batches": 2, "max_epochs": 2},
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"limit_train_batches": 3, "limit_val_batches": 1, "max_epochs": 2},
        {"limit_train_batches": 0.5},
        {"max_steps": 5, "max_epochs": -1},
        {"max_epochs": 2, "check_val_every_n_epoch": 2},
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
        {"detect_anomaly": True},
        {"deterministic": True},
        {"profiler": "simple"},
        {"inference_mode": False},
        {"barebones": True},
    ],
    ids=lambda flags: "-".join([*flags]),
)
@pytest.mark.filterwarnings("ignore:.*barebones")
def test_trainer_flags(flags: dict[str, Any], tmp_path: Path) -> None:
    def fit(strategy: Any, devices: int) -> tuple[dict[str, Tensor], int]:
        tokens, targets = residual_batches(num=1, rows=24)[0]
        rows = list(zip(tokens, targets, strict=True))
        module = residual()
        options = {**flags, "default_root_dir": tmp_path}
        trainer = (
            L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **options)
            if flags.get("barebones")
            else trainer_for(strategy, devices, **options)
        )
        trainer.fit(module, DataLoader(rows, batch_size=6), DataLoader(rows[:12], batch_size=6))
        return module.state_dict(), trainer.global_step

    expected, steps = fit("auto", 1)
    found, found_steps = fit(ours(), 2)
    assert found_steps == steps > 0
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("devices", [1, 3])
def test_fit_twice(devices: int) -> None:
    """Lightning makes a new optimizer for a second fit; apart from that it goes on where the first one ended."""

    def fit(strategy: Any, devices: int) -> tuple[L.LightningModule, L.Trainer]:
        module = residual()
        trainer = trainer_for(strategy, devices)
        trainer.fit(module, BatchDealer(residual_batches()))
        first_optimizer = trainer.optimizers[0]
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, BatchDealer(residual_batches()))
        assert trainer.optimizers[0] is not first_optimizer
        return module, trainer

    expected, expected_trainer = fit("auto", 1)
    found, found_trainer = fit(ours(), devices)
    assert found_trainer.global_step == expected_trainer.global_step == 8
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def test_frozen_teacher_beside_a_student() -> None:
    """Two models in one module: the teacher has no gradient, no optimizer state, and never changes."""

    class Distills(StepModule):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Sequential(nn.Embedding(32, 16), Block(16), nn.Linear(16, 32)).requires_grad_(False)
            self.student = nn.Sequential(nn.Embedding(32, 16), Block(16), Block(16), nn.Linear(16, 32))

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():
                target = self.teacher(batch[0]).softmax(-1)
            return nn.functional.cross_entropy(self.student(batch[0]).flatten(0, 1), target.flatten(0, 1))

    def module() -> L.LightningModule:
        return seeded(Distills).double()

    expected = train(module, residual_batches())
    found = train(module, residual_batches(), ours(), 2)
    assert_results_close(expected, found, rtol=1e-9)
    for parameter in found.module.teacher.parameters():
        assert parameter.grad is None and parameter not in found.trainer.optimizers[0].state


def test_closure_optimizer() -> None:
    """LBFGS evaluates the closure several times in a step."""

    def module() -> L.LightningModule:
        return seeded(lambda: Residual(optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))).double()

    expected = train(module, residual_batches(num=2))
    assert_results_close(expected, train(module, residual_batches(num=2), ours(), 2), rtol=1e-6)


def test_batch_size_finder_with_an_error_in_a_worker(tmp_path: Path) -> None:
    """Out of memory in a layer: in its forward pass, or only when it is recomputed."""
    flags: dict[str, Any] = {"default_root_dir": tmp_path, "enable_checkpointing": True, "limit_val_batches": 0}

    class Small(Block):
        largest, backward_only = 4, False

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > self.largest and (not self.backward_only or torch._C._current_graph_task_id() == -1):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")
            return super().forward(x)

    class InLayer(Tunable):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2] = Small(16)

    # Three micro-batches of at most 4 rows: up to 12 rows fit.
    module = seeded(InLayer)
    assert Tuner(trainer_for(ours(), 2, **flags)).scale_batch_size(module, steps_per_trial=1, init_val=3) == 12
    trainer_for(ours(), 2, **{**flags, "max_steps": 1}).fit(module)  # The model and the machine are as before.
    assert module.trainer.global_step == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_throughput_monitor(accumulate: int, tmp_path: Path) -> None:
    """Its counts are those of a plain run: samples and batches, whatever micro-batches and precision."""

    class Measured(Residual):
        def on_fit_start(self) -> None:
            self.flops_per_batch = 1000

    def fit(strategy: Any, devices: int, precision: str, where: Path) -> list[dict[str, str]]:
        monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
        train(
            lambda: seeded(Measured), residual_batches(num=6), strategy, devices, callbacks=[monitor],
            logger=CSVLogger(where, name="", version=""), log_every_n_steps=1, precision=precision,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        with (where / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        expected = fit("auto", 1, precision, tmp_path / f"plain-{precision}")
        found = fit(ours(), 2, precision, tmp_path / f"ours-{precision}")
        for name in ("train/batches", "train/samples"):
            assert [row[name] for row in found] == [row[name] for row in expected]
        assert max(float(row["train/samples"] or 0) for row in found) == 36


def test_device_stats_monitor(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    train(
        residual, residual_batches(), ours(), 2,
        callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=logger, log_every_n_steps=1,
    )  # fmt: skip
    assert "DeviceStatsMonitor.on_train_batch_start/cpu_percent" in (tmp_path / "metrics.csv").read_text()


def test_rich_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    expected = train(residual, residual_batches())
    found = train(residual, residual_batches(), ours(), 2, callbacks=[RichProgressBar()], enable_progress_bar=True)
    assert_results_close(expected, found, rtol=1e-9)
    assert "Epoch 0/0" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["forward", "recomputation", "hook"])
@pytest.mark.filterwarnings("ignore:.*(was called without a model|no last checkpoint available)")
def test_checkpoint_on_an_exception(where: str, tmp_path: Path) -> None:
    """Written while the step is broken: the weights of the last whole step, of which a new run makes use."""

    class Fails(Residual):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.armed = batch_idx == 2
            if self.armed and where != "hook":
                block = self.blocks[0]
                forward, calls = type(block).forward, []

                def failing(x: Tensor) -> Tensor:
                    calls.append(x)
                    if where == "forward" or len(calls) > 3:
                        raise KeyError("mine")
                    return forward(block, x)

                block.forward = failing

        def on_after_backward(self) -> None:
            if self.armed and where == "hook":
                raise KeyError("mine")

    flags: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    with pytest.raises(KeyError, match="mine"):
        train(
            lambda: seeded(Fails), residual_batches(), ours(), 2, callbacks=[OnExceptionCheckpoint(tmp_path)], **flags
        )
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    expected = train(lambda: seeded(Residual), residual_batches(num=4)[:2], ours(), 1)
    assert saved["global_step"] == 2
    for name, tensor in expected.state.items():
        assert torch.equal(saved["state_dict"][name], tensor), name


def test_gradient_accumulation_scheduler() -> None:
    both(lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], val_batches=None)


def test_timer_stops_in_time() -> None:
    """The first step may run; then the time is up."""
    found = train(residual, residual_batches(num=50), ours(), 2, callbacks=[Timer({"milliseconds": 1})], max_epochs=99)
    assert found.trainer.global_step < 50
