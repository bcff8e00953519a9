"""`StepLog`: a step that runs once per micro-batch logs what one run on the whole batch logs."""

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.aggregation import MaxMetric, RunningMean
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from lightning_roundpipe.step_log import StepLog

NUM_CLASSES = 4
IGNORED = -100


class MicroBatchStrategy(SingleDeviceStrategy):
    """Runs each step of the user once per micro-batch, in threads, with the losses weighted as one whole batch.

    Args:
        sizes: samples of each micro-batch; what a smaller last batch does not fill is left out or cut short.
        order: the order in which the micro-batches run, one after the other; None for all at once, under a lock that
            the model releases in its layers.
    """

    def __init__(self, sizes: tuple[int, ...], order: tuple[int, ...] | None = None) -> None:
        super().__init__(device=torch.device("cpu"))
        self.sizes = sizes
        self.order = order
        self.user_lock = threading.Lock()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._run(self.lightning_module.training_step, batch, batch_idx)

    def validation_step(self, batch: Any, *args: Any) -> Any:
        return self._run(self.lightning_module.validation_step, batch, *args)

    def test_step(self, batch: Any, *args: Any) -> Any:
        return self._run(self.lightning_module.test_step, batch, *args)

    def _run(self, step: Callable[..., Any], batch: tuple[Tensor, Tensor], *args: Any) -> Any:
        micro_batches = [parts for parts in zip(*map(self._split, batch), strict=True) if len(parts[0])]
        losses: list[Any] = [None] * len(micro_batches)
        errors: list[BaseException] = []
        grad_enabled, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        step_log = StepLog(self.lightning_module)

        def run(index: int) -> None:
            try:
                with (
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad_enabled),
                    self.user_lock,
                    step_log.micro_batch(index, len(micro_batches[index][0])),
                ):
                    losses[index] = step(micro_batches[index], *args)
            except BaseException as error:
                errors.append(error)

        self.lightning_module.user_lock = self.user_lock
        try:
            with step_log.capture():
                threads = {index: threading.Thread(target=run, args=(index,)) for index in range(len(micro_batches))}
                for index in self.order or threads:
                    if index in threads:
                        threads[index].start()
                        if self.order:
                            threads[index].join()
                for thread in threads.values():
                    thread.join()
        finally:
            del self.lightning_module.user_lock
        if errors:
            raise errors[0]
        weights = [float((y != IGNORED).sum()) for _, y in micro_batches]
        step_log.flush(losses, weights)
        known = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if loss is not None and weight]
        return sum(loss * weight for loss, weight in known) / sum(weights) if known else None

    def _split(self, tensor: Tensor) -> list[Tensor]:
        starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        return [tensor[start : start + size] for start, size in zip(starts, self.sizes, strict=True)]


STRATEGIES = {
    "in order": lambda: MicroBatchStrategy((3, 3, 2)),
    "reversed": lambda: MicroBatchStrategy((3, 3, 2), order=(2, 1, 0)),
    "shuffled, uneven": lambda: MicroBatchStrategy((1, 4, 2, 1), order=(2, 0, 3, 1)),
    "one": lambda: MicroBatchStrategy((8,)),
}


class UserLayer(nn.Module):
    """A layer that logs; it lets other micro-batches run meanwhile, as a streamed unit does."""

    def __init__(self, owner: "LoggingModel") -> None:
        super().__init__()
        self.linear = nn.Linear(6, NUM_CLASSES)
        object.__setattr__(self, "owner", owner)

    def forward(self, x: Tensor) -> Tensor:
        with released(self.owner):
            out: Tensor = self.linear(x)
            if self.owner.trainer.training:
                self.owner.log("in_layer", out.abs().mean(), on_epoch=True)
        return out


@contextmanager
def released(owner: "LoggingModel") -> Iterator[None]:
    lock = getattr(owner, "user_lock", None)
    if lock is None:
        yield
        return
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


