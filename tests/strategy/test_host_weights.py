"""`host_weights`: frozen weights that stay in their files train, evaluate and are saved like any others."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from lightning_roundpipe.exceptions import HostMemoryError, UnsupportedUseError
from lightning_roundpipe.export import export_pretrained
from lightning_roundpipe.loading import empty_parameters, load_pretrained
from lightning_roundpipe.plan.files import save_schedule
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.runtime.executor import Executor
from lightning_roundpipe.runtime.hardware import host_facts
from lightning_roundpipe.runtime.mapped import FileMappings
from lightning_roundpipe.runtime.placement import HOST_WEIGHTS
from lightning_roundpipe.runtime.staging import StagingRing
from lightning_roundpipe.runtime.units import tensor_bytes
from tests.helpers.equivalence import (
    BatchDealer,
    TrainResult,
    assert_results_close,
    assert_results_equal,
    train,
    trainer_for,
)
from tests.helpers.memory import own_memory
from tests.helpers.models import (
    LanguageModel,
    Residual,
    llama_from_files,
    residual_batches,
    seeded,
    token_batches,
    vector_batches,
)
from tests.helpers.shim import gpu_workers_on_the_host

pytest.importorskip("peft")


def frozen(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


class Watch(L.Callback):
    """Notes, within the fit, how many bytes of frozen weights lie in files."""

    def __init__(self) -> None:
        self.told = self.found = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        files = FileMappings()
        self.told = trainer.strategy.mapped_bytes  # type: ignore[attr-defined]
        self.found = sum(tensor_bytes(parameter) for parameter in module.parameters() if parameter in files)


@pytest.mark.parametrize("kind, tied", [*((kind, False) for kind in HOST_WEIGHTS), ("mmap", True)])
def test_adapters_train_as_in_plain_lightning(tmp_path: Path, kind: str, tied: bool) -> None:
    def build() -> LanguageModel:
        return llama_from_files(tmp_path, tied=tied)

    expected = train(build, token_batches(num=3))
    watch = Watch()
    strategy = RoundPipeStrategy(num_microbatches=3, host_weights=kind)
    found = train(build, token_batches(num=3), strategy, 2, callbacks=[watch])
    assert_results_close(expected, found, rtol=1e-5)
    stays = sum(map(tensor_bytes, frozen(found.module))) if kind in ("auto", "mmap") else 0
    assert watch.told == watch.found == stays


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_same_bits_wherever_weights_lie(tmp_path: Path, precision: Any) -> None:
    one, two = (
        train(
            lambda: llama_from_files(tmp_path, tied=False),
            token_batches(num=2),
            RoundPipeStrategy(num_microbatches=3, host_weights=kind),
            devices,
            precision=precision,
        )
        for kind, devices in (("pinned", 1), ("mmap", 3))
    )
    assert_results_equal(one, two)


@pytest.mark.parametrize(
    "kind, overlap", [("pageable", "exact"), ("pageable", "stale"), ("mmap", "exact"), ("mmap", "off")]
)
def test_same_bits_through_the_staging_ring(
    tmp_path: Path, kind: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the worker of GPUs in host memory: weights in half precision there, so that the ring converts."""
    staged: list[int] = []
    send = StagingRing._send

    def watched(self: StagingRing, part: Tensor, target: Tensor) -> None:
        staged.append(part.data_ptr())
        send(self, part, target)

    monkeypatch.setattr(StagingRing, "_send", watched)
    gpu_workers_on_the_host(monkeypatch, budget_bytes=1)

    def fit(kind: str) -> TrainResult:
        strategy = RoundPipeStrategy(num_microbatches=3, host_weights=kind, optimizer_overlap=overlap)
        precision = RoundPipePrecision("bf16-mixed", half_weights=True)

        def build() -> LanguageModel:
            module = llama_from_files(tmp_path, tied=False)
            module.validation_step = lambda batch, batch_idx: module.log("validated", module.loss(batch))
            return module

        return train(build, token_batches(num=4), strategy, 2, plugins=[precision], val_batches=token_batches(num=2))

    expected = fit("pinned")
    assert not staged
    found = fit(kind)
    assert_results_equal(expected, found)
    files = FileMappings()
    read = sum(any(parameter.data_ptr() == pointer for pointer in staged) for parameter in found.module.parameters())
    assert read == sum(kind == "pageable" or parameter in files for parameter in found.module.parameters()) or (
        kind == "pageable" and overlap == "stale"  # copies are staged, not the masters
    )


