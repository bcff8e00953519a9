"""Checkpoints are ordinary ones: exact to resume from, with any number of workers, with and without the strategy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.optim.lr_scheduler import StepLR

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import (
    BatchDealer,
    TrainResult,
    assert_results_close,
    assert_results_equal,
    train,
    trainer_for,
)
from tests.helpers.models import Residual, residual_batches, seeded


class Resumable(Residual):
    """AdamW, a schedule per step, dropout, and a buffer that is written in every step."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.register_buffer("steps_seen", torch.tensor(0))

    def on_train_batch_start(self, *args: Any) -> None:
        self.steps_seen += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 1, gamma=0.8), "interval": "step"},
        }


class SaveAfter(L.Callback):
    """Saves a checkpoint at the end of one batch, counted over all epochs."""

    def __init__(self, path: Path, batches: int) -> None:
        self.path = path
        self.batches = batches
        self.count = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.count += 1
        if self.count == self.batches:
            trainer.save_checkpoint(self.path)


FLAGS: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
BATCHES = residual_batches(num=6)


def module() -> L.LightningModule:
    return seeded(Resumable).double()


def ours(num_microbatches: int = 3) -> RoundPipeStrategy:
    return RoundPipeStrategy(num_microbatches=num_microbatches)


def fit(strategy: Any, devices: int, **options: Any) -> TrainResult:
    return train(module, BATCHES, strategy, devices, **FLAGS, **options)


@pytest.mark.parametrize("batches", [4, 6, 8], ids=["mid_epoch", "epoch_end", "second_epoch"])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(tmp_path: Path, batches: int) -> None:
    """Weights, moments, step counters, learning rate; on another number of workers."""
    path = tmp_path / "some.ckpt"
    whole = fit(ours(), 2, callbacks=[SaveAfter(path, batches)])
    resumed = fit(ours(), 3, ckpt_path=path)
    assert resumed.trainer.global_step == whole.trainer.global_step
    for kind in ("state", "optimizer"):
        for name, tensor in getattr(whole, kind).items():
            assert torch.equal(tensor, getattr(resumed, kind)[name]), f"{kind} {name}"
    for one, two in zip(whole.losses[batches:], resumed.losses, strict=True):
        assert torch.equal(one, two)
    assert resumed.learning_rates == whole.learning_rates[batches:]


@pytest.mark.parametrize("batches", [3, 9])
def test_resume_in_the_middle_of_accumulation(tmp_path: Path, batches: int) -> None:
    """Lightning does not save pending gradients: the resumed run does what plain Lightning does, to the digit."""
    path = tmp_path / "some.ckpt"
    fit("auto", 1, callbacks=[SaveAfter(path, batches)])
    expected = fit("auto", 1, ckpt_path=path)
    assert_results_close(expected, fit(ours(), 2, ckpt_path=path), rtol=1e-10)
    own = tmp_path / "own.ckpt"
    fit(ours(2), 2, callbacks=[SaveAfter(own, batches)])
    assert_results_close(expected, fit(ours(3), 3, ckpt_path=own), rtol=1e-10)


@pytest.mark.parametrize("saved_by", ["plain", "ours"])
@pytest.mark.parametrize("resumed_by", ["plain", "ours"])
def test_strategies_exchange_checkpoints(tmp_path: Path, saved_by: str, resumed_by: str) -> None:
    path = tmp_path / "some.ckpt"
    strategies: dict[str, Callable[[], tuple[Any, int]]] = {"plain": lambda: ("auto", 1), "ours": lambda: (ours(), 2)}
    expected = fit("auto", 1)
    fit(*strategies[saved_by](), callbacks=[SaveAfter(path, 4)])
    found = fit(*strategies[resumed_by](), ckpt_path=path)
    expected.losses, expected.learning_rates = expected.losses[4:], expected.learning_rates[4:]
    assert_results_close(expected, found, rtol=1e-10)


@pytest.mark.parametrize("saved", ["during the fit", "after it"])
def test_dropout_continues_where_it_stopped(tmp_path: Path, saved: str) -> None:
    """The base of the counted randomness is part of the checkpoint; the resuming process need not be seeded alike."""

    def noisy() -> L.LightningModule:
        return seeded(lambda: Resumable(dropout=0.5))

    class Reseed(L.Callback):
        def setup(self, *args: Any, **options: Any) -> None:
            torch.manual_seed(987)

    path = tmp_path / "some.ckpt"
    whole = train(noisy, BATCHES, ours(), 2, callbacks=[SaveAfter(path, 4)], max_epochs=2)
    if saved == "after it":
        train(noisy, BATCHES, ours(), 2).trainer.save_checkpoint(path)
    resumed = train(noisy, BATCHES, ours(), 3, callbacks=[Reseed()], ckpt_path=path, max_epochs=2)
    for name, tensor in whole.state.items():
        assert torch.equal(tensor, resumed.state[name]), name


