"""Monitors: the names in the loggers, the bytes of the plan, files that viewers read, quiet with other strategies."""

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.callbacks import (
    MemoryMonitor,
    PCIeMonitor,
    PipelineMonitor,
    SpeedMonitor,
    StepMonitor,
    TimelineWriter,
)
from lightning_roundpipe.metrics import LinkThroughput, LinkUtilization
from lightning_roundpipe.plan.stages import StageKind
from lightning_roundpipe.plan.timeline import Lane
from lightning_roundpipe.runtime.stats import StepStats  # noqa: TC001
from lightning_roundpipe.runtime.units import find_units
from tests.helpers.equivalence import trainer_for

NAMES = {
    "bubble_ratio", "bubble_fill", "bubble_drain", "bubble_steady", "bubble_stall", "pcie_h2d_gb_per_s",
    "pcie_h2d_utilization", "pcie_d2h_gb_per_s", "pcie_d2h_utilization", "worker0/pcie_h2d_gb_per_s",
    "worker1/pcie_d2h_utilization", "host_pinned_gib", "host_rss_gib", "step_ms", "update_ms", "update_exposed_ms",
    "samples_per_s", "tokens_per_s",
}  # fmt: skip


class Model(L.LightningModule):
    """An embedding, layers of different sizes, one of them frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, inner), nn.ReLU(), nn.Linear(inner, 8)) for inner in (8, 16, 24, 32)
        )
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(8, 16)
        self.steps: list[StepStats] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch["input_ids"])
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["input_ids"].flatten())

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, RoundPipeStrategy) and strategy.step_stats is not None:
            self.steps.append(strategy.step_stats)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(*callbacks: L.Callback, strategy: Any = None, devices: int = 2, **flags: Any) -> Model:
    module = Model()
    batches = [{"input_ids": torch.randint(16, (6, 5))} for _ in range(4)]
    strategy = RoundPipeStrategy(num_microbatches=3) if strategy is None else strategy
    trainer_for(strategy, devices, callbacks=list(callbacks), log_every_n_steps=1, **flags).fit(
        module, DataLoader(batches, batch_size=None)
    )
    return module


def test_csv_logger_gets_every_name(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(PipelineMonitor(), logger=logger)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in NAMES:
        values = [float(row[f"roundpipe/{name}"]) for row in rows if row.get(f"roundpipe/{name}")]
        assert len(values) == 3, name  # every step but the one that learns
        assert all(value >= 0 for value in values), name
    assert any(row.get("roundpipe/pcie_d2h_gb_per_s_epoch") for row in rows)


def test_tensorboard_logger_gets_every_name(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(str(tmp_path))
    fit(PipelineMonitor(), logger=logger)
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert {f"roundpipe/{name}" for name in NAMES} <= set(events.Tags()["scalars"])


def test_bytes_are_those_of_the_plan() -> None:
    """A stage brings the weights that its worker's previous one has not; a fused or backward one lands gradients."""
    module = fit(PCIeMonitor())
    units = find_units(module)  # called once each, in this order
    uploaded = [sum(p.numel() * 4 for p in unit.parameters) for unit in units]
    landed = [sum(p.numel() * 4 for p in unit.parameters if p.requires_grad) for unit in units]
    for stats in module.steps[1:]:
        up, down = [0, 0], [0, 0]
        there: list[set[int]] = [set(), set()]
        for stage in stats.schedule.plan.stages:
            worker = stage.index % 2
            up[worker] += sum(uploaded[call] for call in stage.calls if call not in there[worker])
            there[worker] = set(stage.calls)
            if stage.kind is not StageKind.FORWARD:
                down[worker] += sum(landed[call] for call in stage.calls)
        assert stats.moved_bytes(Lane.H2D) == tuple(up)
        assert stats.moved_bytes(Lane.D2H) == tuple(down)


def test_the_split_sums_up() -> None:
    for stats in fit(devices=3).steps[1:]:
        bubble = stats.bubble
        assert bubble.total == pytest.approx(stats.bubble_ratio, abs=1e-9)
        assert min(bubble.fill, bubble.drain, bubble.steady, bubble.stall) >= 0


def test_metrics_sum_before_they_divide() -> None:
    module = fit()
    throughput, utilization = LinkThroughput(Lane.H2D), LinkUtilization(Lane.D2H)
    for stats in module.steps:
        throughput.update(stats)
        utilization.update(stats)
    moved = sum(sum(stats.moved_bytes(Lane.H2D)) for stats in module.steps)
    window_s = sum(stats.window_s for stats in module.steps)
    assert throughput.compute().item() == pytest.approx(moved / window_s / 1e9)
    busy_s = sum(sum(stats.link_busy_s(Lane.D2H)) for stats in module.steps)
    assert utilization.compute().item() == pytest.approx(busy_s / (2 * window_s))


