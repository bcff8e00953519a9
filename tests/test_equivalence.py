"""Training with the strategy gives the numbers of plain single-device training on the same whole batches.

Every case of ``tests.helpers.models`` trains for an epoch with optimizer and scheduler; every parameter, buffer, loss,
logged value and optimizer moment is compared.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.plan.stages import Plan
from tests.helpers.equivalence import (
    BatchDealer,
    as_float64,
    assert_equivalent,
    assert_results_close,
    assert_results_equal,
    double_batches,
    in_microbatches,
    train,
    trainer_for,
)
from tests.helpers.models import (
    CASES,
    BatchNormCNN,
    Block,
    Case,
    Classifier,
    Counter,
    Residual,
    StepModule,
    residual_batches,
    seeded,
    token_batches,
    vector_batches,
)

each_case = pytest.mark.parametrize("case", CASES.values(), ids=str)


# ------------------------------------------------------------------------------------------------- models of all sorts


@pytest.mark.parametrize("name", ["qwen3_tied", "residual"])
def test_reference_repeats_itself(name: str) -> None:
    """The comparison itself: the same plain fit twice differs in no bit, and another fit is told apart."""
    case = CASES[name]
    first, second = train(case.module, case.batches()), train(case.module, case.batches())
    assert_results_equal(first, second)
    with pytest.raises(AssertionError, match=r"tensor \S*embed\S*.weight: relative difference"):
        assert_results_close(first, train(case.module, case.batches()[::-1]), rtol=1e-5)


@each_case
def test_float32(case: Case) -> None:
    assert_equivalent(case, devices=3, num_microbatches=3)


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.float64], ids=str)
def test_float64_with_uneven_split(case: Case) -> None:
    """Six rows in four micro-batches; in float64 a missing or doubled term cannot hide in rounding."""
    assert_equivalent(case, devices=2, num_microbatches=4, dtype=torch.float64)


@each_case
def test_nothing_bypasses_the_store(case: Case) -> None:
    """While micro-batches run, the parameters of the module hold NaN: whoever computes with one is found out."""
    from lightning_roundpipe.runtime.testing import poison_masters

    assert_equivalent(case, devices=2, num_microbatches=2, during=lambda trainer: poison_masters(trainer.strategy))


@pytest.mark.parametrize("units", [["Block"], ["blocks.1", "head"], ["Linear", "Embedding"]], ids=str)
def test_units_given_by_hand(units: Any) -> None:
    assert_equivalent(CASES["residual"], devices=2, num_microbatches=2, units=units)


@pytest.mark.parametrize("units", [["NoSuchClass"], ["blocks.17"]], ids=str)
def test_units_that_do_not_exist_are_refused(units: list[str]) -> None:
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2, units=units), devices=2)
    with pytest.raises(Exception, match=units[0]):
        trainer.fit(seeded(Residual), BatchDealer(residual_batches()))


def test_workers_per_device() -> None:
    assert_equivalent(CASES["residual"], devices=2, num_microbatches=3, workers_per_device=2)


# -------------------------------------------------------------------------------------------------------- batch splits


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uneven_batches(devices: int, dtype: torch.dtype) -> None:
    """Batches of 1 row up to more than twice the number of micro-batches."""
    batches = [batch for rows in (1, 2, 5, 6, 7) for batch in residual_batches(num=1, rows=rows)]
    assert_equivalent(Case("uneven", lambda: seeded(Residual), lambda: batches), devices, 3, dtype)


def test_last_batch_of_a_real_dataloader_is_smaller() -> None:
    """Seven rows with batch size 3; the loss on the last row must not be divided by the wrong number."""
    tokens, targets = residual_batches(num=1, rows=7)[0]

    def fit(strategy: Any, devices: int) -> L.LightningModule:
        module = seeded(Residual)
        loader = DataLoader(TensorDataset(tokens, targets), batch_size=3, shuffle=False)
        trainer_for(strategy, devices, max_epochs=2).fit(module, loader)
        return module

    expected, found = fit("auto", 1), fit(RoundPipeStrategy(num_microbatches=2), 2)
    for (name, one), two in zip(expected.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", ["qwen3_tied", "gpt2", "t5", "bert_mlm"])
@pytest.mark.parametrize("num_microbatches", [2, 3, 6])
def test_ignored_labels(name: str, num_microbatches: int) -> None:
    """Rows have different numbers of valid labels, the first row (of 6 micro-batches: the first one) has none.

    A mean of means would be wrong here. Causal models shift the labels, so that one label a row is not counted.
    """
    module = CASES[name].module
    case = Case(f"{name}_ignored", module, lambda: token_batches(num=3, ignored=True))
    assert_equivalent(case, 2, num_microbatches)


class MeanOfRows(StepModule):
    """A loss that is a mean over rows, although its labels hold -100: only ``loss_weight="samples"`` is right."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(64, 16), Block(16), nn.Linear(16, 64))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.model(batch["input_ids"]), batch["labels"]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return losses.mean(-1).mean()


