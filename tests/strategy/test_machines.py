"""Several machines train as one does on the joint batch; a machine that is lost or differs ends the others by name."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from lightning_roundpipe.callbacks import SpeedMonitor
from lightning_roundpipe.exceptions import MachineLostError
from lightning_roundpipe.runtime.collectives import GradientReducer
from tests.helpers.equivalence import BatchDealer, TrainResult, relative_difference, train, trainer_for
from tests.helpers.machines import Failure, Machine, Machines, of_machine, portable
from tests.helpers.models import CASES, BatchNormCNN, Residual, residual_batches, seeded


def fit(machine: Machine, name: str, options: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    case = CASES[name]
    strategy = RoundPipeStrategy(num_microbatches=2, **{"timeout": 30, **options})
    batches = machine.part(case.batches())
    return portable(train(case.module, batches, strategy, 2, num_nodes=machine.count, **flags))


def assert_close(expected: TrainResult, found: dict[str, Any], rtol: float = 1e-6) -> None:
    assert found["state"].keys() == expected.state.keys()
    assert found["optimizer"].keys() == expected.optimizer.keys()
    for name, tensor in {**expected.state, **expected.optimizer}.items():
        assert relative_difference(tensor, {**found["state"], **found["optimizer"]}[name]) <= rtol, name
    assert found["global_step"] == expected.trainer.global_step
    assert found["learning_rates"][-1] == expected.learning_rates[-1]


def error_of(results: list[Any], rank: int, name: str) -> str:
    failure = results[rank]
    assert isinstance(failure, Failure), failure
    assert name in failure.names, failure.message
    return failure.message


EXACT, OFF = {"optimizer_overlap": "exact"}, {"optimizer_overlap": "off"}
FITS = [
    pytest.param("residual_tied", EXACT, {}, 2, id="exact"),
    pytest.param("residual", OFF, {}, 3, id="off, 3 machines"),
    pytest.param("mlp", EXACT, {"accumulate_grad_batches": 2}, 2, id="exact, accumulated"),
    pytest.param("residual", OFF, {"accumulate_grad_batches": 3}, 2, id="off, accumulated"),
    pytest.param("mlp", EXACT, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, 3, id="exact, clipped"),
    pytest.param("residual", OFF, {"gradient_clip_val": 0.05}, 2, id="off, clipped"),
    pytest.param("sparse_embedding", EXACT, {}, 2, id="sparse"),
]


@pytest.mark.parametrize("name, options, flags, count", FITS)
def test_equals_one_machine_on_the_joint_batch(
    machines: Machines, name: str, options: dict[str, Any], flags: dict[str, Any], count: int
) -> None:
    results = machines.run(fit, name, options, flags, count=count, elastic="exact" in str(options))
    expected = train(CASES[name].module, CASES[name].batches(), **flags)
    for rank in range(count):
        assert_close(expected, of_machine(rank, results))
    one = of_machine(0, results)
    for rank in range(1, count):
        other = of_machine(rank, results)
        assert all(torch.equal(tensor, other["state"][name]) for name, tensor in one["state"].items())


def fit_delayed(machine: Machine, flags: dict[str, Any]) -> TrainResult:
    strategy = RoundPipeStrategy(num_microbatches=2, optimizer_overlap="stale", timeout=30)
    batches = machine.part(residual_batches())
    return train(CASES["residual"].module, batches, strategy, 2, num_nodes=machine.count, **flags)


def fit_delayed_portable(machine: Machine, flags: dict[str, Any]) -> dict[str, Any]:
    return portable(fit_delayed(machine, flags))


@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}], ids=str)
def test_delayed_updates_are_those_of_one_machine(machines: Machines, flags: dict[str, Any]) -> None:
    flags = {"max_epochs": 2, **flags}
    results = machines.run(fit_delayed_portable, flags)
    expected = fit_delayed(Machine(0, 1), flags)
    for rank in range(2):
        assert_close(expected, of_machine(rank, results))


class Wavering(Residual):
    """Takes another time for everything on each machine, and in each run."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: time.sleep(random.random() * 0.01))


