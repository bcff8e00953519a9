"""Hugging Face checkpoints from a fit and from Lightning checkpoints: `from_pretrained` reads the same weights."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.checkpoint_io import ShardedCheckpointIO
from lightning_roundpipe.cli import main
from lightning_roundpipe.export import export_checkpoint, export_pretrained, parse_bytes, weights_of
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.memory import peak_memory
from tests.helpers.models import token_batches
from tests.test_loading import CONFIGS, assert_same_model, saved

transformers = pytest.importorskip("transformers")


class Tuned(L.LightningModule):
    """A causal language model as users wrap it."""

    def __init__(self, name: str = "qwen3", frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
        if frozen:
            self.model.requires_grad_(False)
            self.model.model.norm.requires_grad_(True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(name: str = "qwen3", path: Path | None = None, **flags: Any) -> Tuned:
    module = Tuned(name)
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2, **flags)
    trainer.fit(module, BatchDealer([{k: v % 64 for k, v in batch.items()} for batch in token_batches()]))
    if path is not None:
        trainer.save_checkpoint(path)
    return module


def reread(folder: Path, **options: Any) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_after_a_fit(tmp_path: Path, name: str) -> None:
    module = fit(name)
    export_pretrained(module.model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_model(module.model, reread(tmp_path).train())


def test_dtype(tmp_path: Path) -> None:
    module = Tuned()
    export_pretrained(module.model, tmp_path, dtype=torch.bfloat16)
    found = reread(tmp_path).state_dict()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in module.model.state_dict().items())


@pytest.mark.parametrize("name", CONFIGS)
def test_from_a_checkpoint(tmp_path: Path, name: str) -> None:
    module = fit(name, tmp_path / "last.ckpt")
    saved(tmp_path / "base", name)
    assert export_checkpoint(tmp_path / "last.ckpt", tmp_path / "base", tmp_path / "out") == "model."
    assert_same_model(module.model, reread(tmp_path / "out").train())


def test_from_a_sharded_checkpoint_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = fit(path=tmp_path / "last.ckpt", plugins=[ShardedCheckpointIO()])
    assert (tmp_path / "last.ckpt").is_dir()
    saved(tmp_path / "base")
    arguments = [
        f"--checkpoint={tmp_path / 'last.ckpt'}",
        f"--model={tmp_path / 'base'}",
        f"--output={tmp_path / 'out'}",
    ]
    assert main(["export", *arguments, "--json"]) == 0
    assert '"prefix": "model."' in capsys.readouterr().out
    assert_same_model(module.model, reread(tmp_path / "out").train())


def test_frozen_weights_come_from_the_files_they_came_from(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    trained = {name: tensor for name, tensor in Tuned().state_dict().items() if "norm" in name}
    torch.save({"state_dict": trained}, tmp_path / "adapters.ckpt")
    export_checkpoint(tmp_path / "adapters.ckpt", tmp_path / "base", tmp_path / "out")
    found = reread(tmp_path / "out")
    for name, tensor in found.state_dict().items():
        expected = trained.get(f"model.{name}", base.state_dict()[name])
        assert torch.equal(tensor, expected), name


def test_checkpoints_with_objects_must_be_trusted(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": {"where": tmp_path}}, tmp_path / "objects.ckpt")
    with pytest.raises(ValueError, match="trusted"):
        weights_of(tmp_path / "objects.ckpt")
    assert weights_of(tmp_path / "objects.ckpt", trusted=True) == {}


def test_what_can_not_be_exported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"net.weight": torch.ones(2)}}, tmp_path / "other.ckpt")
    saved(tmp_path / "base")
    with pytest.raises(ValueError, match="holds no weights of the model"):
        export_checkpoint(tmp_path / "other.ckpt", tmp_path / "base", tmp_path / "out")
    with pytest.raises(ValueError, match="does not exist"):
        export_checkpoint(tmp_path / "nothing.ckpt", tmp_path / "base", tmp_path / "out")
    assert main(["export", "--checkpoint=nothing", "--model=nothing", f"--output={tmp_path}"]) == 1
    assert "does not exist" in capsys.readouterr().err
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(Tuned().model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        export_pretrained(adapted, tmp_path / "out")
    export_pretrained(adapted.merge_and_unload(), tmp_path / "out")


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("40KB", 40_000), (7, 7), ("1.5 MB", 1_500_000)])
def test_sizes(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


def test_no_size() -> None:
    with pytest.raises(ValueError, match="A size must be"):
        parse_bytes("many")


def test_saving_takes_less_than_two_tensors_of_memory(tmp_path: Path) -> None:
    """192 MiB of weights that are converted as they are written."""
    model = nn.ModuleDict({str(number): nn.Linear(2048, 1024, bias=False) for number in range(24)})
    with peak_memory() as grown:
        export_pretrained(model, tmp_path, dtype=torch.bfloat16, max_shard_size="64MB")
        assert grown() <= 2 * 2048 * 1024 * 4 + 8 * 2**20
