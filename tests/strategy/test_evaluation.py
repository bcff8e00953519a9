"""Validation, test and prediction: any batch size, merged outputs, and no trace of training."""

import copy
import pickle
import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, assert_results_close, train, trainer_for
from tests.helpers.models import CASES, LanguageModel, Residual, residual_batches, seeded


def ours(num_microbatches: int = 3) -> RoundPipeStrategy:
    return RoundPipeStrategy(num_microbatches=num_microbatches)


class NeverTrains(Residual):
    def configure_optimizers(self) -> Any:
        raise AssertionError("Evaluation must not build an optimizer.")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "pair": (logits.argmax(-1), batch[0]), "number": batch_idx, "name": "x"}


UNEVEN = [batch for rows in (1, 2, 5, 6, 7) for batch in residual_batches(num=1, rows=rows)]


@pytest.mark.parametrize("devices", [1, 3])
def test_steps_that_call_no_layer(devices: int) -> None:
    class Looks(NeverTrains):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("mean", batch[0].float().mean(), batch_size=len(batch[0]))

    one, two = (
        trainer_for(strategy, number).test(seeded(Looks), BatchDealer(UNEVEN), verbose=False)
        for strategy, number in (("auto", 1), (ours(), devices))
    )
    assert two[0] == pytest.approx(one[0], rel=1e-6)


@pytest.mark.parametrize("entry", ["validate", "test"])
@pytest.mark.parametrize("devices", [1, 3])
def test_without_fit(entry: str, devices: int) -> None:
    """Two dataloaders, batches from 1 row on; metrics are weighted by rows; no optimizer, no gradient."""

    class TwoLoaders(NeverTrains):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            assert not self.training and not torch.is_grad_enabled()
            self.log("loss", self.loss(batch))

        test_step = validation_step

    def evaluate(strategy: Any, devices: int) -> tuple[L.LightningModule, Any]:
        module = seeded(TwoLoaders)
        loaders = [BatchDealer(UNEVEN), BatchDealer(residual_batches(num=2))]
        return module, getattr(trainer_for(strategy, devices), entry)(module, loaders, verbose=False)

    _, expected = evaluate("auto", 1)
    module, found = evaluate(ours(), devices)
    assert len(found) == 2
    for one, two in zip(expected, found, strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("devices", [1, 2])
def test_predictions_are_merged(devices: int) -> None:
    module = seeded(NeverTrains)
    expected = trainer_for().predict(module, BatchDealer(UNEVEN))
    found = trainer_for(ours(), devices).predict(seeded(NeverTrains), BatchDealer(UNEVEN))
    assert expected is not None and found is not None
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(two["logits"], one["logits"])
        assert torch.equal(two["pair"][0], one["pair"][0]) and torch.equal(two["pair"][1], one["pair"][1])
        assert (two["number"], two["name"]) == (one["number"], "x")


def test_predict_outputs_of_transformers_models() -> None:
    class Predicts(LanguageModel):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(input_ids=batch["input_ids"], use_cache=False)

    case = CASES["qwen3_tied"]

    def module() -> L.LightningModule:
        return Predicts(case.module().model)

    expected = trainer_for().predict(module(), BatchDealer(case.batches()))
    found = trainer_for(ours(), 2).predict(module(), BatchDealer(case.batches()))
    assert expected is not None and found is not None
    for one, two in zip(expected, found, strict=True):
        assert type(two) is type(one)
        torch.testing.assert_close(two.logits, one.logits)


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 2},
    "static": {"do_sample": False, "cache_implementation": "static"},
    "without cache": {"do_sample": False, "use_cache": False},
}


class Generates(LanguageModel):
    """Generates in validation and test, and keeps the tokens."""

    options: dict[str, Any]

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.generated: list[Tensor] = []

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        mask = torch.ones_like(tokens)
        mask[tokens[:, 0] % 2 == 0, :2] = 0  # Some rows are padded on the left.
        return self.model.generate(
            tokens, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, pad_token_id=0, **self.options
        )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch))
        return {"tokens": self.predict_step(batch, batch_idx)}

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.generated.append(outputs["tokens"])

    on_test_batch_end = on_validation_batch_end