def fit_wavering(machine: Machine, options: dict[str, Any]) -> dict[str, Any]:
    random.seed(machine.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_roundpipe.strategy.GradientReducer", partial(GradientReducer, bucket_bytes=600))
        strategy = RoundPipeStrategy(num_microbatches=2, timeout=30, **options)
        return portable(train(lambda: seeded(Wavering), machine.part(residual_batches()), strategy, 3, num_nodes=3))


def test_order_of_collectives_is_the_same_whatever_the_timing(machines: Machines) -> None:
    results = machines.run(fit_wavering, EXACT, count=3)
    expected = train(CASES["residual"].module, residual_batches())
    for rank in range(3):
        assert_close(expected, of_machine(rank, results))


# ---------------------------------------------------------------------------------------------------------- parameters


class Routed(Residual):
    """Machine ``rank`` uses block ``rank``; the last block is used by nobody."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[self.global_rank](self.embed(tokens)))


class JointlyRouted(Residual):
    """What machines with :class:`Routed` train, on the joint batch."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def loss(self, batch: Any) -> Tensor:
        parts = zip(batch[0].chunk(self.count), batch[1].chunk(self.count), strict=True)
        losses = []
        for block, (tokens, targets) in zip(self.blocks, parts, strict=False):
            logits = self.head(block(self.embed(tokens)))
            losses.append(nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()))
        return torch.stack(losses).mean()


def fit_routed(machine: Machine, flags: dict[str, Any]) -> dict[str, Any]:
    strategy = RoundPipeStrategy(num_microbatches=2, timeout=30)
    batches = machine.part(residual_batches())
    found = train(lambda: seeded(Routed), batches, strategy, 2, num_nodes=machine.count, **flags)
    return {**portable(found), "unused": [p.grad is None for p in found.module.blocks[3].parameters()]}


@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}], ids=str)
def test_parameters_used_by_one_machine_or_none(machines: Machines, flags: dict[str, Any]) -> None:
    results = machines.run(fit_routed, flags, count=2)
    expected = train(lambda: seeded(lambda: JointlyRouted(2)), residual_batches(), **flags)
    for rank in range(2):
        assert_close(expected, of_machine(rank, results))
        assert all(of_machine(rank, results)["unused"])


# --------------------------------------------------------------------------------------------------- Lightning's calls