def test_loss_weight_by_samples() -> None:
    case = Case("mean_of_rows", lambda: seeded(MeanOfRows), lambda: token_batches(ignored=True))
    assert_equivalent(case, 2, 4, loss_weight="samples")


class SumOverWeights(MeanOfRows):
    """A weighted mean: rows count ``batch["importance"]`` each."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(self.model(batch["input_ids"]).transpose(1, 2), batch["input_ids"], reduction="none")
        importance = batch["importance"]
        return (losses.mean(-1) * importance).sum() / importance.sum()


def total_importance(batch: dict[str, Tensor]) -> float:
    return float(batch["importance"].sum())


def test_loss_weight_by_callable() -> None:
    def batches() -> list[Any]:
        return [{**batch, "importance": torch.arange(1.0, 7.0)} for batch in token_batches()]

    case = Case("weighted_mean", lambda: seeded(SumOverWeights), batches)
    assert_equivalent(case, 2, 3, loss_weight=total_importance)


class AsksForShapes(StepModule):
    """Records the shapes in which ``training_step`` sees its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(16), nn.Linear(16, 10))
        self.seen: list[dict[str, Any]] = []

    def loss(self, batch: dict[str, Any]) -> Tensor:
        shapes = {key: tuple(value.shape) for key, value in batch.items() if isinstance(value, Tensor)}
        self.seen.append({**batch, **shapes})
        return F.cross_entropy(self.net(batch["inputs"] * batch["scale"]), batch["classes"])


def shaped_batch(**more: Any) -> dict[str, Any]:
    inputs, classes = vector_batches(16, num=1)[0]
    return {"inputs": inputs, "classes": classes, "scale": torch.tensor(2.0), **more}


def test_only_tensors_of_batch_size_are_split() -> None:
    batch = shaped_batch(position_ids=torch.arange(8)[None], names=["a", "b", "c", "d", "e", "f"], mode="fast", level=3)
    found = train(lambda: seeded(AsksForShapes), [batch], RoundPipeStrategy(num_microbatches=3), devices=2)
    parts = found.module.seen
    assert [part["inputs"] for part in parts] == [(2, 16)] * 3
    assert all(part["position_ids"] == (1, 8) and part["scale"] == () for part in parts)
    assert all(part["mode"] == "fast" and part["level"] == 3 for part in parts)


def ambiguous_batch() -> dict[str, Any]:
    """Three rows, and position ids that may be those of three axes."""
    return {
        "inputs": torch.randn(3, 16, generator=torch.Generator().manual_seed(0)),
        "classes": torch.arange(3),
        "scale": torch.tensor(1.0),
        "position_ids": torch.arange(8).expand(3, 3, 8),
    }


def test_ambiguous_tensor_is_refused_by_name() -> None:
    """(3, B, S) position ids cannot be told from a batch of three rows."""
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=3), devices=2)
    with pytest.raises(Exception, match="position_ids"):
        trainer.fit(seeded(AsksForShapes), BatchDealer([ambiguous_batch()]))


@pytest.mark.parametrize(("rule", "shape"), [(1, (3, 1, 8)), (0, (1, 3, 8)), ("replicate", (3, 3, 8))])
def test_split_rules(rule: int | str, shape: tuple[int, ...]) -> None:
    strategy = RoundPipeStrategy(num_microbatches=3, split_rules={"position_ids": rule})
    found = train(lambda: seeded(AsksForShapes), [ambiguous_batch()], strategy, devices=2)
    assert [part["position_ids"] for part in found.module.seen] == [shape] * 3