@pytest.mark.parametrize(
    ("name", "how"),
    [("gpt2", "greedy"), ("t5", "greedy"), ("llama_lora", "greedy"), ("qwen3_moe", "greedy")]
    + [("qwen3_tied", how) for how in GENERATION],
)
def test_generation_everywhere(name: str, how: str) -> None:
    """In validation inside a fit, in validate, test and predict, and after it all: the tokens of the plain model."""

    def run(strategy: Any, devices: int) -> list[Tensor]:
        module = seeded(lambda: Generates(CASES[name].module().model))
        module.options = GENERATION[how]
        batches = CASES[name].batches()[:2]
        one_row = {key: tensor[:1] for key, tensor in batches[0].items()}  # Fewer rows than micro-batches.
        trainer = trainer_for(strategy, devices, num_sanity_val_steps=1, max_epochs=1)
        trainer.fit(module, BatchDealer(CASES[name].batches()), BatchDealer([*batches, one_row]))
        trainer.validate(module, BatchDealer(batches), verbose=False)
        trainer.test(module, [BatchDealer(batches), BatchDealer([one_row])], verbose=False)
        predicted = trainer.predict(module, BatchDealer([*batches, one_row]))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, BatchDealer(CASES[name].batches()), BatchDealer(batches))  # Nothing stayed behind.
        module.eval()
        with torch.no_grad():
            after = module.predict_step(batches[1], 0)
        return [*module.generated, *predicted, after]

    expected, found = run("auto", 1), run(ours(), 2)
    assert len(expected) == len(found)
    for one, two in zip(expected, found, strict=True):
        assert torch.equal(one, two)


def test_generation_uses_its_cache() -> None:
    """After the prompt each layer is given one position at a time."""
    module = seeded(lambda: Generates(CASES["qwen3_tied"].module().model))
    module.options = GENERATION["greedy"]
    lengths: list[int] = []
    module.model.model.layers[1].register_forward_pre_hook(
        lambda layer, args, kwargs: lengths.append((args or (kwargs["hidden_states"],))[0].shape[1]), with_kwargs=True
    )
    trainer_for(ours(2), 2).predict(module, BatchDealer(CASES["qwen3_tied"].batches()[:1]))
    assert sorted(lengths) == [1] * 6 + [8] * 2


@pytest.mark.parametrize("inference_mode", [False, True])
def test_evaluation_modes(inference_mode: bool) -> None:
    """Each step runs in the mode that the trainer asks for, and a fit after it trains as a fresh one."""
    modes: list[tuple[bool, bool]] = []

    class Looks(Residual):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().validation_step(batch, batch_idx)

    module = seeded(Looks)
    trainer = trainer_for(ours(), 2, inference_mode=inference_mode)
    trainer.validate(module, BatchDealer(residual_batches(num=1)), verbose=False)
    assert set(modes) == {(False, inference_mode)}
    modes.clear()
    trainer.fit(module, BatchDealer(residual_batches()), BatchDealer(residual_batches(num=1)))
    assert set(modes) == {(False, False)}
    fresh = train(lambda: seeded(Residual), residual_batches(), ours(), 2)
    for name, tensor in fresh.state.items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_validation_inside_an_epoch() -> None:
    """Sanity check, then validation between accumulated batches: pending gradients survive, newest weights are used."""
    flags: dict[str, Any] = {
        "val_check_interval": 2,
        "accumulate_grad_batches": 3,
        "num_sanity_val_steps": 2,
        "max_epochs": 2,
        "val_batches": UNEVEN,
    }

    class Remembers(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def on_validation_epoch_end(self) -> None:
            self.seen.append(float(self.trainer.callback_metrics["val_loss"]))

    def module() -> L.LightningModule:
        return seeded(Remembers).double()

    expected = train(module, residual_batches(num=6), **flags)
    found = train(module, residual_batches(num=6), ours(), 2, **flags)
    assert_results_close(expected, found, rtol=1e-10)
    assert len(found.module.seen) > 4
    assert found.module.seen == pytest.approx(expected.module.seen)


def test_validate_fit_validate_fit_with_one_trainer() -> None:
    """Evaluation before, between and after fits changes nothing, and optimizer state carries over as in Lightning."""

    def run(strategy: Any, devices: int) -> list[Any]:
        module = seeded(lambda: Residual(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2))).double()
        trainer = trainer_for(strategy, devices)
        loader, val_loader = BatchDealer(residual_batches()), BatchDealer(UNEVEN)
        results: list[Any] = list(trainer.validate(module, val_loader, verbose=False))
        trainer.fit(module, loader, val_loader)
        results += trainer.validate(module, val_loader, verbose=False)
        results += trainer.test(module, val_loader, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader, val_loader)
        results += trainer.validate(module, val_loader, verbose=False)
        results.append({name: float(tensor.sum()) for name, tensor in module.state_dict().items()})
        results.append({"global_step": trainer.global_step, "epoch": trainer.current_epoch})
        return results

    for one, two in zip(run("auto", 1), run(ours(), 2), strict=True):
        assert two == pytest.approx(one, rel=1e-9)