class Logs(Residual):
    """Logs over machines in every way, and asks for what Lightning offers."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(32, average="micro")
        self.found: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("rank", float(self.global_rank), on_epoch=True, sync_dist=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.accuracy(logits.flatten(0, -2), batch[1].flatten())
        self.log("accuracy", self.accuracy)
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_end(self) -> None:
        strategy, rank = self.trainer.strategy, self.global_rank
        self.found["gathered"] = self.all_gather({"x": torch.tensor([1.0, rank])})["x"]
        self.found["broadcast"] = strategy.broadcast(f"from {rank}", src=1)
        self.found["mean"] = strategy.reduce(torch.tensor(float(rank)))
        self.found["sum"] = strategy.reduce(torch.tensor(rank + 1), reduce_op="sum")
        self.found["all"] = strategy.reduce_boolean_decision(rank == 0)
        self.found["any"] = strategy.reduce_boolean_decision(rank == 0, all=False)
        self.found["ranks"] = (self.trainer.world_size, self.trainer.num_nodes, rank, self.trainer.is_global_zero)


def fit_and_evaluate(machine: Machine, ddp: bool, folder: Path) -> dict[str, Any]:
    rows = torch.cat([tokens for tokens, _ in residual_batches(5)])[:27]
    loader = DataLoader(TensorDataset(rows, rows.roll(1, 1)), batch_size=4, shuffle=True)
    ordered = DataLoader(loader.dataset, batch_size=4)
    strategy = DDPStrategy() if ddp else RoundPipeStrategy(num_microbatches=3, timeout=30)
    checkpoints = ModelCheckpoint(folder / str(ddp), monitor="val_loss", save_top_k=1)
    trainer = trainer_for(
        strategy,
        1 if ddp else 2,
        num_nodes=machine.count,
        max_epochs=2,
        callbacks=[checkpoints, EarlyStopping("val_loss", patience=3)],
        enable_checkpointing=True,
        logger=CSVLogger(folder / str(ddp)),
        log_every_n_steps=1,
        default_root_dir=folder,
    )
    module = seeded(Logs)
    torch.manual_seed(5)
    trainer.fit(module, loader, ordered)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= {f"test {name}": value for name, value in trainer.test(module, ordered, verbose=False)[0].items()}
    metrics |= {f"after {name}": value for name, value in trainer.validate(module, ordered, verbose=False)[0].items()}
    predicted = torch.cat(trainer.predict(module, ordered))
    return {
        "state": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "metrics": metrics,
        "predicted": predicted,
        "found": module.found,
        "best": Path(trainer.checkpoint_callback.best_model_path).name,
    }


def test_as_under_ddp(machines: Machines, tmp_path: Path) -> None:
    """Sampler, uneven last batch, logging, metrics, callbacks, validation, test and prediction."""
    expected = machines.run(fit_and_evaluate, True, tmp_path, elastic=True)
    found = machines.run(fit_and_evaluate, False, tmp_path, elastic=True)
    for rank in range(2):
        theirs, ours = of_machine(rank, expected), of_machine(rank, found)
        for name, tensor in theirs["state"].items():
            assert relative_difference(tensor, ours["state"][name]) < 1e-6, name
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-5)
        assert torch.equal(ours["predicted"], theirs["predicted"])
        assert torch.equal(ours["found"].pop("gathered"), theirs["found"].pop("gathered"))
        assert ours["found"] == theirs["found"]
        assert ours["best"] == theirs["best"]
    assert len(list((tmp_path / "False").glob("*.ckpt"))) == 1


class BatchNorm(BatchNormCNN):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def fit_batch_norm(machine: Machine, ddp: bool, manual: bool) -> dict[str, Any]:
    def build() -> BatchNorm:
        module = BatchNorm()
        if manual:
            module.automatic_optimization = False
            module.training_step = partial(step_by_hand, module)
        return module

    strategy = DDPStrategy() if ddp else RoundPipeStrategy(num_microbatches=1, timeout=30)
    batches = machine.part(CASES["cnn"].batches())
    same = CASES["cnn"].batches()[:1]
    flags = {"num_nodes": machine.count, "val_batches": same, "num_sanity_val_steps": 0}
    return portable(train(lambda: seeded(build), batches, strategy, 1, **flags))


def step_by_hand(module: BatchNorm, batch: Any, batch_idx: int) -> None:
    module.optimizers().zero_grad()
    module.manual_backward(module.loss(batch))
    module.optimizers().step()


@pytest.mark.parametrize("manual", [False, True])
def test_running_statistics_are_those_of_machine_0(machines: Machines, manual: bool) -> None:
    expected = machines.run(fit_batch_norm, True, manual, elastic=True)
    found = machines.run(fit_batch_norm, False, manual)
    theirs = of_machine(0, expected)
    for rank in range(2):
        ours = of_machine(rank, found)
        for name, tensor in theirs["state"].items():
            assert relative_difference(tensor, ours["state"][name]) < 1e-5, name
        assert float(ours["metrics"]["val_loss"]) == pytest.approx(float(theirs["metrics"]["val_loss"]), rel=1e-5)


def gather_in_step(machine: Machine, num_microbatches: int) -> None:
    def build() -> Residual:
        module = Residual()
        loss = module.loss
        module.loss = lambda batch: module.all_gather(loss(batch), sync_grads=True).mean()
        return module

    strategy = RoundPipeStrategy(num_microbatches=num_microbatches, timeout=30)
    return portable(train(lambda: seeded(build), machine.part(residual_batches()), strategy, 2, num_nodes=2))


def test_gathering_inside_a_step(machines: Machines) -> None:
    results = machines.run(gather_in_step, 2)
    for rank in range(2):
        assert "once for each micro-batch" in error_of(results, rank, "UnsupportedUseError")
    expected = train(CASES["residual"].module, residual_batches())
    results = machines.run(gather_in_step, 1)
    for rank in range(2):
        assert_close(expected, of_machine(rank, results))


# ------------------------------------------------------------------------------------------------- weights, randomness


def fit_with_dropout(machine: Machine, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed + machine.rank)
    module = Residual(dropout=0.3)
    strategy = RoundPipeStrategy(num_microbatches=2, timeout=30)
    losses: list[Tensor] = []
    trainer = trainer_for(strategy, 2, num_nodes=machine.count)
    batch = residual_batches(1)[0]
    module.on_train_batch_end = lambda outputs, *args: losses.append(outputs["loss"])
    trainer.fit(module, BatchDealer([batch]))
    return {"loss": losses[0], "state": {name: tensor.clone() for name, tensor in module.state_dict().items()}}


def test_same_weights_but_other_dropout_on_each_machine(machines: Machines) -> None:
    one, two = machines.run(fit_with_dropout, 0)
    assert all(torch.equal(tensor, two["state"][name]) for name, tensor in one["state"].items())
    assert one["loss"] != two["loss"]
    again, _ = machines.run(fit_with_dropout, 0)
    assert all(torch.equal(tensor, again["state"][name]) for name, tensor in one["state"].items())


# ------------------------------------------------------------------------------------------------ accumulation by hand


class Manual(Residual):
    """Two optimizers; the second accumulates two batches, without exchanging the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        body = [*self.embed.parameters(), *self.blocks.parameters()]
        return torch.optim.SGD(body, lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        body.zero_grad()
        with body.toggle_model():
            self.manual_backward(self.loss(batch))
            self.clip_gradients(body, 0.1, "norm")
            body.step()
        if batch_idx % 2 == 0:
            head.zero_grad()
        with head.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.loss(batch))
        if batch_idx % 2 == 1:
            head.step()