def test_overlapping_transfers_count_once() -> None:
    from dataclasses import replace

    from lightning_roundpipe.plan.timeline import TransferSpan

    spans = [TransferSpan(Lane.H2D, 1, start, stop, 8) for start, stop in ((0.0, 2.0), (1.0, 3.0), (5.0, 6.0))]
    stats = replace(fit().steps[-1], transfers=tuple(spans))
    assert stats.link_busy_s(Lane.H2D) == (0.0, 4.0)
    assert stats.moved_bytes(Lane.H2D) == (0, 24)


@pytest.mark.parametrize("picture", [None, "png", "svg"])
def test_timeline_writer(tmp_path: Path, picture: str | None) -> None:
    module = fit(TimelineWriter(tmp_path, steps=(3,), picture=picture))
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"step_3.json", *([f"step_3.{picture}"] if picture else [])}
    trace = json.loads((tmp_path / "step_3.json").read_text())["traceEvents"]
    tickets = [event for event in trace if event["ph"] == "X" and event["tid"] == 0]
    assert len(tickets) == len(module.steps[2].spans)
    assert {event["pid"] for event in tickets} == {0, 1}
    assert all(event["dur"] >= 0 for event in trace if event["ph"] == "X")
    uploads = sum(event["args"]["bytes"] for event in trace if event.get("cat") == "h2d")
    assert uploads == sum(module.steps[2].moved_bytes(Lane.H2D))
    if picture:
        assert (tmp_path / f"step_3.{picture}").stat().st_size > 5000


def test_unknown_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="`picture` must be"):
        TimelineWriter(picture="gif")


def test_tokens_are_counted_as_told(tmp_path: Path) -> None:
    module = fit(SpeedMonitor(tokens=lambda batch: None))
    assert "roundpipe/tokens_per_s" not in module.trainer.callback_metrics
    module = fit(SpeedMonitor())
    step = module.trainer.callback_metrics
    ratio = step["roundpipe/tokens_per_s"] / step["roundpipe/samples_per_s"]
    assert ratio.item() == pytest.approx(5)


def test_mfu_needs_a_gpu_that_is_known() -> None:
    class Known(Model):
        flops_per_batch = 1e9

    module = Known()
    monitor = SpeedMonitor()
    batches = [{"input_ids": torch.randint(16, (6, 5))} for _ in range(3)]
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=3), 2, callbacks=[monitor])
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert "roundpipe/mfu" not in trainer.callback_metrics
    monitor._peak_flops = 1e12
    logged: dict[str, float] = {}
    monitor.log_values = lambda module, stats, values: logged.update(values)  # type: ignore[method-assign]
    monitor.on_step(trainer, module, module.steps[-1], batches[0])
    assert logged["mfu"] == pytest.approx(1e9 / (logged["step_ms"] / 1e3) / 1e12)


@pytest.mark.parametrize("monitor", [PCIeMonitor, MemoryMonitor, SpeedMonitor, TimelineWriter, PipelineMonitor])
def test_another_strategy_is_told_once(monitor: type[StepMonitor]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = fit(monitor(), strategy="auto", devices=1)
    messages = [str(warning.message) for warning in told if "measures RoundPipeStrategy" in str(warning.message)]
    assert len(messages) == 1 and monitor.__name__ in messages[0]
    assert not any(name.startswith("roundpipe/") for name in module.trainer.callback_metrics)


def test_yaml_alone_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    config = tmp_path / "config.yaml"
    config.write_text(
        "seed_everything: 0\n"
        "trainer:\n"
        "  accelerator: cpu\n"
        "  devices: 2\n"
        "  max_steps: 3\n"
        "  log_every_n_steps: 1\n"
        "  enable_checkpointing: false\n"
        "  enable_progress_bar: false\n"
        "  enable_model_summary: false\n"
        "  strategy:\n"
        "    class_path: lightning_roundpipe.RoundPipeStrategy\n"
        "    init_args: {num_microbatches: 2}\n"
        "  logger:\n"
        "    class_path: lightning.pytorch.loggers.CSVLogger\n"
        f"    init_args: {{save_dir: {tmp_path}}}\n"
        "  callbacks:\n"
        "    - class_path: lightning_roundpipe.callbacks.PipelineMonitor\n"
        f"      init_args: {{timeline_steps: [2], dirpath: {tmp_path}}}\n"
    )

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader([{"input_ids": torch.randint(16, (6, 5))} for _ in range(4)], batch_size=None)

    monkeypatch.setattr("sys.argv", ["cli.py", "fit", f"--config={config}"])
    cli = LightningCLI(Model, Data, save_config_callback=None)
    assert "roundpipe/pcie_h2d_gb_per_s" in cli.trainer.callback_metrics
    assert (tmp_path / "step_2.json").exists()