def test_fit_evaluate_fit_again_and_save(tmp_path: Path) -> None:
    """Between fits the model is an ordinary one: it generates, and its checkpoint holds everything."""
    results = []
    for options in ({}, {"strategy": "mmap"}):
        module = llama_from_files(tmp_path, tied=False)
        losses = []
        for turn, kind in enumerate(["mmap", "auto", "pinned", "pageable"]):
            strategy: Any = RoundPipeStrategy(num_microbatches=2, host_weights=kind) if options else "auto"
            trainer = trainer_for(strategy, 2 if options else 1)
            torch.manual_seed(turn)
            trainer.fit(module, BatchDealer(token_batches(num=1)))
            module.validation_step = lambda batch, index, module=module: module.log("loss", module.loss(batch))
            losses += [
                result["loss"] for result in trainer.validate(module, BatchDealer(token_batches()), verbose=False)
            ]
            del module.validation_step
            trainer.save_checkpoint(f"{turn}.ckpt")
            saved = torch.load(f"{turn}.ckpt", weights_only=True)["state_dict"]
            assert saved.keys() == module.state_dict().keys()
            assert all(torch.equal(tensor, saved[name]) for name, tensor in module.state_dict().items())
        tokens = module.model.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False)
        results.append((losses, tokens, module.state_dict()))
    (losses, tokens, state), (our_losses, our_tokens, our_state) = results
    assert our_losses == pytest.approx(losses, rel=1e-5)
    assert torch.equal(tokens, our_tokens)
    for name, tensor in state.items():
        torch.testing.assert_close(our_state[name], tensor, rtol=1e-4, atol=1e-6)