def fit_manually(machine: Machine) -> dict[str, Any]:
    strategy = RoundPipeStrategy(timeout=30)
    batches = machine.part(residual_batches())
    return portable(train(lambda: seeded(Manual), batches, strategy, 1, num_nodes=machine.count))


def test_manual_optimization(machines: Machines) -> None:
    results = machines.run(fit_manually)
    expected = train(lambda: seeded(Manual), residual_batches())
    for rank in range(2):
        assert_close(expected, of_machine(rank, results))


class Hooked(Residual):
    """Halves the loss in ``backward``, and what exceeds a bound of each batch's gradient of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward()


def fit_hooked(machine: Machine) -> dict[str, Any]:
    strategy = RoundPipeStrategy(num_microbatches=2, timeout=30)
    batches = machine.part(residual_batches())
    flags = {"num_nodes": machine.count, "accumulate_grad_batches": 2}
    return portable(train(lambda: seeded(Hooked), batches, strategy, 2, **flags))


def test_hooks_see_the_averaged_gradient_of_each_batch(machines: Machines) -> None:
    results = machines.run(fit_hooked)
    expected = train(lambda: seeded(Hooked), residual_batches(), accumulate_grad_batches=2)
    for rank in range(2):
        assert_close(expected, of_machine(rank, results))


# ----------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    "options, flags",
    [({"gradient_wire_dtype": "bfloat16"}, {}), ({}, {"precision": "bf16-true"}), ({}, {"precision": "bf16-mixed"})],
    ids=str,
)
def test_half_precision(machines: Machines, options: dict[str, Any], flags: dict[str, Any]) -> None:
    results = machines.run(fit, "residual", options, flags, count=3)
    expected = train(CASES["residual"].module, residual_batches(), **flags)
    for rank in range(3):
        assert_close(expected, of_machine(rank, results), rtol=2e-2 if flags else 5e-3)
    one, two, three = (of_machine(rank, results)["state"] for rank in range(3))
    assert all(torch.equal(one[name], two[name]) and torch.equal(one[name], three[name]) for name in one)
    if options:  # It was rounded.
        assert any(relative_difference(tensor, one[name]) > 1e-6 for name, tensor in expected.state.items())


# --------------------------------------------------------------------------------------------------------- checkpoints


def fit_from(
    machine: Machine, ckpt_path: str | None, save: str | None, epochs: int, shares: bool = False
) -> dict[str, Any]:
    found = train(
        lambda: seeded(lambda: Residual(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))),
        machine.part(residual_batches()),
        RoundPipeStrategy(num_microbatches=2, timeout=30, shard_optimizer_state=shares)
        if machine.count > 1
        else "auto",
        ckpt_path=ckpt_path,
        num_nodes=machine.count,
        max_epochs=epochs,
        during=lambda trainer: saving(trainer, save),
    )
    return portable(found) if machine.count > 1 else found


@contextmanager
def saving(trainer: L.Trainer, path: str | None) -> Iterator[None]:
    yield
    if path is not None:
        trainer.save_checkpoint(path)


@pytest.mark.parametrize("shares", [False, True])
def test_resumes_on_another_number_of_machines(machines: Machines, tmp_path: Path, shares: bool) -> None:
    path = str(tmp_path / "two.ckpt")
    machines.run(fit_from, None, path, 1, shares, count=2)
    expected = fit_from(Machine(0, 1), None, None, 2)
    results = machines.run(fit_from, path, None, 2, shares, count=3)
    together = {key: value for rank in range(3) for key, value in of_machine(rank, results)["optimizer"].items()}
    for rank in range(3):
        assert_close(expected, {**of_machine(rank, results), "optimizer": together}, rtol=1e-5)
    alone = fit_from(Machine(0, 1), path, None, 2)
    assert_close(expected, portable(alone), rtol=1e-5)


# --------------------------------------------------------------------------------------------------- shared optimizer

SHARED = {"shard_optimizer_state": True}


@pytest.mark.parametrize(
    "options, flags, count",
    [
        (EXACT, {}, 2),
        (OFF, {"accumulate_grad_batches": 2}, 2),
        (EXACT, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, 3),
    ],
    ids=str,
)
def test_each_machine_has_the_optimizer_state_of_its_share(
    machines: Machines, options: dict[str, Any], flags: dict[str, Any], count: int
) -> None:
    results = machines.run(fit, "mlp", {**options, **SHARED}, flags, count=count)
    expected = train(CASES["mlp"].module, CASES["mlp"].batches(), **flags)
    found = [of_machine(rank, results) for rank in range(count)]
    together = {name: tensor for result in found for name, tensor in result["optimizer"].items()}
    assert sum(len(result["optimizer"]) for result in found) == len(together)
    for result in found:
        assert_close(expected, {**result, "optimizer": together})
        assert all(torch.equal(tensor, found[0]["state"][name]) for name, tensor in result["state"].items())


def state_bytes(machine: Machine) -> int:
    def build() -> Residual:
        return Residual(num_blocks=12, width=32, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))

    strategy = RoundPipeStrategy(num_microbatches=2, timeout=30, **SHARED)
    batches = machine.part(residual_batches(2))
    result = train(lambda: seeded(build), batches, strategy, 2, num_nodes=machine.count, callbacks=[SpeedMonitor()])
    assert result.metrics["roundpipe/reduce_ms"] > 0 and "roundpipe/reduce_exposed_ms" in result.metrics
    return sum(tensor.nbytes for tensor in result.optimizer.values())


def test_bytes_of_the_optimizer_state_of_a_share(machines: Machines) -> None:
    whole = 2 * sum(parameter.nbytes for parameter in Residual(num_blocks=12, width=32).parameters())
    for found in machines.run(state_bytes, count=3):
        assert found == pytest.approx(whole / 3, rel=0.1)


class Lbfgs(Residual):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def fit_shared(machine: Machine, build: type[Residual], flags: dict[str, Any]) -> None:
    plugins = [RoundPipePrecision(flags.pop("precision"))] if "precision" in flags else None
    strategy = RoundPipeStrategy(timeout=30, **SHARED)
    batches = machine.part(residual_batches())
    train(build, batches, strategy, 1, num_nodes=machine.count, plugins=plugins, **flags)


@pytest.mark.parametrize(
    "build, flags, said",
    [
        (Manual, {}, "with manual optimization"),
        (Lbfgs, {}, "LBFGS evaluates the loss several times"),
        (Residual, {"precision": "16-mixed"}, "the loss scale"),
    ],
    ids=["manual", "lbfgs", "scaled"],
)
def test_optimizers_that_can_not_be_shared(
    machines: Machines, build: type[Residual], flags: dict[str, Any], said: str
) -> None:
    results = machines.run(fit_shared, build, flags)
    for rank in range(2):
        assert said in error_of(results, rank, "MisconfigurationException")


# -------------------------------------------------------------------------------------------------------------- errors


class Rows(IterableDataset[Any]):
    """A stream of batches, of which nobody knows how many there are."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def fit_stream(machine: Machine) -> None:
    batches = residual_batches(3 + machine.rank)
    strategy = RoundPipeStrategy(num_microbatches=2, timeout=30)
    trainer_for(strategy, 2, num_nodes=2).fit(Residual(), DataLoader(Rows(batches), batch_size=None))