class LoggingModel(LightningModule):
    """Logs what a subclass or a test gives it, in training, validation and test."""

    def __init__(self, log_step: Callable[["LoggingModel", str, Tensor, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.log_step = log_step
        self.layer = UserLayer(self)
        self.metrics = nn.ModuleDict()

    def _step(self, prefix: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        logits = self.layer(x)
        loss = F.cross_entropy(logits, y, ignore_index=IGNORED)
        self.log_step(self, prefix, loss, logits, y)
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._step("train", batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self._step("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._step("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Recorder(Callback):
    """Keeps everything that Lightning shows, after every batch and every epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, dict[str, float]]]] = []

    def _look(self, where: str, trainer: Trainer) -> None:
        shown = {
            "callback": trainer.callback_metrics,
            "logged": trainer.logged_metrics,
            "progress bar": trainer.progress_bar_metrics,
        }
        self.seen.append((where, {kind: {k: float(v) for k, v in shown[kind].items()} for kind in shown}))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._look("train batch", trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._look("validation batch", trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._look("train epoch", trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self._look("validation", trainer)

    def on_test_end(self, trainer: Trainer, *_: Any) -> None:
        self._look("test", trainer)


class MemoryLogger(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))


def loader(num_samples: int, seed: int, ignore: bool = False) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 6, generator=generator)
    y = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    if ignore:
        # Of the first batch, the first three samples (a whole micro-batch) and some others do not count.
        y[torch.tensor([0, 1, 2, 4, 9, 10, 15])] = IGNORED
    return DataLoader(TensorDataset(x, y), batch_size=8)


def run(
    strategy: SingleDeviceStrategy | str, make_model: Callable[[], LightningModule], ignore: bool = False
) -> tuple[Recorder, MemoryLogger, LightningModule]:
    torch.manual_seed(0)
    model = make_model()
    recorder, logger = Recorder(), MemoryLogger()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=2,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[recorder],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # 21 samples: batches of 8, 8 and 5.
    trainer.fit(model, loader(21, 1, ignore), [loader(13, 2), loader(10, 3)])
    trainer.test(model, loader(13, 4), verbose=False)
    return recorder, logger, model


@cache
def plain_run(make_model: Callable[[], LightningModule], ignore: bool) -> tuple[Recorder, MemoryLogger]:
    recorder, logger, _ = run("auto", make_model, ignore)
    return recorder, logger


def assert_same_run(make_model: Callable[[], LightningModule], strategy: str, ignore: bool = False) -> Recorder:
    """Compares a run in micro-batches with a plain one; returns what the plain one showed."""
    plain, plain_logger = plain_run(make_model, ignore)
    split, split_logger, _ = run(STRATEGIES[strategy](), make_model, ignore)
    assert len(plain.seen) == len(split.seen)
    for (where, expected), (split_where, found) in zip(plain.seen, split.seen, strict=True):
        assert split_where == where
        for kind in expected:
            assert list(found[kind]) == list(expected[kind]), f"{kind} at {where}"
            assert found[kind] == pytest.approx(expected[kind], rel=1e-5, abs=1e-6, nan_ok=True), f"{kind} at {where}"
    assert [step for step, _ in split_logger.lines] == [step for step, _ in plain_logger.lines]
    for (_, expected), (_, found) in zip(plain_logger.lines, split_logger.lines, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    return plain


def first(recorder: Recorder, where: str) -> dict[str, float]:
    return next(shown["logged"] for seen_where, shown in recorder.seen if seen_where == where)


def log_values(self: LoggingModel, prefix: str, loss: Tensor, logits: Tensor, y: Tensor) -> None:
    per_sample = logits.square().sum(1)
    self.log(f"{prefix}/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
    self.log(f"{prefix}/default", per_sample.mean())
    self.log(f"{prefix}/sized", per_sample.mean(), on_step=True, on_epoch=True, batch_size=len(y))
    self.log(f"{prefix}/number", logits.mean().item(), True, on_epoch=True, reduce_fx="AVG")
    self.log(f"{prefix}/one_element", per_sample.mean().reshape(1, 1), on_epoch=True)
    self.log(f"{prefix}/sum", float(len(y)), on_step=True, on_epoch=True, reduce_fx="sum")
    self.log(f"{prefix}/max", per_sample.max(), on_step=True, on_epoch=True, reduce_fx=torch.max)
    self.log(f"{prefix}/min", per_sample.min(), on_step=True, on_epoch=True, reduce_fx=min, logger=False)
    self.log_dict({f"{prefix}/half": logits.mean().bfloat16() * 0, f"{prefix}/double": logits.double().mean()})
    # The same name again, with the same options, counts as a second value in Lightning.
    self.log(f"{prefix}/default", 2 * per_sample.mean())


def model_with_values() -> LoggingModel:
    return LoggingModel(log_values)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_are_those_of_the_whole_batch(strategy: str) -> None:
    plain = assert_same_run(model_with_values, strategy)
    epoch = dict(plain.seen)["train epoch"]
    assert {"train/loss_step", "train/loss_epoch", "in_layer_epoch"} <= epoch["logged"].keys()
    assert "train/min_epoch" not in epoch["logged"]
    assert epoch["logged"]["train/sum_epoch"] == 21
    assert "val/loss_epoch/dataloader_idx_1" in dict(plain.seen)["validation"]["callback"]


def log_metrics(self: LoggingModel, prefix: str, loss: Tensor, logits: Tensor, y: Tensor) -> None:
    metrics = self.metrics[f"in_{prefix}"]
    accuracy, auroc, mse, pearson = (metrics[name] for name in ("accuracy", "auroc", "mse", "pearson"))
    accuracy(logits, y)
    self.log("accuracy", accuracy, on_step=True, on_epoch=True, prog_bar=True)
    # F1, AUROC and the correlation of a batch are not means of those of its parts.
    f1 = metrics["f1"](logits, y)
    self.log("f1", f1, on_step=True, on_epoch=True)
    auroc(logits.softmax(1), y)
    self.log("auroc", auroc, on_step=True, on_epoch=True)
    pearson(logits[:, 0], logits[:, 1])
    self.log("pearson", pearson, on_step=True, on_epoch=True)
    # Two calls in a step: the step value is that of the latest call at the time of `log`.
    mse(logits[:, 0], logits[:, 1])
    self.log("mse", mse, on_step=True, on_epoch=False)
    mse(logits[:, 2], logits[:, 3])
    self.log("mse_again", mse, on_step=True, on_epoch=False)
    # Without `forward` there is no step value.
    metrics["updated"].update(logits.mean(1))
    self.log("updated", metrics["updated"], on_step=False, on_epoch=True)
    values = metrics["collection"](logits, y)
    self.log_dict(metrics["collection"], on_step=True, on_epoch=True)
    self.log_dict({f"value_{name}": value for name, value in values.items()}, on_step=True, on_epoch=False)
    metrics["ratio"](logits[:, 0])
    self.log("ratio", metrics["ratio"], on_step=True, on_epoch=True)
    self.log("running", metrics["running"](logits.amax(1)), on_step=True, on_epoch=False)
    metrics["shifted"](logits, y, shift=2)
    self.log("shifted", metrics["shifted"], on_step=True, on_epoch=True)


class ShiftedAccuracy(MulticlassAccuracy):
    """Has a `forward` of its own, whose arguments are not those of `update`."""

    def forward(self, logits: Tensor, y: Tensor, *, shift: int = 1) -> Any:
        return super().forward(logits.roll(shift, 1), y)


def metrics_of_one_loop() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "accuracy": MulticlassAccuracy(NUM_CLASSES, average="micro"),
            "f1": MulticlassF1Score(NUM_CLASSES),
            "auroc": MulticlassAUROC(NUM_CLASSES, thresholds=20),
            "pearson": PearsonCorrCoef(),
            "mse": MeanSquaredError(),
            "updated": MeanMetric(),
            "collection": MetricCollection(
                {"precision": MulticlassPrecision(NUM_CLASSES), "recall": MulticlassRecall(NUM_CLASSES)}, prefix="all_"
            ),
            "ratio": MeanMetric() / MaxMetric(),
            "running": RunningMean(window=2),
            "shifted": ShiftedAccuracy(NUM_CLASSES),
        }
    )


def model_with_metrics() -> LoggingModel:
    model = LoggingModel(log_metrics)
    for loop in ("train", "val", "test"):
        model.metrics[f"in_{loop}"] = metrics_of_one_loop()
    return model


# The correlation of a micro-batch with one sample, which nobody looks at.
@pytest.mark.filterwarnings("ignore:The variance of predictions or target")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_show_the_step_value_of_the_whole_batch(strategy: str) -> None:
    plain = assert_same_run(model_with_metrics, strategy)
    first_batch, epoch = first(plain, "train batch"), dict(plain.seen)["train epoch"]["logged"]
    assert {"accuracy_step", "f1_step", "pearson_step", "mse", "all_recall_step", "ratio_step"} <= first_batch.keys()
    assert {"accuracy_epoch", "auroc_epoch", "updated", "all_precision_epoch"} <= epoch.keys()
    assert first_batch["mse"] != first_batch["mse_again"]


def log_losses(self: LoggingModel, prefix: str, loss: Tensor, logits: Tensor, y: Tensor) -> None:
    self.log(f"{prefix}/loss", loss, on_step=True, on_epoch=True)
    self.log(f"{prefix}/loss_number", loss.item(), on_step=True, on_epoch=True)
    # Not the loss itself, so the user says what it is the mean of.
    self.log(f"{prefix}/twice", (2 * loss).nan_to_num(), on_step=True, batch_size=int((y != IGNORED).sum()))


def model_with_losses() -> LoggingModel:
    return LoggingModel(log_losses)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_over_tokens_is_weighted_as_it_is_optimized(strategy: str) -> None:
    # In three samples of a batch nothing counts: their micro-batch has a loss of 0 / 0 and no weight.
    plain = assert_same_run(model_with_losses, strategy, ignore=True)
    assert first(plain, "train batch")["train/loss_step"] > 0


def test_each_key_reaches_lightning_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = LightningModule.log
    monkeypatch.setattr(
        LightningModule,
        "log",
        lambda self, name, *args, **kwargs: (calls.append(name), real(self, name, *args, **kwargs)),
    )
    run(MicroBatchStrategy((2, 2, 2, 2)), model_with_losses)
    # Two epochs of three training batches; the sanity check, then two validations of two loaders of two batches.
    assert calls.count("train/loss") == 6
    assert calls.count("val/loss") == 4 + 2 * 4


# From here on without a Trainer.


class Calls:
    """Stands in for Lightning's side of `module.log`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, Any, dict[str, Any]]] = []
        monkeypatch.setattr(LightningModule, "log", lambda _, *args, **kwargs: self.made.append((*args, kwargs)))

    @property
    def values(self) -> dict[str, float]:
        return {name: float(value) for name, value, _ in self.made}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


class Module(LightningModule):
    def __init__(self, *metrics: nn.Module) -> None:
        super().__init__()
        self.metrics = nn.ModuleList(metrics)


def micro_batch(step_log: StepLog, index: int, step: Callable[[], object], num_samples: int = 1) -> None:
    """Runs `step` as a micro-batch in a thread of its own."""

    def target() -> None:
        with step_log.micro_batch(index, num_samples):
            step()

    in_thread(target)


def in_thread(target: Callable[[], object]) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def test_keys_come_in_the_order_of_the_micro_batches_with_the_options_of_the_first(calls: Calls) -> None:
    module = Module()
    step_log = StepLog(module)
    with step_log.capture():
        micro_batch(step_log, 2, lambda: [module.log(name, 9.0, prog_bar=True) for name in "dab"], num_samples=3)
        micro_batch(step_log, 0, lambda: [module.log(name, 1.0, logger=False) for name in "ac"])
        micro_batch(step_log, 1, lambda: [module.log(name, 5.0, on_step=True) for name in "ab"])
    assert not calls.made
    step_log.flush([None] * 3, [1.0] * 3)
    assert [(name, float(value), options) for name, value, options in calls.made] == [
        ("a", pytest.approx((1 + 5 + 3 * 9) / 5), {"logger": False}),
        ("c", 1, {"logger": False}),
        ("b", (5 + 3 * 9) / 4, {"on_step": True}),
        ("d", 9, {"prog_bar": True}),
    ]
    step_log.flush([None] * 3, [1.0] * 3)
    assert len(calls.made) == 4


@pytest.mark.parametrize(
    ("values", "losses", "expected"),
    [
        ((1.0, 4.0), (1.0, 4.0), 3.25),  # the loss: weights 1, 3
        ((1.0, 4.0), (1.0, 5.0), 2.0),  # not the loss: samples 2, 1
        ((1.0, 4.0), (1.0, None), 1.0),  # a micro-batch without loss has no part in it
        ((1.0, 4.0), (None, None), 2.0),
        ((float("nan"), 4.0), (float("nan"), 4.0), float("nan")),
    ],
)
def test_the_loss_is_recognized_by_its_value(
    calls: Calls, values: tuple[float, ...], losses: tuple[float | None, ...], expected: float
) -> None:
    module = Module()
    step_log = StepLog(module)
    with step_log.capture():
        for index, value in enumerate(values):
            micro_batch(
                step_log, index, lambda value=value: module.log("loss", torch.tensor(value)), num_samples=2 - index
            )
    step_log.flush([None if loss is None else torch.tensor(loss) for loss in losses], [1, 3])
    assert calls.values == pytest.approx({"loss": expected}, nan_ok=True)


def test_a_batch_size_is_passed_on_as_a_sum_and_only_if_given(calls: Calls) -> None:
    module = Module()
    step_log = StepLog(module)
    with step_log.capture():
        for index in range(3):
            # The last micro-batch has nothing valid: 0 / 0 of no weight.
            count = torch.tensor(2 - index)
            value = torch.tensor(float(index)) / (count > 0)
            micro_batch(step_log, index, lambda v=value, n=count: module.log("sized", v, batch_size=n))
            micro_batch_again(step_log, module)
    step_log.flush([None] * 3, [1.0] * 3)
    (name, value, options), *_ = calls.made
    assert (name, float(value), options) == ("sized", pytest.approx(1 / 3), {"batch_size": 3})


def micro_batch_again(step_log: StepLog, module: Module) -> None:
    """Logs as the recomputation of a layer does: in the micro-batch's thread, but after the user's step."""
    in_thread(lambda: module.log("sized", 1e9))


def test_values_are_taken_at_the_time_of_the_call(calls: Calls) -> None:
    module = Module(MeanMetric(), MeanMetric())
    step_log = StepLog(module)

    def step(value: float) -> None:
        tensor = torch.tensor([value])
        module.log("value", tensor)
        module.metrics[0](tensor)
        module.log("metric", module.metrics[0])
        tensor.fill_(1e9)

    with step_log.capture():
        micro_batch(step_log, 1, lambda: step(5.0))
        micro_batch(step_log, 0, lambda: step(2.0))
    step_log.flush([None] * 2, [1.0] * 2)
    assert float(calls.made[0][1]) == 3.5
    assert module.metrics[0]._forward_cache == 3.5


class Order(Metric):
    """Its value tells the order of its updates; states may not be merged."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("digits", torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, digit: Tensor) -> None:
        self.digits = self.digits * 10 + digit

    def compute(self) -> Tensor:
        return self.digits


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_step_value_of_a_metric_depends_on_the_order_of_the_micro_batches_only(
    calls: Calls, order: tuple[int, ...]
) -> None:
    module = Module(Order())
    step_log = StepLog(module)
    with step_log.capture():
        for index in order:
            micro_batch(step_log, index, lambda digit=index + 1: module.metrics[0](torch.tensor(digit)))
    step_log.flush([None] * 3, [1.0] * 3)
    assert module.metrics[0]._forward_cache == 123
    assert module.metrics[0].update_count == 3
    assert module.metrics[0].compute() == int("".join(str(index + 1) for index in order))


def test_inputs_are_not_kept_once_their_turn_has_come() -> None:
    module = Module(Order())
    step_log = StepLog(module)
    with step_log.capture():
        micro_batch(step_log, 1, lambda: module.metrics[0](torch.tensor(2)))
        assert len(step_log._micro_batches[1].metric_calls) == 1
        micro_batch(step_log, 0, lambda: module.metrics[0](torch.tensor(1)))
        assert not step_log._micro_batches[1].metric_calls


def test_recomputation_changes_no_metric_and_gives_the_value_again(calls: Calls) -> None:
    metrics = MeanMetric(), MeanMetric()
    module = Module(*metrics)
    step_log = StepLog(module)
    values: list[Tensor] = []

    def layer(value: float) -> None:
        values.append(metrics[0](torch.tensor(value)))
        metrics[1].update(torch.tensor(value))

    with step_log.capture():
        micro_batch(step_log, 0, lambda: layer(2.0))
        micro_batch(step_log, 1, lambda: layer(4.0))
        in_thread(lambda: layer(4.0))
        layer(2.0)
        step_log.flush([None] * 2, [1.0] * 2)
        # From now on the main thread is back in Lightning's hooks.
        assert [float(metric.compute()) for metric in metrics] == [3, 3]
        metrics[1].update(torch.tensor(6.0))
        assert float(metrics[1].compute()) == 4
        module.log("hook", 1.0)
        in_thread(lambda: layer(4.0))
    assert [float(value) for value in values] == [2, 4, 4, 2, 4]
    assert metrics[0].compute() == 3
    assert metrics[0]._forward_cache == 3
    assert calls.values == {"hook": 1}


def test_a_copy_of_a_metric_made_in_the_step_is_the_users_own(calls: Calls) -> None:
    module = Module(MeanMetric())
    step_log = StepLog(module)
    copies: list[Metric] = []

    def step() -> None:
        copies.append(module.metrics[0].clone())
        copies[0](torch.tensor(7.0))

    with step_log.capture():
        micro_batch(step_log, 0, step)
    copies[0](torch.tensor(9.0))
    assert copies[0].compute() == 8
    assert not module.metrics[0].update_called


def test_a_network_in_a_metric_and_its_long_states_are_not_copied(calls: Calls) -> None:
    class WithNetwork(Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(1, 1)
            self.add_state("seen", [], dist_reduce_fx="cat")

        def update(self, x: Tensor) -> None:
            self.seen.append(self.network(x))

        def compute(self) -> Tensor:
            return torch.cat(self.seen).mean()

    metric = WithNetwork()
    metric.update(torch.ones(100, 1))
    module = Module(metric)
    step_log = StepLog(module)
    with step_log.capture():
        micro_batch(step_log, 0, lambda: metric(torch.zeros(2, 1)))
        (batch_value,) = step_log._batch_values.values()
        assert batch_value._copy.network.weight is metric.network.weight
        assert [len(x) for x in batch_value._copy.seen] == [2]
    step_log.flush([None], [1.0])
    assert metric._forward_cache == pytest.approx(metric.network.bias.item())
    assert sum(len(x) for x in metric.seen) == 102


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_modules(fails: bool) -> None:
    collection = MetricCollection([MulticlassAccuracy(NUM_CLASSES), MulticlassRecall(NUM_CLASSES)])
    module = Module(collection, MeanMetric() + MaxMetric())
    module.metrics[1].forward = own_forward = MeanMetric().forward
    step_log = StepLog(module)
    before = {part: dict(part.__dict__) for part in module.modules()}

    with pytest.raises(ZeroDivisionError) if fails else step_log.capture():  # noqa: SIM117
        with step_log.capture():
            assert "log" in module.__dict__
            if fails:
                raise ZeroDivisionError

    for part, attributes in before.items():
        assert part.__dict__.keys() == attributes.keys()
        assert all(part.__dict__[name] is value for name, value in attributes.items())
    assert module.metrics[1].forward is own_forward
    del module.metrics[1].forward
    deepcopy(module)
    pickle.loads(pickle.dumps(module))


def test_a_step_that_failed_leaves_nothing_to_the_next(calls: Calls) -> None:
    module = Module(MeanMetric())
    step_log = StepLog(module)

    def step(value: float) -> None:
        module.log("value", value)
        module.metrics[0](torch.tensor(value))

    def fail() -> None:
        with step_log.capture(), step_log.micro_batch(0, 1):
            step(1e9)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    module.metrics[0].reset()
    with step_log.capture(), step_log.micro_batch(0, 1):
        step(2.0)
    step_log.flush([None], [1.0])
    assert calls.values == {"value": 2}
    assert module.metrics[0]._forward_cache == 2


@pytest.mark.parametrize(
    ("log", "error", "message"),
    [
        (lambda self: self.log("x", "text"), ValueError, "values cannot be logged"),
        (lambda self: self.log("x", torch.ones(2)), ValueError, "must have a single element"),
        (lambda self: self.log("x", 1.0, reduce_fx=torch.median), MisconfigurationException, "Only `self.log"),
        (lambda self: self.log("x", 1.0, on_step=False, on_epoch=False), MisconfigurationException, "is not useful"),
        (lambda self: self.child.log("x", 1.0), MisconfigurationException, "not managed by the `Trainer`"),
    ],
    ids=["text", "two elements", "unknown reduction", "neither step nor epoch", "child module"],
)
@pytest.mark.parametrize("strategy", ["auto", "in order"])
def test_what_lightning_refuses_is_refused(
    log: Callable[[Any], None], error: type[Exception], message: str, strategy: str
) -> None:
    def make_model() -> LoggingModel:
        model = LoggingModel(lambda self, *_: log(self))
        model.child = Module()
        return model

    with pytest.raises(error, match=message):
        run("auto" if strategy == "auto" else STRATEGIES[strategy](), make_model)


def test_the_same_name_with_other_options_is_refused() -> None:
    def log_step(self: LoggingModel, *_: Any) -> None:
        self.log("x", 1.0, prog_bar=True)
        self.log("x", 1.0, prog_bar=False)

    with pytest.raises(MisconfigurationException, match=r"twice in `validation_step\.0` with different arguments"):
        run(STRATEGIES["in order"](), lambda: LoggingModel(log_step))


@pytest.mark.gpu
def test_inputs_and_values_on_a_gpu_meet_metrics_on_the_host(calls: Calls) -> None:
    module = Module(MulticlassAccuracy(2, average="micro"))
    step_log = StepLog(module)

    def step(preds: list[int]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            on_gpu = torch.tensor(preds, device="cuda")
            module.metrics[0](on_gpu, torch.ones_like(on_gpu))
            module.metrics[0].update(on_gpu, target=torch.ones_like(on_gpu))
            module.log("mean", on_gpu.float().mean())

    with step_log.capture():
        micro_batch(step_log, 1, lambda: step([1, 1]), num_samples=2)
        micro_batch(step_log, 0, lambda: step([0, 1, 0]), num_samples=3)
    step_log.flush([None] * 2, [1.0] * 2)
    (_, value, _), *_ = calls.made
    assert value.device.type == "cpu"
    assert float(value) == pytest.approx(0.6)
    assert module.metrics[0]._forward_cache == pytest.approx(0.6)
    assert module.metrics[0].compute() == pytest.approx(0.6)
