"""Lightning's hooks are called as on a single device: the same ones, in the same order, equally often."""

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded

Calls = list[str]

# `training_step` and its like run once for every micro-batch, and `forward` is the user's own call.
_MODULE_HOOKS = [
    name
    for hooks in (ModelHooks, DataHooks, CheckpointHooks)
    for name in vars(hooks)
    if not name.startswith("_") and not name.endswith("_dataloader") and name != "configure_sharded_model"
] + [
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_optimizers", "lr_scheduler_step",
    "optimizer_step", "optimizer_zero_grad",
]  # fmt: skip
_CALLBACK_HOOKS = [name for name in vars(L.Callback) if name.startswith("on_")] + ["setup", "teardown"]


def recording(base: type, names: list[str], prefix: str) -> type:
    """A subclass that appends the name of every listed method to ``self.calls`` and then calls the base's method."""

    def overriding(name: str) -> Any:
        def hook(self: Any, *args: Any, **options: Any) -> Any:
            self.calls.append(f"{prefix}.{name}")
            return getattr(base, name)(self, *args, **options)

        return hook

    return type(f"Recording{base.__name__}", (base,), {name: overriding(name) for name in names})


RecordingResidual = recording(Residual, _MODULE_HOOKS, "module")
RecordingCallback = recording(L.Callback, _CALLBACK_HOOKS, "callback")


def record(strategy: Any, devices: int, entry: str, **flags: Any) -> Calls:
    calls: Calls = []
    module, callback = seeded(RecordingResidual), RecordingCallback()
    module.calls = callback.calls = calls
    trainer = trainer_for(strategy, devices, callbacks=[callback], **flags)
    if entry == "fit":
        trainer.fit(module, BatchDealer(residual_batches(num=3)), BatchDealer(residual_batches(num=2)))
    else:
        getattr(trainer, entry)(module, BatchDealer(residual_batches(num=2)))
    return calls


@pytest.mark.parametrize(
    ("entry", "flags"),
    [
        ("fit", {}),
        ("fit", {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_epochs": 2}),
        ("fit", {"val_check_interval": 2, "accumulate_grad_batches": 3, "num_sanity_val_steps": 1}),
        ("fit", {"enable_checkpointing": True}),
        ("fit", {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 0}),
        ("fit", {"fast_dev_run": True}),
        ("validate", {}),
        ("test", {}),
        ("predict", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_same_calls_as_on_a_single_device(entry: str, flags: dict[str, Any], tmp_path: Any) -> None:
    expected = record("auto", 1, entry, default_root_dir=tmp_path / "plain", **flags)
    found = record(RoundPipeStrategy(num_microbatches=3), 2, entry, default_root_dir=tmp_path / "ours", **flags)
    assert found == expected


class CountsForward(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"training_step": 0, "forward": 0, "validation_step": 0}
        self.rows: list[int] = []

    def forward(self, tokens: Any) -> Any:
        self.counts["forward"] += 1
        return super().forward(tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts["training_step"] += 1
        self.rows.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts["validation_step"] += 1
        return super().validation_step(batch, batch_idx)


def test_training_step_runs_once_for_every_microbatch() -> None:
    """Also in a second fit of the same module: nothing is wrapped twice. Recomputation does not run user code."""
    module = seeded(CountsForward)
    for _ in range(2):
        module.counts = dict.fromkeys(module.counts, 0)
        module.rows = []
        trainer = trainer_for(RoundPipeStrategy(num_microbatches=3), 2)
        trainer.fit(module, BatchDealer(residual_batches(num=2)))
        assert module.counts == {"training_step": 6, "forward": 6, "validation_step": 0}
        assert module.rows == [2] * 6


def test_properties_of_the_trainer() -> None:
    """One process with N workers: no samplers are replaced, ranks are those of a single device."""
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 4)
    assert trainer.num_devices == 4
    assert trainer.world_size == 1
    assert trainer.global_rank == trainer.local_rank == trainer.node_rank == 0
    assert trainer.is_global_zero
    assert not trainer._accelerator_connector.is_distributed