def test_file_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    """Keys, shapes and dtypes are those of plain Lightning; ``load_from_checkpoint`` needs nothing of ours."""
    plain_path, path = tmp_path / "plain.ckpt", tmp_path / "ours.ckpt"
    fit("auto", 1, callbacks=[SaveAfter(plain_path, 4)])
    fit(ours(), 2, callbacks=[SaveAfter(path, 4)])
    plain, found = (torch.load(p, weights_only=True) for p in (plain_path, path))
    assert plain.keys() <= found.keys()
    assert plain["state_dict"].keys() == found["state_dict"].keys()
    assert plain["optimizer_states"][0]["state"].keys() == found["optimizer_states"][0]["state"].keys()
    assert plain["global_step"] == found["global_step"]
    assert plain["loops"] == found["loops"]
    for name, tensor in plain["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    reloaded = Resumable.load_from_checkpoint(path)  # In float32, as the class makes it.
    for name, tensor in reloaded.state_dict().items():
        expected = found["state_dict"][name].to(tensor.dtype)
        assert torch.equal(tensor, expected), name


def test_loaded_weights_are_the_ones_that_train(tmp_path: Path) -> None:
    """Weights written after the optimizer was made reach every copy: a step with learning rate 0 leaves them."""

    class Writes(Residual):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=0.0)

        def on_fit_start(self) -> None:
            self.load_state_dict(other)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter.mul_(2)

    other = seeded(Residual, seed=5).state_dict()
    expected = train(lambda: seeded(Writes), residual_batches())
    found = train(lambda: seeded(Writes), residual_batches(), ours(), 2)
    assert_results_close(expected, found, rtol=1e-5)
    assert torch.equal(found.state["head.weight"], 2 * other["head.weight"])


def test_own_state_dict_and_extra_state(tmp_path: Path) -> None:
    class Extra(Resumable):
        def __init__(self) -> None:
            super().__init__()
            self.note = "fresh"

        def get_extra_state(self) -> Any:
            return {"note": self.note}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {f"outer.{key}": value for key, value in super().state_dict(*args, **options).items()}

        def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
            return super().load_state_dict({k.removeprefix("outer."): v for k, v in state.items()}, *args, **options)

        def on_fit_start(self) -> None:
            self.note_at_start, self.note = self.note, "trained"

    path = tmp_path / "extra.ckpt"
    whole = train(lambda: seeded(Extra), BATCHES, ours(), 2, callbacks=[SaveAfter(path, 4)])
    resumed = train(lambda: seeded(Extra), BATCHES, ours(), 2, ckpt_path=path)
    assert resumed.module.note_at_start == "trained"
    assert torch.equal(whole.state["head.weight"], resumed.state["head.weight"])


def test_model_checkpoint_leaves_the_expected_files(tmp_path: Path) -> None:
    def files(strategy: Any, devices: int, where: Path) -> dict[str, float | None]:
        keep = ModelCheckpoint(where, "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
        trainer = trainer_for(strategy, devices, max_epochs=4, callbacks=[keep], enable_checkpointing=True)
        trainer.fit(module(), BatchDealer(BATCHES), BatchDealer(BATCHES[:2]))
        scores = {Path(path).name: float(score) for path, score in keep.best_k_models.items()}
        return {path.name: scores.get(path.name) for path in sorted(where.iterdir())}

    expected, found = files("auto", 1, tmp_path / "plain"), files(ours(), 2, tmp_path / "ours")
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:.*ckpt_path")
def test_saving_after_test_and_from_an_exception(tmp_path: Path) -> None:
    class Fails(Resumable):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise ZeroDivisionError

    trainer = trainer_for(ours(), 2)
    trained = module()
    trainer.fit(trained, BatchDealer(BATCHES))
    trainer.test(trained, BatchDealer(BATCHES[:2]), verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in trained.state_dict().items())

    failing = seeded(Fails)
    trainer = trainer_for(ours(), 2, callbacks=[OnExceptionCheckpoint(tmp_path, "broken")], enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(failing, BatchDealer(BATCHES))
    saved = torch.load(tmp_path / "broken.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in failing.state_dict().items())


def test_missing_key_raises(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    fit(ours(), 2, callbacks=[SaveAfter(path, 4)])
    content = torch.load(path, weights_only=True)
    del content["state_dict"]["blocks.1.up.weight"]
    torch.save(content, path)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight"):
        fit(ours(), 2, ckpt_path=path)


class BuiltLate(Residual):
    """Makes its blocks in ``configure_model``."""

    def configure_model(self) -> None:
        if not len(self.blocks):
            self.blocks.extend(seeded(lambda: Residual(num_blocks=3)).blocks)


def test_configure_model() -> None:
    def late() -> L.LightningModule:
        return seeded(lambda: BuiltLate(num_blocks=0))

    expected = train(late, residual_batches())
    assert_results_close(expected, train(late, residual_batches(), ours(), 2), rtol=1e-5)


def test_init_module_empty_then_load(tmp_path: Path) -> None:
    """``init_module(empty_init=True)`` gives weights without values; the checkpoint fills them."""
    path = tmp_path / "some.ckpt"
    expected = train(lambda: seeded(Residual), BATCHES, callbacks=[SaveAfter(path, 3)])
    trainer = trainer_for(ours(), 2)
    with trainer.init_module(empty_init=True):
        empty = Residual()
    trainer.fit(empty, BatchDealer(BATCHES), ckpt_path=path)
    for name, tensor in expected.module.state_dict().items():
        found = empty.state_dict()[name]
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_parameters_without_values_are_refused_by_name() -> None:
    with torch.device("meta"):
        empty = Residual()
    with pytest.raises(Exception, match=r"blocks\.0\.up\.weight"):
        trainer_for(ours(), 2).fit(empty, BatchDealer(BATCHES))


def test_same_checkpoint_on_any_number_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    fit(ours(), 1, callbacks=[SaveAfter(path, 4)])
    expected = fit(ours(), 1, ckpt_path=path)
    for devices in (2, 4):
        assert_results_equal(expected, fit(ours(), devices, ckpt_path=path))