# -------------------------------------------------------------------------------------------------- parameters, buffers


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def test_tied_weight_is_one_parameter(tmp_path: Any) -> None:
    """First and last unit share a weight: one optimizer entry, counted once in the norm, still one storage on disk."""
    flags: dict[str, Any] = {"gradient_clip_val": 0.1}

    def module() -> L.LightningModule:
        return seeded(lambda: Residual(tied=True, optimizer=adamw)).double()

    batches = residual_batches()
    expected = train(module, batches, **flags)
    found = train(module, batches, RoundPipeStrategy(num_microbatches=3), devices=3, **flags)
    assert_results_close(expected, found, rtol=1e-10)
    assert found.module.head.weight is found.module.embed.weight
    assert len(found.trainer.optimizers[0].state) == len(list(found.module.parameters()))

    found.trainer.save_checkpoint(tmp_path / "tied.ckpt")
    saved = torch.load(tmp_path / "tied.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == expected.module.state_dict().keys()
    assert saved["head.weight"].data_ptr() == saved["embed.weight"].data_ptr()


def test_batch_norm_with_one_microbatch_equals_plain() -> None:
    case = Case("batch_norm", lambda: seeded(BatchNormCNN), lambda: vector_batches(1, 8, 8))
    assert_equivalent(case, devices=2, num_microbatches=1)


@pytest.mark.parametrize("devices", [1, 3])
def test_batch_norm_equals_microbatches_one_after_another(devices: int) -> None:
    """Statistics are per micro-batch, taken in order, and not taken again in recomputation."""
    module, batches = as_float64(lambda: seeded(BatchNormCNN)), double_batches(vector_batches(1, 8, 8))
    expected = train(in_microbatches(module, 3), batches)
    found = train(module, batches, RoundPipeStrategy(num_microbatches=3), devices)
    assert_results_close(expected, found, rtol=1e-10)
    assert int(found.state["net.1.num_batches_tracked"]) == 3 * len(batches)


@pytest.mark.parametrize("devices", [1, 2])
def test_buffers_written_in_forward_are_written_once(devices: int) -> None:
    def build() -> L.LightningModule:
        layers = [layer for _ in range(3) for layer in (Block(16), Counter())]
        return Classifier(nn.Sequential(*layers, nn.Linear(16, 10)))

    def module() -> L.LightningModule:
        return seeded(build)

    batches = vector_batches(16)
    expected = train(in_microbatches(module, 2), batches)
    found = train(module, batches, RoundPipeStrategy(num_microbatches=2), devices)
    assert_results_close(expected, found, rtol=1e-5)
    assert int(found.state["net.1.calls"]) == 2 * len(batches)


class FrozenBlocks(Residual):
    """All blocks but the last are frozen; the optimizer is given every parameter or only those that train."""

    only_trainable = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:-1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return adamw([p for p in self.parameters() if p.requires_grad or not self.only_trainable])


class OnlyTrainable(FrozenBlocks):
    only_trainable = True


@pytest.mark.parametrize("build", [FrozenBlocks, OnlyTrainable])
def test_frozen_parameters(build: type[FrozenBlocks]) -> None:
    before = {name: tensor.clone() for name, tensor in seeded(build).named_parameters()}
    expected = train(lambda: seeded(build), residual_batches())
    found = train(lambda: seeded(build), residual_batches(), RoundPipeStrategy(num_microbatches=3), devices=2)
    assert_results_close(expected, found, rtol=1e-5)
    for name, parameter in found.module.named_parameters():
        if parameter.requires_grad:
            assert not torch.equal(parameter, before[name]), f"{name} was not trained"
        else:
            assert torch.equal(parameter, before[name]), f"{name} is frozen, yet changed"
            assert parameter.grad is None
            assert parameter not in found.trainer.optimizers[0].state


def test_parameters_that_no_loss_reaches_keep_no_gradient() -> None:
    """An expert that is never called is left alone, as torch does: no gradient, hence no update and no decay."""

    class WithSpareBlock(Residual):
        def __init__(self) -> None:
            super().__init__(optimizer=adamw)
            self.spare = Block(16)

    expected = train(lambda: seeded(WithSpareBlock), residual_batches())
    found = train(lambda: seeded(WithSpareBlock), residual_batches(), RoundPipeStrategy(num_microbatches=2), devices=2)
    assert_results_close(expected, found, rtol=1e-5)
    assert all(parameter.grad is None for parameter in found.module.spare.parameters())


def test_lora(tmp_path: Any) -> None:
    """Adapters of all layers train behind a frozen embedding; what is saved and merged is what was trained."""
    from peft import PeftModel
    from safetensors.torch import load_file

    case = CASES["llama_lora"]
    found = train(case.module, case.batches(), RoundPipeStrategy(num_microbatches=3), devices=3)
    model = found.module.model
    adapters = {name: tensor for name, tensor in model.named_parameters() if "lora_B" in name}
    assert len(adapters) == 8
    assert all(tensor.abs().max() > 0 for tensor in adapters.values())

    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    trained = {
        name.replace(".modules_to_save", "").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert saved.keys() == trained.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, trained[name]), name

    tokens = case.batches()[0]["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        reloaded = PeftModel.from_pretrained(case.module().model.unload(), tmp_path, is_trainable=True)
        torch.testing.assert_close(reloaded(input_ids=tokens).logits, expected)

        merged = copy.deepcopy(model).merge_and_unload()
        torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)

    def continued() -> L.LightningModule:
        module = case.module()
        module.model = copy.deepcopy(reloaded)
        return module

    expected_again = train(continued, case.batches())
    again = train(continued, case.batches(), RoundPipeStrategy(num_microbatches=2), devices=2)
    assert_results_close(expected_again, again, rtol=1e-5)


# ----------------------------------------------------------------------------------- what must never go wrong silently


@dataclass
class Carrier:
    """What some models pass from block to block; torch's pytree does not know it."""

    x: Tensor
    depth: int


class CarrierBlock(Block):
    def forward(self, carrier: Carrier) -> Carrier:  # type: ignore[override]
        return Carrier(super().forward(carrier.x), carrier.depth + 1)


class RemembersBlock(Block):
    """Leaves an auxiliary loss on itself, for the training step to pick up."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.auxiliary = x.square().mean()
        return x


class AppendsBlock(Block):
    """Appends its output to a list of its caller."""

    def forward(self, x: Tensor, outputs: list[Tensor]) -> Tensor:  # type: ignore[override]
        outputs.append(super().forward(x))
        return outputs[-1]


class PassesDataclass(Residual):
    block_type: type[Block] = CarrierBlock

    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(self.block_type(16) for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        carrier = Carrier(self.embed(tokens), 0)
        for block in self.blocks:
            carrier = block(carrier)
        assert carrier.depth == len(self.blocks)
        return self.head(carrier.x)


class PicksUpLosses(PassesDataclass):
    block_type = RemembersBlock
    forward = Residual.forward

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * sum(block.auxiliary for block in self.blocks)


class CollectsOutputs(PassesDataclass):
    block_type = AppendsBlock

    def forward(self, tokens: Tensor) -> Tensor:
        x, outputs = self.embed(tokens), []
        for block in self.blocks:
            x = block(x, outputs)
        return self.head(x + sum(outputs))


class RenormalisesEmbedding(Residual):
    """The embedding writes to its own weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16, max_norm=1.0)