def test_weights_that_train_never_stay_in_files(tmp_path: Path) -> None:
    """Nor do those that are unfrozen later."""

    class Unfreezes(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                module.model.base_model.model.lm_head.requires_grad_(True)

    def build() -> LanguageModel:
        return llama_from_files(tmp_path, tied=False)

    expected = train(build, token_batches(num=2), callbacks=[Unfreezes()], max_epochs=2)
    strategy = RoundPipeStrategy(num_microbatches=3, host_weights="mmap")
    found = train(build, token_batches(num=2), strategy, 2, callbacks=[Unfreezes()], max_epochs=2)
    assert_results_close(expected, found, rtol=1e-5)
    files = FileMappings()
    assert all((parameter in files) != parameter.requires_grad for parameter in found.module.parameters())


class Pieces(L.LightningModule):
    """Frozen blocks, and a head that trains; ``edit`` is what a block does besides."""

    def __init__(self, folder: Path, *, manual: bool = False, edit: Callable[[nn.Linear], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(edit) for _ in range(3)).requires_grad_(False)
        self.head = nn.Linear(16, 4)
        if not (folder / "model.safetensors").exists():
            export_pretrained(self.blocks, folder)
        load_pretrained(self.blocks, folder, progress=False)
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = batch[0]
        for block in self.blocks[: 2 + batch_idx % 2]:
            hidden = block(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden), batch[1] % 4)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Block(nn.Module):
    def __init__(self, edit: Callable[[nn.Linear], Any] | None) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.edit = edit

    def forward(self, x: Tensor) -> Tensor:
        if self.edit is not None:
            self.edit(self.layer)
        y: Tensor = x + self.layer(x)
        return y


@pytest.mark.parametrize("options", [{}, {"manual": True}])
@pytest.mark.parametrize("upload_on_call", [None, ["Block"]])
def test_manual_optimization_and_calls_that_may_not_come(tmp_path: Path, options: Any, upload_on_call: Any) -> None:
    expected = train(lambda: Pieces(tmp_path, **options), vector_batches(16))
    strategy = RoundPipeStrategy(
        num_microbatches=1 if options else 3, host_weights="mmap", upload_on_call=upload_on_call, units=["Block"]
    )
    found = train(lambda: Pieces(tmp_path, **options), vector_batches(16), strategy, 2)
    assert_results_close(expected, found, rtol=1e-5)


def test_a_layer_that_writes_to_its_weights_is_refused(tmp_path: Path) -> None:
    def build() -> L.LightningModule:
        return Pieces(tmp_path, edit=lambda layer: layer.weight.mul_(0.5))

    with pytest.raises(UnsupportedUseError, match="blocks"):
        train(build, vector_batches(16), RoundPipeStrategy(num_microbatches=2, host_weights="mmap"), 2)


class Big(L.LightningModule):
    """96 MiB of frozen weights in files, and a few that train."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        with empty_parameters():
            self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(24)).requires_grad_(False)
        if not folder.exists():
            folder.mkdir()
            state = {name: torch.full((1024, 1024), 1e-3) for name in self.layers.state_dict()}
            export_pretrained(self.layers, folder, state_dict=state)
        load_pretrained(self.layers, folder, progress=False)
        self.scale = nn.Parameter(torch.ones(1024))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0].float() * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.scale], lr=0.1)


@pytest.mark.parametrize("kind", ["mmap", "pageable"])
def test_mapped_weights_take_no_memory_of_their_own(tmp_path: Path, kind: str) -> None:
    class Peak(L.Callback):
        bytes = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.bytes = max(self.bytes, own_memory())

    peak = Peak()
    batches = [(torch.ones(4, 1024),)] * 3
    train(lambda: Big(tmp_path / "w"), batches[:1], RoundPipeStrategy(2, host_weights="mmap"), 2)  # warms up
    before = own_memory()
    train(lambda: Big(tmp_path / "w"), batches, RoundPipeStrategy(2, host_weights=kind), 2, callbacks=[peak])
    weights = 24 * 4 * 2**20
    assert peak.bytes - before < 0.1 * weights if kind == "mmap" else peak.bytes - before > 0.9 * weights


# -------------------------------------------------------------------------------------------------------------- budget


def with_free_memory(monkeypatch: pytest.MonkeyPatch, setup_bytes: int, step_bytes: int = 2**40) -> None:
    """Play a host that has so much to give when training is set up, and when the first step runs."""
    for module, num_bytes in (("strategy", setup_bytes), ("runtime.executor", step_bytes)):
        facts = replace(host_facts(), available_bytes=num_bytes, swap_bytes=0)
        monkeypatch.setattr(f"lightning_roundpipe.{module}.host_facts", lambda facts=facts: facts)


def test_what_can_not_fit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free_memory(monkeypatch, 1000)
    monkeypatch.setattr(Executor, "__post_init__", lambda self: pytest.fail("The executor takes memory."))
    with pytest.raises(HostMemoryError, match="gradients"):
        train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(2), 2)


def test_a_model_that_only_evaluates_needs_no_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free_memory(monkeypatch, 0)
    module = seeded(Residual)
    module.test_step = lambda batch, batch_idx: module.log("loss", module.loss(batch))
    trainer_for(RoundPipeStrategy(2), 2).test(module, BatchDealer(residual_batches()), verbose=False)


@pytest.mark.parametrize("missing", [0, 1])
def test_kept_inputs_are_counted_after_the_first_micro_batch(monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    """The first micro-batch has two of five rows; its sums of gradients are there by then."""
    plan = Schedule(Plan((1, 2), 3, (1, 1, 1)), 2, 3)
    save_schedule(plan, "plan.json")
    tokens, hidden = 5 * 8, 5 * 16 * 4  # bytes of a row: five positions
    with_free_memory(monkeypatch, 2**40, 5 * (tokens + 2 * hidden) - missing)
    strategy = RoundPipeStrategy(3, plan="plan.json", optimizer_overlap="off")
    with pytest.raises(HostMemoryError, match="kept inputs of layers") if missing else contextlib.nullcontext():
        train(lambda: seeded(Residual), residual_batches(rows=5), strategy, 2)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="`host_weights` must be one of 'auto', 'pinned', 'pageable', 'mmap'"):
        RoundPipeStrategy(host_weights="disk")
