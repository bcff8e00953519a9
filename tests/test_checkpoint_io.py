"""Checkpoints: written whole or not at all, at once or while training goes on; resumed from to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.checkpoint_io import FileCheckpointIO, ShardedCheckpointIO, is_sharded, load_sharded
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.memory import own_memory, peak_memory
from tests.helpers.models import Residual, residual_batches, seeded


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def fit(plugin: ShardedCheckpointIO | None, epochs: int, resume: Path | None = None, **flags: Any) -> dict[str, Tensor]:
    module = seeded(lambda: Residual(tied=True, optimizer=adamw))
    plugins = [] if plugin is None else [plugin]
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2, plugins=plugins, max_epochs=epochs, **flags)
    trainer.fit(module, BatchDealer(residual_batches()), ckpt_path=resume)
    if plugin is not None and not flags.get("enable_checkpointing"):
        trainer.save_checkpoint("last.ckpt")
    return module.state_dict()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resuming_equals_going_on(asynchronous: bool) -> None:
    plugin = ShardedCheckpointIO(num_threads=2, asynchronous=asynchronous)
    fit(plugin, 1)
    plugin.teardown()
    assert is_sharded("last.ckpt")
    expected = fit(None, 2)
    found = fit(ShardedCheckpointIO(), 2, Path("last.ckpt"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_holds_the_moment_of_its_call() -> None:
    """Training goes on while it is written."""
    saver = ModelCheckpoint("steps", save_top_k=-1, every_n_train_steps=1, filename="{step}")
    fit(ShardedCheckpointIO(asynchronous=True), 1, callbacks=[saver], enable_checkpointing=True)
    plain = ModelCheckpoint("plain", save_top_k=-1, every_n_train_steps=1, filename="{step}")
    fit(None, 1, callbacks=[plain], enable_checkpointing=True)
    for path in sorted(Path("plain").iterdir()):
        expected = torch.load(path, weights_only=True)
        found = load_sharded(Path("steps") / path.name)
        assert found["global_step"] == expected["global_step"]
        for name, tensor in expected["state_dict"].items():
            assert torch.equal(found["state_dict"][name], tensor)
        moments = expected["optimizer_states"][0]["state"]
        for number, state in moments.items():
            for name, value in state.items():
                assert torch.equal(torch.as_tensor(found["optimizer_states"][0]["state"][number][name]), value)


def test_files_are_several() -> None:
    fit(ShardedCheckpointIO(num_threads=3), 1)
    assert len(list(Path("last.ckpt").glob("*.distcp"))) > 1
    assert not list(Path().glob(".*.incomplete"))


def test_a_checkpoint_is_replaced_and_removed() -> None:
    plugin = ShardedCheckpointIO()
    Path("last.ckpt").write_text("a file of that name")
    fit(plugin, 1)
    assert is_sharded("last.ckpt")
    plugin.remove_checkpoint("last.ckpt")
    assert not Path("last.ckpt").exists()


def test_errors_of_a_writer_in_the_background_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ShardedCheckpointIO(asynchronous=True)

    def fails(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(plugin, "_write", fails)
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "here.ckpt")
    with pytest.raises(OSError, match="no space left"):
        plugin.wait()
    plugin.teardown()


def test_one_file_is_still_read() -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, "one.ckpt")
    assert torch.equal(ShardedCheckpointIO().load_checkpoint("one.ckpt")["state_dict"]["w"], torch.ones(2))


def test_what_is_no_checkpoint_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="not a folder with a sharded checkpoint"):
        load_sharded("nothing")
    with pytest.raises(ValueError, match="num_threads"):
        ShardedCheckpointIO(num_threads=0)
    with pytest.raises(TypeError, match="storage_options"):
        ShardedCheckpointIO().save_checkpoint({}, "here.ckpt", storage_options={})


# ------------------------------------------------------------------------------------------------------------ one file


def test_one_file_is_replaced_only_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FileCheckpointIO()
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "folder/one.ckpt")
    save = torch.save

    def fails(content: Any, path: Any) -> None:
        save(content, path)
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space left"):
        plugin.save_checkpoint({"state_dict": {"w": torch.zeros(2)}}, "folder/one.ckpt")
    assert [path.name for path in Path("folder").iterdir()] == ["one.ckpt"]
    for weights_only in (None, True, False):
        read = plugin.load_checkpoint("folder/one.ckpt", weights_only=weights_only)
        assert torch.equal(read["state_dict"]["w"], torch.ones(2))


def test_files_of_older_formats_are_read() -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, "old.ckpt", _use_new_zipfile_serialization=False)
    assert torch.equal(FileCheckpointIO().load_checkpoint("old.ckpt")["state_dict"]["w"], torch.ones(2))
    with pytest.raises(FileNotFoundError):
        FileCheckpointIO().load_checkpoint("nothing.ckpt")


def test_other_places_are_left_to_lightning() -> None:
    plugin = FileCheckpointIO()
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "memory://one.ckpt")
    assert torch.equal(plugin.load_checkpoint("memory://one.ckpt")["state_dict"]["w"], torch.ones(2))


def test_saving_and_loading_take_less_than_a_layer() -> None:
    """Sixteen layers of 8 MiB; Lightning's plugin takes as much again as there is."""
    layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(16))
    layer = 8 * 2**20

    def growth(plugin: TorchCheckpointIO, path: str) -> int:
        plugin.save_checkpoint({"state_dict": nn.Linear(2, 2).state_dict()}, path)  # imports
        with peak_memory() as grown:
            plugin.save_checkpoint({"state_dict": layers.state_dict()}, path)
            return grown()

    assert growth(FileCheckpointIO(), "./one.ckpt") < layer
    assert growth(ShardedCheckpointIO(num_threads=2), "./several.ckpt") < 2 * layer  # two files at once
    assert growth(TorchCheckpointIO(), "./theirs.ckpt") > 12 * layer
    before = own_memory()
    loaded = FileCheckpointIO().load_checkpoint("one.ckpt")
    assert own_memory() - before < layer
    assert all(torch.equal(tensor, loaded["state_dict"][name]) for name, tensor in layers.state_dict().items())


def test_lightnings_asynchronous_plugin_writes_through_it() -> None:
    plugin = AsyncCheckpointIO()
    saver = ModelCheckpoint("saved", filename="last")
    module = seeded(lambda: Residual(optimizer=adamw))
    trainer = trainer_for(
        RoundPipeStrategy(num_microbatches=2), 2, plugins=[plugin], callbacks=[saver], enable_checkpointing=True
    )
    trainer.fit(module, BatchDealer(residual_batches()))
    assert isinstance(plugin.checkpoint_io, FileCheckpointIO)
    saved = torch.load("saved/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("plugin", [lambda: ShardedCheckpointIO(asynchronous=True), AsyncCheckpointIO])
def test_what_is_saved_after_the_fit_is_there_at_once(plugin: Any) -> None:
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2, plugins=[plugin()])
    trainer.fit(seeded(Residual), BatchDealer(residual_batches()))
    for name in ("one.ckpt", "two.ckpt"):
        trainer.save_checkpoint(name)
        assert Path(name).exists()
        assert not any(path.name.endswith(".incomplete") for path in Path().iterdir())