class CallsItselfFunctionally(Residual):
    def loss(self, batch: Any) -> Tensor:
        logits = torch.func.functional_call(self, dict(self.named_parameters()), (batch[0],))
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize(
    "build", [PassesDataclass, PicksUpLosses, CollectsOutputs, RenormalisesEmbedding, CallsItselfFunctionally]
)
def test_right_or_refused(build: Callable[[], L.LightningModule]) -> None:
    """What streaming may not be able to do is refused with the package's own error, and never computed wrongly."""
    case = Case(build.__name__, lambda: seeded(build), residual_batches)
    with contextlib.suppress(UnsupportedUseError):
        assert_equivalent(case, 2, 3, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Compiled modules run eagerly:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_blocks(in_place: bool) -> None:
    """``block.compile()`` and ``torch.compile(block)``; the eager backend, as it needs no compiler."""

    def build() -> L.LightningModule:
        module = Residual()
        for index, block in enumerate(module.blocks):
            if in_place:
                block.compile(backend="eager")
            else:
                module.blocks[index] = torch.compile(block, backend="eager")
        return module

    torch._dynamo.reset()
    assert_equivalent(Case(f"compiled_{in_place}", lambda: seeded(build), residual_batches), 2, 3)


# ----------------------------------------------------------------------------------------------------- random modules

WIDTH = 8


class Sum(nn.Module):
    """Adds up what its children make of the same input."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(branch(x) for branch in self.branches)


class Repeat(nn.Module):
    """Calls its child several times."""

    def __init__(self, child: nn.Module, times: int) -> None:
        super().__init__()
        self.child = child
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.child(x))
        return x


class Scale(nn.Module):
    """A container with a loose parameter and a buffer of its own, both used around its child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x * self.scale) + self.shift


