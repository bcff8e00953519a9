"""`Trainer(strategy="roundpipe")`."""

import subprocess
import sys
from pathlib import Path

import pytest
from lightning import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import lightning_roundpipe
from lightning_roundpipe import RoundPipeStrategy

ROOT = Path(__file__).parents[1]


def test_the_name_is_registered_once() -> None:
    assert StrategyRegistry["roundpipe"]["strategy"] is RoundPipeStrategy
    assert StrategyRegistry.available_strategies().count("roundpipe") == 1
    assert isinstance(StrategyRegistry.get("roundpipe"), RoundPipeStrategy)


def test_importing_again_does_not_clash() -> None:
    """Lightning refuses a name that is taken, and a notebook reloads modules."""
    program = "import importlib, lightning_roundpipe; importlib.reload(lightning_roundpipe)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_registry_of_ones_own() -> None:
    registry = type(StrategyRegistry)()
    RoundPipeStrategy.register_strategies(registry)
    assert "roundpipe" in registry.available_strategies()
    for name in registry.available_strategies():
        assert isinstance(registry.get(name), RoundPipeStrategy)


@pytest.mark.parametrize("devices", [1, 3])
def test_the_trainer_finds_it_by_name(devices: int) -> None:
    trainer = Trainer(strategy="roundpipe", accelerator="cpu", devices=devices, logger=False, enable_progress_bar=False)
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    assert trainer.strategy.num_workers == devices
    assert trainer.world_size == 1
    assert trainer.num_devices == devices


def test_names_and_descriptions() -> None:
    assert RoundPipeStrategy.strategy_name == "roundpipe"
    assert StrategyRegistry["roundpipe"]["description"]
    assert lightning_roundpipe.RoundPipeStrategy is RoundPipeStrategy
