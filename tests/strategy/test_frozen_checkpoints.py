"""Checkpoints without frozen weights: small, and exact to resume from where these weights are."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.checkpoint_io import ShardedCheckpointIO
from lightning_roundpipe.export import export_pretrained
from lightning_roundpipe.loading import load_pretrained
from lightning_roundpipe.runtime.mapped import FileMappings
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded


class Partly(Residual):
    """Frozen blocks, one of them with a trainable norm; a buffer that is written; AdamW."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.embed.requires_grad_(False)
        self.extra = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))
        with torch.no_grad():
            self.blocks[0].get_parameter(next(name for name, _ in self.blocks[0].named_parameters())).add_(shift)

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


def ours(**options: Any) -> RoundPipeStrategy:
    return RoundPipeStrategy(num_microbatches=3, save_frozen_weights=False, **options)


def fit(
    module: L.LightningModule, strategy: Any, epochs: int = 1, resume: str | None = None, **flags: Any
) -> L.Trainer:
    trainer = trainer_for(strategy, 2, max_epochs=epochs, **flags)
    trainer.fit(module, BatchDealer(residual_batches()), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("plugins", [[], [ShardedCheckpointIO()]], ids=["file", "sharded"])
def test_resuming_equals_going_on(plugins: list[Any]) -> None:
    fit(seeded(Partly), ours(), plugins=plugins).save_checkpoint("small.ckpt")
    expected, found = seeded(Partly), seeded(Partly)
    fit(expected, RoundPipeStrategy(num_microbatches=3), 2)
    trainer = fit(found, ours(), 2, "small.ckpt", plugins=plugins)
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in expected.state_dict().items())
    trainer.save_checkpoint("again.ckpt")
    keys = trainer.strategy.checkpoint_io.load_checkpoint("again.ckpt", weights_only=True)["state_dict"].keys()
    assert keys == {"head.weight", "head.bias", "seen"}


def test_what_is_left_out_is_told_by_name() -> None:
    saver = ModelCheckpoint("saved", every_n_epochs=1, filename="last")
    module = seeded(Partly)
    fit(module, ours(), callbacks=[saver], enable_checkpointing=True)
    checkpoint = torch.load("saved/last.ckpt", weights_only=True)
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert set(checkpoint["roundpipe"]["left_out"]) == frozen
    assert checkpoint["state_dict"].keys() | frozen == module.state_dict().keys()
    assert checkpoint["state_dict"]._metadata == module.state_dict()._metadata


def test_any_strategy_of_ours_loads_it_and_other_missing_keys_are_named() -> None:
    fit(seeded(Partly), ours()).save_checkpoint("small.ckpt")
    fit(seeded(Partly), RoundPipeStrategy(num_microbatches=3), 2, "small.ckpt")

    class Wider(Partly):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(RuntimeError, match=r"missing `more\.weight`, `more\.bias`, unexpected nothing"):
        fit(seeded(Wider), ours(), 2, "small.ckpt")
    module = seeded(Wider)
    module.strict_loading = False
    fit(module, ours(), 2, "small.ckpt")


def test_versions_of_modules_reach_them_when_weights_are_loaded() -> None:
    class Versioned(nn.Linear):
        _version = 3
        seen: Any = None

        def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
            Versioned.seen = local_metadata.get("version")
            super()._load_from_state_dict(state, prefix, local_metadata, *args)

    class Newer(Partly):
        def __init__(self) -> None:
            super().__init__()
            self.extra = Versioned(4, 4).requires_grad_(False)

    for strategy in (ours(), RoundPipeStrategy(num_microbatches=3)):
        fit(seeded(Newer), strategy).save_checkpoint("some.ckpt")
        Versioned.seen = None
        fit(seeded(Newer), ours(), 2, "some.ckpt")
        assert Versioned.seen == 3


def test_plain_checkpoints_stay_strict() -> None:
    class Smaller(Residual):
        def __init__(self) -> None:
            super().__init__(num_blocks=3)

    fit(seeded(Smaller), RoundPipeStrategy(num_microbatches=3)).save_checkpoint("plain.ckpt")
    with pytest.raises(RuntimeError, match="Missing key"):
        fit(seeded(Residual), ours(), 2, "plain.ckpt")


def test_what_was_trained_before_it_was_frozen_is_saved() -> None:
    class Freezes(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                module.blocks.requires_grad_(False)

    class Later(Partly):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.requires_grad_(True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = seeded(Later)
    fit(module, ours(), 2, callbacks=[Freezes()]).save_checkpoint("small.ckpt")
    saved = torch.load("small.ckpt", weights_only=True)["state_dict"]
    assert {name for name in module.state_dict() if name not in saved} == {"embed.weight", "extra.weight", "extra.bias"}


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_what_got_its_values_from_a_checkpoint_is_saved(shift: float) -> None:
    fit(seeded(lambda: Partly(shift)), RoundPipeStrategy(num_microbatches=3)).save_checkpoint("full.ckpt")
    trainer = fit(seeded(Partly), ours(), 2, "full.ckpt")
    trainer.save_checkpoint("small.ckpt")
    saved = torch.load("small.ckpt", weights_only=True)["state_dict"]
    assert len(saved) == (4 if shift else 3)


def test_a_full_checkpoint_leaves_equal_weights_in_their_files(tmp_path: Path) -> None:
    """Written to, their pages would become memory."""
    files = tmp_path / "weights"
    export_pretrained(seeded(Partly).blocks, files)

    def build() -> Partly:
        module = seeded(Partly)
        load_pretrained(module.blocks, files, progress=False)
        return module

    fit(build(), RoundPipeStrategy(num_microbatches=3)).save_checkpoint("full.ckpt")
    module = build()
    fit(module, RoundPipeStrategy(num_microbatches=3), 2, "full.ckpt")
    # Pages that nobody has written to follow the file.
    file = next(files.glob("*.safetensors"))
    with file.open("r+b") as opened:
        opened.seek(-4, 2)
        opened.write(torch.tensor(7.5).numpy().tobytes())
    assert any(parameter.flatten()[-1] == 7.5 for parameter in module.blocks.parameters())


def test_optimizer_state_is_not_left_in_the_checkpoint() -> None:
    fit(seeded(Partly), ours()).save_checkpoint("small.ckpt")
    where: list[bool] = []

    class Looks(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            mapped = FileMappings()
            states = trainer.optimizers[0].state.values()
            where.extend(value in mapped for state in states for value in state.values() if isinstance(value, Tensor))

    fit(seeded(Partly), ours(), 2, "small.ckpt", callbacks=[Looks()])
    assert where and not any(where)