class Frozen(nn.Module):
    """A child whose parameters do not train."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


Tree = tuple[Any, ...]
_leaves = st.sampled_from([("linear",), ("block",), ("norm",), ("tanh",)])
trees = st.recursive(
    _leaves,
    lambda children: st.one_of(
        st.tuples(st.just("chain"), st.lists(children, min_size=1, max_size=4)),
        st.tuples(st.just("sum"), st.lists(children, min_size=1, max_size=3)),
        st.tuples(st.just("repeat"), children, st.integers(1, 3)),
        st.tuples(st.just("scale"), children),
        st.tuples(st.just("frozen"), children),
    ),
    max_leaves=8,
)


def grow(tree: Tree) -> nn.Module:
    """Builds the module that a tree describes; inputs and outputs are (B, WIDTH)."""
    builders: dict[str, Callable[..., nn.Module]] = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "block": lambda: Block(WIDTH),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "tanh": nn.Tanh,
        "chain": lambda children: nn.Sequential(*map(grow, children)),
        "sum": lambda children: Sum(list(map(grow, children))),
        "repeat": lambda child, times: Repeat(grow(child), times),
        "scale": lambda child: Scale(grow(child)),
        "frozen": lambda child: Frozen(grow(child)),
    }
    return builders[tree[0]](*tree[1:])


@settings(max_examples=25, deadline=None)
@given(
    tree=trees,
    rows=st.integers(1, 10),
    workers=st.integers(1, 8),
    num_microbatches=st.integers(1, 9),
    accumulate=st.integers(1, 2),
)
def test_random_modules(tree: Tree, rows: int, workers: int, num_microbatches: int, accumulate: int) -> None:
    def module() -> L.LightningModule:
        return seeded(lambda: Classifier(nn.Sequential(grow(tree), nn.Linear(WIDTH, 10)))).double()

    batches = double_batches(vector_batches(WIDTH, num=2, rows=rows))
    expected = train(module, batches, accumulate_grad_batches=accumulate)
    strategy = RoundPipeStrategy(num_microbatches=num_microbatches)
    found = train(module, batches, strategy, workers, accumulate_grad_batches=accumulate)
    assert_results_close(expected, found, rtol=1e-9)


def random_cut(calls: int, draw: random.Random) -> tuple[int, ...]:
    """Cuts a number of calls into stages of random sizes."""
    sizes = []
    while calls:
        sizes.append(draw.randint(1, calls))
        calls -= sizes[-1]
    return tuple(sizes)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    workers=st.integers(1, 8),
    num_microbatches=st.integers(1, 9),
    name=st.sampled_from(["residual_tied", "layer_drop", "u_shape", "shared_block", "auxiliary_loss", "called_twice"]),
)
def test_random_plans(seed: int, workers: int, num_microbatches: int, name: str) -> None:
    """Wherever forward and backward are cut, and however small the fused stage is, the numbers are the same."""
    draw = random.Random(seed)

    def balanced_plan(call_bytes: Sequence[int], num_workers: int) -> Plan:
        fused = draw.randint(0, len(call_bytes))
        streamed = len(call_bytes) - fused
        return Plan(random_cut(streamed, draw), fused, random_cut(streamed, draw))

    with mock.patch("lightning_roundpipe.runtime.planning.balanced_plan", balanced_plan):
        assert_equivalent(CASES[name], workers, num_microbatches, dtype=torch.float64)
