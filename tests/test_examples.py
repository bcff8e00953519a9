"""Every example runs as a user would run it, on a tiny setting, under our strategy and in plain Lightning."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest
import torch

from lightning_roundpipe import RoundPipeStrategy

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY_CAUSAL_LM = ["--steps=3", "--batch-size=4", "--sequence-length=32", "--hidden-size=32", "--layers=3"]


class ImportExample(Protocol):
    def __call__(self, name: str) -> ModuleType: ...


@pytest.fixture
def import_example(monkeypatch: pytest.MonkeyPatch) -> ImportExample:
    """Imports an example from its folder, which is on the path as it is for a script."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_causal_lm_learns_saves_and_writes(
    import_example: ImportExample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = import_example("finetune_causal_lm")
    losses = example.main([*TINY_CAUSAL_LM, "--sample-bytes", "8", "--output", str(tmp_path)])

    assert len(losses) == 3
    assert losses[-1] < losses[0]
    printed = capsys.readouterr().out
    assert "bubble ratio:" in printed
    assert "def __init__(self, " in printed
    assert (tmp_path / "model.ckpt").exists()


def test_causal_lm_gives_the_losses_of_plain_lightning(import_example: ImportExample, tmp_path: Path) -> None:
    example = import_example("finetune_causal_lm")
    arguments = [*TINY_CAUSAL_LM, "--sample-bytes", "1"]
    ours = example.main([*arguments, "--output", str(tmp_path / "roundpipe")])
    plain = example.main([*arguments, "--strategy", "auto", "--output", str(tmp_path / "plain")])

    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=1e-5, atol=0)


@pytest.mark.parametrize("strategy", ["roundpipe", "auto"])
def test_vit_digits_reports_an_accuracy(import_example: ImportExample, tmp_path: Path, strategy: str) -> None:
    example = import_example("vit_digits")
    arguments = ["--epochs", "1", "--strategy", strategy, "--output", str(tmp_path)]

    assert example.main(arguments) > 0.2  # guessing gives 0.1


def test_cli_builds_the_strategy_from_the_file(import_example: ImportExample, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(EXAMPLES / "cli_config.yaml")
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", config, "--trainer.fast_dev_run", "2"])
    cli = import_example("cli").main()

    assert isinstance(cli.trainer.strategy, RoundPipeStrategy)
    assert cli.trainer.global_step == 2


RECIPES = ["full-qwen3", "lora-llama", "lora-qwen3-moe", "long-context"]
TINY_RECIPE = ["--steps=3", "--sequence-length=32", "--batch-size=4"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_gives_the_losses_of_plain_lightning(import_example: ImportExample, recipe: str, tmp_path: Path) -> None:
    example = import_example("train_language_model")
    ours = example.main([recipe, *TINY_RECIPE, "--precision=32-true", "--output", str(tmp_path)])
    plain = example.main([recipe, *TINY_RECIPE, "--precision=32-true", "--strategy=auto"])

    lora = recipe.startswith("lora")  # with a base in bfloat16
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=2e-3 if lora else 1e-5, atol=0)
    assert (tmp_path / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_from_a_file(import_example: ImportExample, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EXAMPLES / "configs" / f"{recipe.replace('-', '_')}.yaml"
    tiny = ["--trainer.max_steps=2", "--data.sequence_length=32", "--data.batch_size=4"]
    tiny += ["--trainer.enable_model_summary=false"]  # which does not know the precision, and says so
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", str(config), *tiny])
    cli = import_example("language_model_cli").main()

    assert isinstance(cli.trainer.strategy, RoundPipeStrategy)
    assert cli.trainer.global_step == 2
    recipe_module, _ = import_example("train_language_model").RECIPES[recipe][0]()
    assert recipe_module.hparams["config"] == cli.model.hparams["config"]
    assert recipe_module.hparams["lora"] == cli.model.hparams["lora"]