def test_streams_of_different_length_are_noticed(machines: Machines) -> None:
    results = machines.run(fit_stream)
    for rank in range(2):
        assert "The data of some machines ends with batch 2" in error_of(results, rank, "MachineMismatchError")


class Breaks(Residual):
    """Raises in the middle of the second step, on machine 1."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank == 1 and self.global_step == 1:
            loss.register_hook(lambda gradient: 1 / 0)
        return loss


def fit_that_breaks(machine: Machine, folder: Path) -> str:
    os.chdir(folder)
    strategy = RoundPipeStrategy(num_microbatches=2, timeout=30)
    try:
        train(Breaks, machine.part(residual_batches()), strategy, 2, num_nodes=machine.count)
    except ZeroDivisionError:
        wait_for(Path("ended"))
        return "raised"
    except MachineLostError as error:
        Path("ended").touch()
        return str(error)
    return "trained"


def test_error_in_a_step_ends_the_others(machines: Machines, tmp_path: Path) -> None:
    lost, raised = machines.run(fit_that_breaks, tmp_path)
    assert raised == "raised"
    assert "Another machine was lost while gradients were averaged" in lost


class Fails(L.Callback):
    """Ends the process, raises, or hangs, at the second batch, on machine 1."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank == 0 and index == 1 and self.how == "dies":
            torch.distributed.barrier()  # As Lightning, metrics and user code may do.
        if trainer.global_rank == 1 and index == 1:
            if self.how == "raises":
                raise ZeroDivisionError("on purpose")
            if self.how == "dies":
                os._exit(1)
            wait_for(Path("ended"))