def test_module_is_an_ordinary_one_after_fit() -> None:
    """Nothing of ours is left on it: forward, backward, deepcopy, pickle, and training elsewhere."""
    threads = set(threading.enumerate())
    plain, module = seeded(Residual), seeded(Residual)
    tokens = residual_batches()[0][0]
    trainer = trainer_for(ours(), 3)
    trainer.fit(module, BatchDealer(residual_batches()))
    assert set(threading.enumerate()) <= threads

    for submodule, original in zip(module.modules(), plain.modules(), strict=True):
        assert type(submodule) is type(original)
        assert type(submodule._parameters) is type(original._parameters)
        assert type(submodule._buffers) is type(original._buffers)
        assert submodule._forward_hooks == original._forward_hooks
        assert submodule._forward_pre_hooks == original._forward_pre_hooks
        ours_only = submodule.__dict__.keys() - original.__dict__.keys()
        assert not {name for name in ours_only if "forward" in name}

    expected = module(tokens)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module.cpu()))):
        torch.testing.assert_close(copied(tokens), expected)
    module(tokens).sum().backward()
    assert module.head.weight.grad is not None
    trainer_for().fit(module, BatchDealer(residual_batches(num=1)))


def test_module_can_be_copied_when_fit_starts() -> None:
    """``copy.deepcopy(self)`` in ``on_fit_start``, as for a reference policy, gives an independent module."""

    class Copies(Residual):
        def on_fit_start(self) -> None:
            layers = torch.nn.ModuleList([self.embed, *self.blocks, self.head])
            self.teacher = [copy.deepcopy(layers)]  # In a list: not a submodule.
            self.whole = [copy.deepcopy(self)]

        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                self.logits_of_copy = self.whole[0](residual_batches()[0][0])

    module = seeded(Copies)
    tokens = residual_batches()[0][0]
    with torch.no_grad():
        before = module(tokens)
    trainer_for(ours(), 2).fit(module, BatchDealer(residual_batches()))
    assert not torch.allclose(module(tokens), before)
    torch.testing.assert_close(module.logits_of_copy, before)
    with torch.no_grad():
        torch.testing.assert_close(module.whole[0](tokens), before)
    assert torch.equal(module.teacher[0][0].weight, seeded(Copies).embed.weight)


def test_module_can_be_called_in_hooks() -> None:
    """Outside the steps the module computes with its masters, with and without gradients."""

    class CallsItself(Residual):
        def _compute(self) -> None:
            tokens = residual_batches()[0][0]
            gradient = torch.autograd.grad(self(tokens).square().mean(), self.head.weight)[0]
            self.results.append(float(gradient.sum()))

        def on_train_start(self) -> None:
            self._compute()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self._compute()

        def on_train_batch_end(self, *args: Any) -> None:
            self._compute()

        def on_fit_end(self) -> None:
            self._compute()

    def run(strategy: Any, devices: int) -> list[float]:
        module = seeded(CallsItself).double()
        module.results = []
        with torch.enable_grad():
            trainer_for(strategy, devices).fit(module, BatchDealer(residual_batches()))
        return module.results

    assert run(ours(), 2) == pytest.approx(run("auto", 1))


def test_sampler_is_left_alone() -> None:
    class ChecksSampler(Residual):
        def on_train_start(self) -> None:
            self.sampler_type = type(self.trainer.train_dataloader.sampler).__name__

    tokens, targets = residual_batches(num=1)[0]
    module = seeded(ChecksSampler)
    rows = list(zip(tokens, targets, strict=True))
    trainer_for(ours(), 3).fit(module, DataLoader(rows, batch_size=3, shuffle=True))
    assert module.sampler_type == "RandomSampler"