def fit_twice(machine: Machine) -> dict[str, Any]:
    with pytest.raises(ZeroDivisionError):
        fit(machine, "residual", EXACT, {"callbacks": [Stops()]})
    return fit(machine, "residual", EXACT, {})


class Stops(L.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("elastic", [False, True])
def test_machines_that_all_failed_may_try_again(machines: Machines, elastic: bool) -> None:
    expected = train(CASES["residual"].module, residual_batches())
    results = machines.run(fit_twice, elastic=elastic)
    for rank in range(2):
        assert_close(expected, of_machine(rank, results))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def fit_until(machine: Machine, how: str, folder: Path, timeout: float) -> str:
    os.chdir(folder)
    options = {**EXACT, "timeout": timeout}
    try:
        fit(machine, "residual", options, {"callbacks": [Fails(how)]})
    except ZeroDivisionError:
        wait_for(Path("ended"))  # As long as this is handled, the error keeps everything alive.
        return "raised"
    except MachineLostError as error:
        Path("ended").touch()
        return str(error)
    return "trained"


def test_error_on_one_machine_ends_the_others(machines: Machines, tmp_path: Path) -> None:
    lost, raised = machines.run(fit_until, "raises", tmp_path, 30, count=2)
    assert raised == "raised"
    assert "Another machine was lost" in lost
    assert "Timed out" not in lost


def test_machine_that_hangs_ends_the_others(machines: Machines, tmp_path: Path) -> None:
    lost, _ = machines.run(fit_until, "hangs", tmp_path, 1, count=2)
    assert "Another machine was lost" in lost
    assert "Timed out" in lost


def fit_with(machine: Machine, one: dict[str, Any], other: dict[str, Any]) -> None:
    choice = one if machine.rank == 0 else other
    batches = machine.part(residual_batches())[: choice.get("batches", 4)]
    strategy = RoundPipeStrategy(timeout=30, **choice.get("options", {"num_microbatches": 2}))
    build = choice.get("module", Residual)
    train(lambda: seeded(build), batches, strategy, 2, num_nodes=machine.count, **choice.get("flags", {}))


def small_steps() -> Residual:
    return Residual(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))


def wide() -> Residual:
    return Residual(width=24)


@pytest.mark.parametrize(
    "other, said",
    [
        ({"options": {"num_microbatches": 3}}, "`num_microbatches`: 2 on machine 0, 3 on machine 1"),
        ({"flags": {"accumulate_grad_batches": 2}}, "`accumulate_grad_batches`: 1 on machine 0, 2 on machine 1"),
        ({"module": small_steps}, "'lr': 0.01"),
        ({"module": wide}, "`embed.weight`: [32, 16] torch.float32 trained on machine 0, [32, 24]"),
        ({"batches": 3}, "number of training batches: 4 on machine 0, 3 on machine 1"),
    ],
    ids=["micro-batches", "accumulation", "optimizer", "shapes", "batches"],
)
def test_machines_that_differ_are_refused(machines: Machines, other: dict[str, Any], said: str) -> None:
    results = machines.run(fit_with, {}, other, count=2)
    for rank in range(2):
        assert said in error_of(results, rank, "MachineMismatchError")


def test_death_of_a_machine_ends_the_others(machines: Machines, tmp_path: Path) -> None:
    results = machines.run(fit_until, "dies", tmp_path, 30, count=3)
    assert results[1] is None
    for rank in (0, 2):
        assert "Another machine was lost" in of_machine(rank, results)
    assert "while machines exchanged something" in of_machine(0, results)
